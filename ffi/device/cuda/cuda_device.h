// The CUDA implementation of GraphDevice.
#pragma once

#include <memory>

#include "ffi/device/graph_device.h"

namespace jaxgraph {

enum class CudaArenaKind {
  kMappedIfPossible,  // the base never moves, where the device can map memory
  kMoving,            // plain allocations: growing moves the base
};

// Makes no CUDA call: a device that does not exist is reported by the first call that needs it.
std::unique_ptr<GraphDevice> MakeCudaDevice(
    int ordinal, CudaArenaKind arena_kind = CudaArenaKind::kMappedIfPossible);

}  // namespace jaxgraph
