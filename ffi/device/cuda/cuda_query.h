// What can be asked of the machine's GPUs without making a context on any of them.
#pragma once

#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"

namespace jaxgraph {

// CUDA 13 compiles for nothing older: 75 is Turing.
constexpr int kMinComputeCapability = 75;

// Number of visible GPUs; 0 also where there is no driver, or one that is too old.
int CudaDeviceCount() noexcept;

// 90 for capability 9.0.
Status CudaComputeCapability(int ordinal, int* capability);

// The device that a stream belongs to.
Status CudaStreamDevice(Stream stream, int* ordinal);

}  // namespace jaxgraph
