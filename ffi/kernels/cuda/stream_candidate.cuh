// Which of two elements of a row its argmax takes.
#pragma once

#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/stream_argmax.h"

namespace jaxgraph {

constexpr uint32_t kNowhere = ~uint32_t{0};  // rows are shorter

__device__ __forceinline__ StreamCandidate NoCandidate() { return {0, kNowhere}; }

// `later` stands behind `earlier`, which is an element.
__device__ __forceinline__ bool TakesOver(float later, float earlier) {
  return earlier == earlier && !(later <= earlier);
}
// Elements come in the order of the row.
__device__ __forceinline__ void See(float value, uint32_t where, StreamCandidate* best) {
  if (best->where == kNowhere || TakesOver(value, best->value)) *best = {value, where};
}
// Any two; nowhere is behind everything.
__device__ __forceinline__ StreamCandidate Better(const StreamCandidate& a,
                                                  const StreamCandidate& b) {
  const bool a_first = a.where < b.where;
  const StreamCandidate &first = a_first ? a : b, &second = a_first ? b : a;
  return second.where != kNowhere && TakesOver(second.value, first.value) ? second : first;
}
// Of all lanes from the first `lanes` on; the first lane has it.
template <int kLanes = kWarp>
__device__ __forceinline__ StreamCandidate BestOfWarp(StreamCandidate mine) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o /= 2) {
    mine = Better(mine, {__shfl_xor_sync(kAllLanes, mine.value, o),
                         __shfl_xor_sync(kAllLanes, mine.where, o)});
  }
  return mine;
}

}  // namespace jaxgraph
