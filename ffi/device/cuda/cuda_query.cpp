#include "ffi/device/cuda/cuda_query.h"

#include <cuda_runtime_api.h>

#include "ffi/device/cuda/cuda_error.h"

namespace jaxgraph {

int CudaDeviceCount() noexcept {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  IgnoreCudaError(error);
  return error == cudaSuccess ? count : 0;
}

Status CudaComputeCapability(int ordinal, int* capability) {
  int major = 0, minor = 0;
  JAXGRAPH_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal));
  JAXGRAPH_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal));
  *capability = major * 10 + minor;
  return Status::Ok();
}

Status CudaStreamDevice(Stream stream, int* ordinal) {
  JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamGetDevice(static_cast<cudaStream_t>(stream), ordinal));
  return Status::Ok();
}

}  // namespace jaxgraph
