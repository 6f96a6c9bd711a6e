// A chunk of a cache as one warp works on it, without shared memory: keys and values come from
// memory in the very registers that the tensor cores take, 16 bytes a load. Dimensions that are
// summed over may be in any order, so a lane's 8 neighbours along d serve as its columns of two
// products; and the columns of the values may be, so its 8 neighbours along e are rows of four
// products.
#pragma once

#include "ffi/kernels/cuda/attention_mma.cuh"

namespace jaxgraph {

// What a warp works on at a time.
template <int kWidth>
struct Shape {
  static constexpr int kTiles = 128 / kWidth;  // of 16 positions
  static constexpr int kChunk = 16 * kTiles;
  static constexpr int kBlocks = kWidth / 32;  // of a key
  static constexpr int kGroups = kWidth / 64;  // of the columns of a value
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// 16 bytes, or zeros. Not through the first-level cache: a row may have been read too early.
__device__ __forceinline__ uint4 LoadVector(const char* from, bool inside) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@inside ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(static_cast<uint32_t>(inside))
      : "memory");
  return v;
}

__device__ __forceinline__ uint32_t Word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Rows of keys or values, from the place in a row that this lane reads.
struct LaneRows {
  const char* column;
  int64_t stride;
  __device__ __forceinline__ uint4 Load(int position, int end, int offset) const {
    return LoadVector(column + position * stride + offset, position < end);
  }
};

// [tile][i]: positions lane / 4 and 8 below; [block]: 8 neighbours along d of 32.
template <int kWidth>
using Keys = uint4[Shape<kWidth>::kTiles][2][Shape<kWidth>::kBlocks];
// [tile][i]: positions lane % 4 * 2, the next, and the two 8 below; [group]: 8 columns of 64.
template <int kWidth>
using Values = uint4[Shape<kWidth>::kTiles][4][Shape<kWidth>::kGroups];

template <int kWidth>
__device__ __forceinline__ void LoadKeys(const LaneRows& rows, int first, int end,
                                         Keys<kWidth>& keys) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < Shape<kWidth>::kBlocks; ++b) {
        keys[t][i][b] = rows.Load(first + 16 * t + 8 * i + FirstRow(), end, 64 * b);
      }
    }
  }
}
template <int kWidth>
__device__ __forceinline__ void LoadValues(const LaneRows& rows, int first, int end,
                                           Values<kWidth>& values) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int g = 0; g < Shape<kWidth>::kGroups; ++g) {
        values[t][i][g] =
            rows.Load(first + 16 * t + 8 * (i / 2) + i % 2 + FirstHead(), end, 128 * g);
      }
    }
  }
}

// Brings a chunk's rows near. That reads nothing, so it may be done at any time.
template <int kWidth>
__device__ __forceinline__ void Prefetch(const char* rows, int64_t stride, int first, int end) {
  constexpr int kSector = 32, kSectors = 2 * kWidth / kSector, kAtOnce = kWarp / kSectors;
  const int lane = threadIdx.x % kWarp;
  const char* const column = rows + lane % kSectors * kSector;
#pragma unroll
  for (int i = 0; i < Shape<kWidth>::kChunk; i += kAtOnce) {
    const int row = first + i + lane / kSectors;
    if (row < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(column + row * stride));
  }
}

// A chunk's scores; see RowScores.
template <int kWidth>
using Scores = RowScores<2 * Shape<kWidth>::kTiles>;

template <typename Math, int kWidth>
__device__ __forceinline__ void RawScores(const Keys<kWidth>& keys,
                                          const uint4 (&queries)[Shape<kWidth>::kBlocks],
                                          Scores<kWidth>& scores) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
    float products[4] = {};
#pragma unroll
    for (int b = 0; b < Shape<kWidth>::kBlocks; ++b) {
      const uint4 &above = keys[t][0][b], &below = keys[t][1][b];
      Math::MultiplyAdd({{above.x, below.x, above.y, below.y}}, queries[b].x, queries[b].y,
                        products);
      Math::MultiplyAdd({{above.z, below.z, above.w, below.w}}, queries[b].z, queries[b].w,
                        products);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[2 * t + c / 2][c % 2] = products[c];
  }
}

// sums[group][word]: of the column 8 FirstRow() + 2 word of the group: queries FirstHead() and the
// next; then of the next column.
template <int kWidth>
using Sums = float[Shape<kWidth>::kGroups][4][4];

template <typename Math, int kWidth>
__device__ __forceinline__ void AddValues(const Values<kWidth>& values,
                                          const Scores<kWidth>& weights, Sums<kWidth>& sums) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
    SplitWeights split[2];  // of 8 positions each
#pragma unroll
    for (int i = 0; i < 2; ++i) split[i] = Split<Math>(weights[2 * t + i]);
#pragma unroll
    for (int g = 0; g < Shape<kWidth>::kGroups; ++g) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) row[i] = Word(values[t][i][g], w);
        const Fragment f = {
            {__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632),
             __byte_perm(row[2], row[3], 0x5410), __byte_perm(row[2], row[3], 0x7632)}};
        Math::MultiplyAdd(f, split[0].high, split[1].high, sums[g][w]);
        Math::MultiplyAdd(f, split[0].low, split[1].low, sums[g][w]);
      }
    }
  }
}

#endif

}  // namespace jaxgraph
