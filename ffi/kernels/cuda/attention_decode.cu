// ATTENTION over a cache of bf16 or f16 with rows of 64 or 128 elements, the ones that models have
// (compute capability 9.0): made for the short time that a decode step leaves.
//
// Chunks of 32 or 16 positions are dealt out in turn to the blocks of a cluster and to their warps.
// A warp works on its chunks alone and without shared memory: keys and values come from memory in
// the very registers that the tensor cores take, 16 bytes a load. Dimensions that are summed over
// may be in any order, so a lane's 8 neighbours along d serve as its columns of two products; and
// the columns of the values may be, so its 8 neighbours along e are rows of four products. The next
// chunk's keys are on their way while the present one's values are worked on, and the other way
// round.
//
// Where it is known which rows of the cache an earlier launch of the program may still be writing
// (attention_early.h), a warp's first chunk is fetched before the wait for that launch; one that
// holds such a row is fetched again behind it.
//
// At the end the warps of a block, then the blocks of a cluster combine what they have, in a fixed
// order. What a block sends to another goes straight into that one's shared memory, whose barrier
// counts the bytes that have come: nobody waits for more than he needs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/attention_mma.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kHeads = kMmaHeads;
constexpr int kMinWarps = 4, kMaxWarps = 8;  // of a block
constexpr int kMaxThreads = kMaxWarps * kWarp;
constexpr int kPortableCluster = 8, kMaxCluster = 16;  // more than 8 is granted on demand
constexpr uint32_t kPartBytes = 32;  // 4 sums of a query, its peak and total, 2 unused

struct DecodePlan {
  AttentionArgs args;
  EarlyCache early;
  int32_t warps, splits, pieces;  // pieces: of the queries, each with its own cluster
  int32_t heads;                  // of a piece
  uint8_t bound_is_position;      // one and the same tensor
  uint8_t vectors_out;            // 4 outputs can be stored at once
  uint8_t skips;                  // the cache before a window need not be read
  uint8_t reserved[5];
};

// Shared memory: what the warps have, [warp, query, column]; their peaks and totals; what comes
// from the blocks of the cluster, [block, part]; the barrier that counts it.
template <int kWidth>
struct BlockLayout {
  static constexpr uint32_t kPitch = kWidth + 8;  // floats: fewer bank conflicts
  uint32_t sums = 0, peaks, totals, parts, barrier, bytes;
  __host__ __device__ BlockLayout(int warps, int heads, int splits) {
    constexpr uint32_t kFloat = sizeof(float);
    peaks = warps * heads * kPitch * kFloat;
    totals = peaks + warps * kHeads * kFloat;
    parts = totals + warps * kHeads * kFloat;
    const uint32_t units = heads * kWidth / 4;
    barrier = parts + (splits > 1 ? (units + splits - 1) / splits * splits * kPartBytes : 0);
    bytes = barrier + 16;
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

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

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitForBytes(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier)
      : "memory");
}
// The same place in another block of the cluster.
__device__ __forceinline__ uint32_t InBlock(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void Send(uint32_t to, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ uint32_t Word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// ---- a warp's chunk ----

template <int kWidth>
struct Shape {
  static constexpr int kTiles = 128 / kWidth;  // of 16 positions
  static constexpr int kChunk = 16 * kTiles;
  static constexpr int kBlocks = kWidth / 32;  // of a key
  static constexpr int kGroups = kWidth / 64;  // of the columns of a value
};

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

// [tile][2 i + j]: of the position lane / 4 + 8 i, the query FirstHead() + j.
template <int kWidth>
using Scores = float[Shape<kWidth>::kTiles][4];

template <typename Math, int kWidth>
__device__ __forceinline__ void RawScores(const Keys<kWidth>& keys,
                                          const uint4 (&queries)[Shape<kWidth>::kBlocks],
                                          Scores<kWidth>& scores) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[t][c] = 0;
#pragma unroll
    for (int b = 0; b < Shape<kWidth>::kBlocks; ++b) {
      const uint4 &above = keys[t][0][b], &below = keys[t][1][b];
      Math::MultiplyAdd({{above.x, below.x, above.y, below.y}}, queries[b].x, queries[b].y,
                        scores[t]);
      Math::MultiplyAdd({{above.z, below.z, above.w, below.w}}, queries[b].z, queries[b].w,
                        scores[t]);
    }
  }
}

// The simple form, step by step: what all scores have in common is asked once a step.
template <int kWidth, typename F>
__device__ __forceinline__ void ForEach(Scores<kWidth>& scores, F f) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) f(scores[t][c], 16 * t + 8 * (c / 2), c % 2);
  }
}
template <int kWidth>
__device__ __forceinline__ void RoundScores(DType dtype, Scores<kWidth>& scores) {
  if (dtype == DType::kF32) return;
  ForEach<kWidth>(scores, [dtype](float& x, int, int) { x = RoundTo(dtype, x); });
}
template <int kWidth>
__device__ __forceinline__ void MaskSimply(const ScoreForm& form, int first, const int (&last)[2],
                                           Scores<kWidth>& scores) {
  const float factor = __uint_as_float(form.factor), fill = __uint_as_float(form.fill);
  RoundScores<kWidth>(form.raw, scores);
  if (form.divides) {
    ForEach<kWidth>(scores, [factor](float& x, int, int) { x /= factor; });
  } else {
    ForEach<kWidth>(scores, [factor](float& x, int, int) { x *= factor; });
  }
  RoundScores<kWidth>(form.scaled, scores);
  const int position = first + FirstRow();
  ForEach<kWidth>(scores, [&](float& x, int row, int j) {
    if (position + row > last[j]) x = fill;
  });
  RoundScores<kWidth>(form.masked, scores);
}

// sums[group][word]: of the column 8 FirstRow() + 2 word of the group: queries FirstHead() and the
// next; then of the next column.
template <int kWidth>
using Sums = float[Shape<kWidth>::kGroups][4][4];

// Weights enter as a sum of two 16-bit numbers, for one would round them more than f32 does.
template <typename Math, int kWidth>
__device__ __forceinline__ void AddValues(const Values<kWidth>& values,
                                          const Scores<kWidth>& weights, Sums<kWidth>& sums) {
#pragma unroll
  for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
    uint32_t high[2], low[2];  // of 8 positions each, as the right operand
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = weights[t][2 * i], y = weights[t][2 * i + 1];
      const uint16_t a = Math::Narrow(x), b = Math::Narrow(y);
      high[i] = Transposed(Pair(a, b));
      low[i] = Transposed(Pair(Math::Narrow(x - Math::Widen(a)), Math::Narrow(y - Math::Widen(b))));
    }
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
        Math::MultiplyAdd(f, high[0], high[1], sums[g][w]);
        Math::MultiplyAdd(f, low[0], low[1], sums[g][w]);
      }
    }
  }
}

// ---- any known form ----

// What a query sees, and its part of the bias.
struct View {
  int from, last;  // positions
  const char* bias;
};
__device__ __forceinline__ View ViewOf(const AttentionArgs& p, int b0, int b1, int query,
                                       int last) {
  const ScoreForm& form = p.form;
  View view = {INT_MIN, last, nullptr};
  if (form.window != ScoreForm::kNoWindow) view.from = last + form.offset - form.window;
  if (p.bias != nullptr) {
    view.bias =
        p.bias + b0 * p.bias_strides[0] + b1 * p.bias_strides[1] + query * p.bias_strides[2];
  }
  return view;
}
__device__ __forceinline__ float Masked(const AttentionArgs& p, const View& view, int position,
                                        float x) {
  const ScoreForm& form = p.form;
  const float factor = __uint_as_float(form.factor), fill = __uint_as_float(form.fill);
  x = RoundTo(form.raw, x);
  x = RoundTo(form.scaled, form.divides ? x / factor : x * factor);
  if (form.capped) {
    const float in = __uint_as_float(form.cap_in);
    x = RoundTo(form.cap, form.cap_divides ? x / in : x * in);
    x = RoundTo(form.cap, tanhf(x));
    x = RoundTo(form.cap, x * __uint_as_float(form.cap_out));
  }
  if (view.bias != nullptr) {
    x += LoadFloat<float>(view.bias + min(position, p.s - 1) * p.bias_strides[3], form.bias_dtype);
  }
  x = RoundTo(form.biased, x);
  if (position > view.last || position < view.from) x = form.adds_fill ? x + fill : fill;
  return RoundTo(form.masked, x);
}

// ---- values that are not finite ----

// An infinite value times a part of a weight, which may be 0 or negative, is not what the whole
// weight would give. So where a sum is NaN the warp makes all its sums again, one product after the
// other. Not inlined, for it is rare.
template <typename Math, int kWidth>
__device__ __noinline__ void SumOneByOne(const AttentionArgs& p, const char* q, const char* k,
                                         const char* v, int b0, int b1, int first_query, int count,
                                         int first, int step, int end, const float* peaks,
                                         float* sums) {
  constexpr int kOwn = kWidth / kWarp, kItem = 2;  // columns of a lane, side by side
  const int column = threadIdx.x % kWarp * kOwn;
  const auto load = [](const char* from) {
    return Math::Widen(*reinterpret_cast<const volatile uint16_t*>(from));
  };
  for (int h = 0; h < count; ++h) {
    const int query = first_query + h;
    const View view = ViewOf(p, b0, b1, query, LastVisible(p, b0, b1, query));
    float sum[kOwn] = {};
    for (int at = first; at < end; at += step) {
      for (int position = at; position < min(at + Shape<kWidth>::kChunk, end); ++position) {
        float score = 0;
        for (int c = 0; c < kOwn; ++c) {
          score = fmaf(load(q + h * p.q_strides[2] + (column + c) * kItem),
                       load(k + position * p.k_strides[3] + (column + c) * kItem), score);
        }
#pragma unroll
        for (int o = kWarp / 2; o > 0; o /= 2) score += __shfl_xor_sync(kAllLanes, score, o);
        const float weight = ScaleOf(Masked(p, view, position, score), peaks[h]);
        for (int c = 0; c < kOwn; ++c) {
          sum[c] = fmaf(weight, load(v + position * p.v_strides[2] + (column + c) * kItem), sum[c]);
        }
      }
    }
    for (int c = 0; c < kOwn; ++c) sums[h * BlockLayout<kWidth>::kPitch + column + c] = sum[c];
  }
}

// ---- what warps or blocks have of a query and 4 columns ----

struct Part {
  float4 sum;
  float peak, total;
};

// Adds `part`, whose peak is at most `peak`.
__device__ __forceinline__ void Add(const Part& part, Part* all) {
  const float scale = ScaleOf(part.peak, all->peak);
  all->total = fmaf(part.total, scale, all->total);
  all->sum.x = fmaf(part.sum.x, scale, all->sum.x);
  all->sum.y = fmaf(part.sum.y, scale, all->sum.y);
  all->sum.z = fmaf(part.sum.z, scale, all->sum.z);
  all->sum.w = fmaf(part.sum.w, scale, all->sum.w);
}

template <typename Math>
__device__ __forceinline__ void Store(const DecodePlan& plan, int b0, int b1, int query, int column,
                                      const Part& all) {
  const AttentionArgs& p = plan.args;
  char* const to = p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] +
                   query * p.out_strides[2] + column * p.out_strides[3];
  const float x = all.sum.x / all.total, y = all.sum.y / all.total, z = all.sum.z / all.total,
              w = all.sum.w / all.total;
  if (plan.vectors_out) {
    *reinterpret_cast<uint2*>(to) = {Pair(Math::Narrow(x), Math::Narrow(y)),
                                     Pair(Math::Narrow(z), Math::Narrow(w))};
  } else {
    StoreFloat(to, p.out_dtype, x);
    StoreFloat(to + p.out_strides[3], p.out_dtype, y);
    StoreFloat(to + 2 * p.out_strides[3], p.out_dtype, z);
    StoreFloat(to + 3 * p.out_strides[3], p.out_dtype, w);
  }
}

// Does the chunk hold a row that an earlier launch may have written since it was read?
__device__ __forceinline__ bool Holds(const RewrittenRows& rows, int first, int count) {
  if (rows.index == nullptr) return false;
  const int64_t at = LoadInteger(rows.index, rows.index_dtype);
  const int64_t row = max(min(at, int64_t{rows.last_start}), int64_t{0});
  return row < first + count && first < row + rows.count;
}

#endif

// kSimple: the form of scores is.
template <typename Math, int kWidth, bool kSimple>
__global__ void __launch_bounds__(kMaxThreads, kWidth == 64 ? 2 : 1)
    AttentionDecodeKernel(const __grid_constant__ DecodePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kChunk = Shape<kWidth>::kChunk;
  constexpr int kUnitsOfHead = kWidth / 4;  // a unit: 4 columns
  asm volatile("griddepcontrol.launch_dependents;");
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const AttentionArgs& p = plan.args;
  const BlockLayout<kWidth> layout(plan.warps, plan.heads, plan.splits);
  float* const peaks = reinterpret_cast<float*>(shared + layout.peaks);
  float* const totals = reinterpret_cast<float*>(shared + layout.totals);
  const uint32_t barrier = SharedAddress(shared + layout.barrier);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  const int rank = blockIdx.x % plan.splits, cluster = blockIdx.x / plan.splits;
  const int batch = cluster / plan.pieces, first_query = cluster % plan.pieces * kHeads;
  const int count = min(plan.heads, p.g - first_query);
  const int b0 = batch / p.b1, b1 = batch - b0 * p.b1;
  const int units = count * kUnitsOfHead;
  const int owned = (units - rank + plan.splits - 1) / plan.splits;  // every splits-th, from `rank`
  if (plan.splits > 1) {
    // Before a block sends anything, all must be there with their barriers.
    if (threadIdx.x == 0) InitBarrier(barrier, plan.splits * owned * kPartBytes);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }

  const char* const q = p.q + b0 * p.q_strides[0] + b1 * p.q_strides[1] +
                        static_cast<int64_t>(first_query) * p.q_strides[2];
  const char* const k = p.k + b0 * p.k_strides[0] + b1 * p.k_strides[1];
  const char* const v = p.v + b0 * p.v_strides[0] + b1 * p.v_strides[1];
  const LaneRows key_rows = {k + lane % 4 * 16, p.k_strides[3]};
  const LaneRows value_rows = {v + FirstRow() * 16, p.v_strides[2]};
  const int step = plan.splits * plan.warps * kChunk;

  uint4 queries[Shape<kWidth>::kBlocks];
  bool waited = false;
  const auto wait = [&] {
    if (waited) return;
    waited = true;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int head = FirstRow();
    const char* const from = q + head * p.q_strides[2] + lane % 4 * 16;
#pragma unroll
    for (int b = 0; b < Shape<kWidth>::kBlocks; ++b) {
      queries[b] = LoadVector(from + 64 * b, head < count);
    }
  };
  if (!plan.early.position) wait();
  // Of the query lane % kHeads: the last position that it sees, and what the bound says of that.
  const int query = first_query + min(lane % kHeads, count - 1);
  const int seen = LastVisible(p, b0, b1, query);
  int end = p.s;
  if (plan.bound_is_position) {
    const int position = seen + p.form.offset;
    if (position >= 0 && position < p.s) end = position + 1;
  } else {
    end = LastPosition(p, b0, b1, query) + 1;
  }
  const int last[2] = {__shfl_sync(kAllLanes, seen, FirstHead()),
                       __shfl_sync(kAllLanes, seen, FirstHead() + 1)};
  // At `end` and behind no query of this block sees anything.
#pragma unroll
  for (int o = kHeads / 2; o > 0; o /= 2) end = max(end, __shfl_xor_sync(kAllLanes, end, o));
  int begin = 0;  // before it, neither
  if (!kSimple && plan.skips) {
    const int from = ViewOf(p, b0, b1, query, seen).from;
    if (from <= seen && seen >= 0 && from < p.s) begin = max(from, 0);
#pragma unroll
    for (int o = kHeads / 2; o > 0; o /= 2)
      begin = min(begin, __shfl_xor_sync(kAllLanes, begin, o));
    begin = begin / kChunk * kChunk;
  }

  Keys<kWidth> keys;
  Values<kWidth> values;
  const int first = begin + (warp * plan.splits + rank) * kChunk;
  // The last row that is seen is the one that was just written, as a rule.
  if (!plan.early.cache || (first < end && end <= first + kChunk)) wait();
  LoadKeys<kWidth>(key_rows, first, end, keys);
  LoadValues<kWidth>(value_rows, first, end, values);
  if (!waited) {
    wait();
    if (Holds(plan.early.keys, first, kChunk) || Holds(plan.early.values, first, kChunk)) {
      LoadKeys<kWidth>(key_rows, first, end, keys);
      LoadValues<kWidth>(value_rows, first, end, values);
    }
  }

  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {};
  Sums<kWidth> sums = {};
  for (int at = first; at < end; at += step) {
    Scores<kWidth> scores;
    RawScores<Math, kWidth>(keys, queries, scores);
    LoadKeys<kWidth>(key_rows, at + step, end, keys);
    if constexpr (kSimple) {
      MaskSimply<kWidth>(p.form, at, last, scores);
    } else {
      const View views[2] = {
          ViewOf(p, b0, b1, min(first_query + FirstHead(), p.g - 1), last[0]),
          ViewOf(p, b0, b1, min(first_query + FirstHead() + 1, p.g - 1), last[1])};
      ForEach<kWidth>(scores, [&](float& x, int row, int j) {
        x = Masked(p, views[j], at + row + FirstRow(), x);
      });
    }
    if (at + kChunk > p.s) {
      ForEach<kWidth>(scores, [&](float& x, int row, int) {
        if (at + row + FirstRow() >= p.s) x = -INFINITY;
      });
    }
    float scale[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float above = -INFINITY;
#pragma unroll
      for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
        above = fmaxf(above, fmaxf(scores[t][j], scores[t][2 + j]));
      }
      const float next =
          fmaxf(peak[j], AcrossRows(above, [](float a, float b) { return fmaxf(a, b); }));
      const float shift = PeakOrZero(next);
      scale[j] = __expf(peak[j] - shift);
      total[j] *= scale[j];
      peak[j] = next;
#pragma unroll
      for (int t = 0; t < Shape<kWidth>::kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[t][2 * i + j];
          score = __expf(score - shift);
          total[j] += score;
        }
      }
    }
    if (__any_sync(kAllLanes, scale[0] != 1 || scale[1] != 1)) {
#pragma unroll
      for (int g = 0; g < Shape<kWidth>::kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < 16; ++c) sums[g][c / 4][c % 4] *= scale[c % 2];
      }
    }
    AddValues<Math, kWidth>(values, scores, sums);
    LoadValues<kWidth>(value_rows, at + step, end, values);
  }

  // The warps of the block.
  float* const mine =
      reinterpret_cast<float*>(shared) + warp * plan.heads * BlockLayout<kWidth>::kPitch;
  bool finite = true;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = FirstHead() + j;
    const float sum = AcrossRows(total[j], [](float a, float b) { return a + b; });
    if (lane < 4) {
      peaks[warp * kHeads + head] = peak[j];
      totals[warp * kHeads + head] = sum;
    }
    if (head >= count) continue;
    float* const row = mine + head * BlockLayout<kWidth>::kPitch + FirstRow() * 8;
#pragma unroll
    for (int g = 0; g < Shape<kWidth>::kGroups; ++g) {
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const float4 four = {sums[g][w][j], sums[g][w][2 + j], sums[g][w + 1][j],
                             sums[g][w + 1][2 + j]};
        *reinterpret_cast<float4*>(row + 64 * g + 2 * w) = four;
        finite =
            finite && four.x == four.x && four.y == four.y && four.z == four.z && four.w == four.w;
      }
    }
  }
  if (!__all_sync(kAllLanes, finite)) {
    __syncwarp();
    SumOneByOne<Math, kWidth>(p, q, k, v, b0, b1, first_query, count, first, step, end,
                              peaks + warp * kHeads, mine);
  }
  __syncthreads();
  if (plan.splits > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const int head = unit / kUnitsOfHead, column = unit % kUnitsOfHead * 4;
    Part parts[kMaxWarps], all = {{0, 0, 0, 0}, -INFINITY, 0};
#pragma unroll
    for (int w = 0; w < kMaxWarps; ++w) {
      parts[w] = {{0, 0, 0, 0}, -INFINITY, 0};
      if (w >= plan.warps) continue;
      parts[w].peak = peaks[w * kHeads + head];
      parts[w].total = totals[w * kHeads + head];
      parts[w].sum = *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(shared) +
          (w * plan.heads + head) * BlockLayout<kWidth>::kPitch + column);
      all.peak = fmaxf(all.peak, parts[w].peak);
    }
#pragma unroll
    for (int w = 0; w < kMaxWarps; ++w) Add(parts[w], &all);
    if (plan.splits == 1) {
      Store<Math>(plan, b0, b1, first_query + head, column, all);
      continue;
    }
    const int to = unit % plan.splits, slot = unit / plan.splits;
    const int owned_there = (units - to + plan.splits - 1) / plan.splits;
    const uint32_t part = InBlock(
        SharedAddress(shared + layout.parts + (rank * owned_there + slot) * kPartBytes), to);
    const uint32_t counter = InBlock(barrier, to);
    Send(part, all.sum, counter);
    Send(part + 16, {all.peak, all.total, 0, 0}, counter);
  }
  if (plan.splits == 1 || threadIdx.x >= owned) return;

  // The blocks of the cluster, in the units that are this one's.
  WaitForBytes(barrier);
  for (int slot = threadIdx.x; slot < owned; slot += blockDim.x) {
    const char* const from = shared + layout.parts + slot * kPartBytes;
    Part all = {{0, 0, 0, 0}, -INFINITY, 0};
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r >= plan.splits) break;
      all.peak =
          fmaxf(all.peak, *reinterpret_cast<const float*>(from + r * owned * kPartBytes + 16));
    }
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r >= plan.splits) break;
      const float4* const part = reinterpret_cast<const float4*>(from + r * owned * kPartBytes);
      Add({part[0], part[1].x, part[1].y}, &all);
    }
    const int unit = slot * plan.splits + rank;
    Store<Math>(plan, b0, b1, first_query + unit / kUnitsOfHead, unit % kUnitsOfHead * 4, all);
  }
#endif
}

template <typename Math, int kWidth, bool kSimple>
const KernelInfo kDecode = {
    kSimple ? "attention_decode" : "attention_decode_form", sizeof(DecodePlan), nullptr,
    reinterpret_cast<const void*>(&AttentionDecodeKernel<Math, kWidth, kSimple>)};

template <typename Math>
const KernelInfo* KernelFor(const AttentionArgs& args) {
  const bool simple = args.form.simple();
  if (args.d == 64) return simple ? &kDecode<Math, 64, true> : &kDecode<Math, 64, false>;
  return simple ? &kDecode<Math, 128, true> : &kDecode<Math, 128, false>;
}

// What a window hides weighs nothing, so it need not be read: its scores are -inf, or far below all
// that a cap lets through. (Otherwise the scores that are seen might be as low.)
bool HiddenWeighsNothing(const ScoreForm& form) {
  float fill, cap;
  std::memcpy(&fill, &form.fill, sizeof fill);
  std::memcpy(&cap, &form.cap_out, sizeof cap);
  if (fill == -INFINITY) return true;
  return form.capped && form.bias < 0 && !form.adds_fill && fill < -2 * std::fabs(cap) - 200;
}

// One for each of Hopper's 132 multiprocessors, so that the next launch's find room beside them. A
// constant, not asked of the device: equal nodes must give equal launches.
constexpr int64_t kMostBlocks = 132;

}  // namespace

bool FitsDecodeKernel(const AttentionArgs& args) {
  return FitsTensorKernel(args) && args.form.known && args.d == args.e &&
         (args.d == 64 || args.d == 128) && args.q_strides[3] == 2 && IsAligned(args.q, 16) &&
         args.q_strides[0] % 16 == 0 && args.q_strides[1] % 16 == 0 && args.q_strides[2] % 16 == 0;
}

AttentionSplit SplitForDecode(const AttentionArgs& args) {
  const int64_t chunks = CeilDiv(args.s, 16 * 128 / args.d);
  const int64_t units = static_cast<int64_t>(args.b0) * args.b1 * CeilDiv(args.g, kHeads);
  // Larger clusters wait for one another longer: they are for caches that take their time.
  const int most = chunks <= 2 * kPortableCluster * kMaxWarps ? kPortableCluster : kMaxCluster;
  AttentionSplit split = {1, kMinWarps};
  while (split.blocks < most && 2 * split.blocks * units <= kMostBlocks &&
         split.blocks * split.warps < chunks) {
    split.blocks *= 2;
  }
  // Few warps leave room for the next launch's blocks.
  const int64_t warps = CeilDiv(chunks, 2 * split.blocks);
  split.warps = static_cast<int32_t>(std::clamp<int64_t>(warps, kMinWarps, kMaxWarps));
  split.warps = static_cast<int32_t>(std::min<int64_t>(split.warps, chunks));
  return split;
}

void LaunchAttentionDecode(const AttentionArgs& args, const EarlyCache& early,
                           const AttentionSplit& split, Launches* launches) {
  DecodePlan plan = {};
  plan.args = args;
  plan.early = early;
  plan.warps = split.warps;
  plan.splits = split.blocks;
  plan.heads = std::min(args.g, kHeads);
  plan.pieces = static_cast<int32_t>(CeilDiv(args.g, kHeads));
  plan.bound_is_position =
      args.bound != nullptr && args.bound == args.position &&
      args.bound_dtype == args.form.position_dtype &&
      std::equal(args.bound_strides, args.bound_strides + 3, args.position_strides);
  plan.vectors_out = args.out_dtype == args.k_dtype && args.out_strides[3] == 2 &&
                     IsAligned(args.out, 8) && args.out_strides[0] % 8 == 0 &&
                     args.out_strides[1] % 8 == 0 && args.out_strides[2] % 8 == 0;

  plan.skips = args.form.window != ScoreForm::kNoWindow && HiddenWeighsNothing(args.form);

  Launch launch;
  launch.kernel =
      args.k_dtype == DType::kBF16 ? KernelFor<BF16Math>(args) : KernelFor<F16Math>(args);
  launch.grid[0] =
      static_cast<uint32_t>(static_cast<int64_t>(args.b0) * args.b1 * plan.pieces * plan.splits);
  launch.block[0] = static_cast<uint32_t>(plan.warps * kWarp);
  launch.cluster = static_cast<uint32_t>(plan.splits);
  launch.shared_bytes = args.d == 64 ? BlockLayout<64>(plan.warps, plan.heads, plan.splits).bytes
                                     : BlockLayout<128>(plan.warps, plan.heads, plan.splits).bytes;
  SetParams(plan, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
