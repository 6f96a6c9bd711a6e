// Pieces that the streaming products share: the rows in shared memory, the products' way out, and
// Hopper's instructions.
#pragma once

#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/stream.h"

namespace jaxgraph {

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = kStreamWarps * kWarp;

// ---- instructions ----

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A launch that depends on this one may start; it waits (below) before it reads what we write.
__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Returns when every launch before this one is complete and its writes can be seen.
__device__ __forceinline__ void WaitForLaunchBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Weights are read once a step: they should not push caches and activations out of L2.
__device__ __forceinline__ uint64_t ReadOncePolicy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// d += a (16 x 16, row-major) * b (16 x 8, column-major), f32 sums.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (T::kIsBF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

// ---- the two types of rows and weights ----

struct StreamBF16 {
  static constexpr bool kIsBF16 = true;
  static constexpr DType kDType = DType::kBF16;
  static __device__ __forceinline__ float ToFloat(uint16_t bits) { return BF16ToFloat(bits); }
  static __device__ __forceinline__ uint16_t FromFloat(float v) { return FloatToBF16(v); }
};
struct StreamF16 {
  static constexpr bool kIsBF16 = false;
  static constexpr DType kDType = DType::kF16;
  static __device__ __forceinline__ float ToFloat(uint16_t bits) { return F16ToFloat(bits); }
  static __device__ __forceinline__ uint16_t FromFloat(float v) { return FloatToF16(v); }
};

// 8 elements.
union Eight {
  uint4 packed;
  uint16_t bits[8];
};

template <typename T>
__device__ __forceinline__ float Rounded(float v) {
  return T::ToFloat(T::FromFloat(v));
}

// ---- the rows ----

// Brings the rows into shared memory, `row_pitch` bytes apart, with zeros behind them; all threads
// of the block together. With a norm every block computes it, and the last one stores it: its share
// of the products is the smallest.
template <typename T>
__device__ __forceinline__ void BringRows(const StreamParams& p, char* rows,
                                          float (*by_warp)[kMaxStreamRows]) {
  const int eights = p.k / 8, pitch = p.row_pitch;
  const bool stores = blockIdx.x == gridDim.x - 1;
  for (int m = 0; m < p.m; ++m) {
    float squares = 0;
    for (int i = threadIdx.x; i < pitch / 16; i += kStreamThreads) {
      Eight x = {};
      if (i < eights) {
        x.packed = *reinterpret_cast<const uint4*>(p.row + m * p.row_m + 16 * i);
        if (p.has_norm) {
          if (p.added != nullptr) {
            Eight y;
            y.packed = *reinterpret_cast<const uint4*>(p.added + m * p.added_m + 16 * i);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              x.bits[j] = T::FromFloat(T::ToFloat(x.bits[j]) + T::ToFloat(y.bits[j]));
            }
          }
          if (stores && p.sum != nullptr) {
            *reinterpret_cast<uint4*>(p.sum + m * p.sum_m + 16 * i) = x.packed;
          }
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float v = T::ToFloat(x.bits[j]);
            squares = __fadd_rn(squares, __fmul_rn(v, v));
          }
        }
      }
      *reinterpret_cast<uint4*>(rows + m * pitch + 16 * i) = x.packed;
    }
    if (p.has_norm) {
#pragma unroll
      for (int o = kWarp / 2; o > 0; o /= 2) squares += __shfl_xor_sync(kAllLanes, squares, o);
      if (threadIdx.x % kWarp == 0) by_warp[threadIdx.x / kWarp][m] = squares;
    }
  }
  __syncthreads();
  if (!p.has_norm) return;
  for (int m = 0; m < p.m; ++m) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) total += by_warp[w][m];
    const float length = __uint_as_float(p.length), eps = __uint_as_float(p.eps);
    const float mean = p.divides ? total / length : __fmul_rn(total, length);
    const float scale = 1.0f / sqrtf(__fadd_rn(mean, eps));
    for (int i = threadIdx.x; i < eights; i += kStreamThreads) {
      Eight x, w;
      x.packed = *reinterpret_cast<const uint4*>(rows + m * pitch + 16 * i);
      if (p.weight != nullptr) w.packed = *reinterpret_cast<const uint4*>(p.weight + 16 * i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float h = __fmul_rn(T::ToFloat(x.bits[j]), scale);
        if (p.weight != nullptr) {
          h = __fmul_rn(p.rounds_first ? Rounded<T>(h) : h, T::ToFloat(w.bits[j]));
        }
        x.bits[j] = T::FromFloat(h);
      }
      *reinterpret_cast<uint4*>(rows + m * pitch + 16 * i) = x.packed;
      if (stores) *reinterpret_cast<uint4*>(p.norm + m * p.norm_m + 16 * i) = x.packed;
    }
  }
  __syncthreads();
}

// ---- the way out ----

// silu(gate) * up of two products that were rounded already.
template <typename T>
__device__ __forceinline__ void StoreActivated(const StreamParams& p, int m, int64_t n, float gate,
                                               float up) {
  const float sigmoid = 1.0f / (1.0f + expf(-gate));
  const float silu =
      p.silu_rounds ? Rounded<T>(gate * Rounded<T>(sigmoid)) : __fmul_rn(gate, sigmoid);
  *reinterpret_cast<uint16_t*>(p.activated + m * p.activated_m + 2 * n) =
      T::FromFloat(__fmul_rn(silu, up));
}

}  // namespace jaxgraph
