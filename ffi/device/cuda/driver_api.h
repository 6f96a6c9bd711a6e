// The driver functions that the runtime does not offer, looked up at run time: the library must
// load on a machine without a driver, so it cannot link against libcuda.
#pragma once

#include <cuda.h>

#include "ffi/core/status.h"

namespace jaxgraph {

struct DriverApi {
  decltype(&::cuGetErrorName) GetErrorName = nullptr;
  decltype(&::cuDeviceGet) DeviceGet = nullptr;
  decltype(&::cuDeviceGetAttribute) DeviceGetAttribute = nullptr;
  decltype(&::cuMemGetAllocationGranularity) MemGetAllocationGranularity = nullptr;
  decltype(&::cuMemAddressReserve) MemAddressReserve = nullptr;
  decltype(&::cuMemAddressFree) MemAddressFree = nullptr;
  decltype(&::cuMemCreate) MemCreate = nullptr;
  decltype(&::cuMemRelease) MemRelease = nullptr;
  decltype(&::cuMemMap) MemMap = nullptr;
  decltype(&::cuMemUnmap) MemUnmap = nullptr;
  decltype(&::cuMemSetAccess) MemSetAccess = nullptr;

  // Null where the driver lacks any of them. Looked up once.
  static const DriverApi* Get();

  Status Check(CUresult result, const char* call) const;
};

}  // namespace jaxgraph
