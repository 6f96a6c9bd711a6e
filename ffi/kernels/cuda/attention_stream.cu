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
#include <cooperative_groups.h>

#include <algorithm>
#include <climits>

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

struct alignas(16) StreamParams {
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

// ---- asynchronous copies ----

// 16 bytes to shared memory, or zeros; the address must be valid either way.
__device__ __forceinline__ void CopyAsync(char* to, const char* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
#else
  *reinterpret_cast<uint4*>(to) =
      inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
#endif
}
__device__ __forceinline__ void CommitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all groups of this thread but the last `kPending`, for all lanes of the warp.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
  __syncwarp();
}

// Starts the copy of the rows [first, first + kTile) of `rows`; those at `end` and behind are
// zeros.
__device__ __forceinline__ void CopyTile(const char* rows, int64_t stride, FastDiv vectors,
                                         uint32_t pitch, int first, int end, char* to) {
  const uint32_t count = kTile * vectors.divisor;
#pragma unroll 4
  for (uint32_t i = threadIdx.x % kWarp; i < count; i += kWarp) {
    const uint32_t row = vectors.Quotient(i), at = 16 * (i - row * vectors.divisor);
    const int position = first + static_cast<int>(row);
    const bool inside = position < end;
    CopyAsync(to + row * pitch + at, rows + (inside ? position : 0) * stride + at, inside);
  }
  CommitCopies();
}

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

// Runs the score program on up to four queries at a time.
template <typename W, int kHeads>
__device__ __forceinline__ void Mask(const AttentionArgs& p, const ExprParams& expr, int b0, int b1,
                                     int first_query, int position, float (&scores)[kHeads]) {
  constexpr int kLanes = kHeads < 4 ? kHeads : 4;
#pragma unroll
  for (int h = 0; h < kHeads; h += kLanes) {
    ScoreSpace<kLanes> space = {b0, b1, min(position, p.s - 1), {}};
    Lanes<W, kLanes> lanes;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      space.query[j] = min(first_query + h + j, p.g - 1);
      lanes.lane[j] = FromFloat<W>(scores[h + j]);
    }
    lanes = MaskScores<W, kLanes>(expr, space, lanes);
#pragma unroll
    for (int j = 0; j < kLanes; ++j) scores[h + j] = AsFloat(lanes.lane[j]);
  }
}

// The same for programs of the known form: the position that query `h` sees last.
__device__ __forceinline__ int LastVisible(const AttentionArgs& p, int b0, int b1, int query) {
  const ScoreForm& form = p.form;
  if (form.position < 0) return INT_MAX;
  const int64_t* strides = p.expr.src_strides[form.position];
  const int64_t last = LoadInteger(
      p.expr.srcs[form.position] + b0 * strides[0] + b1 * strides[1] + query * strides[2],
      form.position_dtype);
  return static_cast<int>(min(max(last, int64_t{-1} << 24), int64_t{p.s} + (1 << 24)) -
                          form.offset);
}
__device__ __forceinline__ float MaskKnown(const ScoreForm& form, float raw, bool visible) {
  const float x = RoundTo(form.raw, raw), factor = __uint_as_float(form.factor);
  const float scaled = RoundTo(form.scaled, form.divides ? x / factor : x * factor);
  return RoundTo(form.masked, visible ? scaled : __uint_as_float(form.fill));
}

// What one warp, block or cluster has seen of the queries: sums of values weighted by
// exp(score - peak), with the total weight. A peak of -inf: nothing.
__device__ __forceinline__ float ScaleOf(float peak, float common) {
  return expf(peak - PeakOrZero(common));
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

template <typename T, int kHeads, typename W>
__global__ void __launch_bounds__(kMaxThreads, kHeads < 8 ? 2 : 1)
    AttentionStreamKernel(const __grid_constant__ StreamParams sp) {
  constexpr int kVector = 16 / T::kSize, kChunks = kColumns / kVector;
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const AttentionArgs& p = sp.args;
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
  const char* const k = p.k + b0 * p.k_strides[0] + b1 * p.k_strides[1];
  const char* const v = p.v + b0 * p.v_strides[0] + b1 * p.v_strides[1];

  // Behind `end` no query of this block sees anything.
  int end = LastPosition(p, b0, b1, min(first_query + lane % kHeads, p.g - 1)) + 1;
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) end = max(end, __shfl_xor_sync(kAllLanes, end, o));
  const int tiles = (end + kTile - 1) / kTile, step = sp.splits * sp.warps;
  int tile = warp * sp.splits + rank;
  if (tile < tiles) {
    CopyTile(k, p.k_strides[3], sp.key_vectors, sp.key_pitch, tile * kTile, end, keys);
    CopyTile(v, p.v_strides[2], sp.value_vectors, sp.value_pitch, tile * kTile, end, values);
  }

  for (int i = threadIdx.x; i < kHeads * p.d; i += blockDim.x) {
    const int h = i / p.d, c = i - h * p.d;
    const char* q = p.q + b0 * p.q_strides[0] + b1 * p.q_strides[1] +
                    min(first_query + h, p.g - 1) * p.q_strides[2] + c * p.q_strides[3];
    queries[i] = LoadFloat<float>(q, p.q_dtype);
  }
  const bool known = p.form.known;
  int last[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    last[h] = known ? LastVisible(p, b0, b1, min(first_query + h, p.g - 1)) : 0;
  }
  const ExprParams& expr = *reinterpret_cast<const ExprParams*>(shared);
  if (known) {
    __syncthreads();
  } else {
    ToShared(p.expr, shared_memory);
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
      CopyTile(k, p.k_strides[3], sp.key_vectors, sp.key_pitch, (tile + step) * kTile, end, keys);
    } else {
      CommitCopies();
    }
    if (known) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        scores[h] = MaskKnown(p.form, scores[h], position <= last[h]);
      }
    } else {
      Mask<W, kHeads>(p, expr, b0, b1, first_query, position, scores);
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
      CopyTile(v, p.v_strides[2], sp.value_vectors, sp.value_pitch, (tile + step) * kTile, end,
               values);
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
    StoreFloat(p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] +
                   (first_query + h) * p.out_strides[2] + (column - h * p.e) * p.out_strides[3],
               p.out_dtype, weighted / all);
  }
  SyncCluster(sp.splits);  // others may still read what this block has
}

template <typename T, int kHeads, typename W>
const KernelInfo kStream = {"attention_stream", sizeof(StreamParams), nullptr,
                            reinterpret_cast<const void*>(&AttentionStreamKernel<T, kHeads, W>)};

template <typename T, typename W>
const KernelInfo* KernelFor(int heads) {
  return heads == 1   ? &kStream<T, 1, W>
         : heads == 2 ? &kStream<T, 2, W>
         : heads == 4 ? &kStream<T, 4, W>
                      : &kStream<T, 8, W>;
}
template <typename T>
const KernelInfo* KernelFor(int heads, bool wide) {
  return wide ? KernelFor<T, uint64_t>(heads) : KernelFor<T, uint32_t>(heads);
}

// Rows an odd number of 16-byte vectors apart: reading them side by side meets no bank twice.
uint32_t PitchOf(uint32_t vectors) { return 16 * (vectors | 1); }

// Two for each of Hopper's 132 multiprocessors. A constant, not asked of the device: equal nodes
// must give equal launches.
constexpr int64_t kMostBlocks = 264;

}  // namespace

void LaunchAttentionStream(const AttentionArgs& args, bool clusters, Launches* launches) {
  const int heads = args.g <= 2 ? args.g : args.g <= 4 ? 4 : 8;
  const uint32_t item = static_cast<uint32_t>(SizeOf(args.k_dtype));
  StreamParams params = {};
  params.args = args;
  params.key_vectors = FastDiv::By(args.d * item / 16);
  params.value_vectors = FastDiv::By(args.e * item / 16);
  params.key_pitch = PitchOf(params.key_vectors.divisor);
  params.value_pitch = 16 * params.value_vectors.divisor;
  const uint32_t tiles = kTile * (params.key_pitch + params.value_pitch + heads * sizeof(float));
  params.warp_bytes = std::max<uint32_t>(tiles, heads * kColumns * kWarp * sizeof(float));
  const int64_t num_tiles = CeilDiv(args.s, kTile);
  params.pieces = static_cast<int32_t>(CeilDiv(args.g, heads));

  const int64_t units = static_cast<int64_t>(args.b0) * args.b1 * params.pieces;
  params.splits = 1;
  while (clusters && params.splits < kMaxCluster && 2 * params.splits * units <= kMostBlocks &&
         params.splits < num_tiles) {
    params.splits *= 2;
  }
  params.warps = kMaxWarps;
  const auto shared_bytes = [&] {
    return BlockLayout(heads, args.d, args.e, params.warps).warps +
           params.warps * params.warp_bytes;
  };
  while (params.warps > 1 &&
         (shared_bytes() > kSharedBudget || params.splits * (params.warps / 2) >= num_tiles)) {
    params.warps /= 2;
  }

  Launch launch;
  const bool wide = args.wide && !args.form.known;
  launch.kernel = args.k_dtype == DType::kBF16  ? KernelFor<BF16Element>(heads, wide)
                  : args.k_dtype == DType::kF16 ? KernelFor<F16Element>(heads, wide)
                                                : KernelFor<F32Element>(heads, wide);
  launch.grid[0] = static_cast<uint32_t>(units * params.splits);
  launch.block[0] = static_cast<uint32_t>(params.warps * kWarp);
  launch.cluster = static_cast<uint32_t>(params.splits);
  launch.shared_bytes = shared_bytes();
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
