// Pieces that the streaming products share: the rows in shared memory, the products' way out, and
// Hopper's instructions.
#pragma once

#include "ffi/kernels/cuda/async_copy.cuh"
#include "ffi/kernels/cuda/cluster.cuh"
#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = kStreamWarps * kWarp;

// ---- instructions ----

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
// The same of what other blocks read, too.
__device__ __forceinline__ void CopyAsync(uint32_t to, const char* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}
// The same of what this multiprocessor reads again: its first-level cache keeps it.
__device__ __forceinline__ void CopyAsyncNear(uint32_t to, const char* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}
// Waits until at most `n` of the groups committed are still on their way. Not a switch: its table
// of addresses lies in memory, and is cold the first time.
__device__ __forceinline__ void WaitForCopies(int n) {
  static_assert(kMaxStages == 8);
  if (n < 4) {
    if (n < 2) {
      if (n < 1) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
      } else {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
      }
    } else if (n < 3) {
      asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 3;" ::: "memory");
    }
  } else if (n < 6) {
    if (n < 5) {
      asm volatile("cp.async.wait_group 4;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 5;" ::: "memory");
    }
  } else if (n < 7) {
    asm volatile("cp.async.wait_group 6;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 7;" ::: "memory");
  }
}

// Barriers that count the bytes of bulk copies; used by this thread, or by others once they have
// met it. The fence takes its time, so all barriers share one.
__device__ __forceinline__ void InitBarriers(uint32_t first, int count) {
  for (int i = 0; i < count; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(first + 8 * i));
  }
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
// The same of what is read once a step.
__device__ __forceinline__ void BulkCopyOnce(uint32_t to, const char* from, uint32_t bytes,
                                             uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// Asks L2 for memory, which stays coherent there: allowed before the wait, whoever writes it.
__device__ __forceinline__ void PrefetchLine(const char* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// The barrier's phases alternate between parity 0, the first, and 1.
__device__ __forceinline__ void WaitForBytes(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif

// Where a block stands: in its cluster, and that among all. Clusters are powers of two, and
// divisions by what is known only here take long.
struct BlockPlace {
  int rank, cluster, clusters, shift;
};
__device__ __forceinline__ BlockPlace PlaceOfBlock(const StreamParams& p) {
  const int shift = __ffs(p.splits) - 1, block = blockIdx.x;
  return {block & (p.splits - 1), block >> shift, static_cast<int>(gridDim.x) >> shift, shift};
}

// A place among lines of kLineBytes. They would all start in the same bank, so their 16-byte pieces
// are turned.
constexpr int kLineBytes = 128;
__device__ __forceinline__ uint32_t PlaceOf(int line, int piece) {
  return line * kLineBytes + ((piece ^ (line & 7)) << 4);
}

// 16 x 16 elements as tensor cores want the left operand, from lines that are its rows or columns;
// from lines that are columns of the right operand, two of those, of 16 x 8.
template <bool kLinesAreRows>
__device__ __forceinline__ void LoadMatrix(uint32_t address, uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 750
  if constexpr (kLinesAreRows) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
  }
#endif
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
  // Two at a time, the first in the low bits: half the instructions.
  static __device__ __forceinline__ float2 ToFloats(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
  static __device__ __forceinline__ uint32_t FromFloats(float2 v) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(v.y), "f"(v.x));
    return bits;
  }
  // What f32 would give, rounded: a product of two such numbers is exact there.
  static __device__ __forceinline__ uint32_t Multiply(uint32_t a, uint32_t b) {
    uint32_t bits;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    return bits;
  }
};
struct StreamF16 {
  static constexpr bool kIsBF16 = false;
  static constexpr DType kDType = DType::kF16;
  static __device__ __forceinline__ float ToFloat(uint16_t bits) { return F16ToFloat(bits); }
  static __device__ __forceinline__ uint16_t FromFloat(float v) { return FloatToF16(v); }
  static __device__ __forceinline__ float2 ToFloats(uint32_t bits) {
    return {F16ToFloat(static_cast<uint16_t>(bits)), F16ToFloat(static_cast<uint16_t>(bits >> 16))};
  }
  static __device__ __forceinline__ uint32_t FromFloats(float2 v) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(v.y), "f"(v.x));
    return bits;
  }
  static __device__ __forceinline__ uint32_t Multiply(uint32_t a, uint32_t b) {
    uint32_t bits;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    return bits;
  }
};

// 8 elements.
union Eight {
  uint4 packed;
  uint32_t pairs[4];
  uint16_t bits[8];
};

template <typename T>
__device__ __forceinline__ float Rounded(float v) {
  return T::ToFloat(T::FromFloat(v));
}

// ---- the rows ----

#if __CUDA_ARCH__ >= 900
// The norm's weight is read once a step as the matrices are: L2 can have it before the row is
// there.
__device__ __forceinline__ void PrefetchNormWeight(const StreamParams& p) {
  const int at = 128 * static_cast<int>(threadIdx.x);
  if (p.weight != nullptr && at < 2 * p.k) PrefetchLine(p.weight + at);
}

// The scale of a row's norm, of the sum of its squares.
__device__ __forceinline__ float ScaleOf(const StreamParams& p, float total) {
  const float length = __uint_as_float(p.length), eps = __uint_as_float(p.eps);
  const float mean = p.divides ? total / length : __fmul_rn(total, length);
  return 1.0f / sqrtf(__fadd_rn(mean, eps));
}
// The same of the sums of squares that its warps have.
__device__ __forceinline__ float NormScale(const StreamParams& p, const float* by_warp,
                                           int warps = kStreamWarps) {
  float total = 0;
#pragma unroll
  for (int w = 0; w < kStreamWarps; ++w) {
    if (w < warps) total += by_warp[w];
  }
  return ScaleOf(p, total);
}

template <typename T>
__device__ __forceinline__ Eight Sum(Eight x, const Eight& y) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 a = T::ToFloats(x.pairs[j]), b = T::ToFloats(y.pairs[j]);
    x.pairs[j] = T::FromFloats({a.x + b.x, a.y + b.y});
  }
  return x;
}
template <typename T>
__device__ __forceinline__ float AddSquares(float squares, const Eight& x) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 v = T::ToFloats(x.pairs[j]);
    squares = __fadd_rn(squares, __fmul_rn(v.x, v.x));
    squares = __fadd_rn(squares, __fmul_rn(v.y, v.y));
  }
  return squares;
}
__device__ __forceinline__ float SumOfWarp(float v) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
}
// Two neighbouring elements of the norm.
template <typename T>
__device__ __forceinline__ uint32_t ScaledPair(const StreamParams& p, uint32_t x, uint32_t weight,
                                               float scale) {
  float2 h = T::ToFloats(x);
  h = {__fmul_rn(h.x, scale), __fmul_rn(h.y, scale)};
  if (p.weight != nullptr) {
    if (p.rounds_first) return T::Multiply(T::FromFloats(h), weight);
    const float2 w = T::ToFloats(weight);
    h = {__fmul_rn(h.x, w.x), __fmul_rn(h.y, w.y)};
  }
  return T::FromFloats(h);
}
template <typename T>
__device__ __forceinline__ Eight Scaled(const StreamParams& p, Eight x, const Eight& weight,
                                        float scale) {
#pragma unroll
  for (int j = 0; j < 4; ++j) x.pairs[j] = ScaledPair<T>(p, x.pairs[j], weight.pairs[j], scale);
  return x;
}

__device__ __forceinline__ Eight LoadEight(const char* from) {
  return {*reinterpret_cast<const uint4*>(from)};
}
__device__ __forceinline__ void StoreEight(char* to, const Eight& x) {
  *reinterpret_cast<uint4*>(to) = x.packed;
}

// Brings the norm of a single row into shared memory, at most kMost eighths a thread.
template <typename T, int kMost>
__device__ __forceinline__ void BringNorm(const StreamParams& p, char* row, int end,
                                          float* by_warp) {
  const int thread = threadIdx.x;
  const bool stores = blockIdx.x == gridDim.x - 1;
  Eight x[kMost], added[kMost], weight[kMost] = {};
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    const int at = 16 * (thread + j * kStreamThreads);
    if (at >= 16 * end) break;
    x[j] = LoadEight(p.row + at);
    if (p.added != nullptr) added[j] = LoadEight(p.added + at);
    if (p.weight != nullptr) weight[j] = LoadEight(p.weight + at);
  }
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    const int at = 16 * (thread + j * kStreamThreads);
    if (at >= 16 * end) break;
    if (p.added != nullptr) x[j] = Sum<T>(x[j], added[j]);
    if (stores && p.sum != nullptr) StoreEight(p.sum + at, x[j]);
    squares = AddSquares<T>(squares, x[j]);
  }
  squares = SumOfWarp(squares);
  if (thread % kWarp == 0) by_warp[thread / kWarp] = squares;
  __syncthreads();
  const float scale = NormScale(p, by_warp);
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    const int at = 16 * (thread + j * kStreamThreads);
    if (at >= 16 * end) break;
    x[j] = Scaled<T>(p, x[j], weight[j], scale);
    StoreEight(row + at, x[j]);
    if (stores) StoreEight(p.norm + at, x[j]);
  }
  __syncthreads();
}

// Brings eighths [begin, end) of a single row into shared memory, `begin` first, with zeros behind
// them up to `row_pitch`; all of it where there is a norm. Threads fetch what they work on, which
// is there sooner than a copy that a barrier announces. The norm as in BringNorms. All threads meet
// at the end.
template <typename T>
__device__ __forceinline__ void BringRow(const StreamParams& p, char* row, int begin, int end,
                                         float* by_warp) {
  const int thread = threadIdx.x;
  const int zeros = 16 * (end - begin + thread);
  if (zeros < p.row_pitch) StoreEight(row + zeros, {});
  if (!p.has_norm) {
    constexpr int kAtOnce = 4;
    for (int first = begin + thread; first < end; first += kAtOnce * kStreamThreads) {
      Eight x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * kStreamThreads;
        if (i < end) x[j] = LoadEight(p.row + 16 * i);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * kStreamThreads;
        if (i < end) StoreEight(row + 16 * (i - begin), x[j]);
      }
    }
    __syncthreads();
    return;
  }
  // Most rows are short, and code that is not run need not be fetched.
  if (end <= kStreamThreads) {
    BringNorm<T, 1>(p, row, end, by_warp);
  } else {
    BringNorm<T, kMaxNormElements / 8 / kStreamThreads>(p, row, end, by_warp);
  }
}
#endif

// ---- the way out ----

// silu(gate) * up of two products that were rounded already.
template <typename T>
__device__ __forceinline__ uint16_t Activated(const StreamParams& p, float gate, float up) {
  const float sigmoid = 1.0f / (1.0f + expf(-gate));
  const float silu =
      p.silu_rounds ? Rounded<T>(gate * Rounded<T>(sigmoid)) : __fmul_rn(gate, sigmoid);
  return T::FromFloat(__fmul_rn(silu, up));
}

}  // namespace jaxgraph
