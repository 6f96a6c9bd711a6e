// Pieces that the kernels of MATMUL share.
#pragma once

#include "ffi/kernels/cuda/matmul.h"
#include "ffi/kernels/cuda/scalar.cuh"

namespace jaxgraph {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct BF16Element {
  static constexpr int kSize = 2;
  static __device__ __forceinline__ float Load(const char* p) {
    return BF16ToFloat(*reinterpret_cast<const uint16_t*>(p));
  }
  static __device__ __forceinline__ void Unpack(const uint4& v, float (&f)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(words[i] << 16);
      f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

struct F16Element {
  static constexpr int kSize = 2;
  static __device__ __forceinline__ float Load(const char* p) {
    return F16ToFloat(*reinterpret_cast<const uint16_t*>(p));
  }
  static __device__ __forceinline__ void Unpack(const uint4& v, float (&f)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = F16ToFloat(static_cast<uint16_t>(words[i]));
      f[2 * i + 1] = F16ToFloat(static_cast<uint16_t>(words[i] >> 16));
    }
  }
};

struct F32Element {
  static constexpr int kSize = 4;
  static __device__ __forceinline__ float Load(const char* p) {
    return *reinterpret_cast<const float*>(p);
  }
  static __device__ __forceinline__ void Unpack(const uint4& v, float (&f)[4]) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }
};

// 16 bytes that are read once: they need no place in the first-level cache. Not the read-only path,
// since b may be what the launch before wrote (a cache).
__device__ __forceinline__ uint4 LoadOnce(const char* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// The batch's part of an address.
__device__ __forceinline__ int64_t BatchOffset(const MatmulParams& p, const int64_t (&strides)[2],
                                               int batch) {
  const int b0 = batch / p.batch[1];
  return b0 * strides[0] + (batch - b0 * p.batch[1]) * strides[1];
}

// The same of b, which the batch may choose by an index.
__device__ __forceinline__ int64_t MatrixOffset(const MatmulParams& p, int batch) {
  if (p.index == nullptr) return BatchOffset(p, p.b_batch, batch);
  const int64_t at = LoadInteger(p.index + BatchOffset(p, p.index_batch, batch), p.index_dtype);
  return max(min(at, static_cast<int64_t>(p.matrices) - 1), int64_t{0}) * p.b_batch[0];
}

}  // namespace jaxgraph
