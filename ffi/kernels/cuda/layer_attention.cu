// The first half of a small model's layer; see layer.h. A cluster has a KV head and its queries.
//
//   1. Each block computes a few rows of the query, key and value products, rotates what it has and
//      sends it to all.
//   2. Positions are dealt out to the blocks and their warps, 16 at a time, as in
//      attention_decode.cu; what a block has of the outputs it sends to all.
//   3. Each block multiplies the outputs by its own rows of the output matrix.
//
// The weights and the first positions are on their way before the wait: of the cache no launch in
// front of this one writes anything, and the row that this one writes is put in behind it.
#include <algorithm>
#include <climits>

#include "ffi/kernels/cuda/attention_chunk.cuh"
#include "ffi/kernels/cuda/attention_scores.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/layer_device.cuh"

namespace jaxgraph {
namespace {

constexpr int kUnit = 16;   // positions of a warp at a time
constexpr int kWidth = 64;  // elements of a head that a lane's loads reach
static_assert(kMaxLayerWidth == kWidth);

// A block's shared memory, in bytes, and its share. The projections come in quads: elements 2j and
// 2j + 1 of a head and the two that they are rotated against; quads are dealt out to the blocks in
// turn.
struct AttentionPlan {
  LayerAttentionParams p;
  RowsLayout wide, out;
  int32_t outputs;  // of the cluster
  int32_t quads, own_quads, quads_of_head, warps;
  int32_t pieces, sharers;  // what a block sends: pieces, each to as many blocks at once
  int32_t part_floats;
  int32_t row, angles, sums, by_warp, projected, warp_sums, peaks, parts, factors, attended,
      barriers, bytes;
  int32_t scales_only;  // all that is done to a score, but for the mask, is a multiplication
  int32_t reserved = 0;

  explicit AttentionPlan(const LayerAttentionParams& params) : p(params) {
    scales_only = !p.form.divides && p.form.raw == DType::kF32 && p.form.scaled == DType::kF32 &&
                  p.form.masked == DType::kF32;
    outputs = p.heads * p.width;
    quads_of_head = p.width / 4;
    quads = (p.heads + 2) * quads_of_head;
    own_quads = (quads + kLayerCluster - 1) / kLayerCluster;  // at most
    const int units = (p.rows + kUnit * kLayerCluster - 1) / (kUnit * kLayerCluster);
    warps = std::min(units, kLayerWarps);
    pieces = outputs / 4 + p.heads;
    sharers = std::min(kLayerThreads / pieces, kLayerCluster);
    part_floats = 4 * pieces;
    wide = RowsLayout::Of(own_quads * 4, p.in.size);
    out = RowsLayout::Of(p.in.size / kLayerCluster, outputs);
    out.first = wide.first + wide.bytes();
    row = out.first + out.bytes();
    angles = row + wide.chunks * 64;
    sums = angles + RoundUp(p.width * 4, 16);
    by_warp = sums + std::max(wide.sum_bytes(), out.sum_bytes());
    projected = by_warp + kLayerWarps * 4;
    warp_sums = projected + RoundUp((p.heads + 2) * p.width * 2, 16);
    peaks = warp_sums + warps * outputs * 4;
    parts = peaks + kLayerWarps * kMaxLayerHeads * 8;
    factors = parts + kLayerCluster * pieces * 16;
    attended = factors + kMaxLayerHeads * (kLayerCluster * 4 + 8);  // and peaks and totals
    barriers = attended + out.chunks * 64;
    bytes = barriers + 32;
  }
  // Every piece has a thread, and so has every quad that is sent to one block.
  bool fits() const {
    return sharers >= 1 && own_quads * kLayerCluster <= kLayerThreads && wide.fits() &&
           out.fits() && bytes <= kMaxLayerShared;
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
  __device__ __forceinline__ void Replace(const char* key, const char* value, int first,
                                          int written, int width) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + KeyPosition(i) != written) continue;
#pragma unroll
      for (int b = 0; b < kWidth / 32; ++b) {
        if (KeyElement(b) < width) {
          keys[i][b] = *reinterpret_cast<const uint4*>(key + 2 * KeyElement(b));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + ValuePosition(i) == written && ValueElement() < width) {
        values[i] = *reinterpret_cast<const uint4*>(value + 2 * ValueElement());
      }
    }
  }
};

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
  float sum = 0;
  for (int s = 0; s < end; ++s) {
    const char* const key = s == written ? new_key : p.keys + head * p.key_head + s * p.key_row;
    const char* const value =
        s == written ? new_key + 2 * p.width : p.values + head * p.value_head + s * p.value_row;
    float raw = 0;
    for (int d = 0; d < p.width; ++d) raw = fmaf(element(query + 2 * d), element(key + 2 * d), raw);
    const float weight = __expf(SimpleScore(p.form, raw, s <= last) - PeakOrZero(peak));
    sum = fmaf(weight, element(value + 2 * e), sum);
  }
  return sum / total;
}

// What the warps, at most kWarps, have of 4 columns of a query or, not `is_sum`, its peak and
// total.
template <int kWarps>
__device__ __forceinline__ float4 CombineWarps(const AttentionPlan& plan, const float2* peaks,
                                               const float* sums, bool is_sum) {
  float2 of_warp[kWarps];
  float4 sum[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    of_warp[w] = {-INFINITY, 0};
    sum[w] = {};
    if (w < plan.warps) of_warp[w] = peaks[w * kMaxLayerHeads];
    if (w < plan.warps && is_sum) {
      sum[w] = *reinterpret_cast<const float4*>(sums + w * plan.outputs);
    }
  }
  float peak = of_warp[0].x;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) peak = fmaxf(peak, of_warp[w].x);
  float4 all = {};
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float scale = __expf(of_warp[w].x - PeakOrZero(peak));
    total += scale * of_warp[w].y;
    all = {all.x + scale * sum[w].x, all.y + scale * sum[w].y, all.z + scale * sum[w].z,
           all.w + scale * sum[w].w};
  }
  return is_sum ? all : float4{peak, total, 0, 0};
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
  float* const sums = reinterpret_cast<float*>(shared + plan.sums);
  float* const angles = reinterpret_cast<float*>(shared + plan.angles);
  float* const warp_sums = reinterpret_cast<float*>(shared + plan.warp_sums);
  float2* const peaks = reinterpret_cast<float2*>(shared + plan.peaks);  // and totals
  float* const parts = reinterpret_cast<float*>(shared + plan.parts);
  float* const factors = reinterpret_cast<float*>(shared + plan.factors);
  // The cluster's peaks and totals; not in `peaks`, where other warps may still read for others.
  float2* const totals = reinterpret_cast<float2*>(factors + kMaxLayerHeads * kLayerCluster);
  char* const projected = shared + plan.projected;
  const uint32_t weights_there = SharedAddress(shared + plan.barriers);
  const uint32_t sent = weights_there + 8, all_sent = weights_there + 16;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int rank = blockIdx.x % kLayerCluster, head = blockIdx.x / kLayerCluster;
  const int half = p.width / 2, part_floats = plan.part_floats;

  // Everything that is there already.
  if (warp == kLayerWarps - 1) {  // which has positions to fetch in long caches alone
    const int owned = (plan.quads - rank + kLayerCluster - 1) / kLayerCluster * 4;
    if (lane == 0) {
      ExpectFromCluster(weights_there, 2 * (owned * p.in.size + plan.out.rows * plan.outputs));
      ExpectFromCluster(sent, 2 * (p.heads + 2) * p.width);
      ExpectFromCluster(all_sent, kLayerCluster * part_floats * 4);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    const uint64_t policy = ReadOncePolicy();
    for (int i = lane; i < owned; i += kWarp) {
      const int quad = rank + i / 4 * kLayerCluster, h = quad / plan.quads_of_head;
      const int element = (quad - h * plan.quads_of_head) * 2 + i % 2 + i % 4 / 2 * half;
      const LayerMatrix& m = h < p.heads ? p.query : h == p.heads ? p.key : p.value;
      const int64_t row = (h < p.heads ? head * p.heads + h : head) * p.width + element;
      FetchRow(shared + plan.wide.first + i * plan.wide.pitch, m.weights + row * m.pitch, p.in.size,
               plan.wide.chunks, weights_there, policy);
    }
    for (int r = lane; r < plan.out.rows; r += kWarp) {
      FetchRow(
          shared + plan.out.first + r * plan.out.pitch,
          p.output.weights + (rank * plan.out.rows + r) * p.output.pitch + 2 * head * plan.outputs,
          plan.outputs, plan.out.chunks, weights_there, policy);
    }
  }
  ArriveInCluster();
  const uint2 weight = LoadWeight<Math>(p.in);
  for (int i = plan.outputs + thread; i < plan.out.chunks * kChunk; i += kLayerThreads) {
    *reinterpret_cast<uint16_t*>(shared + plan.attended + PlaceOfElement(i)) = 0;
  }
  int last = INT_MAX, end = p.rows;  // the last position that is seen; behind `end` nothing is read
  if (p.position != nullptr) {
    const int position = *reinterpret_cast<const int32_t*>(p.position);
    last = max(position, -(1 << 30)) - p.form.offset;
    if (p.bounded && position >= 0 && position < p.rows) end = position + 1;
  }
  const char* const keys = p.keys + head * p.key_head;
  const char* const values = p.values + head * p.value_head;
  const int first = (warp * kLayerCluster + rank) * kUnit;
  Positions positions;
  positions.Load(keys, p.key_row, values, p.value_row, first, end, p.width);

  RowProduct wide(plan.wide, shared, plan.row, plan.sums);
  RowProduct out(plan.out, shared, plan.attended, plan.sums);
  // The quad that this thread sends, and where to.
  const int own = thread / kLayerCluster, to = thread % kLayerCluster;
  const int quad = rank + own * kLayerCluster;
  int of_head = quad / plan.quads_of_head;
  int element = (quad - of_head * plan.quads_of_head) * 2;
  uint32_t place = InBlock(to, SharedAddress(projected + 2 * (of_head * p.width + element)));
  uint32_t counter = InBlock(to, sent);
  // The piece of the outputs, and the first of the blocks.
  int sharer = thread / plan.pieces;
  const int piece = thread - sharer * plan.pieces;
  const bool is_sum = piece < plan.outputs / 4;
  int piece_head = is_sum ? 4 * piece / p.width : piece - plan.outputs / 4;
  int output_head = thread / p.width;
  float* part = p.parts + int64_t{head} * p.in.size + rank * plan.out.rows + thread;
  for (int* const value : {&of_head, &element, &sharer, &piece_head, &output_head}) {
    ComputeNow(*value);
  }
  ComputeNow(place);
  ComputeNow(counter);
  ComputeNow(part);
  wide.ComputeNow();
  out.ComputeNow();
  WaitForCluster();
  WaitForLaunchBefore();

  // 1.
  int written = LoadFresh<int32_t>(p.index);
  float angle = 0;
  if (thread < p.width) {
    angle = LoadFresh<float>(thread < half ? p.cos + thread : p.sin + thread - half);
  }
  BringNorm<Math, kMaxLayerClusters>(p.in, weight, blockIdx.x == gridDim.x - 1, shared + plan.row,
                                     reinterpret_cast<float*>(shared + plan.by_warp));
  if (thread < p.width) angles[thread] = angle;
  WaitForBytes(weights_there, 0);
  wide.Run<Math>();
  __syncthreads();
  if (quad < plan.quads && own < plan.own_quads) {
    const float4 sum = SumOf<float4>(plan.wide, sums, 4 * own);
    const float2 low = Widened<Math>(Math::NarrowPair(sum.x, sum.y));
    const float2 high = Widened<Math>(Math::NarrowPair(sum.z, sum.w));
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
    Send(place, __uint_as_float(Math::NarrowPair(a[0], a[1])), counter);
    Send(place + 2 * half, __uint_as_float(Math::NarrowPair(b[0], b[1])), counter);
  }
  if (p.drops && (written < 0 || written >= p.rows)) written = -1;
  if (!p.drops) written = max(min(written, p.rows - 1), 0);
  const char* const new_key = projected + 2 * plan.outputs;
  const char* const new_value = new_key + 2 * p.width;
  WaitForClusterBytes(sent);

  // 2.
  if (warp < plan.warps) {
    uint4 queries[kWidth / 32];
#pragma unroll
    for (int b = 0; b < kWidth / 32; ++b) {
      const int at = Positions::KeyElement(b);
      queries[b] = {};
      if (FirstRow() < p.heads && at < p.width) {
        queries[b] = *reinterpret_cast<const uint4*>(projected + 2 * (FirstRow() * p.width + at));
      }
    }
    // Of queries FirstHead() and the next. mine[word]: of the column 8 FirstRow() + 2 word: the two
    // queries; then of the next column.
    Softmax softmax;
    float mine[4][4] = {}, total[2] = {};
    if (first < end) {
      if (written >= first && written < first + kUnit) {
        positions.Replace(new_key, new_value, first, written, p.width);
      }
      float products[2][4] = {};
#pragma unroll
      for (int b = 0; b < kWidth / 32; ++b) {
        const uint4 &above = positions.keys[0][b], &below = positions.keys[1][b];
        Math::MultiplyAdd({{above.x, below.x, above.y, below.y}}, queries[b].x, queries[b].y,
                          products[0]);
        Math::MultiplyAdd({{above.z, below.z, above.w, below.w}}, queries[b].z, queries[b].w,
                          products[1]);
      }
      RowScores<2> scores;
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[i / 2][i % 2] = products[0][i] + products[1][i];
      const int lasts[2] = {last, last};
      if (plan.scales_only) {
        const int position = first + FirstRow();
        ForEach(scores, [&](float& x, int row, int) {
          const float scaled = x * __uint_as_float(p.form.factor);
          x = position + row > last ? __uint_as_float(p.form.fill) : scaled;
        });
      } else {
        MaskSimply(p.form, first, lasts, scores);
      }
      ForEach(scores, [&](float& x, int row, int) {
        if (first + row + FirstRow() >= end) x = -INFINITY;
      });
      float unused[2];
      softmax.Weigh(scores, unused);
#pragma unroll
      for (int j = 0; j < 2; ++j) total[j] = softmax.Total(j);
      const SplitWeights split[2] = {Split<Math>(scores[0]), Split<Math>(scores[1])};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) row[i] = Word(positions.values[i], w);
        const Fragment f = {
            {__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632),
             __byte_perm(row[2], row[3], 0x5410), __byte_perm(row[2], row[3], 0x7632)}};
        Math::MultiplyAdd(f, split[0].high, split[1].high, mine[w]);
        Math::MultiplyAdd(f, split[0].low, split[1].low, mine[w]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int h = FirstHead() + j;
      if (h >= p.heads) continue;
      if (lane < 4) peaks[warp * kMaxLayerHeads + h] = {softmax.peak[j], total[j]};
      const int column = Positions::ValueElement();
      if (column >= p.width) continue;
      float* const row = warp_sums + warp * plan.outputs + h * p.width + column;
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        *reinterpret_cast<float4*>(row + 2 * w) = {mine[w][j], mine[w][2 + j], mine[w + 1][j],
                                                   mine[w + 1][2 + j]};
      }
    }
  }
  __syncthreads();
  // Each block's sums, peaks and totals to all: 4 columns of a query, or its peak and total.
  if (sharer < plan.sharers) {
    float4 all;
    if (plan.warps > 4) {
      all = CombineWarps<8>(plan, peaks + piece_head, warp_sums + 4 * piece, is_sum);
    } else {
      all = CombineWarps<4>(plan, peaks + piece_head, warp_sums + 4 * piece, is_sum);
    }
    const uint32_t there = SharedAddress(parts + rank * part_floats + 4 * piece);
    for (int i = sharer; i < kLayerCluster; i += plan.sharers) {
      const int block = (i + rank) % kLayerCluster;
      Send(InBlock(block, there), all, InBlock(block, all_sent));
    }
  }
  // Meanwhile the cache gets its row.
  if (rank == kLayerCluster - 1 && written >= 0 && thread < p.width / 4) {
    const bool is_key = thread < p.width / 8;
    const int at = 16 * (is_key ? thread : thread - p.width / 8);
    char* const row = is_key ? p.keys + head * p.key_head + written * p.key_row
                             : p.values + head * p.value_head + written * p.value_row;
    StoreEight(row + at, LoadEight((is_key ? new_key : new_value) + at));
  }
  WaitForClusterBytes(all_sent);
  if (warp < p.heads) {
    const float* const of_block = parts + lane % kLayerCluster * part_floats + plan.outputs;
    const float2 mine = *reinterpret_cast<const float2*>(of_block + 4 * warp);
    float peak = mine.x;
#pragma unroll
    for (int o = kLayerCluster / 2; o > 0; o /= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, o));
    }
    const float scale = __expf(mine.x - peak);  // NaN where no query sees anything
    float total = scale * mine.y;
#pragma unroll
    for (int o = kLayerCluster / 2; o > 0; o /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, o);
    }
    if (lane < kLayerCluster) {
      factors[warp * kLayerCluster + lane] = __fdividef(scale, total);
    }
    if (lane == 0) totals[warp] = {peak, total};
  }
  __syncthreads();
  for (int i = thread, h = output_head; i < plan.outputs; i += kLayerThreads) {
    if (i >= kLayerThreads) h = i / p.width;
    float part[kLayerCluster];
#pragma unroll
    for (int r = 0; r < kLayerCluster; ++r) part[r] = parts[r * part_floats + i];
    const float4* const factor = reinterpret_cast<const float4*>(factors + h * kLayerCluster);
    float sum[4] = {};
#pragma unroll
    for (int r = 0; r < kLayerCluster; r += 4) {
      const float4 f = factor[r / 4];
      sum[0] = fmaf(f.x, part[r], sum[0]);
      sum[1] = fmaf(f.y, part[r + 1], sum[1]);
      sum[2] = fmaf(f.z, part[r + 2], sum[2]);
      sum[3] = fmaf(f.w, part[r + 3], sum[3]);
    }
    float output = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    if (output != output) {
      output = OneByOne<Math>(p, head, i, SharedAddress(projected), last, end, written, totals[h].x,
                              totals[h].y);
    }
    *reinterpret_cast<uint16_t*>(shared + plan.attended + PlaceOfElement(i)) =
        static_cast<uint16_t>(Math::NarrowPair(output, 0));
  }
  __syncthreads();

  // 3.
  out.Run<Math>();
  __syncthreads();
  if (thread < plan.out.rows) {
    *part = SumOf<float>(plan.out, sums, thread);
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
