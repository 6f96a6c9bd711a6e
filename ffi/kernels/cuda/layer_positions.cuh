// Positions of the cache in a warp's registers, as a small model's layer attends to them, and the
// projected heads that are put among them.
#pragma once

#include "ffi/kernels/cuda/attention_chunk.cuh"
#include "ffi/kernels/cuda/layer_device.cuh"

namespace jaxgraph {

constexpr int kUnit = 16;   // positions of a warp at a time
constexpr int kWidth = 64;  // elements of a head that a lane's loads reach
static_assert(kMaxLayerWidth == kWidth);

#if __CUDA_ARCH__ >= 900

// Where elements [first, first + 4) of a head, first a multiple of four, lie among its octets, in
// bytes.
__device__ __forceinline__ int PlaceInHead(int first, int half) {
  return 4 * first + (first < half ? 0 : 8 - 4 * half);
}
// Elements [first, first + 8) of projected heads.
struct EightOfHead {
  int low, high;  // where four of them lie
  bool inside;

  __device__ __forceinline__ EightOfHead(int first, int width)
      : low(PlaceInHead(first, width / 2)),
        high(PlaceInHead(first + 4, width / 2)),
        inside(first < width) {}
  __device__ __forceinline__ uint4 Load(const char* head) const {
    uint2 a = {}, b = {};
    if (inside) {
      a = *reinterpret_cast<const uint2*>(head + low);
      b = *reinterpret_cast<const uint2*>(head + high);
    }
    return {a.x, a.y, b.x, b.y};
  }
};

// What a warp has of 16 positions. Keys [i][block]: positions lane / 4 and 8 below, 8 neighbours
// along the head of 32. Values [i]: positions lane % 4 * 2, the next, and the two 8 below, 8
// columns.
struct Positions {
  uint4 keys[2][kWidth / 32];
  uint4 values[4];

  static __device__ __forceinline__ int KeyPosition(int i) { return 8 * i + FirstRow(); }
  static __device__ __forceinline__ int ValuePosition(int i) {
    return 8 * (i / 2) + i % 2 + FirstHead();
  }
  // Elements of a head where this lane's 8 begin.
  static __device__ __forceinline__ int KeyElement(int b) { return 32 * b + threadIdx.x % 4 * 8; }
  static __device__ __forceinline__ int ValueElement() { return FirstRow() * 8; }

  __device__ __forceinline__ void Load(const char* keys_of_head, int64_t key_row,
                                       const char* values_of_head, int64_t value_row, int first,
                                       int end, int width) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + KeyPosition(i);
#pragma unroll
      for (int b = 0; b < kWidth / 32; ++b) {
        keys[i][b] = LoadVector(keys_of_head + at * key_row + 2 * KeyElement(b),
                                at < end && KeyElement(b) < width);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + ValuePosition(i);
      values[i] = LoadVector(values_of_head + at * value_row + 2 * ValueElement(),
                             at < end && ValueElement() < width);
    }
  }
  // Puts in the row that is written at `written`.
  __device__ __forceinline__ void Replace(const uint4 (&key)[kWidth / 32], const uint4& value,
                                          int first, int written) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < kWidth / 32; ++b) {
        if (first + KeyPosition(i) == written) keys[i][b] = key[b];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + ValuePosition(i) == written) values[i] = value;
    }
  }

  // Of query FirstRow(), with positions ValuePosition(i). Positions are columns of the products, so
  // that keys are operands as they come, and weights will be. Of a query's four words, two are in
  // one row of the left operand and two in another, eight below (as in RowProduct), and the keys'
  // words are multiplied with the one or the other.
  template <typename Math>
  __device__ __forceinline__ void Score(const uint4 (&query)[kWidth / 32],
                                        float (&scores)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float upper[4] = {}, lower[4] = {};
#pragma unroll
      for (int b = 0; b < kWidth / 32; ++b) {
        const Fragment f = {{query[b].x, query[b].z, query[b].y, query[b].w}};
        Math::MultiplyAdd(f, keys[i][b].x, keys[i][b].y, upper);
        Math::MultiplyAdd(f, keys[i][b].z, keys[i][b].w, lower);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) scores[2 * i + j] = upper[j] + lower[2 + j];
    }
  }
  // Adds the values, weighted. A weight enters as the sum of two 16-bit numbers, for one would
  // round it more than f32 does.
  template <typename Math>
  __device__ __forceinline__ void AddValues(const float (&weights)[4], float (&sums)[4][4]) const {
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = Math::NarrowPair(weights[2 * i], weights[2 * i + 1]);
      const float2 rounded = Widened<Math>(high[i]);
      low[i] = Math::NarrowPair(weights[2 * i] - rounded.x, weights[2 * i + 1] - rounded.y);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i] = Word(values[i], w);
      const Fragment f = {{__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632),
                           __byte_perm(row[2], row[3], 0x5410),
                           __byte_perm(row[2], row[3], 0x7632)}};
      Math::MultiplyAdd(f, high[0], high[1], sums[w]);
      Math::MultiplyAdd(f, low[0], low[1], sums[w]);
    }
  }
};
// Over the lanes that have the same query's scores.
template <typename F>
__device__ __forceinline__ float AcrossPositions(float x, F combine) {
#pragma unroll
  for (int o = 1; o < 4; o *= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}

#endif

}  // namespace jaxgraph
