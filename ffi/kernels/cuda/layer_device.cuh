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

// A block's shared memory begins with what every block has, whose addresses need no looking up: the
// warps' sums of squares, and barriers.
constexpr int kBarriers = 4 * kLayerWarps;
constexpr int kMaxBarriers = 4;
constexpr int kBehindBarriers = kBarriers + 8 * kMaxBarriers;

constexpr int kSumsOfSplit = 16 * kLayerWarps;  // floats: of as many tiles as there are warps

constexpr int RoundUp(int n, int unit) { return (n + unit - 1) / unit * unit; }
constexpr int ChunksOf(int k) { return (k + kChunk - 1) / kChunk; }

// Rows of weights in shared memory, and how the warps share their products with one row: tiles of
// 16 rows are dealt out; where they are few, k is shared as well.
struct RowsLayout {
  int32_t first = 0, pitch = 0, rows = 0, chunks = 0, tiles = 0;
  int32_t splits = 0, shift = 0, of_split = 0;  // 1 << shift splits of so many chunks
  // The lanes that read at once read two rows, 64 bytes of each, from all banks.
  static RowsLayout Of(int rows, int k) {
    RowsLayout at;
    at.rows = rows;
    at.chunks = ChunksOf(k);
    at.pitch = at.chunks * 64 + (at.chunks % 2 == 0 ? 64 : 0);
    at.tiles = (rows + 15) / 16;
    static_assert(kLayerWarps == 8);
    at.shift = at.tiles > 4 ? 0 : at.tiles > 2 ? 1 : at.tiles > 1 ? 2 : 3;
    at.splits = 1 << at.shift;
    at.of_split = (at.chunks + at.splits - 1) / at.splits;
    return at;
  }
  int bytes() const { return rows * pitch; }
  int sum_bytes() const { return splits * kSumsOfSplit * 4; }
  // Every tile has a warp.
  bool fits() const { return tiles <= kLayerWarps; }
};

#if __CUDA_ARCH__ >= 900

// The words that a lane and its neighbour have, in the order of the lanes.
__device__ __forceinline__ float2 WordsOfTwo(float word) {
  const float next = __shfl_xor_sync(kAllLanes, word, 1);
  return threadIdx.x % 2 == 0 ? float2{word, next} : float2{next, word};
}

// Has a value computed here, before a wait, when there is time. The compilers would rather do it
// where the value is used: neither looks through a shuffle. All lanes come here together.
template <typename I>
__device__ __forceinline__ void ComputeNow(I& value) {
  value = __shfl_sync(kAllLanes, value, threadIdx.x % kWarp);
}
template <typename T>
__device__ __forceinline__ void ComputeNow(T*& value) {
  asm volatile("" : "+l"(value));
}

// A power that would be subnormal is 0: what it is added to is much larger.
__device__ __forceinline__ float Exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(kLog2E * x));
  return power;
}

// Asks for k elements of a row of weights, which the barrier will announce; what is behind them, up
// to a whole chunk, is made zero.
__device__ __forceinline__ void FetchRow(char* to, const char* from, int k, int chunks,
                                         uint32_t barrier, uint64_t policy) {
  BulkCopyOnce(SharedAddress(to), from, 2 * k, barrier, policy);
  for (int c = k / 8; c < chunks * 4; ++c) StoreEight(to + 16 * c, {});
}

// Not through the first-level cache: an earlier launch on this multiprocessor has read the place.
template <typename V>
__device__ __forceinline__ V LoadFresh(const void* from) {
  return __ldcg(static_cast<const V*>(from));
}
// The same of 8 bytes, asked for right here: the compiler would put it off until they are used.
__device__ __forceinline__ uint2 LoadFreshNow(const char* from) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
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

// The sum of `count` parts, kLow to kHigh, in order. They are asked for together, without a
// condition for each, so every number of them has code of its own.
template <int kLow, int kHigh>
__device__ __forceinline__ float4 SumOfParts(const float* parts, int count) {
  if constexpr (kLow < kHigh) {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    return count <= kMiddle ? SumOfParts<kLow, kMiddle>(parts, count)
                            : SumOfParts<kMiddle + 1, kHigh>(parts, count);
  } else {
    float4 part[kLow];
#pragma unroll
    for (int i = 0; i < kLow; ++i) part[i] = LoadFresh<float4>(parts + i * kMaxLayerRow);
#pragma unroll
    for (int i = 1; i < kLow; ++i) part[0] = Add(part[0], part[i]);
    return part[0];
  }
}

// Brings the norm of a row into shared memory; every block computes it, from four elements a
// thread. Made before the wait; at most kParts parts.
template <typename Math, int kParts>
class RowNorm {
 public:
  __device__ __forceinline__ explicit RowNorm(const LayerRow& p)
      : p_(p), at_(4 * static_cast<int>(threadIdx.x)), inside_(at_ < p.size) {
    // Where there is none, ones: they change no bit.
    weight_.x = weight_.y = Math::NarrowPair(1.0f, 1.0f);
    if (p.weight != nullptr && inside_) {
      weight_ = *reinterpret_cast<const uint2*>(p.weight + 2 * at_);
    }
    row_ = p.row + 2 * at_;
    parts_ = p.parts + at_;
    num_parts_ = p.num_parts;
    ComputeNow(num_parts_);
    ComputeNow(row_);
    ComputeNow(parts_);
  }

  // Where the block's threads meet. `stores`: this block stores the sum.
  __device__ __forceinline__ void Bring(bool stores, char* shared, char* to) const {
    float* const by_warp = reinterpret_cast<float*>(shared);
    const bool adds = num_parts_ > 0 || p_.added != nullptr;
    uint2 row = {};
    float x[4] = {};
    if (inside_) {
      row = LoadFreshNow(row_);
      float y[4] = {};
      if (num_parts_ > 0) {
        const float4 sum = SumOfParts<1, kParts>(parts_, num_parts_);
        SetAll<Math>({Math::NarrowPair(sum.x, sum.y), Math::NarrowPair(sum.z, sum.w)}, y);
      } else if (p_.added != nullptr) {
        SetAll<Math>(LoadFresh<uint2>(p_.added + 2 * at_), y);
      }
      SetAll<Math>(row, x);
      if (adds) {
        row = {Math::NarrowPair(x[0] + y[0], x[1] + y[1]),
               Math::NarrowPair(x[2] + y[2], x[3] + y[3])};
        SetAll<Math>(row, x);
      }
    }
    const float squares = SumOfWarp((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
    if (threadIdx.x % kWarp == 0) by_warp[threadIdx.x / kWarp] = squares;
    if (stores && inside_ && adds && p_.sum != nullptr) {
      *reinterpret_cast<uint2*>(p_.sum + 2 * at_) = row;
    }
    __syncthreads();
    static_assert(kLayerWarps == 8);
    const float4 low = *reinterpret_cast<const float4*>(by_warp);
    const float4 high = *reinterpret_cast<const float4*>(by_warp + 4);
    const float total =
        ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
    const float scale =
        rsqrtf(__fadd_rn(__fmul_rn(total, __uint_as_float(p_.mean)), __uint_as_float(p_.eps)));
    if (inside_) {
      const float2 w[2] = {Widened<Math>(weight_.x), Widened<Math>(weight_.y)};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(x[j], scale);
      if (p_.rounds_first) RoundAll<Math>(x);
      *reinterpret_cast<uint2*>(to + 2 * at_) = {
          Math::NarrowPair(__fmul_rn(x[0], w[0].x), __fmul_rn(x[1], w[0].y)),
          Math::NarrowPair(__fmul_rn(x[2], w[1].x), __fmul_rn(x[3], w[1].y))};
    }
    __syncthreads();
  }

 private:
  const LayerRow& p_;
  const int at_;
  const bool inside_;
  uint2 weight_;
  const char* row_;
  const float* parts_;
  int num_parts_;
};

// The products of rows of weights and of one row x, all in shared memory: a warp's part. Made
// before x is there; while it waits, a warp has kHeld chunks of its weights in registers, if it has
// as many.
//
// What a lane loads of a row of weights, four words, is the left operand of a product of tensor
// cores as it stands. There, words 0 and 2 are of one row and words 1 and 3 of another, eight
// below. So the first column of the right operand are words 0 and 2 of x, and the second column
// words 1 and 3: the upper row times the first column and the lower row times the second make the
// sum.
template <int kHeld>
class RowProduct {
 public:
  __device__ __forceinline__ RowProduct(const RowsLayout& at, char* shared, int x, int sums)
      : shared_(shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int tile = warp >> at.shift, split = warp & (at.splits - 1);
    const int row = 16 * tile + lane / 4, column = lane % 4 * 16 + 64 * split * at.of_split;
    above_ = at.first + min(row, at.rows - 1) * at.pitch + column;
    below_ = at.first + min(row + 8, at.rows - 1) * at.pitch + column;
    x_ = x + column + lane / 4 % 2 * 4;
    count_ = tile < at.tiles ? min(at.of_split, at.chunks - split * at.of_split) : 0;
    sums_ = sums + 4 * (split * kSumsOfSplit + tile * 16 + lane / 4);
    stores_ = tile < at.tiles && lane % 4 == 0;
  }
  __device__ __forceinline__ void ComputeNow() {
    for (int* const value : {&above_, &below_, &x_, &count_, &sums_}) jaxgraph::ComputeNow(*value);
  }
  // The weights are there.
  __device__ __forceinline__ void Hold() {
    if (count_ < kHeld) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held_[i] = WeightsAt(64 * i);
  }

  // Chunks take turns, so that sums do not wait for one another.
  template <typename Math>
  __device__ __forceinline__ void Run() const {
    float above[2][4] = {}, below[2][4] = {};
    int at = 0, left = count_;
    if (count_ >= kHeld) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        MultiplyAdd<Math>(held_[i], 64 * i, above[i % 2], below[i % 2]);
      }
      at = 64 * kHeld, left -= kHeld;
    }
#pragma unroll 1
    for (; left >= 2; left -= 2, at += 128) {
      MultiplyAdd<Math>(WeightsAt(at), at, above[0], below[0]);
      MultiplyAdd<Math>(WeightsAt(at + 64), at + 64, above[1], below[1]);
    }
    if (left > 0) MultiplyAdd<Math>(WeightsAt(at), at, above[0], below[0]);
    if (stores_) {
      float* const sums = reinterpret_cast<float*>(shared_ + sums_);
      sums[0] = (above[0][0] + above[0][3]) + (above[1][0] + above[1][3]);
      sums[8] = (below[0][0] + below[0][3]) + (below[1][0] + below[1][3]);
    }
  }

 private:
  struct Weights {  // this lane's of a chunk: of a row, and of that 8 below it
    Fragment above, below;
  };
  __device__ __forceinline__ Weights WeightsAt(int at) const {
    const uint4 a = *reinterpret_cast<const uint4*>(shared_ + above_ + at);
    const uint4 b = *reinterpret_cast<const uint4*>(shared_ + below_ + at);
    return {{{a.x, a.y, a.z, a.w}}, {{b.x, b.y, b.z, b.w}}};
  }
  template <typename Math>
  __device__ __forceinline__ void MultiplyAdd(const Weights& w, int at, float (&above)[4],
                                              float (&below)[4]) const {
    const char* const x = shared_ + x_ + at;
    const uint32_t words[] = {*reinterpret_cast<const uint32_t*>(x),
                              *reinterpret_cast<const uint32_t*>(x + 8)};
    Math::MultiplyAdd(w.above, words[0], words[1], above);
    Math::MultiplyAdd(w.below, words[0], words[1], below);
  }

  char* shared_;
  int above_, below_, x_, count_, sums_, stores_;
  Weights held_[kHeld];
};

template <int kSplits, typename V, int kRows>
__device__ __forceinline__ void AddSplits(const float* from, V (&sum)[kRows]) {
  V part[kRows][kSplits];
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      part[n][i] = *reinterpret_cast<const V*>(from + 8 * n + i * kSumsOfSplit);
    }
  }
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    sum[n] = part[n][0];
#pragma unroll
    for (int i = 1; i < kSplits; ++i) sum[n] = Add(sum[n], part[n][i]);
  }
}
// Of these products, when the warps have met: row r, or as many rows from there on as V holds, and
// for each further sum those 8 rows on.
template <typename V, int kRows>
__device__ __forceinline__ void SumsOf(const RowsLayout& at, const char* sums, int r,
                                       V (&sum)[kRows]) {
  const float* const from = reinterpret_cast<const float*>(sums) + r;
  if (at.splits == 2) {
    AddSplits<2>(from, sum);
  } else if (at.splits == 4) {
    AddSplits<4>(from, sum);
  } else if (at.splits == 8) {
    AddSplits<8>(from, sum);
  } else {
    AddSplits<1>(from, sum);
  }
}

#endif

}  // namespace jaxgraph
