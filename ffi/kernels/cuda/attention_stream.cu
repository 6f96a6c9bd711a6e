// ATTENTION over a cache whose rows are contiguous: the cache is read once, for all queries of a
// group, and split over warps and over the blocks of a cluster.
//
// Tiles of 32 positions are dealt out in turn to the blocks of a cluster and to their warps, so
// that all have the same share wherever the bound lies. A warp works on its tiles alone:
//   - keys and values come into its own shared memory by asynchronous copies; while it works on the
//     keys of a tile, its values are on their way, and the other way round;
//   - a lane computes the scores of one position, all queries, runs the score program on them, and
//     the warp keeps a running maximum a query;
//   - for the weighted sum a lane takes 16 bytes of columns, and groups of lanes take positions.
// At the end warps, then blocks combine what they have, in a fixed order.
#include <algorithm>

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kTile = kWarp;  // positions
constexpr int kMaxWarps = 8;  // of a block
constexpr int kMaxThreads = kMaxWarps * kWarp;
constexpr int kMaxCluster = 16;                // more than 8 is granted on demand
constexpr int kColumns = 8;                    // of the weighted sum, that a lane owns
constexpr uint32_t kSharedBudget = 100 << 10;  // two blocks on a multiprocessor

struct StreamPlan {
  AttentionArgs args;
  FastDiv key_vectors, value_vectors;  // 16-byte vectors of a row
  uint32_t key_pitch, value_pitch;     // bytes between rows in shared memory
  uint32_t warp_bytes;                 // shared memory of one warp
  int32_t warps, splits, pieces;       // pieces: of the queries, each with its own cluster
};

// Shared memory of a block, behind one another; then that of the warps.
struct BlockLayout {
  uint32_t queries, sums, peaks, totals, by_warp, warps;
  __host__ __device__ BlockLayout(int heads, int d, int e, int num_warps) {
    queries = sizeof(ExprParams);
    sums = queries + heads * d * 4;
    peaks = sums + heads * e * 4;
    totals = peaks + 16 * 4;
    by_warp = totals + 16 * 4;  // peak and total of every warp and query
    warps = by_warp + 2 * num_warps * 8 * 4;
  }
};

// ---- the parts of a warp's work on a tile ----

// scores[h] = q[h] . the key of this lane's position.
template <typename T, int kHeads>
__device__ __forceinline__ void RawScores(const float* queries, int d, const char* key,
                                          float (&scores)[kHeads]) {
  constexpr int kVector = 16 / T::kSize;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) scores[h] = 0;
#pragma unroll 2
  for (int i = 0; i < d; i += kVector) {
    float x[kVector];
    T::Unpack(*reinterpret_cast<const uint4*>(key + i * T::kSize), x);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int c = 0; c < kVector; c += 4) {
        const float4 q = *reinterpret_cast<const float4*>(queries + h * d + i + c);
        scores[h] = fmaf(q.x, x[c], scores[h]);
        scores[h] = fmaf(q.y, x[c + 1], scores[h]);
        scores[h] = fmaf(q.z, x[c + 2], scores[h]);
        scores[h] = fmaf(q.w, x[c + 3], scores[h]);
      }
    }
  }
}

// Runs the score program on the queries of this lane's position.
template <typename Score, int kHeads>
__device__ __forceinline__ void Mask(const AttentionArgs& p, const ExprParams& program, int b0,
                                     int b1, int first_query, int position,
                                     float (&scores)[kHeads]) {
  using W = typename Score::W;
  constexpr int kLanes = Score::kLanes;
#pragma unroll
  for (int h = 0; h < kHeads; h += kLanes) {
    ScoreSpace<kLanes> space = {b0, b1, min(position, p.s - 1), {}};
    Lanes<W, kLanes> lanes;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      space.query[j] = min(first_query + h + j, p.g - 1);
      lanes.lane[j] = FromFloat<W>(scores[h + j]);
    }
    lanes = MaskScores<W, kLanes>(program, space, lanes);
#pragma unroll
    for (int j = 0; j < kLanes; ++j) scores[h + j] = AsFloat(lanes.lane[j]);
  }
}

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) x += __shfl_xor_sync(kAllLanes, x, o);
  return x;
}

__device__ __forceinline__ void SyncCluster(int splits) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    cooperative_groups::this_cluster().sync();
    return;
  }
#endif
  __syncthreads();
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ float ReadFrom(int rank, float* address) {
#if __CUDA_ARCH__ >= 900
  return *cooperative_groups::this_cluster().map_shared_rank(address, rank);
#else
  return *address;
#endif
}

template <typename T, int kHeads, typename Score>
__global__ void __launch_bounds__(kMaxThreads, kHeads < 8 ? 2 : 1) AttentionStreamKernel(
    const __grid_constant__ typename Score::template Params<StreamPlan> params) {
  constexpr int kVector = 16 / T::kSize, kChunks = kColumns / kVector;
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const StreamPlan& sp = params.plan;
  const AttentionArgs& p = sp.args;
  BeginLaunch();
  const BlockLayout layout(kHeads, p.d, p.e, sp.warps);
  float* const queries = reinterpret_cast<float*>(shared + layout.queries);
  float* const sums = reinterpret_cast<float*>(shared + layout.sums);
  float* const peaks = reinterpret_cast<float*>(shared + layout.peaks);
  float* const totals = reinterpret_cast<float*>(shared + layout.totals);
  float* const warp_peaks = reinterpret_cast<float*>(shared + layout.by_warp);
  float* const warp_totals = warp_peaks + sp.warps * kHeads;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  char* const keys = shared + layout.warps + warp * sp.warp_bytes;
  char* const values = keys + kTile * sp.key_pitch;
  float* const weights = reinterpret_cast<float*>(values + kTile * sp.value_pitch);

  const int rank = blockIdx.x % sp.splits;
  const int unit = blockIdx.x / sp.splits;
  const int batch = unit / sp.pieces, first_query = unit % sp.pieces * kHeads;
  const int b0 = batch / p.b1, b1 = batch - b0 * p.b1;
  const TileRows k = {p.k + b0 * p.k_strides[0] + b1 * p.k_strides[1], p.k_strides[3],
                      sp.key_vectors, sp.key_pitch};
  const TileRows v = {p.v + b0 * p.v_strides[0] + b1 * p.v_strides[1], p.v_strides[2],
                      sp.value_vectors, sp.value_pitch};

  // Behind `end` no query of this block sees anything.
  int end = LastPosition(p, b0, b1, min(first_query + lane % kHeads, p.g - 1)) + 1;
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) end = max(end, __shfl_xor_sync(kAllLanes, end, o));
  const int tiles = (end + kTile - 1) / kTile, step = sp.splits * sp.warps;
  int tile = warp * sp.splits + rank;
  if (tile < tiles) {
    CopyTile(k, tile * kTile, end, keys);
    CopyTile(v, tile * kTile, end, values);
  }

  for (int i = threadIdx.x; i < kHeads * p.d; i += blockDim.x) {
    const int h = i / p.d, c = i - h * p.d;
    const char* q = p.q + b0 * p.q_strides[0] + b1 * p.q_strides[1] +
                    min(first_query + h, p.g - 1) * p.q_strides[2] + c * p.q_strides[3];
    queries[i] = LoadFloat<float>(q, p.q_dtype);
  }
  int last[kHeads];  // of the known form
  if constexpr (Score::kHasProgram) {
    ToShared(params.program, shared_memory);
  } else {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      last[h] = LastVisible(p, b0, b1, min(first_query + h, p.g - 1));
    }
    __syncthreads();
  }

  // A lane's columns of the weighted sum, and its share of the positions.
  const int vectors = static_cast<int>(sp.value_vectors.divisor);
  const int groups = vectors < kWarp ? kWarp / vectors : 1;
  const int group = vectors < kWarp ? lane / vectors : 0;
  const int vector = vectors < kWarp ? lane - group * vectors : lane;

  float peak[kHeads], total[kHeads], sum[kHeads][kColumns];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    peak[h] = -INFINITY;
    total[h] = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[h][c] = 0;
  }
  for (; tile < tiles; tile += step) {
    const int position = tile * kTile + lane;
    const bool more = tile + step < tiles;
    WaitForCopies<1>();
    float scores[kHeads];
    RawScores<T, kHeads>(queries, p.d, keys + lane * sp.key_pitch, scores);
    __syncwarp();
    if (more) {
      CopyTile(k, (tile + step) * kTile, end, keys);
    } else {
      CommitCopies();
    }
    if constexpr (Score::kHasProgram) {
      Mask<Score, kHeads>(p, *reinterpret_cast<const ExprParams*>(shared), b0, b1, first_query,
                          position, scores);
    } else {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        scores[h] = MaskKnown(p.form, scores[h], position <= last[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float score = position < p.s ? scores[h] : -INFINITY;
      const float next = fmaxf(peak[h], WarpMax(score));
      const float weight = ScaleOf(score, next);
      if (next != peak[h]) {  // the same for the whole warp
        const float scale = ScaleOf(peak[h], next);
        total[h] *= scale;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[h][c] *= scale;
        peak[h] = next;
      }
      total[h] += weight;
      weights[lane * kHeads + h] = weight;
    }
    WaitForCopies<1>();
    if (group < groups) {
#pragma unroll 2
      for (int i = group; i < kTile; i += groups) {
        float w[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) w[h] = weights[i * kHeads + h];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int at = vector + chunk * kWarp;
          if (at >= vectors) break;
          float x[kVector];
          T::Unpack(*reinterpret_cast<const uint4*>(values + i * sp.value_pitch + 16 * at), x);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
#pragma unroll
            for (int c = 0; c < kVector; ++c) {
              float& to = sum[h][chunk * kVector + c];
              to = fmaf(w[h], x[c], to);
            }
          }
        }
      }
    }
    __syncwarp();
    if (more) {
      CopyTile(v, (tile + step) * kTile, end, values);
    }
  }

  // The warps of the block. What they have lies where their tiles were.
  WaitForCopies<0>();
  float* const mine = reinterpret_cast<float*>(keys);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) mine[(h * kColumns + c) * kWarp + lane] = sum[h][c];
    total[h] = WarpSum(total[h]);
    if (lane == 0) {
      warp_peaks[warp * kHeads + h] = peak[h];
      warp_totals[warp * kHeads + h] = total[h];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeads * p.e; i += blockDim.x) {
    const int h = i / p.e, column = i - h * p.e;
    const int at = column / kVector, chunk = at / kWarp;
    const int within = chunk * kVector + column % kVector;
    float common = -INFINITY, all = 0, weighted = 0;
    for (int w = 0; w < sp.warps; ++w) common = fmaxf(common, warp_peaks[w * kHeads + h]);
    for (int w = 0; w < sp.warps; ++w) {
      const float* from =
          reinterpret_cast<const float*>(shared + layout.warps + w * sp.warp_bytes) +
          (h * kColumns + within) * kWarp + at % kWarp;
      float part = 0;
      for (int g = 0; g < groups; ++g) part += from[g * vectors];
      const float scale = ScaleOf(warp_peaks[w * kHeads + h], common);
      weighted = fmaf(part, scale, weighted);
      all = fmaf(warp_totals[w * kHeads + h], scale, all);
    }
    sums[i] = weighted;
    if (column == 0) {
      peaks[h] = common;
      totals[h] = all;
    }
  }
  SyncCluster(sp.splits);

  // The blocks of the cluster, each for its share of the columns.
  const int share = (kHeads * p.e + sp.splits - 1) / sp.splits;
  for (int i = threadIdx.x; i < share; i += blockDim.x) {
    const int column = rank * share + i, h = column / p.e;
    if (h >= kHeads || first_query + h >= p.g) break;
    float common = -INFINITY, all = 0, weighted = 0;
    float block_peak[kMaxCluster], block_total[kMaxCluster], block_sum[kMaxCluster];
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r >= sp.splits) break;
      block_peak[r] = ReadFrom(r, peaks + h);
      block_total[r] = ReadFrom(r, totals + h);
      block_sum[r] = ReadFrom(r, sums + column);
    }
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r < sp.splits) common = fmaxf(common, block_peak[r]);
    }
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r >= sp.splits) break;
      const float scale = ScaleOf(block_peak[r], common);
      weighted = fmaf(block_sum[r], scale, weighted);
      all = fmaf(block_total[r], scale, all);
    }
    weighted *= TakeSink(p, b0, b1, first_query + h, common, &all);
    StoreFloat(p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] +
                   (first_query + h) * p.out_strides[2] + (column - h * p.e) * p.out_strides[3],
               p.out_dtype, weighted / all);
  }
  SyncCluster(sp.splits);  // others may still read what this block has
}

template <typename T, int kHeads, typename Score>
const KernelInfo kStream = {
    Score::kHasProgram ? "attention_stream_program" : "attention_stream",
    sizeof(typename Score::template Params<StreamPlan>), nullptr,
    reinterpret_cast<const void*>(&AttentionStreamKernel<T, kHeads, Score>)};

template <typename T, int kHeads>
const KernelInfo* KernelFor(const AttentionArgs& args) {
  constexpr int kLanes = kHeads < 4 ? kHeads : 4;
  return args.form.known ? &kStream<T, kHeads, KnownScore>
         : args.wide     ? &kStream<T, kHeads, ProgramScore<uint64_t, kLanes>>
                         : &kStream<T, kHeads, ProgramScore<uint32_t, kLanes>>;
}
template <typename T>
const KernelInfo* KernelFor(const AttentionArgs& args, int heads) {
  return heads == 1   ? KernelFor<T, 1>(args)
         : heads == 4 ? KernelFor<T, 4>(args)
                      : KernelFor<T, 8>(args);
}

// Rows an odd number of 16-byte vectors apart: reading them side by side meets no bank twice.
uint32_t PitchOf(uint32_t vectors) { return 16 * (vectors | 1); }

// Two for each of Hopper's 132 multiprocessors. A constant, not asked of the device: equal nodes
// must give equal launches.
constexpr int64_t kMostBlocks = 264;

}  // namespace

void LaunchAttentionStream(const AttentionNode& node, bool clusters, Launches* launches) {
  const AttentionArgs& args = node.args;
  const int heads = args.g == 1 ? 1 : args.g <= 4 ? 4 : 8;
  const uint32_t item = static_cast<uint32_t>(SizeOf(args.k_dtype));
  StreamPlan plan = {};
  plan.args = args;
  plan.key_vectors = FastDiv::By(args.d * item / 16);
  plan.value_vectors = FastDiv::By(args.e * item / 16);
  plan.key_pitch = PitchOf(plan.key_vectors.divisor);
  plan.value_pitch = 16 * plan.value_vectors.divisor;
  const uint32_t tile = kTile * (plan.key_pitch + plan.value_pitch + heads * sizeof(float));
  plan.warp_bytes = std::max<uint32_t>(tile, heads * kColumns * kWarp * sizeof(float));
  plan.pieces = static_cast<int32_t>(CeilDiv(args.g, heads));

  const int64_t tiles = CeilDiv(args.s, kTile);
  const int64_t units = static_cast<int64_t>(args.b0) * args.b1 * plan.pieces;
  plan.splits = 1;
  while (clusters && plan.splits < kMaxCluster && 2 * plan.splits * units <= kMostBlocks &&
         plan.splits < tiles) {
    plan.splits *= 2;
  }
  plan.warps = kMaxWarps;
  const auto shared_bytes = [&] {
    return BlockLayout(heads, args.d, args.e, plan.warps).warps + plan.warps * plan.warp_bytes;
  };
  while (plan.warps > 1 &&
         (shared_bytes() > kSharedBudget || plan.splits * (plan.warps / 2) >= tiles)) {
    plan.warps /= 2;
  }

  Launch launch;
  launch.kernel = args.k_dtype == DType::kBF16  ? KernelFor<BF16Element>(args, heads)
                  : args.k_dtype == DType::kF16 ? KernelFor<F16Element>(args, heads)
                                                : KernelFor<F32Element>(args, heads);
  launch.grid[0] = static_cast<uint32_t>(units * plan.splits);
  launch.block[0] = static_cast<uint32_t>(plan.warps * kWarp);
  launch.cluster = static_cast<uint32_t>(plan.splits);
  launch.shared_bytes = shared_bytes();
  if (args.form.known) {
    SetParams(KnownParams<StreamPlan>{plan}, &launch);
  } else {
    SetParams(ProgramParams<StreamPlan>{node.program, plan}, &launch);
  }
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
