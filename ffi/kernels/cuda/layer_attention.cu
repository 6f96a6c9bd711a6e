// The first half of a small model's layer; see layer.h. A cluster has a KV head and its queries.
//
//   1. Each block computes a few rows of the query, key and value products, rotates what it has and
//      sends it to all.
//   2. Positions are dealt out to the blocks and their warps, 16 at a time, as in
//      attention_decode.cu. So are the outputs, in pieces: what a block has of a piece it sends to
//      the block that gathers it, which sends the whole of it to all.
//   3. Each block multiplies the outputs by its own rows of the output matrix.
//
// The weights and the first positions are on their way before the wait: of the cache no launch in
// front of this one writes anything, and the row that this one writes is put in behind it.
#include <algorithm>
#include <climits>

#include "ffi/kernels/cuda/attention_scores.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/layer_device.cuh"
#include "ffi/kernels/cuda/layer_positions.cuh"

namespace jaxgraph {
namespace {

// Chunks of weights that a warp holds in registers.
constexpr int kHeldWide = 5, kHeldOut = 3;
// What is waited for, as offsets in shared memory.
constexpr int kWeightsThere = kBarriers, kProjectionsSent = kBarriers + 8,
              kPartsSent = kBarriers + 16, kOutputsSent = kBarriers + 24;
static_assert(kOutputsSent + 8 == kBehindBarriers);
// Every piece of four outputs has a thread and, in the block that gathers it, a warp.
static_assert(kMaxLayerHeads * kMaxLayerWidth / 4 <= kLayerCluster * kLayerWarps);

// A block's shared memory, in bytes, and its share. The projections come in octets: elements 4j to
// 4j + 3 of a head and the four that they are rotated against, 16 bytes; octets are dealt out to
// the blocks in turn. So are the outputs, four columns of a query a piece, to those that gather
// them.
struct AttentionPlan {
  LayerAttentionParams p;
  RowsLayout wide, out;
  int32_t outputs;  // of the cluster
  int32_t octets, own_octets, octets_of_head, warps, pieces;
  int32_t row, angles, sums, projected, warp_sums, peaks, parts, part_peaks, attended, bytes;
  int32_t reserved = 0;
  int32_t scales_only;  // all that is done to a score, but for the mask, is a multiplication

  explicit AttentionPlan(const LayerAttentionParams& params) : p(params) {
    scales_only = !p.form.divides && p.form.raw == DType::kF32 && p.form.scaled == DType::kF32 &&
                  p.form.masked == DType::kF32;
    outputs = p.heads * p.width;
    octets_of_head = p.width / 8;
    octets = (p.heads + 2) * octets_of_head;
    own_octets = (octets + kLayerCluster - 1) / kLayerCluster;  // at most
    const int units = (p.rows + kUnit * kLayerCluster - 1) / (kUnit * kLayerCluster);
    warps = units > kLayerWarps / 2 ? kLayerWarps : kLayerWarps / 2;
    pieces = outputs / 4;
    wide = RowsLayout::Of(own_octets * 8, p.in.size);
    out = RowsLayout::Of(p.in.size / kLayerCluster, outputs);
    wide.first = kBehindBarriers;
    out.first = wide.first + wide.bytes();
    row = out.first + out.bytes();
    angles = row + wide.chunks * 64;
    sums = angles + RoundUp(p.width * 4, 16);
    projected = sums + std::max(wide.sum_bytes(), out.sum_bytes());
    warp_sums = projected + RoundUp((p.heads + 2) * p.width * 2, 16);
    peaks = warp_sums + warps * outputs * 4;
    const int own_pieces = (pieces + kLayerCluster - 1) / kLayerCluster;  // at most
    parts = peaks + kLayerWarps * kMaxLayerHeads * 8;
    part_peaks = parts + own_pieces * kLayerCluster * 16;
    attended = part_peaks + own_pieces * kLayerCluster * 8;
    bytes = attended + out.chunks * 64;
  }
  // Every octet has a thread for each block that it is sent to.
  bool fits() const {
    return own_octets * kLayerCluster <= kLayerThreads && wide.fits() && out.fits() &&
           bytes <= kMaxLayerShared;
  }
};

#if __CUDA_ARCH__ >= 900

// A score by the simple form.
__device__ __forceinline__ float SimpleScore(const ScoreForm& form, float raw, bool visible) {
  const float factor = __uint_as_float(form.factor);
  const float x = RoundTo(form.raw, raw);
  const float scaled = RoundTo(form.scaled, form.divides ? x / factor : x * factor);
  return RoundTo(form.masked, visible ? scaled : __uint_as_float(form.fill));
}

// An output whose sums are not finite, one product after the other: a weight enters the tensor
// cores as a sum of two numbers, and what an infinite value makes of the second is not what the
// whole weight would give. Rare, so not inlined and not fast.
template <typename Math>
__device__ __noinline__ float OneByOne(const LayerAttentionParams& p, int head, int output,
                                       uint32_t projected_at, int last, int end, int written,
                                       float peak, float total) {
  const auto projected = static_cast<const char*>(__cvta_shared_to_generic(projected_at));
  const int h = output / p.width, e = output % p.width;
  const auto element = [](const char* from) {
    return Math::Widen(*reinterpret_cast<const volatile uint16_t*>(from));
  };
  const char* const query = projected + 2 * h * p.width;
  const char* const new_key = projected + 2 * p.heads * p.width;
  const char* const new_value = new_key + 2 * p.width;
  const auto place = [&](int i) { return PlaceInHead(i & ~3, p.width / 2) + i % 4 * 2; };
  float sum = 0;
  for (int s = 0; s < end; ++s) {
    const bool is_new = s == written;
    const char* const key = is_new ? new_key : p.keys + head * p.key_head + s * p.key_row;
    const char* const value = is_new ? new_value : p.values + head * p.value_head + s * p.value_row;
    float raw = 0;
    for (int d = 0; d < p.width; ++d) {
      raw = fmaf(element(query + place(d)), element(key + (is_new ? place(d) : 2 * d)), raw);
    }
    const float weight = __expf(SimpleScore(p.form, raw, s <= last) - PeakOrZero(peak));
    sum = fmaf(weight, element(value + (is_new ? place(e) : 2 * e)), sum);
  }
  return sum / total;
}

// What the warps have of 4 columns of a query, and its peak and total.
struct Piece {
  float4 sum;
  float2 peak;  // and total
};
template <int kWarps>
__device__ __forceinline__ Piece CombineWarps(const float2* peaks, const float* sums, int outputs) {
  float2 of_warp[kWarps];
  float4 sum[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    of_warp[w] = peaks[w * kMaxLayerHeads];
    sum[w] = *reinterpret_cast<const float4*>(sums + w * outputs);
  }
  float peak = of_warp[0].x;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) peak = fmaxf(peak, of_warp[w].x);
  float4 all = {};
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float scale = Exp(of_warp[w].x - PeakOrZero(peak));
    total += scale * of_warp[w].y;
    all = {all.x + scale * sum[w].x, all.y + scale * sum[w].y, all.z + scale * sum[w].z,
           all.w + scale * sum[w].w};
  }
  return {all, {peak, total}};
}

// The largest of a warp: integers that are ordered as the numbers are have an instruction for it. A
// NaN may lose, but what is scaled by its distance from the largest becomes one.
__device__ __forceinline__ float LargestOfWarp(float x) {
  const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(flip(__reduce_max_sync(kAllLanes, flip(__float_as_int(x)))));
}

#endif

template <typename Math>
__global__ void __launch_bounds__(kLayerThreads, 2)
    LayerAttentionKernel(const __grid_constant__ AttentionPlan plan) {
#if __CUDA_ARCH__ >= 900
  LetNextStart();
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const LayerAttentionParams& p = plan.p;
  float* const angles = reinterpret_cast<float*>(shared + plan.angles);
  float* const warp_sums = reinterpret_cast<float*>(shared + plan.warp_sums);
  float2* const peaks = reinterpret_cast<float2*>(shared + plan.peaks);  // and totals
  float* const parts = reinterpret_cast<float*>(shared + plan.parts);
  float2* const part_peaks = reinterpret_cast<float2*>(shared + plan.part_peaks);
  char* const projected = shared + plan.projected;
  const uint32_t weights_there = SharedAddress(shared + kWeightsThere);
  const uint32_t projections_sent = SharedAddress(shared + kProjectionsSent);
  const uint32_t parts_sent = SharedAddress(shared + kPartsSent);
  const uint32_t outputs_sent = SharedAddress(shared + kOutputsSent);
  const int thread = threadIdx.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = blockIdx.x % kLayerCluster, head = blockIdx.x / kLayerCluster;
  const int half = p.width / 2;

  // Everything that is there already. First what the cache's positions wait for.
  const int position = p.position != nullptr ? *reinterpret_cast<const int32_t*>(p.position) : 0;
  const int owned = (plan.octets - rank + kLayerCluster - 1) / kLayerCluster * 8;
  if (thread == 0) {
    ExpectFromCluster(weights_there, 2 * (owned * p.in.size + plan.out.rows * plan.outputs));
    ExpectFromCluster(projections_sent, 2 * (p.heads + 2) * p.width);
    const int own_pieces = (plan.pieces - rank + kLayerCluster - 1) / kLayerCluster;
    ExpectFromCluster(parts_sent, own_pieces * kLayerCluster * 24);
    ExpectFromCluster(outputs_sent, 2 * plan.outputs);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  // A warp's lanes ask one after the other, so all warps do.
  const int asker = lane * kLayerWarps + warp;
  const uint64_t policy = ReadOncePolicy();
  for (int i = asker; i < owned; i += kLayerThreads) {
    // Two of an octet, the two that they are rotated against, and the same of the next two.
    const int octet = rank + i / 8 * kLayerCluster, h = octet / plan.octets_of_head;
    const int element =
        (octet - h * plan.octets_of_head) * 4 + i % 8 / 4 * 2 + i % 2 + i % 4 / 2 * half;
    const LayerMatrix& m = h < p.heads ? p.query : h == p.heads ? p.key : p.value;
    const int64_t row = (h < p.heads ? head * p.heads + h : head) * p.width + element;
    FetchRow(shared + plan.wide.first + i * plan.wide.pitch, m.weights + row * m.pitch, p.in.size,
             plan.wide.chunks, weights_there, policy);
  }
  for (int r = asker; r < plan.out.rows; r += kLayerThreads) {
    FetchRow(
        shared + plan.out.first + r * plan.out.pitch,
        p.output.weights + (rank * plan.out.rows + r) * p.output.pitch + 2 * head * plan.outputs,
        plan.outputs, plan.out.chunks, weights_there, policy);
  }
  ArriveWithBarriers();
  const RowNorm<Math, kMaxLayerClusters> norm(p.in);
  for (int i = plan.outputs + thread; i < plan.out.chunks * kChunk; i += kLayerThreads) {
    *reinterpret_cast<uint16_t*>(shared + plan.attended + 2 * i) = 0;
  }
  int last = INT_MAX, end = p.rows;  // the last position that is seen; behind `end` nothing is read
  if (p.position != nullptr) {
    constexpr int kFar = 1 << 30;  // beyond every position and offset
    last = min(max(position, -kFar), kFar) - p.form.offset;
    if (p.bounded && position >= 0 && position < p.rows) end = position + 1;
  }
  const char* const keys = p.keys + head * p.key_head;
  const char* const values = p.values + head * p.value_head;
  const int first = (warp * kLayerCluster + rank) * kUnit;
  Positions positions;
  positions.Load(keys, p.key_row, values, p.value_row, first, end, p.width);

  RowProduct<kHeldWide> wide(plan.wide, shared, plan.row, plan.sums);
  // All that this thread sends goes to one block: an octet, half of which it computes, a piece of
  // this block's outputs, and one that this warp gathers.
  const int to = threadIdx.x % kLayerCluster, own = threadIdx.x / kLayerCluster;
  const int octet = rank + own * kLayerCluster;
  int of_head = octet / plan.octets_of_head;
  int element = (octet - of_head * plan.octets_of_head) * 4 + threadIdx.x % 2 * 2;
  int piece_head = 4 * thread / p.width;
  const int own_piece = warp * kLayerCluster + rank;
  uint32_t there = InBlock(to, SharedAddress(shared));
  float* part = p.parts + head * kMaxLayerRow + rank * plan.out.rows + thread;
  for (int* const value : {&of_head, &element, &piece_head}) ComputeNow(*value);
  ComputeNow(there);
  ComputeNow(part);
  wide.ComputeNow();
  WaitForCluster();
  WaitForBytes(weights_there, 0);
  wide.Hold();
  WaitForLaunchBefore();

  // 1.
  int written = LoadFresh<int32_t>(p.index);
  // By warps that have nothing of a short row.
  const int angle_at = thread - (kLayerThreads - kWidth);
  const bool has_angle = angle_at >= 0 && angle_at < p.width;
  float angle = 0;
  if (has_angle) {
    angle = LoadFresh<float>(angle_at < half ? p.cos + angle_at : p.sin + angle_at - half);
  }
  norm.Bring(blockIdx.x == gridDim.x - 1, shared, shared + plan.row);
  if (has_angle) angles[angle_at] = angle;
  wide.Run<Math>();
  __syncthreads();
  float low_pair = 0, high_pair = 0;
  if (octet < plan.octets) {
    float4 sum[1];
    SumsOf(plan.wide, shared + plan.sums, own * 8 + threadIdx.x % 2 * 4, sum);
    const float2 low = Widened<Math>(Math::NarrowPair(sum[0].x, sum[0].y));
    const float2 high = Widened<Math>(Math::NarrowPair(sum[0].z, sum[0].w));
    float a[2] = {low.x, low.y}, b[2] = {high.x, high.y};
    if (of_head <= p.heads) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = a[n], y = b[n];
        const float cos = angles[element + n], sin = angles[half + element + n];
        a[n] = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
        b[n] = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
      }
    }
    low_pair = __uint_as_float(Math::NarrowPair(a[0], a[1]));
    high_pair = __uint_as_float(Math::NarrowPair(b[0], b[1]));
  }
  const float2 low = WordsOfTwo(low_pair), high = WordsOfTwo(high_pair);
  if (octet < plan.octets) {
    Send(there + plan.projected + 16 * octet, float4{low.x, low.y, high.x, high.y},
         there + kProjectionsSent);
  }
  if (p.drops && (written < 0 || written >= p.rows)) written = -1;
  if (!p.drops) written = max(min(written, p.rows - 1), 0);
  ComputeNow(written);
  const char* const new_key = projected + 2 * plan.outputs;
  const char* const new_value = new_key + 2 * p.width;
  EightOfHead of_key[] = {{Positions::KeyElement(0), p.width}, {Positions::KeyElement(1), p.width}};
  EightOfHead of_value(Positions::ValueElement(), p.width);
  // Queries that there are none of make columns that nobody reads.
  int query = plan.projected + 2 * min(FirstRow(), p.heads - 1) * p.width;
  for (EightOfHead* const eight : {&of_key[0], &of_key[1], &of_value}) {
    ComputeNow(eight->low);
    ComputeNow(eight->high);
  }
  ComputeNow(query);
  WaitForClusterBytes(projections_sent);

  // 2.
  if (warp < plan.warps) {
    const uint4 queries[] = {of_key[0].Load(shared + query), of_key[1].Load(shared + query)};
    // Of query FirstRow().
    float peak = -INFINITY, total = 0;
    // [word]: of column 8 FirstRow() + 2 word: queries FirstHead() and the next; then of the next
    // column.
    float mine[4][4] = {};
    if (first < end) {
      if (written >= first && written < first + kUnit) {
        const uint4 key[] = {of_key[0].Load(new_key), of_key[1].Load(new_key)};
        positions.Replace(key, of_value.Load(new_value), first, written);
      }
      float scores[4];  // of positions ValuePosition(i)
      positions.Score<Math>(queries, scores);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first + Positions::ValuePosition(i);
        if (plan.scales_only) {
          const float scaled = scores[i] * __uint_as_float(p.form.factor);
          scores[i] = at > last ? __uint_as_float(p.form.fill) : scaled;
        } else {
          scores[i] = SimpleScore(p.form, scores[i], at <= last);
        }
        if (at >= end) scores[i] = -INFINITY;
      }
      peak = AcrossPositions(fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])),
                             [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
      for (float& x : scores) x = Exp(x - PeakOrZero(peak));
      total = AcrossPositions((scores[0] + scores[1]) + (scores[2] + scores[3]),
                              [](float a, float b) { return a + b; });
      positions.AddValues<Math>(scores, mine);
    }
    if (FirstRow() < p.heads && lane % 4 == 0) {
      peaks[warp * kMaxLayerHeads + FirstRow()] = {peak, total};
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int h = FirstHead() + j;
      const int column = Positions::ValueElement();
      if (h >= p.heads || column >= p.width) continue;
      float* const row = warp_sums + warp * plan.outputs + h * p.width + column;
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        *reinterpret_cast<float4*>(row + 2 * w) = {mine[w][j], mine[w][2 + j], mine[w + 1][j],
                                                   mine[w + 1][2 + j]};
      }
    }
  }
  __syncthreads();
  // Each block's sums, peaks and totals to those that gather them.
  if (thread < plan.pieces) {
    const float2* const of_query = peaks + piece_head;
    const float* const of_piece = warp_sums + 4 * thread;
    const Piece piece = plan.warps == kLayerWarps
                            ? CombineWarps<kLayerWarps>(of_query, of_piece, plan.outputs)
                            : CombineWarps<kLayerWarps / 2>(of_query, of_piece, plan.outputs);
    Send(there + plan.part_peaks + 8 * octet, piece.peak, there + kPartsSent);
    Send(there + plan.parts + 16 * octet, piece.sum, there + kPartsSent);
  }
  // Meanwhile the cache gets its row.
  if (rank == kLayerCluster - 1 && written >= 0 && thread < p.width / 4) {
    const bool is_key = thread < p.width / 8;
    const int at = 16 * (is_key ? thread : thread - p.width / 8);
    char* const row = is_key ? p.keys + head * p.key_head + written * p.key_row
                             : p.values + head * p.value_head + written * p.value_row;
    StoreEight(row + at, {EightOfHead(at / 2, p.width).Load(is_key ? new_key : new_value)});
  }
  RowProduct<kHeldOut> out(plan.out, shared, plan.attended, plan.sums);
  out.ComputeNow();
  out.Hold();
  if (own_piece < plan.pieces) {
    WaitForClusterBytes(parts_sent);
    const int slot = warp * kLayerCluster + to;
    const float2 peak_of_block = part_peaks[slot];
    const float4 sum_of_block = *reinterpret_cast<const float4*>(parts + 4 * slot);
    const float peak = LargestOfWarp(peak_of_block.x);
    const float scale = Exp(peak_of_block.x - peak);  // NaN where no query sees anything
    float sum[] = {scale * sum_of_block.x, scale * sum_of_block.y, scale * sum_of_block.z,
                   scale * sum_of_block.w, scale * peak_of_block.y};
#pragma unroll
    for (int o = kLayerCluster / 2; o > 0; o /= 2) {
#pragma unroll
      for (float& x : sum) x += __shfl_xor_sync(kAllLanes, x, o);
    }
    float output[4];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      output[i] = __fdividef(sum[i], sum[4]);
      finite = finite && output[i] == output[i];
    }
    if (!finite) {
      const float again =
          OneByOne<Math>(p, head, 4 * own_piece + lane % 4, SharedAddress(projected), last, end,
                         written, peak, sum[4]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float one = __shfl_sync(kAllLanes, again, i);
        if (output[i] != output[i]) output[i] = one;
      }
    }
    if (lane < kLayerCluster) {
      Send(there + plan.attended + 8 * own_piece,
           float2{__uint_as_float(Math::NarrowPair(output[0], output[1])),
                  __uint_as_float(Math::NarrowPair(output[2], output[3]))},
           there + kOutputsSent);
    }
  }
  WaitForClusterBytes(outputs_sent);

  // 3.
  out.Run<Math>();
  __syncthreads();
  if (thread < plan.out.rows) {
    float sum[1];
    SumsOf(plan.out, shared + plan.sums, thread, sum);
    __stcg(part, sum[0]);
  }
#endif
}

template <typename Math>
const KernelInfo kAttention = {"layer_attention", sizeof(AttentionPlan), nullptr,
                               reinterpret_cast<const void*>(&LayerAttentionKernel<Math>)};

}  // namespace

bool FitsLayerAttention(const LayerAttentionParams& p) {
  return p.in.size % kChunk == 0 && p.in.size <= kMaxLayerRow && p.kv_heads <= kMaxLayerParts &&
         p.heads <= kMaxLayerHeads && p.width <= kMaxLayerWidth && p.width % 8 == 0 &&
         p.rows >= 1 && p.rows <= kMaxLayerPositions && AttentionPlan(p).fits();
}

void LaunchLayerAttention(const LayerAttentionParams& p, DType dtype, Launches* launches) {
  const AttentionPlan plan(p);
  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? &kAttention<BF16Math> : &kAttention<F16Math>;
  launch.grid[0] = static_cast<uint32_t>(p.kv_heads * kLayerCluster);
  launch.block[0] = kLayerThreads;
  launch.cluster = kLayerCluster;
  launch.shared_bytes = static_cast<uint32_t>(plan.bytes);
  SetParams(plan, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
