// Copies of wandering bases into slots of the arena and out of them: all of one direction in one
// launch. The kernels look at the alignment themselves, so that another address is other
// parameters.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint64_t kBytesPerBlock = kThreads * 16 * 4;
constexpr uint64_t kMaxBlocksPerCopy = 1024;
static_assert(kMaxSlots <= kThreads);

// By all blocks along x.
__device__ __forceinline__ void CopyBytes(char* dst, const char* src, uint64_t bytes) {
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * kThreads;
  const uint64_t addresses = reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src);
  const uint64_t vectors = addresses % 16 == 0 ? bytes / 16 : 0;
  for (uint64_t i = thread; i < vectors; i += threads) {
    reinterpret_cast<uint4*>(dst)[i] = reinterpret_cast<const uint4*>(src)[i];
  }
  for (uint64_t i = 16 * vectors + thread; i < bytes; i += threads) dst[i] = src[i];
}

__global__ void __launch_bounds__(kThreads) SlotFillKernel(const __grid_constant__ SlotFill p) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < p.num_addresses) {
    reinterpret_cast<char**>(p.table)[threadIdx.x] = p.addresses[threadIdx.x];
  }
  if (blockIdx.y >= p.num_copies) return;
  const SlotCopy& copy = p.copies[blockIdx.y];
  CopyBytes(copy.dst, copy.src, copy.bytes);
}

__global__ void __launch_bounds__(kThreads) SlotDrainKernel(const __grid_constant__ SlotDrain p) {
  BeginLaunch();
  if (blockIdx.y >= p.num_sources) return;
  const SlotSource& source = p.sources[blockIdx.y];
  CopyBytes(reinterpret_cast<char* const*>(p.table)[blockIdx.y], source.src, source.bytes);
}

const KernelInfo kSlotFill = {"slot_fill", sizeof(SlotFill), nullptr,
                              reinterpret_cast<const void*>(&SlotFillKernel)};
const KernelInfo kSlotDrain = {"slot_drain", sizeof(SlotDrain), nullptr,
                               reinterpret_cast<const void*>(&SlotDrainKernel)};

// A row of blocks for each of `count` copies of that many bytes or less.
void SetGrid(uint64_t count, uint64_t most_bytes, Launch* launch) {
  const uint64_t blocks = (most_bytes + kBytesPerBlock - 1) / kBytesPerBlock;
  launch->grid[0] = static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, kMaxBlocksPerCopy));
  launch->grid[1] = static_cast<uint32_t>(std::max<uint64_t>(count, 1));
  launch->block[0] = kThreads;
}

}  // namespace

void EmitSlotFillLaunch(const SlotFill& fill, Launch* launch) {
  uint64_t most = 0;
  for (uint64_t i = 0; i < fill.num_copies; ++i) most = std::max(most, fill.copies[i].bytes);
  launch->kernel = &kSlotFill;
  SetGrid(fill.num_copies, most, launch);
  SetParams(fill, launch);
}

void EmitSlotDrainLaunch(const SlotDrain& drain, Launch* launch) {
  uint64_t most = 0;
  for (uint64_t i = 0; i < drain.num_sources; ++i) most = std::max(most, drain.sources[i].bytes);
  launch->kernel = &kSlotDrain;
  SetGrid(drain.num_sources, most, launch);
  SetParams(drain, launch);
}

}  // namespace jaxgraph
