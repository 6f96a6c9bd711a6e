// Pieces that the kernels of a layer share.
#pragma once

#include <algorithm>

#include "ffi/kernels/cuda/attention_mma.cuh"
#include "ffi/kernels/cuda/layer.h"
#include "ffi/kernels/cuda/stream_device.cuh"

namespace jaxgraph {

constexpr int kLayerWarps = 8;
constexpr int kLayerThreads = kLayerWarps * kWarp;
constexpr int kChunk = 32;  // elements along k that a lane's 16 bytes are a quarter of

constexpr int RoundUp(int n, int unit) { return (n + unit - 1) / unit * unit; }
constexpr int ChunksOf(int k) { return (k + kChunk - 1) / kChunk; }

// Rows of weights in shared memory, and how the warps share their products with one row: tiles of
// 16 rows are dealt out; where they are few, k is shared as well.
struct RowsLayout {
  int32_t first = 0, pitch = 0, rows = 0, chunks = 0, tiles = 0, splits = 0;
  // The lanes that read at once read two rows, 64 bytes of each, from all banks.
  static RowsLayout Of(int rows, int k) {
    RowsLayout at;
    at.rows = rows;
    at.chunks = ChunksOf(k);
    at.pitch = at.chunks * 64 + (at.chunks % 2 == 0 ? 64 : 0);
    at.tiles = (rows + 15) / 16;
    at.splits = std::max(1, kLayerWarps / at.tiles);
    return at;
  }
  int bytes() const { return rows * pitch; }
  int sum_bytes() const { return splits * tiles * 64; }
  // Every tile has a warp.
  bool fits() const { return tiles <= kLayerWarps; }
};

#if __CUDA_ARCH__ >= 900

// Asks for k elements of a row of weights, which the barrier will announce; what is behind them, up
// to a whole chunk, is made zero.
__device__ __forceinline__ void FetchRow(char* to, const char* from, int k, int chunks,
                                         uint32_t barrier, uint64_t policy) {
  BulkCopyOnce(SharedAddress(to), from, 2 * k, barrier, policy);
  for (int c = k / 8; c < chunks * 4; ++c) StoreEight(to + 16 * c, {});
}

__device__ __forceinline__ uint2 LoadWeight(const LayerRow& p) {
  uint2 weight = {};
  const int at = 4 * static_cast<int>(threadIdx.x);
  if (p.weight != nullptr && at < p.size) {
    weight = *reinterpret_cast<const uint2*>(p.weight + 2 * at);
  }
  return weight;
}

// Not through the first-level cache: an earlier launch on this multiprocessor has read the place.
template <typename V>
__device__ __forceinline__ V LoadFresh(const void* from) {
  return __ldcg(static_cast<const V*>(from));
}

// Brings the norm into shared memory, where the block's threads meet. Every block computes it;
// `stores`: this one stores the sum.
template <typename Math>
__device__ __forceinline__ void BringNorm(const LayerRow& p, const uint2& weight, bool stores,
                                          char* to, float* by_warp) {
  const int at = 4 * static_cast<int>(threadIdx.x);
  float x[4] = {};
  if (at < p.size) {
    const uint2 row = LoadFresh<uint2>(p.row + 2 * at);
    float4 part[kMaxLayerParts];
    uint2 added = {};
    if (p.added != nullptr) added = LoadFresh<uint2>(p.added + 2 * at);
#pragma unroll
    for (int i = 0; i < kMaxLayerParts; ++i) {
      if (i < p.num_parts) part[i] = LoadFresh<float4>(p.parts + int64_t{i} * p.size + at);
    }
    const uint32_t words[2] = {row.x, row.y}, more[2] = {added.x, added.y};
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = Math::Widen(static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2)));
      y[j] = Math::Widen(static_cast<uint16_t>(more[j / 2] >> 16 * (j % 2)));
    }
    if (p.num_parts > 0) {
      float4 sum = part[0];
#pragma unroll
      for (int i = 1; i < kMaxLayerParts; ++i) {
        if (i >= p.num_parts) break;
        sum = {sum.x + part[i].x, sum.y + part[i].y, sum.z + part[i].z, sum.w + part[i].w};
      }
      y[0] = Math::Widen(Math::Narrow(sum.x));
      y[1] = Math::Widen(Math::Narrow(sum.y));
      y[2] = Math::Widen(Math::Narrow(sum.z));
      y[3] = Math::Widen(Math::Narrow(sum.w));
    }
    if (p.num_parts > 0 || p.added != nullptr) {
      uint16_t bits[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bits[j] = Math::Narrow(x[j] + y[j]);
        x[j] = Math::Widen(bits[j]);
      }
      if (stores && p.sum != nullptr) {
        *reinterpret_cast<uint2*>(p.sum + 2 * at) = {Pair(bits[0], bits[1]),
                                                     Pair(bits[2], bits[3])};
      }
    }
  }
  const float squares = SumOfWarp((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
  if (threadIdx.x % kWarp == 0) by_warp[threadIdx.x / kWarp] = squares;
  __syncthreads();
  const float4 low = *reinterpret_cast<const float4*>(by_warp);
  const float4 high = *reinterpret_cast<const float4*>(by_warp + 4);
  const float total = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
  const float scale =
      rsqrtf(__fadd_rn(__fmul_rn(total, __uint_as_float(p.mean)), __uint_as_float(p.eps)));
  if (at < p.size) {
    const uint32_t words[2] = {weight.x, weight.y};
    uint16_t bits[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float h = __fmul_rn(x[j], scale);
      if (p.weight != nullptr) {
        if (p.rounds_first) h = Math::Widen(Math::Narrow(h));
        h *= Math::Widen(static_cast<uint16_t>(words[j / 2] >> 16 * (j % 2)));
      }
      bits[j] = Math::Narrow(h);
    }
    *reinterpret_cast<uint2*>(to + 2 * at) = {Pair(bits[0], bits[1]), Pair(bits[2], bits[3])};
  }
  __syncthreads();
}

// The products of rows of weights and of one row x, all in shared memory: a warp's part. Made
// before the wait, run behind it.
class RowProduct {
 public:
  __device__ __forceinline__ RowProduct(const RowsLayout& at, const char* shared, int x,
                                        float* sums) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int tile = warp / at.splits, split = warp - tile * at.splits;
    const int row = 16 * tile + lane / 4, column = lane % 4 * 16 + 64 * split;
    above_ = shared + at.first + min(row, at.rows - 1) * at.pitch + column;
    below_ = shared + at.first + min(row + 8, at.rows - 1) * at.pitch + column;
    x_ = shared + x + column;
    step_ = 64 * at.splits;
    count_ = tile < at.tiles ? (at.chunks - split + at.splits - 1) / at.splits : 0;
    sums_ = sums + (split * at.tiles + tile) * 16 + lane / 4;
    stores_ = tile < at.tiles && lane % 4 == 0;
  }

  // A sum over k may be in any order, so a lane's 16 bytes are its columns of two products.
  template <typename Math>
  __device__ __forceinline__ void Run() const {
    float sum[4][4] = {};
    const char *above = above_, *below = below_, *x = x_;
    for (int c = 0; c < count_; c += 2) {
      const bool two = c + 1 < count_;
      const uint4 a = *reinterpret_cast<const uint4*>(above);
      const uint4 b = *reinterpret_cast<const uint4*>(below);
      const uint4 v = *reinterpret_cast<const uint4*>(x);
      uint4 d = {}, e = {}, w = {};
      if (two) {
        d = *reinterpret_cast<const uint4*>(above + step_);
        e = *reinterpret_cast<const uint4*>(below + step_);
        w = *reinterpret_cast<const uint4*>(x + step_);
      }
      Math::MultiplyAdd({{a.x, b.x, a.y, b.y}}, v.x, v.y, sum[0]);
      Math::MultiplyAdd({{a.z, b.z, a.w, b.w}}, v.z, v.w, sum[1]);
      Math::MultiplyAdd({{d.x, e.x, d.y, e.y}}, w.x, w.y, sum[2]);
      Math::MultiplyAdd({{d.z, e.z, d.w, e.w}}, w.z, w.w, sum[3]);
      above += 2 * step_;
      below += 2 * step_;
      x += 2 * step_;
    }
    if (stores_) {
      sums_[0] = (sum[0][0] + sum[1][0]) + (sum[2][0] + sum[3][0]);
      sums_[8] = (sum[0][2] + sum[1][2]) + (sum[2][2] + sum[3][2]);
    }
  }

 private:
  const char *above_, *below_, *x_;
  float* sums_;
  int step_, count_;
  bool stores_;
};
__device__ __forceinline__ float Add(float a, float b) { return a + b; }
__device__ __forceinline__ float2 Add(const float2& a, const float2& b) {
  return {a.x + b.x, a.y + b.y};
}
__device__ __forceinline__ float4 Add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
// Row r of these products, or as many as V holds, when the warps have met.
template <typename V>
__device__ __forceinline__ V SumOf(const RowsLayout& at, const float* sums, int r) {
  V part[kLayerWarps];
#pragma unroll
  for (int i = 0; i < kLayerWarps; ++i) {
    if (i < at.splits) part[i] = *reinterpret_cast<const V*>(sums + i * 16 * at.tiles + r);
  }
  V sum = part[0];
#pragma unroll
  for (int i = 1; i < kLayerWarps; ++i) {
    if (i < at.splits) sum = Add(sum, part[i]);
  }
  return sum;
}

#endif

}  // namespace jaxgraph
