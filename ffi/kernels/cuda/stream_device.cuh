// Pieces that the streaming products share: the rows in shared memory, the products' way out, and
// Hopper's instructions.
#pragma once

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"

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
  RandomDelay();
}

#if __CUDA_ARCH__ >= 900
// Weights are read once a step: they should not push caches and activations out of L2.
__device__ __forceinline__ uint64_t ReadOncePolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// 16 bytes, or zeros where there is nothing.
__device__ __forceinline__ void CopyAsync(uint32_t to, const char* from, bool inside,
                                          uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(inside ? 16 : 0), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `n` of the groups committed are still on their way.
__device__ __forceinline__ void WaitForCopies(int n) {
  static_assert(kMaxStages == 8);
  switch (n) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    case 4:
      asm volatile("cp.async.wait_group 4;" ::: "memory");
      break;
    case 5:
      asm volatile("cp.async.wait_group 5;" ::: "memory");
      break;
    case 6:
      asm volatile("cp.async.wait_group 6;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 7;" ::: "memory");
  }
}

// A barrier that counts the bytes of bulk copies.
__device__ __forceinline__ void InitBarrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void Expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BulkCopy(uint32_t to, const char* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void WaitForBytes(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier)
      : "memory");
}
#endif

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

// What rows take of shared memory: themselves, then what is added to them and the norm's weight.
__host__ __device__ inline int RowBytes(const StreamParams& p) {
  return ((p.added != nullptr ? 2 : 1) * p.m + (p.weight != nullptr ? 1 : 0)) * p.row_pitch;
}

#if __CUDA_ARCH__ >= 900
// Brings the rows into shared memory, `row_pitch` bytes apart, with zeros behind them; all threads
// of the block together, which have met since the barrier was made. With a norm every block
// computes it, and the last one stores it: its share of the products is the smallest.
template <typename T>
__device__ __forceinline__ void BringRows(const StreamParams& p, char* rows, uint32_t barrier,
                                          float (*by_warp)[kMaxStreamRows]) {
  const int pitch = p.row_pitch, eights = p.k / 8, bytes = 2 * p.k;
  char* added = rows + p.m * pitch;
  const char* weight = rows + (p.added != nullptr ? 2 : 1) * p.m * pitch;
  if (threadIdx.x == 0) {
    Expect(barrier, (RowBytes(p) / pitch) * bytes);
    for (int m = 0; m < p.m; ++m) {
      BulkCopy(SharedAddress(rows + m * pitch), p.row + m * p.row_m, bytes, barrier);
      if (p.added == nullptr) continue;
      BulkCopy(SharedAddress(added + m * pitch), p.added + m * p.added_m, bytes, barrier);
    }
    if (p.weight != nullptr) BulkCopy(SharedAddress(weight), p.weight, bytes, barrier);
  }
  for (int m = 0; m < p.m; ++m) {
    const int i = eights + static_cast<int>(threadIdx.x);
    if (i < pitch / 16) *reinterpret_cast<uint4*>(rows + m * pitch + 16 * i) = uint4{0, 0, 0, 0};
  }
  WaitForBytes(barrier);
  if (!p.has_norm) {
    __syncthreads();  // for the zeros
    return;
  }
  const bool stores = blockIdx.x == gridDim.x - 1;
  for (int m = 0; m < p.m; ++m) {
    float squares = 0;
    for (int i = threadIdx.x; i < eights; i += kStreamThreads) {
      uint4* place = reinterpret_cast<uint4*>(rows + m * pitch + 16 * i);
      Eight x = {*place};
      if (p.added != nullptr) {
        const Eight y = {*reinterpret_cast<const uint4*>(added + m * pitch + 16 * i)};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x.bits[j] = T::FromFloat(T::ToFloat(x.bits[j]) + T::ToFloat(y.bits[j]));
        }
        *place = x.packed;
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
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) squares += __shfl_xor_sync(kAllLanes, squares, o);
    if (threadIdx.x % kWarp == 0) by_warp[threadIdx.x / kWarp][m] = squares;
  }
  __syncthreads();
  const float length = __uint_as_float(p.length), eps = __uint_as_float(p.eps);
  for (int m = 0; m < p.m; ++m) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) total += by_warp[w][m];
    const float mean = p.divides ? total / length : __fmul_rn(total, length);
    const float scale = 1.0f / sqrtf(__fadd_rn(mean, eps));
    for (int i = threadIdx.x; i < eights; i += kStreamThreads) {
      uint4* place = reinterpret_cast<uint4*>(rows + m * pitch + 16 * i);
      Eight x = {*place}, w = {};
      if (p.weight != nullptr) w.packed = *reinterpret_cast<const uint4*>(weight + 16 * i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float h = __fmul_rn(T::ToFloat(x.bits[j]), scale);
        if (p.weight != nullptr) {
          h = __fmul_rn(p.rounds_first ? Rounded<T>(h) : h, T::ToFloat(w.bits[j]));
        }
        x.bits[j] = T::FromFloat(h);
      }
      *place = x.packed;
      if (stores) *reinterpret_cast<uint4*>(p.norm + m * p.norm_m + 16 * i) = x.packed;
    }
  }
  __syncthreads();
}
#endif

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
