// ATTENTION over a cache of bf16 or f16 on tensor cores (compute capability 9.0).
//
// Tiles of 32 positions are dealt out in turn to the blocks of a cluster and to their warps, so
// that all have the same share wherever the bound lies. A warp works on its tiles alone:
//   - keys and values come into its own shared memory by asynchronous copies; while it works on the
//     keys of a tile, its values are on their way, and the other way round;
//   - scores are keys x queries: positions are the rows of the product, so that few queries (8 at a
//     time) waste nothing; each lane has 4 positions of 2 queries, and keeps the running maximum;
//   - the weighted sum is values x weights, with the columns of the values as rows.
// At the end warps, then blocks combine what they have, in a fixed order: every block sends the
// others their share, and each combines its own.
#include <algorithm>

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/attention_mma.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

// Older devices compile an empty kernel, so that for them the helpers have no caller.
#pragma nv_diag_suppress 177

namespace jaxgraph {
namespace {

constexpr int kTile = kWarp;  // positions
constexpr int kHeads = kMmaHeads;
constexpr int kMaxWarps = 8;  // of a block
constexpr int kMaxThreads = kMaxWarps * kWarp;
constexpr int kMaxCluster = 16;                // more than 8 is granted on demand
constexpr int kItem = 2;                       // bytes of an element
constexpr uint32_t kSharedBudget = 100 << 10;  // two blocks on a multiprocessor

struct TensorPlan {
  AttentionArgs args;
  FastDiv key_vectors, value_vectors;  // 16-byte vectors of a row
  uint32_t key_pitch, value_pitch;     // bytes between rows in shared memory
  uint32_t warp_bytes;                 // shared memory of one warp
  int32_t warps, splits, pieces;       // pieces: of the queries, each with its own cluster
  int32_t heads;                       // of a piece
  FastDiv width;                       // e
  FastDiv share;                       // outputs of a piece that a block of the cluster combines
  uint8_t pairs;                       // q can be read in pairs
  uint8_t reserved[3];
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

// The queries of a block.
struct Where {
  int b0, b1, first_query, count;
};

__device__ __forceinline__ TileRows KeyRows(const TensorPlan& plan, const Where& where) {
  const AttentionArgs& p = plan.args;
  return {p.k + where.b0 * p.k_strides[0] + where.b1 * p.k_strides[1], p.k_strides[3],
          plan.key_vectors, plan.key_pitch};
}
__device__ __forceinline__ TileRows ValueRows(const TensorPlan& plan, const Where& where) {
  const AttentionArgs& p = plan.args;
  return {p.v + where.b0 * p.v_strides[0] + where.b1 * p.v_strides[1], p.v_strides[2],
          plan.value_vectors, plan.value_pitch};
}

// ---- tensor cores ----

template <bool kTranspose>
__device__ __forceinline__ Fragment LoadFragment(const char* row) {
  const uint32_t address = SharedAddress(row);
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

// Queries as the right operand, [d, query]: words of two neighbours along d.
template <int kBlocks>
__device__ __forceinline__ void LoadQueries(const TensorPlan& plan, const Where& where,
                                            uint32_t (&words)[kBlocks][2]) {
  const AttentionArgs& p = plan.args;
  const int head = FirstRow(), column = FirstHead();
  const char* const row = p.q + where.b0 * p.q_strides[0] + where.b1 * p.q_strides[1] +
                          (where.first_query + min(head, where.count - 1)) * p.q_strides[2];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = block * 16 + half * 8 + column;
      uint32_t word = 0;
      if (at < p.d && head < where.count) {
        const char* from = row + at * p.q_strides[3];
        word = plan.pairs ? *reinterpret_cast<const uint32_t*>(from)
                          : Pair(*reinterpret_cast<const uint16_t*>(from),
                                 *reinterpret_cast<const uint16_t*>(from + p.q_strides[3]));
      }
      words[block][half] = word;
    }
  }
}

using Scores = RowScores<4>;

template <typename Math, int kBlocks>
__device__ __forceinline__ void RawScores(const char* keys, uint32_t pitch, int d,
                                          const uint32_t (&queries)[kBlocks][2], Scores& scores) {
  const int lane = threadIdx.x % kWarp;
  const char* row = keys + lane % 16 * pitch + lane / 16 * 16;
  float products[2][4] = {};
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (block * 16 >= d) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Fragment f = LoadFragment<false>(row + half * 16 * pitch + block * 32);
      Math::MultiplyAdd(f, queries[block][0], queries[block][1], products[half]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scores[i][0] = products[i / 2][i % 2 * 2];
    scores[i][1] = products[i / 2][i % 2 * 2 + 1];
  }
}

// A warp's memory for a tile's scores or weights, [position][query].
constexpr int kScorePitch = kHeads + 1;
constexpr uint32_t kScoreBytes = kTile * kScorePitch * sizeof(float);

// Runs the score program. For it a lane takes one position: the scores go through shared memory.
template <typename Score>
__device__ __forceinline__ void RunProgram(const AttentionArgs& p, const ExprParams& program,
                                           const Where& at, int first_position, float* scratch,
                                           Scores& scores) {
  using W = typename Score::W;
  constexpr int kLanes = Score::kLanes, kPitch = kScorePitch;
  const auto exchange = [&](auto access) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        access(scratch[(FirstRow() + 8 * i) * kPitch + FirstHead() + j], scores[i][j]);
      }
    }
    __syncwarp();
  };
  exchange([](float& memory, float& score) { memory = score; });
  const int lane = threadIdx.x % kWarp;
  for (int h = 0; h < at.count; h += kLanes) {
    ScoreSpace<kLanes> space = {at.b0, at.b1, min(first_position + lane, p.s - 1), {}};
    Lanes<W, kLanes> lanes;
    float* const mine = scratch + lane * kPitch + h;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      space.query[j] = min(at.first_query + h + j, p.g - 1);
      lanes.lane[j] = FromFloat<W>(mine[j]);
    }
    lanes = MaskScores<W, kLanes>(program, space, lanes);
#pragma unroll
    for (int j = 0; j < kLanes; ++j) mine[j] = AsFloat(lanes.lane[j]);
  }
  __syncwarp();
  exchange([](float& memory, float& score) { score = memory; });
}

// Of the known form: what this lane's queries see last.
template <typename Score>
__device__ __forceinline__ void LastOfLane(const AttentionArgs& p, const Where& at,
                                           int (&last)[2]) {
  if constexpr (!Score::kHasProgram) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      last[j] = LastVisible(p, at.b0, at.b1, min(at.first_query + FirstHead() + j, p.g - 1));
    }
  }
}

// Masks a tile's scores: by the known form, or by the program.
template <typename Score>
__device__ __forceinline__ void Mask(const AttentionArgs& p, const ExprParams* program,
                                     const Where& at, int first_position, const int (&last)[2],
                                     float* scratch, Scores& scores) {
  if constexpr (Score::kHasProgram) {
    RunProgram<Score>(p, *program, at, first_position, scratch, scores);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int position = first_position + FirstRow() + 8 * i;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (!Score::kHasProgram) {
        scores[i][j] = MaskKnown(p.form, scores[i][j], position <= last[j]);
      }
      if (position >= p.s) scores[i][j] = -INFINITY;
    }
  }
}

// Of the columns block * 16 + FirstRow() and 8 below: queries FirstHead() and the next.
template <int kBlocks>
using Sums = float[kBlocks][4];

template <typename Math, int kBlocks>
__device__ __forceinline__ void AddValues(const char* values, uint32_t pitch, int e,
                                          const Scores& weights, Sums<kBlocks>& sums) {
  SplitWeights split[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split[i] = Split<Math>(weights[i]);
  const int lane = threadIdx.x % kWarp;
  const char* row = values + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (block * 16 >= e) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Fragment f = LoadFragment<true>(row + half * 16 * pitch + block * 32);
      Math::MultiplyAdd(f, split[2 * half].high, split[2 * half + 1].high, sums[block]);
      Math::MultiplyAdd(f, split[2 * half].low, split[2 * half + 1].low, sums[block]);
    }
  }
}

// Where a warp's tiles were, [query, column]. False: this lane has one that is NaN.
template <int kBlocks>
__device__ __forceinline__ bool StoreSums(const Sums<kBlocks>& sums, int count, int e, float* to) {
  bool numbers = true;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = FirstHead() + j;
    if (head >= count) continue;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block * 16 >= e) break;
      float* const column = to + head * e + block * 16 + FirstRow();
      const float above = sums[block][j], below = sums[block][2 + j];
      column[0] = above;
      column[8] = below;
      numbers = numbers && above == above && below == below;
    }
  }
  return numbers;
}

// ---- values that are not finite ----

// A warp's tiles: `first`, and every step-th behind it; no position at `end` or behind is read.
struct Tiles {
  int first, step, end;
  __device__ __forceinline__ bool Has(int tile) const { return tile * kTile < end; }
};

// An infinite value times a part of a weight, which may be 0 or negative, is not what the whole
// weight would give. So where a sum is NaN the warp makes all its sums again, one product after the
// other, in the same memory. Not inlined, for it is rare.
template <typename Math, int kBlocks, typename Score>
__device__ __noinline__ void SumOneByOne(const TensorPlan& plan, const ExprParams* program,
                                         const Where& at, const Tiles& tiles, const float* peaks,
                                         char* keys) {
  const AttentionArgs& p = plan.args;
  const TileRows k = KeyRows(plan, at), v = ValueRows(plan, at);
  char* const values = keys + kTile * k.pitch;
  float* const weights = reinterpret_cast<float*>(keys);  // once the keys have been read
  uint32_t queries[kBlocks][2];
  LoadQueries(plan, at, queries);
  int last[2];
  LastOfLane<Score>(p, at, last);
  Sums<kBlocks> sums = {};
  for (int tile = tiles.first; tiles.Has(tile); tile += tiles.step) {
    CopyTile(k, tile * kTile, tiles.end, keys);
    CopyTile(v, tile * kTile, tiles.end, values);
    WaitForCopies<0>();
    Scores scores;
    RawScores<Math, kBlocks>(keys, k.pitch, p.d, queries, scores);
    __syncwarp();
    Mask<Score>(p, program, at, tile * kTile, last,
                reinterpret_cast<float*>(values + kTile * v.pitch), scores);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weights[(FirstRow() + 8 * i) * kScorePitch + FirstHead() + j] =
            ScaleOf(scores[i][j], peaks[FirstHead() + j]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block * 16 >= p.e) break;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float* const weight = weights + FirstHead() + c % 2;
        const char* const value = values + (block * 16 + FirstRow() + 8 * (c / 2)) * kItem;
#pragma unroll 1
        for (int i = 0; i < kTile; ++i) {
          sums[block][c] = fmaf(
              weight[i * kScorePitch],
              Math::Widen(*reinterpret_cast<const uint16_t*>(value + i * v.pitch)), sums[block][c]);
        }
      }
    }
    __syncwarp();
  }
  StoreSums<kBlocks>(sums, at.count, p.e, reinterpret_cast<float*>(keys));
}

// kBlocks: of 16, that d and e have at most.
template <typename Math, int kBlocks, typename Score>
__global__ void __launch_bounds__(kMaxThreads, kBlocks <= 8 ? 2 : 1) AttentionTensorKernel(
    const __grid_constant__ typename Score::template Params<TensorPlan> params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const TensorPlan& plan = params.plan;
  const AttentionArgs& p = plan.args;
  const int share = static_cast<int>(plan.share.divisor);
  const BlockLayout layout(Score::kHasProgram ? sizeof(ExprParams) : 0, plan.splits, share,
                           plan.warps);
  float* const warp_peaks = reinterpret_cast<float*>(shared + layout.warp_peaks);
  float* const warp_totals = reinterpret_cast<float*>(shared + layout.warp_totals);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  char* const keys = shared + layout.warps + warp * plan.warp_bytes;
  char* const values = keys + kTile * plan.key_pitch;

  const int rank = blockIdx.x % plan.splits, unit = blockIdx.x / plan.splits;
  const int batch = unit / plan.pieces, b0 = batch / p.b1;
  const int first_query = unit % plan.pieces * kHeads;
  const Where at = {b0, batch - b0 * p.b1, first_query, min(plan.heads, p.g - first_query)};
  const TileRows k = KeyRows(plan, at), v = ValueRows(plan, at);
  const ExprParams* const program =
      Score::kHasProgram ? reinterpret_cast<const ExprParams*>(shared) : nullptr;
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (Score::kHasProgram) ToShared(params.program, shared_memory);
  BeginLaunch();
  // Before a block sends anything, all must be there.
  if (plan.splits > 1) cluster.barrier_arrive();

  uint32_t queries[kBlocks][2];
  LoadQueries(plan, at, queries);
  int last[2];
  LastOfLane<Score>(p, at, last);
  // At `end` and behind no query of this block sees anything.
  int end = LastPosition(p, at.b0, at.b1, first_query + min(lane % kHeads, at.count - 1)) + 1;
#pragma unroll
  for (int o = kHeads / 2; o > 0; o /= 2) end = max(end, __shfl_xor_sync(kAllLanes, end, o));
  const Tiles tiles = {warp * plan.splits + rank, plan.splits * plan.warps, end};
  if (tiles.Has(tiles.first)) {
    CopyTile(k, tiles.first * kTile, end, keys);
    CopyTile(v, tiles.first * kTile, end, values);
  }

  Softmax softmax;
  Sums<kBlocks> sums = {};
  for (int tile = tiles.first; tiles.Has(tile); tile += tiles.step) {
    const int next = tile + tiles.step;
    const bool more = tiles.Has(next);
    WaitForCopies<1>();
    Scores scores;
    RawScores<Math, kBlocks>(keys, plan.key_pitch, p.d, queries, scores);
    __syncwarp();
    if (more) {
      CopyTile(k, next * kTile, end, keys);
    } else {
      CommitCopies();
    }
    Mask<Score>(p, program, at, tile * kTile, last,
                reinterpret_cast<float*>(values + kTile * plan.value_pitch), scores);
    float scale[2];
    if (softmax.Weigh(scores, scale)) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[block][c] *= scale[c % 2];
      }
    }
    WaitForCopies<1>();
    AddValues<Math, kBlocks>(values, plan.value_pitch, p.e, scores, sums);
    __syncwarp();
    if (more) CopyTile(v, next * kTile, end, values);
  }

  // The warps of the block: their sums lie where their tiles were, [query, column].
  WaitForCopies<0>();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float total = softmax.Total(j);
    if (lane < 4) {
      warp_peaks[warp * kHeads + FirstHead() + j] = softmax.peak[j];
      warp_totals[warp * kHeads + FirstHead() + j] = total;
    }
  }
  const bool numbers = StoreSums<kBlocks>(sums, at.count, p.e, reinterpret_cast<float*>(keys));
  if (!__all_sync(kAllLanes, numbers)) {
    __syncwarp();
    SumOneByOne<Math, kBlocks, Score>(plan, program, at, tiles, warp_peaks + warp * kHeads, keys);
  }
  __syncthreads();
  if (plan.splits > 1) cluster.barrier_wait();
  // To the block `to`: for a cluster of one, to itself.
  const auto remote = [&](uint32_t at, int to) {
    float* const local = reinterpret_cast<float*>(shared + at);
    return plan.splits > 1 ? cluster.map_shared_rank(local, to) : local;
  };
  const auto block_peak = [&](int head) {
    float peak = -INFINITY;
    for (int w = 0; w < plan.warps; ++w) peak = fmaxf(peak, warp_peaks[w * kHeads + head]);
    return peak;
  };
  for (int i = threadIdx.x; i < at.count * p.e; i += blockDim.x) {
    const int head = static_cast<int>(plan.width.Quotient(i));
    const int to = static_cast<int>(plan.share.Quotient(i));
    const float common = block_peak(head);
    float sum = 0;
    for (int w = 0; w < plan.warps; ++w) {
      const float* from =
          reinterpret_cast<const float*>(shared + layout.warps + w * plan.warp_bytes);
      sum = fmaf(from[i], ScaleOf(warp_peaks[w * kHeads + head], common), sum);
    }
    remote(layout.sums, to)[rank * share + i - to * share] = sum;
  }
  for (int i = threadIdx.x; i < plan.splits * kHeads; i += blockDim.x) {
    const int head = i % kHeads, to = i / kHeads;
    const float common = block_peak(head);
    float sum = 0;
    for (int w = 0; w < plan.warps; ++w) {
      sum =
          fmaf(warp_totals[w * kHeads + head], ScaleOf(warp_peaks[w * kHeads + head], common), sum);
    }
    remote(layout.peaks, to)[rank * kHeads + head] = common;
    remote(layout.totals, to)[rank * kHeads + head] = sum;
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
  const int outputs = min(share, at.count * p.e - rank * share);
  for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
    const int output = rank * share + i, head = static_cast<int>(plan.width.Quotient(output));
    float common = -INFINITY, sum = 0, all = 0;
    for (int r = 0; r < plan.splits; ++r) common = fmaxf(common, peaks[r * kHeads + head]);
    for (int r = 0; r < plan.splits; ++r) {
      const float scale = ScaleOf(peaks[r * kHeads + head], common);
      sum = fmaf(block_sums[r * share + i], scale, sum);
      all = fmaf(totals[r * kHeads + head], scale, all);
    }
    sum *= TakeSink(p, at.b0, at.b1, first_query + head, common, &all);
    StoreFloat(p.out + at.b0 * p.out_strides[0] + at.b1 * p.out_strides[1] +
                   static_cast<int64_t>(first_query + head) * p.out_strides[2] +
                   (output - head * p.e) * p.out_strides[3],
               p.out_dtype, sum / all);
  }
#endif
}

template <typename Math, int kBlocks, typename Score>
const KernelInfo kTensor = {
    Score::kHasProgram ? "attention_tensor_program" : "attention_tensor",
    sizeof(typename Score::template Params<TensorPlan>), nullptr,
    reinterpret_cast<const void*>(&AttentionTensorKernel<Math, kBlocks, Score>)};

template <typename Math, int kBlocks>
const KernelInfo* KernelFor(const AttentionArgs& args) {
  return args.form.known ? &kTensor<Math, kBlocks, KnownScore>
         : args.wide     ? &kTensor<Math, kBlocks, ProgramScore<uint64_t, 4>>
         : args.g == 1   ? &kTensor<Math, kBlocks, ProgramScore<uint32_t, 1>>
                         : &kTensor<Math, kBlocks, ProgramScore<uint32_t, 4>>;
}
template <typename Math>
const KernelInfo* KernelFor(const AttentionArgs& args, int width) {
  return width <= 64    ? KernelFor<Math, 4>(args)
         : width <= 128 ? KernelFor<Math, 8>(args)
                        : KernelFor<Math, 16>(args);
}

// Rows an odd number of 16-byte vectors apart: reading them side by side meets no bank twice.
uint32_t PitchOf(uint32_t vectors) { return 16 * (vectors | 1); }

// Two for each of Hopper's 132 multiprocessors. A constant, not asked of the device: equal nodes
// must give equal launches.
constexpr int64_t kMostBlocks = 264;

}  // namespace

void LaunchAttentionTensor(const AttentionNode& node, Launches* launches) {
  const AttentionArgs& args = node.args;
  TensorPlan plan = {};
  plan.args = args;
  plan.heads = std::min(args.g, kHeads);
  plan.pieces = static_cast<int32_t>(CeilDiv(args.g, kHeads));
  plan.width = FastDiv::By(args.e);
  plan.key_vectors = FastDiv::By(args.d * kItem / 16);
  plan.value_vectors = FastDiv::By(args.e * kItem / 16);
  plan.key_pitch = PitchOf(plan.key_vectors.divisor);
  plan.value_pitch = PitchOf(plan.value_vectors.divisor);
  plan.warp_bytes = kTile * (plan.key_pitch + plan.value_pitch);
  if (!args.form.known) plan.warp_bytes += kScoreBytes;
  plan.pairs = args.q_strides[3] == kItem && IsAligned(args.q, 4) && args.q_strides[0] % 4 == 0 &&
               args.q_strides[1] % 4 == 0 && args.q_strides[2] % 4 == 0;

  const int64_t tiles = CeilDiv(args.s, kTile);
  const int64_t units = static_cast<int64_t>(args.b0) * args.b1 * plan.pieces;
  plan.splits = 1;
  while (plan.splits < kMaxCluster && 2 * plan.splits * units <= kMostBlocks &&
         plan.splits < tiles) {
    plan.splits *= 2;
  }
  plan.share = FastDiv::By(static_cast<uint32_t>(CeilDiv(plan.heads * args.e, plan.splits)));
  plan.warps = kMaxWarps;
  const auto shared_bytes = [&] {
    const BlockLayout layout(args.form.known ? 0 : sizeof(ExprParams), plan.splits,
                             plan.share.divisor, plan.warps);
    return layout.warps + plan.warps * plan.warp_bytes;
  };
  while (plan.warps > 1 &&
         (shared_bytes() > kSharedBudget || plan.splits * (plan.warps / 2) >= tiles)) {
    plan.warps /= 2;
  }

  Launch launch;
  const int width = std::max(args.d, args.e);
  launch.kernel = args.k_dtype == DType::kBF16 ? KernelFor<BF16Math>(args, width)
                                               : KernelFor<F16Math>(args, width);
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
