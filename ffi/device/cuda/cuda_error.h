// How CUDA's error codes become Status.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/status.h"

namespace jaxgraph {

// What becomes of the call: out of memory, poisoned, ...
Code CodeOf(cudaError_t error);

// Ok for cudaSuccess. Else clears the runtime's last error, so that nobody else (JAX, a later call
// of ours) trips on it, and says in the message which call failed.
Status CudaStatus(cudaError_t error, const char* call);

// Drops a failure of a call that must not fail the caller (destruction).
void IgnoreCudaError(cudaError_t error);

}  // namespace jaxgraph

#define JAXGRAPH_CUDA_RETURN_IF_ERROR(call) \
  JAXGRAPH_RETURN_IF_ERROR(::jaxgraph::CudaStatus((call), #call))
