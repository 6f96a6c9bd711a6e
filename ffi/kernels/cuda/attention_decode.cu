// ATTENTION over a cache of bf16 or f16 with rows of 64 or 128 elements, the ones that models have
// (compute capability 9.0): made for the short time that a decode step leaves.
//
// Chunks of 32 or 16 positions are dealt out in turn to the blocks of a group and to their warps.
// A warp works on its chunks alone (attention_chunk.cuh). The next chunk's keys are on their way
// while the present one's values are worked on, and the other way round.
//
// Where it is known which rows of the cache an earlier launch of the program may still be writing
// (attention_early.h), a warp's first chunk is fetched before the wait for that launch; one that
// holds such a row is fetched again behind it.
//
// At the end the warps of a block, then the blocks of a group combine what they have
// (attention_parts.cuh). A group is a cluster, whose blocks send one another what they have, so
// that nobody waits for more than he needs; or, for a long cache, blocks that run anywhere and
// leave it in a workspace to a second launch (attention_combine.cu).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ffi/kernels/cuda/attention_chunk.cuh"
#include "ffi/kernels/cuda/attention_parts.cuh"
#include "ffi/kernels/cuda/attention_scores.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kHeads = kMmaHeads;
constexpr int kMaxWarps = 8;                           // of a block
constexpr int kPortableCluster = 8, kMaxCluster = 16;  // more than 8 is granted on demand
constexpr uint32_t kPartBytes = 32;  // 4 sums of a query, its peak and total, 2 unused

struct DecodePlan {
  AttentionArgs args;
  EarlyCache early;
  float* workspace;               // null: a group is a cluster
  int32_t warps, splits, pieces;  // pieces: of the queries, each with its own group
  int32_t heads;                  // of a piece
  uint8_t bound_is_position;      // one and the same tensor
  uint8_t vectors_out;            // 4 outputs can be stored at once
  uint8_t skips;                  // the cache before a window need not be read
  uint8_t reserved;
  uint32_t blocks;  // that attend; those behind them bring weights near
  WeightsAhead ahead;
};

// Shared memory: what the warps have, [warp, query, column]; their peaks and totals; what comes
// from the blocks of the cluster, [block, part]; the barrier that counts it.
template <int kWidth>
struct BlockLayout {
  static constexpr uint32_t kPitch = kWidth + 8;  // floats: fewer bank conflicts
  uint32_t sums = 0, peaks, parts, barrier, bytes;
  __host__ __device__ BlockLayout(int warps, int heads, int splits) {
    constexpr uint32_t kFloat = sizeof(float);
    peaks = warps * heads * kPitch * kFloat;
    parts = peaks + warps * kHeads * 2 * kFloat;
    const uint32_t units = heads * kWidth / 4;
    barrier = parts + (splits > 1 ? (units + splits - 1) / splits * splits * kPartBytes : 0);
    bytes = barrier + 16;
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// An infinite value times a part of a weight, which may be 0 or negative, is not what the whole
// weight would give. So where a sum is NaN the warp makes all its sums again, one product after the
// other. Not inlined, for it is rare.
template <typename Math, int kWidth>
__device__ __noinline__ void SumOneByOne(const AttentionArgs& p, const char* q, const char* k,
                                         const char* v, int b0, int b1, int first_query, int count,
                                         int first, int step, int end,
                                         const float2* peaks_and_totals, float* sums) {
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
        const float weight = ScaleOf(Masked(p, view, position, score), peaks_and_totals[h].x);
        for (int c = 0; c < kOwn; ++c) {
          sum[c] = fmaf(weight, load(v + position * p.v_strides[2] + (column + c) * kItem), sum[c]);
        }
      }
    }
    for (int c = 0; c < kOwn; ++c) sums[h * BlockLayout<kWidth>::kPitch + column + c] = sum[c];
  }
}

// The weights, by the blocks from `block` on, of `blocks` that do it.
__device__ __noinline__ void AskForWeights(const WeightsAhead& ahead, uint32_t block,
                                           uint32_t blocks) {
  const int32_t all = ahead.matrices * ahead.parts * ahead.pieces;
  for (int32_t i = threadIdx.x * blocks + block; i < all; i += blockDim.x * blocks) {
    const int32_t piece = i / (ahead.matrices * ahead.parts);
    const int32_t place = i - piece * (ahead.matrices * ahead.parts);
    const int32_t part = place / ahead.matrices;
    const char* const from = ahead.weights[place - part * ahead.matrices] +
                             part * ahead.part_bytes + int64_t{piece} * kAheadPiece;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(kAheadPiece)
                 : "memory");
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

// kSimple: the form of scores is. kOnce: the form is plain, and no warp has more than one chunk.
// There is less code then, and less of it to fetch: a decode step comes by once a layer, and finds
// it cold.
template <typename Math, int kWidth, bool kSimple, bool kOnce>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kWidth == 64 ? 2 : 1)
    AttentionDecodeKernel(const __grid_constant__ DecodePlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kChunk = Shape<kWidth>::kChunk;
  constexpr int kUnitsOfHead = kWidth / 4;  // a unit: 4 columns
  asm volatile("griddepcontrol.launch_dependents;");
  if (blockIdx.x >= plan.blocks) {
    AskForWeights(plan.ahead, blockIdx.x - plan.blocks, gridDim.x - plan.blocks);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    return;
  }
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const AttentionArgs& p = plan.args;
  const bool sends = plan.splits > 1 && plan.workspace == nullptr;
  const BlockLayout<kWidth> layout(plan.warps, plan.heads, sends ? plan.splits : 1);
  float2* const peaks = reinterpret_cast<float2*>(shared + layout.peaks);  // and totals
  const uint32_t barrier = SharedAddress(shared + layout.barrier);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  const int rank = blockIdx.x % plan.splits, group = blockIdx.x / plan.splits;
  const int batch = group / plan.pieces, first_query = group % plan.pieces * kHeads;
  const int count = min(plan.heads, p.g - first_query);
  const int b0 = batch / p.b1, b1 = batch - b0 * p.b1;
  const int units = count * kUnitsOfHead;
  // Of a cluster, which is a power of two: every splits-th unit, from `rank`.
  const int shift = __ffs(plan.splits) - 1, owned = (units - rank + plan.splits - 1) >> shift;
  if (sends) {
    // Before a block sends anything, all must be there with their barriers.
    if (threadIdx.x == 0) ExpectFromCluster(barrier, plan.splits * owned * kPartBytes);
    ArriveInCluster();
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
    if (sends) WaitForCluster();  // all blocks have started, with their barriers
    asm volatile("griddepcontrol.wait;" ::: "memory");
    RandomDelay();
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
  if (!plan.early.cache || (first < end && end <= first + kChunk)) {
    if (!waited) {
      Prefetch<kWidth>(k, p.k_strides[3], first, end);
      Prefetch<kWidth>(v, p.v_strides[2], first, end);
    }
    wait();
  }
  LoadKeys<kWidth>(key_rows, first, end, keys);
  LoadValues<kWidth>(value_rows, first, end, values);
  if (!waited) {
    wait();
    if (Holds(plan.early.keys, first, kChunk) || Holds(plan.early.values, first, kChunk)) {
      LoadKeys<kWidth>(key_rows, first, end, keys);
      LoadValues<kWidth>(value_rows, first, end, values);
    }
  }

  Softmax softmax;
  Sums<kWidth> sums = {};
  for (int at = first; at < end; at += step) {
    Scores<kWidth> scores;
    RawScores<Math, kWidth>(keys, queries, scores);
    if constexpr (!kOnce) LoadKeys<kWidth>(key_rows, at + step, end, keys);
    if constexpr (kOnce) {
      MaskPlainly(p.form, at, last, scores);
    } else if constexpr (kSimple) {
      MaskSimply(p.form, at, last, scores);
    } else {
      const View views[2] = {
          ViewOf(p, b0, b1, min(first_query + FirstHead(), p.g - 1), last[0]),
          ViewOf(p, b0, b1, min(first_query + FirstHead() + 1, p.g - 1), last[1])};
      ForEach(scores,
              [&](float& x, int row, int j) { x = Masked(p, views[j], at + row + FirstRow(), x); });
    }
    if (at + kChunk > p.s) {
      ForEach(scores, [&](float& x, int row, int) {
        if (at + row + FirstRow() >= p.s) x = -INFINITY;
      });
    }
    if constexpr (kOnce) {
      softmax.WeighFirst(scores);
    } else if (float scale[2]; softmax.Weigh(scores, scale)) {
#pragma unroll
      for (int g = 0; g < Shape<kWidth>::kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < 16; ++c) sums[g][c / 4][c % 4] *= scale[c % 2];
      }
    }
    AddValues<Math, kWidth>(values, scores, sums);
    if constexpr (kOnce) break;
    LoadValues<kWidth>(value_rows, at + step, end, values);
  }

  // The warps of the block.
  float* const mine =
      reinterpret_cast<float*>(shared) + warp * plan.heads * BlockLayout<kWidth>::kPitch;
  bool finite = true;
  const float sum_of_weights[2] = {softmax.Total(0), softmax.Total(1)};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = FirstHead() + j;
    if (lane < 4) peaks[warp * kHeads + head] = {softmax.peak[j], sum_of_weights[j]};
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

  // Warps without a chunk have nothing to add.
  int with_chunks = plan.warps;
  if (kOnce && sends) {
    with_chunks = max(((end + kChunk - 1) / kChunk - rank + plan.splits - 1) >> shift, 1);
  }
  for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const int head = unit / kUnitsOfHead, column = unit % kUnitsOfHead * 4;
    const float* const sum_of =
        reinterpret_cast<const float*>(shared) + head * BlockLayout<kWidth>::kPitch + column;
    const Part all = Combined<kMaxWarps / 2>(with_chunks, [&](int w) -> Part {
      const float2 rest = peaks[w * kHeads + head];
      return {
          *reinterpret_cast<const float4*>(sum_of + w * plan.heads * BlockLayout<kWidth>::kPitch),
          rest.x, rest.y};
    });
    if (plan.splits == 1) {
      Store<Math>(p, plan.vectors_out, b0, b1, first_query + head, column, all);
      continue;
    }
    if (!sends) {
      const int64_t row = static_cast<int64_t>(blockIdx.x) * plan.heads + head;
      PartRow(plan.workspace, kWidth, row).Store(kWidth, column, all);
      continue;
    }
    const int to = unit & (plan.splits - 1), slot = unit >> shift;
    const int owned_there = (units - to + plan.splits - 1) >> shift;
    const uint32_t part = InBlock(
        to, SharedAddress(shared + layout.parts + (rank * owned_there + slot) * kPartBytes));
    const uint32_t counter = InBlock(to, barrier);
    Send(part, all.sum, counter);
    Send(part + 16, {all.peak, all.total, 0, 0}, counter);
  }
  if (!sends || threadIdx.x >= owned) return;

  // The blocks of the cluster, in the units that are this one's.
  WaitForClusterBytes(barrier);
  for (int slot = threadIdx.x; slot < owned; slot += blockDim.x) {
    const Part all = Combined<kMaxCluster / 4>(plan.splits, [&](int r) -> Part {
      const float4* const part =
          reinterpret_cast<const float4*>(shared + layout.parts + (r * owned + slot) * kPartBytes);
      return {part[0], part[1].x, part[1].y};
    });
    const int unit = slot * plan.splits + rank;
    Store<Math>(p, plan.vectors_out, b0, b1, first_query + unit / kUnitsOfHead,
                unit % kUnitsOfHead * 4, all);
  }
#endif
}

template <typename Math, int kWidth, bool kSimple, bool kOnce>
const KernelInfo kDecode = {
    kSimple ? "attention_decode" : "attention_decode_form", sizeof(DecodePlan), nullptr,
    reinterpret_cast<const void*>(&AttentionDecodeKernel<Math, kWidth, kSimple, kOnce>)};

template <typename Math, int kWidth>
const KernelInfo* KernelFor(const AttentionArgs& args, const AttentionSplit& split) {
  if (!args.form.simple()) return &kDecode<Math, kWidth, false, false>;
  const int64_t once = int64_t{split.blocks} * split.warps * Shape<kWidth>::kChunk;
  return args.form.plain() && args.s <= once ? &kDecode<Math, kWidth, true, true>
                                             : &kDecode<Math, kWidth, true, false>;
}
template <typename Math>
const KernelInfo* KernelFor(const AttentionArgs& args, const AttentionSplit& split) {
  return args.d == 64 ? KernelFor<Math, 64>(args, split) : KernelFor<Math, 128>(args, split);
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

// Of a Hopper. Small launches have one block for each, so that the next launch's find room beside
// them. A constant, not asked of the device: equal nodes must give equal launches.
constexpr int64_t kMultiprocessors = 132;
// So many blocks can bring weights near.
constexpr int64_t kEnoughIdle = 32;

}  // namespace

bool FitsDecodeKernel(const AttentionArgs& args) {
  return FitsTensorKernel(args) && args.form.known && args.d == args.e &&
         (args.d == 64 || args.d == 128) && args.q_strides[3] == 2 && IsAligned(args.q, 16) &&
         args.q_strides[0] % 16 == 0 && args.q_strides[1] % 16 == 0 && args.q_strides[2] % 16 == 0;
}

AttentionSplit SplitForDecode(const AttentionArgs& args, const Workspace& workspace) {
  const bool narrow = args.d == 64;
  const int64_t chunks = CeilDiv(args.s, narrow ? Shape<64>::kChunk : Shape<128>::kChunk);
  const int64_t units = static_cast<int64_t>(args.b0) * args.b1 * CeilDiv(args.g, kHeads);
  // Registers leave room for two blocks of 8 warps with narrow rows, of 4 warps with wide ones.
  const int warps = narrow ? kMaxWarps : kMaxWarps / 2;
  const int64_t row_floats = std::min(args.g, kHeads) * (args.d + kPartRest);
  const int64_t room = std::min(2 * kMultiprocessors, workspace.floats / row_floats) / units;
  if (room > 1 && 2 * warps < chunks && IsAligned(workspace.address, 16)) {
    return {static_cast<int32_t>(std::min(room, CeilDiv(chunks, warps))), warps, true};
  }
  // Larger clusters wait for one another longer: they are for caches that take their time.
  const bool is_long = chunks > 2 * kPortableCluster * kMaxWarps;
  const int most = is_long && narrow ? kMaxCluster : kPortableCluster;
  AttentionSplit split = {1, is_long ? kMaxWarps : warps, false};
  // All blocks at once.
  if (narrow && units > 2 * kMultiprocessors) split.warps = kMaxWarps / 2;
  while (split.blocks < most && 2 * split.blocks * units <= kMultiprocessors &&
         split.blocks * split.warps < chunks) {
    split.blocks *= 2;
  }
  // Twice as many blocks of half the warps find room beside those of the launch before.
  if (narrow && split.warps == kMaxWarps && split.blocks > 1 && 2 * split.blocks <= most &&
      2 * split.blocks * units <= kMultiprocessors) {
    split = {2 * split.blocks, kMaxWarps / 2, false};
  }
  split.warps = static_cast<int32_t>(std::min<int64_t>(split.warps, CeilDiv(chunks, split.blocks)));
  return split;
}

void LaunchAttentionDecode(const AttentionArgs& args, const Workspace& workspace,
                           const EarlyCache& early, const AttentionSplit& split,
                           const WeightsAhead& ahead, Launches* launches) {
  DecodePlan plan = {};
  plan.args = args;
  plan.early = early;
  const RewrittenRows &keys = early.keys, &values = early.values;
  if (keys.index == values.index && keys.index_dtype == values.index_dtype &&
      keys.count == values.count && keys.last_start == values.last_start) {
    plan.early.values.index = nullptr;  // the same rows: one look is enough
  }
  if (split.in_workspace) plan.workspace = reinterpret_cast<float*>(workspace.address);
  plan.warps = split.warps;
  plan.splits = split.blocks;
  plan.heads = std::min(args.g, kHeads);
  plan.pieces = static_cast<int32_t>(CeilDiv(args.g, kHeads));
  plan.bound_is_position = BoundIsPosition(args);
  plan.vectors_out = StoresVectors(args);
  plan.skips = args.form.window != ScoreForm::kNoWindow && HiddenWeighsNothing(args.form);

  const int in_cluster = split.in_workspace ? 1 : plan.splits;
  Launch launch;
  launch.kernel = args.k_dtype == DType::kBF16 ? KernelFor<BF16Math>(args, split)
                                               : KernelFor<F16Math>(args, split);
  const int64_t blocks = int64_t{args.b0} * args.b1 * plan.pieces * plan.splits;
  // Whole clusters, where multiprocessors are idle.
  const int64_t idle = std::max(kMultiprocessors - blocks, int64_t{0}) / in_cluster * in_cluster;
  plan.blocks = static_cast<uint32_t>(blocks);
  launch.grid[0] = plan.blocks;
  if (ahead.matrices > 0 && idle >= kEnoughIdle) {
    plan.ahead = ahead;
    launch.grid[0] += static_cast<uint32_t>(idle);
  }
  launch.block[0] = static_cast<uint32_t>(plan.warps * kWarp);
  launch.cluster = static_cast<uint32_t>(in_cluster);
  launch.shared_bytes = args.d == 64 ? BlockLayout<64>(plan.warps, plan.heads, in_cluster).bytes
                                     : BlockLayout<128>(plan.warps, plan.heads, in_cluster).bytes;
  SetParams(plan, &launch);
  launches->push_back(std::move(launch));
  if (split.in_workspace) LaunchAttentionCombine(args, workspace, plan.splits, launches);
}

}  // namespace jaxgraph
