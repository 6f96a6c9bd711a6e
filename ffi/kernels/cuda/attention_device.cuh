// Pieces that the kernels of ATTENTION share.
#pragma once

#include "ffi/kernels/cuda/attention.h"
#include "ffi/kernels/cuda/interpreter.cuh"

namespace jaxgraph {

// Scores of kLanes queries at one position: where the score program stands.
template <int kLanes>
struct ScoreSpace {
  int b0, b1, position;
  int query[kLanes];  // of the group; valid ones, also where a lane's result is not wanted

  __device__ __forceinline__ void Offsets(const int64_t (&strides)[kExprMaxRank],
                                          int64_t (&offset)[kLanes]) const {
    const int64_t row = b0 * strides[0] + b1 * strides[1] + position * strides[3];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) offset[j] = row + query[j] * strides[2];
  }
  __device__ __forceinline__ bool Active(int) const { return true; }
};

// The score program: raw scores to masked ones. Not inlined, for it is long.
template <typename W, int kLanes>
__device__ __noinline__ Lanes<W, kLanes> MaskScores(const ExprParams& p,
                                                    const ScoreSpace<kLanes> space,
                                                    const Lanes<W, kLanes> raw) {
  Registers<W, kLanes> registers;
  registers.value[kRawRegister] = raw;
  Run<W, kLanes, false>(p, p.stages[0].elem_begin, p.stages[0].elem_end, space, registers, nullptr);
  return registers.value[kMaskedRegister];
}

// The last position that query `g` may see. Without a bound, the last one there is.
__device__ __forceinline__ int LastPosition(const AttentionArgs& p, int b0, int b1, int g) {
  if (p.bound == nullptr) return p.s - 1;
  const int64_t bound = LoadInteger(
      p.bound + b0 * p.bound_strides[0] + b1 * p.bound_strides[1] + g * p.bound_strides[2],
      p.bound_dtype);
  return bound < 0 || bound >= p.s ? p.s - 1 : static_cast<int>(bound);
}

// What exp(x - peak) is to subtract: a row of which nothing is seen yet must not give inf - inf.
template <typename F>
__device__ __forceinline__ F PeakOrZero(F peak) {
  return peak == -INFINITY ? F(0) : peak;
}

}  // namespace jaxgraph
