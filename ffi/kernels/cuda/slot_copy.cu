// Copies between slots of the arena and wandering bases: many small ones in one launch. The kernel
// itself looks at the alignment, so that a new address needs no more than a patch.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kMaxCopies = 16;
constexpr uint32_t kThreads = 256;
constexpr uint64_t kBytesPerBlock = kThreads * 16 * 4;
constexpr uint64_t kMaxBlocksPerCopy = 1024;

struct SlotCopyParams {
  SlotCopy copies[kMaxCopies];
};
static_assert(sizeof(SlotCopy) == 24);

__global__ void __launch_bounds__(kThreads)
    SlotCopyKernel(const __grid_constant__ SlotCopyParams p) {
  const SlotCopy& copy = p.copies[blockIdx.y];
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * kThreads;
  const uint64_t addresses =
      reinterpret_cast<uintptr_t>(copy.dst) | reinterpret_cast<uintptr_t>(copy.src);
  const uint64_t vectors = addresses % 16 == 0 ? copy.bytes / 16 : 0;
  for (uint64_t i = thread; i < vectors; i += threads) {
    reinterpret_cast<uint4*>(copy.dst)[i] = reinterpret_cast<const uint4*>(copy.src)[i];
  }
  for (uint64_t i = 16 * vectors + thread; i < copy.bytes; i += threads) copy.dst[i] = copy.src[i];
}

const KernelInfo kSlotCopy = {"slot_copy", sizeof(SlotCopyParams), nullptr,
                              reinterpret_cast<const void*>(&SlotCopyKernel)};

}  // namespace

void EmitSlotCopyLaunches(const std::vector<SlotCopy>& copies, Launches* launches) {
  for (size_t first = 0; first < copies.size(); first += kMaxCopies) {
    const size_t count = std::min<size_t>(kMaxCopies, copies.size() - first);
    SlotCopyParams params = {};
    std::copy_n(copies.begin() + first, count, params.copies);
    uint64_t largest = 1;
    for (size_t i = 0; i < count; ++i) largest = std::max(largest, params.copies[i].bytes);
    Launch launch;
    launch.kernel = &kSlotCopy;
    launch.grid[0] = static_cast<uint32_t>(
        std::min((largest + kBytesPerBlock - 1) / kBytesPerBlock, kMaxBlocksPerCopy));
    launch.grid[1] = static_cast<uint32_t>(count);
    launch.block[0] = kThreads;
    SetParams(params, &launch);
    launches->push_back(std::move(launch));
  }
}

}  // namespace jaxgraph
