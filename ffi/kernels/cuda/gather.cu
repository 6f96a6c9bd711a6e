// GATHER, and COPY, which is a gather without indices: a thread a word.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/moves.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

template <typename Word>
__device__ __forceinline__ void Fill(uint64_t pattern, char* to) {
  if constexpr (sizeof(Word) == 16) {
    *reinterpret_cast<ulonglong2*>(to) = ulonglong2{pattern, pattern};
  } else {
    StoreBits(to, sizeof(Word), pattern);
  }
}

template <typename Word>
__global__ void __launch_bounds__(kMoveThreads) GatherKernel(const __grid_constant__ MoveParams p) {
  BeginLaunch();
  const int64_t slice = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (slice >= p.num_slices) return;
  bool inside = true;
  int64_t from = slice * p.whole_outer;
  for (int c = 0; c < p.num_components; ++c) {
    from += StartOf(p, c, slice, &inside) * p.component_stride[c];
  }
  const bool fills = p.mode == IndexMode::kFillOrDrop && !inside;
  for (uint32_t word = blockIdx.y * blockDim.x + threadIdx.x; word < p.words;
       word += gridDim.y * blockDim.x) {
    uint32_t index[kMaxRank];
    int64_t in_whole, in_slice;
    LocateWord(p, word, index, &in_whole, &in_slice);
    char* to = p.slices + slice * p.slices_outer + in_slice;
    if (fills) {
      Fill<Word>(p.fill, to);
    } else {
      MoveWord<Word>(p.whole + from + in_whole, to);
    }
  }
}

template <typename Word>
const KernelInfo kGather = {"gather", sizeof(MoveParams), nullptr,
                            reinterpret_cast<const void*>(&GatherKernel<Word>)};

void LaunchGather(const MoveParams& p, Launches* launches) {
  if (p.words == 0) return;
  Launch launch;
  launch.kernel = JAXGRAPH_KERNEL_OF_WORD(kGather, p.word);
  // Short slices share a block.
  uint32_t across = 1;
  while (across < kMoveThreads && across < p.words) across *= 2;
  launch.block[0] = across;
  launch.block[1] = kMoveThreads / across;
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(p.num_slices, launch.block[1]));
  launch.grid[1] = static_cast<uint32_t>(std::min<int64_t>(CeilDiv(p.words, across), 65535));
  SetParams(p, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace

Status EmitGather(const ResolvedNode& node, Launches* launches) {
  MoveParams p;
  JAXGRAPH_RETURN_IF_ERROR(PrepareGather(node, &p));
  LaunchGather(p, launches);
  return Status::Ok();
}

Status EmitCopy(const ResolvedNode& node, Launches* launches) {
  MoveParams p;
  JAXGRAPH_RETURN_IF_ERROR(PrepareCopy(node, &p));
  LaunchGather(p, launches);
  return Status::Ok();
}

}  // namespace jaxgraph
