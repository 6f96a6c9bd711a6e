// Ends a benchmark with a message where a call fails: there is nothing to measure then.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "ffi/core/status.h"

#define CHECK_CUDA(expr)                                                   \
  do {                                                                     \
    const cudaError_t error_ = (expr);                                     \
    if (error_ != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #expr, cudaGetErrorString(error_)); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

namespace jaxgraph {

inline void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

}  // namespace jaxgraph
