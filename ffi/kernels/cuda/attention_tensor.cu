// ATTENTION over a cache of bf16 or f16 on tensor cores (compute capability 9.0).
//
// Tiles of 32 or 16 positions are dealt out in turn to the blocks of a cluster and to their warps,
// so that all have the same share wherever the bound lies. A warp works on its tiles alone:
//   - keys and values come into its own shared memory by asynchronous copies, which run ahead of
//   its
//     work by a tile or two;
//   - scores are keys x queries: positions are the rows of the product, so that few queries (8 at a
//     time) waste nothing; each lane has a few positions of 2 queries, and keeps the running
//     maximum;
//   - the weighted sum is values x weights, with the columns of the values as rows. Weights enter
//   as
//     a sum of two 16-bit numbers, for one would round them more than f32 does.
// At the end warps, then blocks combine what they have, in a fixed order: every block sends the
// others their share, and each combines its own.
#include <algorithm>
#include <type_traits>

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kHeads = 8;     // queries at a time: the columns of a product
constexpr int kMaxWarps = 8;  // of a block
constexpr int kMaxThreads = kMaxWarps * kWarp;
constexpr int kMaxCluster = 16;                // more than 8 is granted on demand
constexpr int kStages = 2;                     // tiles on their way or worked on
constexpr uint32_t kSharedBudget = 112 << 10;  // two blocks on a multiprocessor

// Rows of `blocks` times 16 elements: positions of a tile, so that several warps have room.
__host__ __device__ constexpr int TileOf(int blocks) { return blocks <= 4 ? 32 : 16; }

// Rows an odd number of 16-byte vectors apart: reading them side by side meets no bank twice.
__host__ __device__ constexpr uint32_t PitchOf(uint32_t vectors) { return 16 * (vectors | 1); }

struct TensorPlan {
  AttentionArgs args;
  FastDiv key_vectors, value_vectors;  // 16-byte vectors of a row
  uint32_t key_pitch, value_pitch;     // bytes between rows in shared memory
  uint32_t warp_bytes;                 // shared memory of a warp
  int32_t warps, splits, pieces;       // pieces: of the queries, each with its own cluster
  int32_t heads;                       // of a piece
  FastDiv width;                       // e
  FastDiv share;                       // outputs of a piece that a block of the cluster combines
  uint8_t pairs;                       // q can be read in pairs
  uint8_t bound_is_position;           // of the known form: one and the same tensor
  uint8_t reserved[2];
  uint64_t tail;  // no hidden padding: see SetParams
};

// Shared memory of a block: what the blocks of the cluster send, what the warps have, their tiles.
struct BlockLayout {
  uint32_t sums, peaks, totals, warp_peaks, warp_totals, warps;
  __host__ __device__ BlockLayout(uint32_t program_bytes, int splits, int share, int num_warps) {
    constexpr uint32_t kFloat = sizeof(float);
    sums = program_bytes;
    peaks = sums + splits * share * kFloat;
    totals = peaks + splits * kHeads * kFloat;
    warp_peaks = totals + splits * kHeads * kFloat;
    warp_totals = warp_peaks + num_warps * kHeads * kFloat;
    warps = (warp_totals + num_warps * kHeads * kFloat + 15) / 16 * 16;
  }
};

// ---- tensor cores ----

struct Fragment {  // 16 x 16 of the left operand
  uint32_t word[4];
};

template <bool kTranspose>
__device__ __forceinline__ Fragment LoadFragment(const char* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  Fragment f;
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3])
                 : "r"(address)
                 : "memory");
  }
  return f;
}

// An 8 x 8 matrix of 16-bit numbers that lies across the warp, transposed.
__device__ __forceinline__ uint32_t Transposed(uint32_t rows) {
  uint32_t columns;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

struct BF16Math {
  static __device__ __forceinline__ void MultiplyAdd(const Fragment& a, uint32_t b0, uint32_t b1,
                                                     float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint16_t Narrow(float v) { return FloatToBF16(v); }
  static __device__ __forceinline__ float Widen(uint16_t v) { return BF16ToFloat(v); }
};
struct F16Math {
  static __device__ __forceinline__ void MultiplyAdd(const Fragment& a, uint32_t b0, uint32_t b1,
                                                     float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint16_t Narrow(float v) { return FloatToF16(v); }
  static __device__ __forceinline__ float Widen(uint16_t v) { return F16ToFloat(v); }
};

__device__ __forceinline__ uint32_t Pair(uint16_t low, uint16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}

// ---- what a lane owns ----
// Products have their rows at lane / 4 and 8 below, their columns (queries) at lane % 4 * 2 and the
// next.

__device__ __forceinline__ int FirstRow() { return threadIdx.x % kWarp / 4; }
__device__ __forceinline__ int FirstHead() { return threadIdx.x % 4 * 2; }

// Over the lanes that have the same queries.
template <typename F>
__device__ __forceinline__ float AcrossRows(float x, F combine) {
#pragma unroll
  for (int o = 4; o < kWarp; o *= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}

// Queries as the right operand, [d, query]: words of two neighbours along d.
template <int kBlocks>
__device__ __forceinline__ void LoadQueries(const AttentionArgs& p, const char* q, int count,
                                            bool pairs, uint32_t (&words)[kBlocks][2]) {
  const int head = threadIdx.x % kWarp / 4, column = threadIdx.x % 4 * 2;
  const char* row = q + min(head, count - 1) * p.q_strides[2];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = block * 16 + half * 8 + column;
      uint32_t word = 0;
      if (at < p.d && head < count) {
        const char* from = row + at * p.q_strides[3];
        word = pairs ? *reinterpret_cast<const uint32_t*>(from)
                     : Pair(*reinterpret_cast<const uint16_t*>(from),
                            *reinterpret_cast<const uint16_t*>(from + p.q_strides[3]));
      }
      words[block][half] = word;
    }
  }
}

// [i][j]: of the position FirstRow() + 8 i, query FirstHead() + j.
template <int kTile>
using Scores = float[kTile / 8][2];

template <typename Math, int kTile, int kBlocks, bool kFull>
__device__ __forceinline__ void RawScores(const char* keys, uint32_t pitch, int d,
                                          const uint32_t (&queries)[kBlocks][2],
                                          Scores<kTile>& scores) {
  const int lane = threadIdx.x % kWarp;
  const char* row = keys + lane % 16 * pitch + lane / 16 * 16;
  float products[kTile / 16][4] = {};
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (!kFull && block * 16 >= d) break;
#pragma unroll
    for (int part = 0; part < kTile / 16; ++part) {
      const Fragment f = LoadFragment<false>(row + part * 16 * pitch + block * 32);
      Math::MultiplyAdd(f, queries[block][0], queries[block][1], products[part]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i) {
    scores[i][0] = products[i / 2][i % 2 * 2];
    scores[i][1] = products[i / 2][i % 2 * 2 + 1];
  }
}

template <int kTile, typename F>
__device__ __forceinline__ void ForEach(Scores<kTile>& scores, F f) {
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) f(scores[i][j], i, j);
  }
}
template <int kTile>
__device__ __forceinline__ void RoundScores(DType dtype, Scores<kTile>& scores) {
  if (dtype == DType::kF32) return;
  ForEach<kTile>(scores, [dtype](float& x, int, int) { x = RoundTo(dtype, x); });
}

// The known form, step by step: what all scores have in common is asked once a step.
template <int kTile>
__device__ __forceinline__ void MaskKnown(const ScoreForm& form, int first_position,
                                          const int (&last)[2], Scores<kTile>& scores) {
  const float factor = __uint_as_float(form.factor), fill = __uint_as_float(form.fill);
  RoundScores<kTile>(form.raw, scores);
  if (form.divides) {
    ForEach<kTile>(scores, [factor](float& x, int, int) { x /= factor; });
  } else {
    ForEach<kTile>(scores, [factor](float& x, int, int) { x *= factor; });
  }
  RoundScores<kTile>(form.scaled, scores);
  const int position = first_position + FirstRow();
  ForEach<kTile>(scores, [&](float& x, int i, int j) {
    if (position + 8 * i > last[j]) x = fill;
  });
  RoundScores<kTile>(form.masked, scores);
}

// Runs the score program. For it a lane takes one position: the scores go through shared memory.
template <typename Score, int kTile>
__device__ __forceinline__ void RunProgram(const AttentionArgs& p, const ExprParams& program,
                                           int b0, int b1, int first_query, int count,
                                           int first_position, float* scratch,
                                           Scores<kTile>& scores) {
  using W = typename Score::W;
  constexpr int kLanes = Score::kLanes, kPitch = kHeads + 1;
  float* const own = scratch + FirstRow() * kPitch + FirstHead();
  ForEach<kTile>(scores, [own](float& x, int i, int j) { own[8 * i * kPitch + j] = x; });
  __syncwarp();
  const int lane = threadIdx.x % kWarp, row = lane % kTile;
  for (int h = lane / kTile * kLanes; h < count; h += kWarp / kTile * kLanes) {
    ScoreSpace<kLanes> space = {b0, b1, min(first_position + row, p.s - 1), {}};
    Lanes<W, kLanes> lanes;
    float* const mine = scratch + row * kPitch + h;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      space.query[j] = min(first_query + h + j, p.g - 1);
      lanes.lane[j] = FromFloat<W>(mine[j]);
    }
    lanes = MaskScores<W, kLanes>(program, space, lanes);
#pragma unroll
    for (int j = 0; j < kLanes; ++j) mine[j] = AsFloat(lanes.lane[j]);
  }
  __syncwarp();
  ForEach<kTile>(scores, [own](float& x, int i, int j) { x = own[8 * i * kPitch + j]; });
}

// sums[block]: of columns block * 16 + FirstRow() and 8 below, queries FirstHead() and the next.
template <typename Math, int kTile, int kBlocks, bool kFull>
__device__ __forceinline__ void AddValues(const char* values, uint32_t pitch, int e,
                                          const Scores<kTile>& weights, float (&sums)[kBlocks][4]) {
  uint32_t high[kTile / 8], low[kTile / 8];  // weights of 8 positions each, as the right operand
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i) {
    const uint16_t a = Math::Narrow(weights[i][0]), b = Math::Narrow(weights[i][1]);
    high[i] = Transposed(Pair(a, b));
    low[i] = Transposed(Pair(Math::Narrow(weights[i][0] - Math::Widen(a)),
                             Math::Narrow(weights[i][1] - Math::Widen(b))));
  }
  const int lane = threadIdx.x % kWarp;
  const char* row = values + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int part = 0; part < kTile / 16; ++part) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (!kFull && block * 16 >= e) break;
      const Fragment f = LoadFragment<true>(row + part * 16 * pitch + block * 32);
      Math::MultiplyAdd(f, high[2 * part], high[2 * part + 1], sums[block]);
      Math::MultiplyAdd(f, low[2 * part], low[2 * part + 1], sums[block]);
    }
  }
}

// ---- copies ----

// Rows of kVectors times 16 bytes, known when compiling: a lane stays in its column.
template <int kTile, int kVectors>
struct FixedRows {
  static constexpr int kAtOnce = kWarp / kVectors, kSteps = kTile / kAtOnce;
  static constexpr uint32_t kPitch = PitchOf(kVectors);
  const char* column;  // of row 0
  int64_t stride;

  __device__ __forceinline__ FixedRows(const TileRows& t)
      : column(t.rows + threadIdx.x % kVectors * 16), stride(t.stride) {}

  __device__ __forceinline__ void Copy(int first, int end, char* tile) const {
    const int row = threadIdx.x % kWarp / kVectors;
    const char* from = column + static_cast<int64_t>(first + row) * stride;
    char* const to = tile + row * kPitch + threadIdx.x % kVectors * 16;
    if (first + kTile <= end) {
      const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address + i * kAtOnce * kPitch),
            "l"(from)
            : "memory");
        from += kAtOnce * stride;
      }
    } else {
      for (int i = 0; i < kSteps; ++i) {
        const bool inside = first + row + i * kAtOnce < end;
        CopyAsync(to + i * kAtOnce * kPitch, inside ? from : column, inside);
        from += kAtOnce * stride;
      }
    }
    CommitCopies();
  }
};

// Any rows.
template <int kTile>
struct AnyRows {
  const TileRows& t;
  __device__ __forceinline__ void Copy(int first, int end, char* tile) const {
    CopyTile<kTile>(t, first, end, tile);
  }
};

// What several warps or blocks have of a query and an output: peaks and totals are kHeads apart. In
// their order; all are read before any is used.
struct Combined {
  float peak, total, sum;
};
template <int kMost>
__device__ __forceinline__ Combined Combine(int parts, const float* peaks, const float* totals,
                                            const float* sums, int sum_stride) {
  float peak[kMost], total[kMost], sum[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const bool there = i < parts;
    peak[i] = there ? peaks[i * kHeads] : -INFINITY;
    total[i] = there ? totals[i * kHeads] : 0.0f;
    sum[i] = there ? sums[i * sum_stride] : 0.0f;
  }
  Combined all = {-INFINITY, 0, 0};
#pragma unroll
  for (int i = 0; i < kMost; ++i) all.peak = fmaxf(all.peak, peak[i]);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float scale = ScaleOf(peak[i], all.peak);
    all.total = fmaf(total[i], scale, all.total);
    all.sum = fmaf(sum[i], scale, all.sum);
  }
  return all;
}

// kBlocks: of 16, that d and e have at most; kFull: exactly.
template <typename Math, int kBlocks, bool kFull, typename Score>
__global__ void __launch_bounds__(kMaxThreads, kBlocks <= 8 ? 2 : 1) AttentionTensorKernel(
    const __grid_constant__ typename Score::template Params<TensorPlan> params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  constexpr int kTile = TileOf(kBlocks), kVectors = 2 * kBlocks;
  const TensorPlan& plan = params.plan;
  const AttentionArgs& p = plan.args;
  const int share = static_cast<int>(plan.share.divisor);
  const BlockLayout layout(Score::kHasProgram ? sizeof(ExprParams) : 0, plan.splits, share,
                           plan.warps);
  float* const warp_peaks = reinterpret_cast<float*>(shared + layout.warp_peaks);
  float* const warp_totals = reinterpret_cast<float*>(shared + layout.warp_totals);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  char* const keys = shared + layout.warps + warp * plan.warp_bytes;
  const uint32_t key_pitch = kFull ? PitchOf(kVectors) : plan.key_pitch;
  const uint32_t value_pitch = kFull ? PitchOf(kVectors) : plan.value_pitch;
  const uint32_t stage_bytes = kTile * (key_pitch + value_pitch);
  char* const values = keys + kTile * key_pitch;
  float* const scratch = reinterpret_cast<float*>(keys + kStages * stage_bytes);

  const int rank = blockIdx.x % plan.splits, unit = blockIdx.x / plan.splits;
  const int batch = unit / plan.pieces, first_query = unit % plan.pieces * kHeads;
  const int count = min(plan.heads, p.g - first_query);
  const int b0 = batch / p.b1, b1 = batch - b0 * p.b1;
  const TileRows k = {p.k + b0 * p.k_strides[0] + b1 * p.k_strides[1], p.k_strides[3],
                      plan.key_vectors, plan.key_pitch};
  const TileRows v = {p.v + b0 * p.v_strides[0] + b1 * p.v_strides[1], p.v_strides[2],
                      plan.value_vectors, plan.value_pitch};
  using Rows = std::conditional_t<kFull, FixedRows<kTile, kVectors>, AnyRows<kTile>>;
  const Rows key_rows{k}, value_rows{v};
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (Score::kHasProgram) ToShared(params.program, shared_memory);
  int end = p.s;
  const char* const q = p.q + b0 * p.q_strides[0] + b1 * p.q_strides[1] +
                        static_cast<int64_t>(first_query) * p.q_strides[2];
  // These are made before the wait, with all the parameters that they take: those come slowly.
  asm volatile("" ::"l"(q), "l"(k.rows), "l"(k.stride), "l"(v.rows), "l"(v.stride), "r"(end));
  BeginLaunch();
  // Before a block sends anything, all must be there.
  if (plan.splits > 1) cluster.barrier_arrive();

  uint32_t queries[kBlocks][2];
  LoadQueries(p, q, count, plan.pairs, queries);
  // Of the query lane % kHeads: the last position that it sees, and what the bound says of that.
  const int query = first_query + min(lane % kHeads, count - 1);
  int seen = INT_MAX;
  if constexpr (!Score::kHasProgram) seen = LastVisible(p, b0, b1, query);
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
  const int tiles = (end + kTile - 1) / kTile, step = plan.splits * plan.warps;
  int tile = warp * plan.splits + rank;
  // The copies of a tile are two groups, keys and values, empty where there is no such tile.
  const auto copy = [&](const Rows& rows, int at, char* to) {
    if (at < tiles) {
      rows.Copy(at * kTile, end, to);
    } else {
      CommitCopies();
    }
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    copy(key_rows, tile + stage * step, keys + stage * stage_bytes);
    copy(value_rows, tile + stage * step, values + stage * stage_bytes);
  }

  float peak[2] = {-INFINITY, -INFINITY}, total[2] = {}, sums[kBlocks][4] = {};
  uint32_t stage = 0;  // offset of the present tile's
  for (; tile < tiles; tile += step) {
    WaitForCopies<2 * kStages - 1>();
    Scores<kTile> scores;
    RawScores<Math, kTile, kBlocks, kFull>(keys + stage, key_pitch, p.d, queries, scores);
    __syncwarp();
    copy(key_rows, tile + kStages * step, keys + stage);
    if constexpr (Score::kHasProgram) {
      RunProgram<Score, kTile>(p, *reinterpret_cast<const ExprParams*>(shared), b0, b1, first_query,
                               count, tile * kTile, scratch, scores);
    } else {
      MaskKnown<kTile>(p.form, tile * kTile, last, scores);
    }
    if (tile * kTile + kTile > p.s) {
      ForEach<kTile>(scores, [&](float& x, int i, int) {
        if (tile * kTile + FirstRow() + 8 * i >= p.s) x = -INFINITY;
      });
    }
    float scale[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float above = scores[0][j];
#pragma unroll
      for (int i = 1; i < kTile / 8; ++i) above = fmaxf(above, scores[i][j]);
      const float next =
          fmaxf(peak[j], AcrossRows(above, [](float a, float b) { return fmaxf(a, b); }));
      const float shift = PeakOrZero(next);
      scale[j] = __expf(peak[j] - shift);
      total[j] *= scale[j];
      peak[j] = next;
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
        scores[i][j] = __expf(scores[i][j] - shift);
        total[j] += scores[i][j];
      }
    }
    if (__any_sync(kAllLanes, scale[0] != 1 || scale[1] != 1)) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[block][c] *= scale[c % 2];
      }
    }
    WaitForCopies<2 * kStages - 1>();
    AddValues<Math, kTile, kBlocks, kFull>(values + stage, value_pitch, p.e, scores, sums);
    __syncwarp();
    copy(value_rows, tile + kStages * step, values + stage);
    stage = stage_bytes - stage;
  }

  // The warps of the block: their sums lie where their tiles were, [query, column].
  WaitForCopies<0>();
  float* const mine = reinterpret_cast<float*>(keys);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = FirstHead() + j;
    const float sum = AcrossRows(total[j], [](float a, float b) { return a + b; });
    if (lane < 4) {
      warp_peaks[warp * kHeads + head] = peak[j];
      warp_totals[warp * kHeads + head] = sum;
    }
    if (head >= count) continue;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (!kFull && block * 16 >= p.e) break;
      float* const column = mine + head * p.e + block * 16 + FirstRow();
      column[0] = sums[block][j];
      column[8] = sums[block][2 + j];
    }
  }
  __syncthreads();
  if (plan.splits > 1) cluster.barrier_wait();
  // To the block `to`: for a cluster of one, to itself.
  const auto remote = [&](uint32_t at, int to) {
    float* const local = reinterpret_cast<float*>(shared + at);
    return plan.splits > 1 ? cluster.map_shared_rank(local, to) : local;
  };
  for (int i = threadIdx.x; i < count * p.e; i += blockDim.x) {
    const int head = static_cast<int>(plan.width.Quotient(i));
    const int to = static_cast<int>(plan.share.Quotient(i));
    const Combined all = Combine<kMaxWarps>(plan.warps, warp_peaks + head, warp_totals + head,
                                            reinterpret_cast<float*>(shared + layout.warps) + i,
                                            plan.warp_bytes / sizeof(float));
    remote(layout.sums, to)[rank * share + i - to * share] = all.sum;
  }
  for (int i = threadIdx.x; i < plan.splits * kHeads; i += blockDim.x) {
    const int head = i % kHeads, to = i / kHeads;
    const Combined all =
        Combine<kMaxWarps>(plan.warps, warp_peaks + head, warp_totals + head, warp_totals, 0);
    remote(layout.peaks, to)[rank * kHeads + head] = all.peak;
    remote(layout.totals, to)[rank * kHeads + head] = all.total;
  }
  if (plan.splits > 1) {
    cluster.sync();
  } else {
    __syncthreads();
  }

  // The blocks of the cluster, in this one's share of the outputs.
  const float* const block_sums = reinterpret_cast<const float*>(shared + layout.sums);
  const float* const peaks = reinterpret_cast<const float*>(shared + layout.peaks);
  const float* const totals = reinterpret_cast<const float*>(shared + layout.totals);
  const int outputs = min(share, count * p.e - rank * share);
  for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
    const int at = rank * share + i, head = static_cast<int>(plan.width.Quotient(at));
    const Combined all =
        Combine<kMaxCluster>(plan.splits, peaks + head, totals + head, block_sums + i, share);
    StoreFloat(p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] +
                   static_cast<int64_t>(first_query + head) * p.out_strides[2] +
                   (at - head * p.e) * p.out_strides[3],
               p.out_dtype, all.sum / all.total);
  }
#endif
}

template <typename Math, int kBlocks, bool kFull, typename Score>
const KernelInfo kTensor = {
    Score::kHasProgram ? "attention_tensor_program" : "attention_tensor",
    sizeof(typename Score::template Params<TensorPlan>), nullptr,
    reinterpret_cast<const void*>(&AttentionTensorKernel<Math, kBlocks, kFull, Score>)};

template <typename Math, int kBlocks, bool kFull>
const KernelInfo* KernelFor(const AttentionArgs& args) {
  return args.form.known ? &kTensor<Math, kBlocks, kFull, KnownScore>
         : args.wide     ? &kTensor<Math, kBlocks, kFull, ProgramScore<uint64_t, 4>>
         : args.g == 1   ? &kTensor<Math, kBlocks, kFull, ProgramScore<uint32_t, 1>>
                         : &kTensor<Math, kBlocks, kFull, ProgramScore<uint32_t, 4>>;
}
template <typename Math>
const KernelInfo* KernelFor(const AttentionArgs& args, int blocks) {
  const bool full = args.d == args.e && args.d == 16 * blocks;
  if (blocks == 4) return KernelFor<Math, 4, true>(args);
  if (blocks == 8) return full ? KernelFor<Math, 8, true>(args) : KernelFor<Math, 8, false>(args);
  return full ? KernelFor<Math, 16, true>(args) : KernelFor<Math, 16, false>(args);
}

// Two for each of Hopper's 132 multiprocessors. A constant, not asked of the device: equal nodes
// must give equal launches.
constexpr int64_t kMostBlocks = 264;

}  // namespace

void LaunchAttentionTensor(const AttentionNode& node, Launches* launches) {
  const AttentionArgs& args = node.args;
  constexpr int kItem = 2;
  TensorPlan plan = {};
  plan.args = args;
  plan.heads = std::min(args.g, kHeads);
  plan.pieces = static_cast<int32_t>(CeilDiv(args.g, kHeads));
  plan.width = FastDiv::By(args.e);
  plan.key_vectors = FastDiv::By(args.d * kItem / 16);
  plan.value_vectors = FastDiv::By(args.e * kItem / 16);
  plan.key_pitch = PitchOf(plan.key_vectors.divisor);
  plan.value_pitch = PitchOf(plan.value_vectors.divisor);
  const int width = std::max(args.d, args.e);
  const int blocks = args.d == 64 && args.e == 64 ? 4 : width <= 128 ? 8 : 16;
  const int tile = TileOf(blocks);
  plan.warp_bytes = kStages * tile * (plan.key_pitch + plan.value_pitch);
  if (!args.form.known) plan.warp_bytes += tile * (kHeads + 1) * sizeof(float);
  plan.pairs = args.q_strides[3] == kItem && IsAligned(args.q, 4) && args.q_strides[0] % 4 == 0 &&
               args.q_strides[1] % 4 == 0 && args.q_strides[2] % 4 == 0;

  plan.bound_is_position =
      args.form.known && args.bound != nullptr && args.bound == args.position &&
      args.bound_dtype == args.form.position_dtype &&
      std::equal(args.bound_strides, args.bound_strides + 3, args.position_strides);

  // A tile for every warp, as far as blocks and their memory go.
  const auto shared_bytes = [&] {
    plan.share = FastDiv::By(static_cast<uint32_t>(CeilDiv(plan.heads * args.e, plan.splits)));
    const BlockLayout layout(args.form.known ? 0 : sizeof(ExprParams), plan.splits,
                             plan.share.divisor, plan.warps);
    return layout.warps + plan.warps * plan.warp_bytes;
  };
  const int64_t tiles = CeilDiv(args.s, tile);
  const int64_t units = static_cast<int64_t>(args.b0) * args.b1 * plan.pieces;
  plan.splits = 1;
  plan.warps = kMaxWarps;
  while (plan.warps > 1 && shared_bytes() > kSharedBudget) --plan.warps;
  while (plan.splits < kMaxCluster && 2 * plan.splits * units <= kMostBlocks &&
         plan.splits * plan.warps < tiles) {
    plan.splits *= 2;
  }
  plan.warps = static_cast<int32_t>(std::min<int64_t>(plan.warps, CeilDiv(tiles, plan.splits)));
  while (plan.warps > 1 && shared_bytes() > kSharedBudget) --plan.warps;

  Launch launch;
  launch.kernel = args.k_dtype == DType::kBF16 ? KernelFor<BF16Math>(args, blocks)
                                               : KernelFor<F16Math>(args, blocks);
  launch.grid[0] = static_cast<uint32_t>(units * plan.splits);
  launch.block[0] = static_cast<uint32_t>(plan.warps * kWarp);
  launch.cluster = static_cast<uint32_t>(plan.splits);
  launch.shared_bytes = shared_bytes();
  if (args.form.known) {
    SetParams(KnownParams<TensorPlan>{plan}, &launch);
  } else {
    SetParams(ProgramParams<TensorPlan>{node.program, plan}, &launch);
  }
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
