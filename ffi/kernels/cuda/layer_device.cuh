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

// Where a word of a row lies in shared memory, in bytes, and one of its two elements.
__device__ __forceinline__ int PlaceOfWord(uint32_t w) { return 4 * w; }
__device__ __forceinline__ int PlaceOfElement(uint32_t i) { return PlaceOfWord(i / 2) + i % 2 * 2; }

// Has a value computed here, before the wait, when there is time. The compiler would rather do it
// where the value is used.
template <typename I>
__device__ __forceinline__ void ComputeNow(I& value) {
  asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void ComputeNow(float*& value) { asm volatile("" : "+l"(value)); }

// Asks for k elements of a row of weights, which the barrier will announce; what is behind them, up
// to a whole chunk, is made zero.
__device__ __forceinline__ void FetchRow(char* to, const char* from, int k, int chunks,
                                         uint32_t barrier, uint64_t policy) {
  BulkCopyOnce(SharedAddress(to), from, 2 * k, barrier, policy);
  for (int c = k / 8; c < chunks * 4; ++c) StoreEight(to + 16 * c, {});
}

// Where there is none, ones: they change no bit.
template <typename Math>
__device__ __forceinline__ uint2 LoadWeight(const LayerRow& p) {
  const uint32_t ones = Math::NarrowPair(1.0f, 1.0f);
  uint2 weight = {ones, ones};
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

__device__ __forceinline__ float Add(float a, float b) { return a + b; }
__device__ __forceinline__ float2 Add(const float2& a, const float2& b) {
  return {a.x + b.x, a.y + b.y};
}
__device__ __forceinline__ float4 Add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
// Both numbers of a word; four numbers of two.
template <typename Math>
__device__ __forceinline__ float2 Widened(uint32_t word) {
  return {Math::Widen(static_cast<uint16_t>(word)), Math::Widen(static_cast<uint16_t>(word >> 16))};
}
template <typename Math>
__device__ __forceinline__ void SetAll(const uint2& words, float (&x)[4]) {
  const float2 low = Widened<Math>(words.x), high = Widened<Math>(words.y);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}
template <typename Math>
__device__ __forceinline__ void RoundAll(float (&x)[4]) {
  SetAll<Math>({Math::NarrowPair(x[0], x[1]), Math::NarrowPair(x[2], x[3])}, x);
}

// Brings the norm into shared memory, where the block's threads meet. Every block computes it;
// `stores`: this one stores the sum. At most kParts parts.
template <typename Math, int kParts>
__device__ __forceinline__ void BringNorm(const LayerRow& p, const uint2& weight, bool stores,
                                          char* to, float* by_warp) {
  const int at = 4 * static_cast<int>(threadIdx.x);
  float x[4] = {};
  if (at < p.size) {
    uint2 row = LoadFresh<uint2>(p.row + 2 * at), added = {};
    float4 part[kParts];
    if (p.added != nullptr) added = LoadFresh<uint2>(p.added + 2 * at);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (i < p.num_parts) part[i] = LoadFresh<float4>(p.parts + int64_t{i} * p.size + at);
    }
    SetAll<Math>(row, x);
    float y[4];
    SetAll<Math>(added, y);
    if (p.num_parts > 0) {
      float4 sum = part[0];
#pragma unroll
      for (int i = 1; i < kParts; ++i) {
        if (i < p.num_parts) sum = Add(sum, part[i]);
      }
      SetAll<Math>({Math::NarrowPair(sum.x, sum.y), Math::NarrowPair(sum.z, sum.w)}, y);
    }
    if (p.num_parts > 0 || p.added != nullptr) {
      row = {Math::NarrowPair(x[0] + y[0], x[1] + y[1]),
             Math::NarrowPair(x[2] + y[2], x[3] + y[3])};
      SetAll<Math>(row, x);
      if (stores && p.sum != nullptr) *reinterpret_cast<uint2*>(p.sum + 2 * at) = row;
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
    const float2 w[2] = {Widened<Math>(weight.x), Widened<Math>(weight.y)};
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(x[j], scale);
    if (p.rounds_first) RoundAll<Math>(x);
    const uint32_t t = threadIdx.x;
    *reinterpret_cast<uint32_t*>(to + PlaceOfWord(2 * t)) =
        Math::NarrowPair(__fmul_rn(x[0], w[0].x), __fmul_rn(x[1], w[0].y));
    *reinterpret_cast<uint32_t*>(to + PlaceOfWord(2 * t + 1)) =
        Math::NarrowPair(__fmul_rn(x[2], w[1].x), __fmul_rn(x[3], w[1].y));
  }
  __syncthreads();
}

// The products of rows of weights and of one row x, all in shared memory: a warp's part. Made
// before the wait, run behind it.
class RowProduct {
 public:
  __device__ __forceinline__ RowProduct(const RowsLayout& at, char* shared, int x, int sums)
      : shared_(shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int tile = warp / at.splits, split = warp - tile * at.splits;
    const int row = 16 * tile + lane / 4, column = lane % 4 * 16 + 64 * split;
    above_ = at.first + min(row, at.rows - 1) * at.pitch + column;
    below_ = at.first + min(row + 8, at.rows - 1) * at.pitch + column;
    x_ = x + 64 * split + lane % 4 * 16;
    step_ = 64 * at.splits;
    count_ = tile < at.tiles ? (at.chunks - split + at.splits - 1) / at.splits : 0;
    sums_ = sums + 4 * ((split * at.tiles + tile) * 16 + lane / 4);
    stores_ = tile < at.tiles && lane % 4 == 0;
  }
  __device__ __forceinline__ void ComputeNow() {
    for (int* const value : {&above_, &below_, &x_, &count_, &sums_}) jaxgraph::ComputeNow(*value);
  }

  // A sum over k may be in any order, so a lane's 16 bytes are its columns of two products. Two
  // chunks at a time: so many sums do not wait for one another.
  template <typename Math>
  __device__ __forceinline__ void Run() const {
    float sum[4][4] = {};
    const char *x = shared_ + x_, *above = shared_ + above_, *below = shared_ + below_;
    int left = count_;
#pragma unroll 2
    for (; left >= 2; left -= 2) {
      const uint4 a = *reinterpret_cast<const uint4*>(above);
      const uint4 b = *reinterpret_cast<const uint4*>(below);
      const uint4 v = *reinterpret_cast<const uint4*>(x);
      const uint4 d = *reinterpret_cast<const uint4*>(above + step_);
      const uint4 e = *reinterpret_cast<const uint4*>(below + step_);
      const uint4 w = *reinterpret_cast<const uint4*>(x + step_);
      Math::MultiplyAdd({{a.x, b.x, a.y, b.y}}, v.x, v.y, sum[0]);
      Math::MultiplyAdd({{a.z, b.z, a.w, b.w}}, v.z, v.w, sum[1]);
      Math::MultiplyAdd({{d.x, e.x, d.y, e.y}}, w.x, w.y, sum[2]);
      Math::MultiplyAdd({{d.z, e.z, d.w, e.w}}, w.z, w.w, sum[3]);
      above += 2 * step_;
      below += 2 * step_;
      x += 2 * step_;
    }
    if (left > 0) {
      const uint4 a = *reinterpret_cast<const uint4*>(above);
      const uint4 b = *reinterpret_cast<const uint4*>(below);
      const uint4 v = *reinterpret_cast<const uint4*>(x);
      Math::MultiplyAdd({{a.x, b.x, a.y, b.y}}, v.x, v.y, sum[0]);
      Math::MultiplyAdd({{a.z, b.z, a.w, b.w}}, v.z, v.w, sum[1]);
    }
    if (stores_) {
      float* const sums = reinterpret_cast<float*>(shared_ + sums_);
      sums[0] = (sum[0][0] + sum[1][0]) + (sum[2][0] + sum[3][0]);
      sums[8] = (sum[0][2] + sum[1][2]) + (sum[2][2] + sum[3][2]);
    }
  }

 private:
  char* shared_;
  int above_, below_, x_, step_, count_, sums_, stores_;
};

template <int kSplits, typename V>
__device__ __forceinline__ V SumOfSplits(const float* from, int stride) {
  V part[kSplits];
#pragma unroll
  for (int i = 0; i < kSplits; ++i) part[i] = *reinterpret_cast<const V*>(from + i * stride);
  V sum = part[0];
#pragma unroll
  for (int i = 1; i < kSplits; ++i) sum = Add(sum, part[i]);
  return sum;
}
// Row r of these products, or as many as V holds, when the warps have met.
template <typename V>
__device__ __forceinline__ V SumOf(const RowsLayout& at, const float* sums, int r) {
  static_assert(kLayerWarps == 8);  // shared by 1, 2, 3, 4 or more tiles
  const int stride = 16 * at.tiles;
  if (at.splits == 8) return SumOfSplits<8, V>(sums + r, stride);
  if (at.splits == 4) return SumOfSplits<4, V>(sums + r, stride);
  if (at.splits == 2) return SumOfSplits<2, V>(sums + r, stride);
  return *reinterpret_cast<const V*>(sums + r);
}

#endif

}  // namespace jaxgraph
