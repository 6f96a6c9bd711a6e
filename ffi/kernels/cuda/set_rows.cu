// SET_ROWS: a block a slice (or a part of one). Where slices overlap, the last one wins whatever
// the order in which blocks run: a word is written only if no later slice writes it too.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/moves.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

// Does the slice `later` touch anything of [begin[c], begin[c] + extent[c]) along all components?
__device__ __forceinline__ bool Touches(const MoveParams& p, int later,
                                        const int64_t (&begin)[kMaxComponents],
                                        const int64_t (&extent)[kMaxComponents]) {
  bool inside = true, touches = true;
#pragma unroll
  for (int c = 0; c < kMaxComponents; ++c) {
    if (c >= p.num_components) break;
    const int64_t start = StartOf(p, c, later, &inside);
    touches = touches && start < begin[c] + extent[c] && begin[c] < start + p.extent[c];
  }
  return touches && (inside || p.mode != IndexMode::kFillOrDrop);
}

template <typename Word>
__global__ void __launch_bounds__(kMoveThreads)
    SetRowsKernel(const __grid_constant__ MoveParams p) {
  BeginLaunch();
  const int slice = blockIdx.x;
  bool inside = true;
  int64_t to = 0, begin[kMaxComponents] = {}, extent[kMaxComponents] = {};
#pragma unroll
  for (int c = 0; c < kMaxComponents; ++c) {
    if (c >= p.num_components) break;
    begin[c] = StartOf(p, c, slice, &inside);
    extent[c] = p.extent[c];
    to += begin[c] * p.component_stride[c];
  }
  if (p.mode == IndexMode::kFillOrDrop && !inside) return;  // the whole block agrees

  bool touched = false;
  for (int64_t later = int64_t{slice} + 1 + threadIdx.x; later < p.num_slices;
       later += blockDim.x) {
    touched = touched || Touches(p, static_cast<int>(later), begin, extent);
  }
  touched = __syncthreads_or(touched);
  if (touched && p.single) return;

  for (uint32_t word = blockIdx.y * blockDim.x + threadIdx.x; word < p.words;
       word += gridDim.y * blockDim.x) {
    uint32_t index[kMaxRank];
    int64_t in_whole, in_slice;
    LocateWord(p, word, index, &in_whole, &in_slice);
    bool overwritten = false;
    if (touched) {
      int64_t at[kMaxComponents] = {}, one[kMaxComponents] = {};
#pragma unroll
      for (int c = 0; c < kMaxComponents; ++c) {
        if (c >= p.num_components) break;
        at[c] = begin[c];
#pragma unroll
        for (int d = 0; d < kMaxRank; ++d) {
          if (d == p.component_dim[c]) at[c] += index[d];
        }
        one[c] = 1;
      }
      for (int later = slice + 1; later < p.num_slices && !overwritten; ++later) {
        overwritten = Touches(p, later, at, one);
      }
    }
    if (overwritten) continue;
    MoveWord<Word>(p.slices + slice * p.slices_outer + in_slice, p.whole + to + in_whole);
  }
}

template <typename Word>
const KernelInfo kSetRows = {"set_rows", sizeof(MoveParams), nullptr,
                             reinterpret_cast<const void*>(&SetRowsKernel<Word>)};

}  // namespace

Status EmitSetRows(const ResolvedNode& node, Launches* launches) {
  MoveParams p;
  JAXGRAPH_RETURN_IF_ERROR(PrepareSetRows(node, &p));
  if (p.words == 0) return Status::Ok();
  Launch launch;
  launch.kernel = JAXGRAPH_KERNEL_OF_WORD(kSetRows, p.word);
  launch.grid[0] = static_cast<uint32_t>(p.num_slices);
  launch.grid[1] = static_cast<uint32_t>(std::min<int64_t>(CeilDiv(p.words, kMoveThreads), 65535));
  launch.block[0] = static_cast<uint32_t>(
      std::min<int64_t>(CeilDiv(std::max<int64_t>(p.words, p.num_slices), 32) * 32, kMoveThreads));
  SetParams(p, &launch);
  launches->push_back(std::move(launch));
  return Status::Ok();
}

}  // namespace jaxgraph
