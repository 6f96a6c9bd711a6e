// Pieces that the kernels of ATTENTION share.
#pragma once

#include <cooperative_groups.h>

#include <climits>

#include "ffi/kernels/cuda/async_copy.cuh"
#include "ffi/kernels/cuda/attention.h"
#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/interpreter.cuh"

namespace jaxgraph {

// ---- scores ----

// Where the score program stands: scores of kLanes queries at one position.
template <int kLanes>
struct ScoreSpace {
  int b0, b1, position;
  int query[kLanes];  // valid ones, also where a lane's result is not wanted

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

// How a kernel masks scores: it knows the program's form, or runs the program.
struct KnownScore {
  static constexpr bool kHasProgram = false;
  template <typename Plan>
  using Params = KnownParams<Plan>;
};
template <typename Word, int kNumLanes>
struct ProgramScore {
  static constexpr bool kHasProgram = true;
  using W = Word;
  static constexpr int kLanes = kNumLanes;
  template <typename Plan>
  using Params = ProgramParams<Plan>;
};

// The known form: the position that a query sees last.
__device__ __forceinline__ int LastVisible(const AttentionArgs& p, int b0, int b1, int query) {
  if (p.position == nullptr) return INT_MAX;
  const int64_t position =
      LoadInteger(p.position + b0 * p.position_strides[0] + b1 * p.position_strides[1] +
                      query * p.position_strides[2],
                  p.form.position_dtype);
  const int64_t far = int64_t{1} << 30;  // beyond every position and offset
  return static_cast<int>(min(max(position, -far), far)) - p.form.offset;
}
__device__ __forceinline__ float MaskKnown(const ScoreForm& form, float raw, bool visible) {
  const float x = RoundTo(form.raw, raw), factor = __uint_as_float(form.factor);
  const float scaled = RoundTo(form.scaled, form.divides ? x / factor : x * factor);
  return RoundTo(form.masked, visible ? scaled : __uint_as_float(form.fill));
}

// The last position that a query may see by the node's bound. Without one, the last there is.
__device__ __forceinline__ int LastPosition(const AttentionArgs& p, int b0, int b1, int query) {
  if (p.bound == nullptr) return p.s - 1;
  const int64_t bound = LoadInteger(
      p.bound + b0 * p.bound_strides[0] + b1 * p.bound_strides[1] + query * p.bound_strides[2],
      p.bound_dtype);
  return bound < 0 || bound >= p.s ? p.s - 1 : static_cast<int>(bound);
}

// ---- softmax ----

// What exp(x - peak) is to subtract: where nothing is seen yet it must not be inf - inf.
template <typename F>
__device__ __forceinline__ F PeakOrZero(F peak) {
  return peak == -INFINITY ? F(0) : peak;
}
// The weight of a score, or of what was weighted by another peak, under the peak `common`.
__device__ __forceinline__ float ScaleOf(float score, float common) {
  return expf(score - PeakOrZero(common));
}

// The sink of a query, if there is one, takes its part: `peak` and `total`, of all positions, are
// made those of both. Returns what the weighted sum is to be multiplied by.
template <typename Real>
__device__ __forceinline__ Real TakeSink(const AttentionArgs& p, int b0, int b1, int query,
                                         Real peak, Real* total) {
  if (p.sink == nullptr) return 1;
  const Real sink = LoadFloat<Real>(
      p.sink + b0 * p.sink_strides[0] + b1 * p.sink_strides[1] + query * p.sink_strides[2],
      p.sink_dtype);
  const Real shift = PeakOrZero(fmax(peak, sink)), scale = exp(peak - shift);
  *total = *total * scale + exp(sink - shift);
  return scale;
}

// ---- shared memory, and asynchronous copies to it ----

// 16 bytes, or zeros; the address must be valid either way.
__device__ __forceinline__ void CopyAsync(char* to, const char* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
#else
  *reinterpret_cast<uint4*>(to) =
      inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
#endif
}
// Waits for all groups of this thread but the last `kPending`, and for the warp.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
  __syncwarp();
}

// Rows of a cache, `vectors` times 16 bytes each, and of a tile of them, `pitch` bytes apart.
struct TileRows {
  const char* rows;
  int64_t stride;
  FastDiv vectors;
  uint32_t pitch;
};

// Starts a warp's copy of a tile, the rows [first, first + 32); those at `end` and behind are
// zeros.
__device__ __forceinline__ void CopyTile(const TileRows& t, int first, int end, char* tile) {
  const uint32_t vectors = t.vectors.divisor, lane = threadIdx.x % 32;
  if (32 % vectors == 0) {  // a lane stays in its column
    const uint32_t step = 32 / vectors, row = t.vectors.Quotient(lane);
    const uint32_t column = 16 * (lane - row * vectors);
    int position = first + static_cast<int>(row);
    const char* from = t.rows + position * t.stride + column;
    char* to = tile + row * t.pitch + column;
#pragma unroll 4
    for (uint32_t i = 0; i < vectors; ++i) {
      CopyAsync(to, position < end ? from : t.rows, position < end);
      position += step;
      from += step * t.stride;
      to += step * t.pitch;
    }
  } else {
    for (uint32_t i = lane; i < 32 * vectors; i += 32) {
      const uint32_t row = t.vectors.Quotient(i), column = 16 * (i - row * vectors);
      const int position = first + static_cast<int>(row);
      const bool inside = position < end;
      CopyAsync(tile + row * t.pitch + column, t.rows + (inside ? position : 0) * t.stride + column,
                inside);
    }
  }
  CommitCopies();
}

}  // namespace jaxgraph
