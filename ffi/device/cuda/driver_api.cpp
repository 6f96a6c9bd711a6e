#include "ffi/device/cuda/driver_api.h"

#include <cuda_runtime_api.h>

#include <string>

#include "ffi/device/cuda/cuda_error.h"

namespace jaxgraph {
namespace {

// All of them have had these signatures since this version.
constexpr unsigned kDriverVersion = 12000;

template <typename F>
bool Find(const char* symbol, F* function) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(symbol, &pointer, kDriverVersion,
                                                             cudaEnableDefault, &result);
  IgnoreCudaError(error);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return false;
  *function = reinterpret_cast<F>(pointer);
  return true;
}

bool FindAll(DriverApi* api) {
  return Find("cuGetErrorName", &api->GetErrorName) && Find("cuDeviceGet", &api->DeviceGet) &&
         Find("cuDeviceGetAttribute", &api->DeviceGetAttribute) &&
         Find("cuMemGetAllocationGranularity", &api->MemGetAllocationGranularity) &&
         Find("cuMemAddressReserve", &api->MemAddressReserve) &&
         Find("cuMemAddressFree", &api->MemAddressFree) && Find("cuMemCreate", &api->MemCreate) &&
         Find("cuMemRelease", &api->MemRelease) && Find("cuMemMap", &api->MemMap) &&
         Find("cuMemUnmap", &api->MemUnmap) && Find("cuMemSetAccess", &api->MemSetAccess);
}

}  // namespace

const DriverApi* DriverApi::Get() {
  static DriverApi api;
  static const bool found = FindAll(&api);
  return found ? &api : nullptr;
}

Status DriverApi::Check(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return Status::Ok();
  const char* name = nullptr;
  GetErrorName(result, &name);
  // The runtime's errors have the driver's numbers.
  static_assert(static_cast<int>(cudaErrorMemoryAllocation) == CUDA_ERROR_OUT_OF_MEMORY);
  static_assert(static_cast<int>(cudaErrorIllegalAddress) == CUDA_ERROR_ILLEGAL_ADDRESS);
  static_assert(static_cast<int>(cudaErrorLaunchFailure) == CUDA_ERROR_LAUNCH_FAILED);
  return Status(CodeOf(static_cast<cudaError_t>(result)),
                std::string(call) + ": " + (name != nullptr ? name : "unknown error"));
}

}  // namespace jaxgraph
