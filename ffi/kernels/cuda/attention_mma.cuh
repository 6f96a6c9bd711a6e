// Tensor cores, as the kernels of ATTENTION use them: few queries are the columns of a product.
#pragma once

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/scalar.cuh"

// Older devices compile empty kernels, so that for them these have no caller.
#pragma nv_diag_suppress 177

namespace jaxgraph {

constexpr int kMmaHeads = 8;  // queries at a time

struct Fragment {  // 16 x 16 of the left operand
  uint32_t word[4];
};

// An 8 x 8 matrix of 16-bit numbers that lies across the warp, transposed.
__device__ __forceinline__ uint32_t Transposed(uint32_t rows) {
  uint32_t columns;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// Numbers of 16 bits, and c += a x b of them (16 x 16 by 16 x 8).
struct BF16Math {
  static __device__ __forceinline__ void MultiplyAdd(const Fragment& a, uint32_t b0, uint32_t b1,
                                                     float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint16_t Narrow(float v) { return FloatToBF16(v); }
  static __device__ __forceinline__ uint32_t NarrowPair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return Narrow(low) | static_cast<uint32_t>(Narrow(high)) << 16;
#endif
  }
  static __device__ __forceinline__ float Widen(uint16_t v) { return BF16ToFloat(v); }
};
struct F16Math {
  static __device__ __forceinline__ void MultiplyAdd(const Fragment& a, uint32_t b0, uint32_t b1,
                                                     float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint16_t Narrow(float v) { return FloatToF16(v); }
  static __device__ __forceinline__ uint32_t NarrowPair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return Narrow(low) | static_cast<uint32_t>(Narrow(high)) << 16;
#endif
  }
  static __device__ __forceinline__ float Widen(uint16_t v) { return F16ToFloat(v); }
};

__device__ __forceinline__ uint32_t Pair(uint16_t low, uint16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}

// ---- what a lane owns ----
// Products have their rows at lane / 4 and 8 below, their columns (queries) at lane % 4 * 2 and the
// next.

__device__ __forceinline__ int FirstRow() { return threadIdx.x % kWarp / 4; }
__device__ __forceinline__ int FirstHead() { return threadIdx.x % 4 * 2; }

// Over the lanes that have the same queries.
template <typename F>
__device__ __forceinline__ float AcrossRows(float x, F combine) {
#pragma unroll
  for (int o = 4; o < kWarp; o *= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}

// ---- softmax ----

// Scores or weights of a lane: [i][j] of the position FirstRow() + 8 i, the query FirstHead() + j.
template <int kRows>
using RowScores = float[kRows][2];

// The running softmax of a lane's two queries.
struct Softmax {
  float peak[2] = {-INFINITY, -INFINITY};  // the same for all lanes of a query
  float total[2] = {};                     // this lane's part

  // Makes weights of scores. What was weighted before is to be multiplied by `scale`; false: by 1,
  // all over the warp.
  template <int kRows>
  __device__ __forceinline__ bool Weigh(RowScores<kRows>& scores, float (&scale)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float above = scores[0][j];
#pragma unroll
      for (int i = 1; i < kRows; ++i) above = fmaxf(above, scores[i][j]);
      const float next =
          fmaxf(peak[j], AcrossRows(above, [](float a, float b) { return fmaxf(a, b); }));
      const float shift = PeakOrZero(next);
      scale[j] = __expf(peak[j] - shift);
      total[j] *= scale[j];
      peak[j] = next;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        scores[i][j] = __expf(scores[i][j] - shift);
        total[j] += scores[i][j];
      }
    }
    return __any_sync(kAllLanes, scale[0] != 1 || scale[1] != 1);
  }
  // The same of the first scores.
  template <int kRows>
  __device__ __forceinline__ void WeighFirst(RowScores<kRows>& scores) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float above = scores[0][j];
#pragma unroll
      for (int i = 1; i < kRows; ++i) above = fmaxf(above, scores[i][j]);
      peak[j] = AcrossRows(above, [](float a, float b) { return fmaxf(a, b); });
      const float shift = PeakOrZero(peak[j]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        scores[i][j] = __expf(scores[i][j] - shift);
        total[j] += scores[i][j];
      }
    }
  }

  // Over all positions, for the query FirstHead() + j.
  __device__ __forceinline__ float Total(int j) const {
    return AcrossRows(total[j], [](float a, float b) { return a + b; });
  }
};

// Weights of 8 positions as the right operand. As a sum of two 16-bit numbers, for one would round
// them more than f32 does.
struct SplitWeights {
  uint32_t high, low;
};
template <typename Math>
__device__ __forceinline__ SplitWeights Split(const float (&weights)[2]) {
  const uint32_t high = Math::NarrowPair(weights[0], weights[1]);
  const float low[2] = {weights[0] - Math::Widen(static_cast<uint16_t>(high)),
                        weights[1] - Math::Widen(static_cast<uint16_t>(high >> 16))};
  return {Transposed(high), Transposed(Math::NarrowPair(low[0], low[1]))};
}

}  // namespace jaxgraph
