// Streaming products of 2 to 8 rows on tensor cores, for which they are as much work as one. A
// block makes the columns of a tile from its cluster's share of k; its warps share that, a stage at
// a time, each through its own ring in shared memory. The rows stay in L2, and come with each stage
// (stream_rows_stage.cuh); a lane norms what it multiplies. The warps' sums meet in shared memory;
// of a cluster each block finishes some rows, and the others send it theirs; both in order. The
// ring runs on from one tile to the next; a cluster makes one.
#include <algorithm>

#include "ffi/kernels/cuda/stream_candidate.cuh"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/stream_rows_stage.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

#if __CUDA_ARCH__ >= 900
// Norms of several rows into shared memory. Each row has warps of its own, a power of two of them.
// Each is stored by one block. Behind it come zeros, for stages end where k does not.
template <typename T>
__device__ __forceinline__ void BringNorms(const StreamParams& p, char* rows, uint32_t barrier) {
  constexpr int kAtOnce = 4;
  const int pitch = p.row_pitch, eights = p.k / 8;
  const char* weight = rows + p.m * pitch;
  auto by_warp = reinterpret_cast<float (*)[kStreamWarps]>(rows + (p.m + (p.weight != nullptr)) *
                                                                      pitch);  // sums of squares
  if (threadIdx.x == 0 && p.weight != nullptr) {
    Expect(barrier, 16 * eights);
    BulkCopy(SharedAddress(weight), p.weight, 16 * eights, barrier);
  }
  static_assert(kMaxFewRows <= kStreamWarps);
  const int warps = kStreamWarps >> (32 - __clz(p.m - 1));
  const int m = threadIdx.x / kWarp / warps, step = warps * kWarp, thread = threadIdx.x % step;
  const bool stores = blockIdx.x == gridDim.x - 1 - m % gridDim.x;
  if (m < p.m) {
    const int zeros = 16 * (eights + thread);
    if (zeros < pitch) StoreEight(rows + m * pitch + zeros, {});
    float squares = 0;
    for (int first = thread; first < eights; first += kAtOnce * step) {
      Eight x[kAtOnce], added[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = 16 * (first + j * step);
        if (at >= 16 * eights) break;
        x[j] = LoadEight(p.row + m * p.row_m + at);
        if (p.added != nullptr) added[j] = LoadEight(p.added + m * p.added_m + at);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = 16 * (first + j * step);
        if (at >= 16 * eights) break;
        if (p.added != nullptr) x[j] = Sum<T>(x[j], added[j]);
        StoreEight(rows + m * pitch + at, x[j]);
        if (p.sum != nullptr && stores) StoreEight(p.sum + m * p.sum_m + at, x[j]);
        squares = AddSquares<T>(squares, x[j]);
      }
    }
    squares = SumOfWarp(squares);
    if (threadIdx.x % kWarp == 0) by_warp[m][threadIdx.x / kWarp % warps] = squares;
  }
  if (p.weight != nullptr) WaitForBytes(barrier, 0);
  __syncthreads();
  if (m < p.m) {
    const float scale = NormScale(p, by_warp[m], warps);
#pragma unroll 4
    for (int i = thread; i < eights; i += step) {
      char* place = rows + m * pitch + 16 * i;
      Eight w = {};
      if (p.weight != nullptr) w = LoadEight(weight + 16 * i);
      const Eight x = Scaled<T>(p, LoadEight(place), w, scale);
      StoreEight(place, x);
      if (stores) StoreEight(p.norm + m * p.norm_m + 16 * i, x);
    }
  }
}

// The parts of the squares of the lane's row. Every warp sums them alike.
class Squares {
 public:
  // Asks for the first of them, which are all, as a rule.
  __device__ __forceinline__ explicit Squares(const StreamParams& p) {
#pragma unroll
    for (int j = 0; j < kFirst; ++j) first_[j] = Has(p, j) ? p.squares[At(j)] : 0.0f;
  }
  // Of the row's norm.
  __device__ __forceinline__ float Scale(const StreamParams& p) const {
    float total = 0;
#pragma unroll
    for (int j = 0; j < kFirst; ++j) total += first_[j];
#pragma unroll 8
    for (int j = kFirst; Has(p, j); ++j) total += p.squares[At(j)];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    return ScaleOf(p, total);
  }

 private:
  static constexpr int kFirst = 8;
  static __device__ __forceinline__ bool Has(const StreamParams& p, int j) {
    return 4 * j + static_cast<int>(threadIdx.x % 4) < p.num_parts;
  }
  static __device__ __forceinline__ int At(int j) {
    return (4 * j + threadIdx.x % 4) * kMaxFewRows + threadIdx.x % kWarp / 4;
  }
  float first_[kFirst];
};

// ---- the way out: a thread has four neighbouring columns of a row ----

__device__ __forceinline__ void AddFour(const float* from, int pitch, int count,
                                        float (&total)[4]) {
#pragma unroll
  for (int j = 0; j < kStreamWarps; ++j) {
    if (j >= count) break;
    const float4 v = *reinterpret_cast<const float4*>(from + j * pitch);
    total[0] += v.x;
    total[1] += v.y;
    total[2] += v.z;
    total[3] += v.w;
  }
}

// Stores the first `count` of four elements of 16 bits: all at once, if they lie so.
__device__ __forceinline__ void StoreFour(char* to, const uint16_t (&v)[4], int count) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = {v[0] | uint32_t{v[1]} << 16, v[2] | uint32_t{v[3]} << 16};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) *reinterpret_cast<uint16_t*>(to + 2 * i) = v[i];
  }
}

// What four columns meet on their way out; asked for before the sums meet.
struct WayOut {
  uint2 residual;
  float4 cos, sin;
  int position;
};
template <typename S>
__device__ __forceinline__ void FetchWayOut(const StreamParams& p, const Tile& tile, int m, int q,
                                            WayOut* out) {
  if (p.residual != nullptr) {
    const int n = tile.column + 4 * q;
    if (n < p.product[0].n) {
      out->residual = *reinterpret_cast<const uint2*>(p.residual + m * p.residual_m + 2 * n);
    }
  }
  if constexpr (S::kIsHead) {
    if (p.heads.cos != nullptr) {
      const int at = 4 * q % (kStreamedHead / 2);
      out->cos = *reinterpret_cast<const float4*>(p.heads.cos + at);
      out->sin = *reinterpret_cast<const float4*>(p.heads.sin + at);
    }
    if (p.heads.position != nullptr) out->position = *p.heads.position;
  }
}

// Turns four columns of a head, stores what came of it, and in a cache. By whole warps.
template <typename T, typename S>
__device__ __forceinline__ void StoreHead(const StreamParams& p, const Tile& tile, bool mine, int m,
                                          int q, const WayOut& out, uint16_t (&items)[4]) {
  const StreamedHeads& h = p.heads;
  const int i = tile.first;
  if (h.turned[i] != nullptr) {
    const bool low = q < S::kQuads / 2;
    const float cos[4] = {out.cos.x, out.cos.y, out.cos.z, out.cos.w};
    const float sin[4] = {out.sin.x, out.sin.y, out.sin.z, out.sin.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = T::ToFloat(items[j]);
      const float other = __shfl_xor_sync(kAllLanes, x, S::kQuads / 2);
      const float a = __fmul_rn(x, cos[j]), b = __fmul_rn(other, sin[j]);
      items[j] = T::FromFloat(low ? __fsub_rn(a, b) : __fadd_rn(a, b));
    }
    if (mine) {
      const int64_t at = int64_t{m} * p.product[i].n + tile.column + 4 * q;
      StoreFour(h.turned[i] + 2 * at, items, 4);
    }
  }
  if (h.cached[i] != nullptr && mine) {
    const int at = max(min(out.position, h.num_positions - 1), 0);
    if (h.drops && at != out.position) return;
    StoreFour(h.cached[i] + m * h.cache_m + tile.column / kStreamedHead * h.cache_head +
                  at * h.cache_position + 8 * q,
              items, 4);
  }
}

// Stores four columns of a row of the tile, those that there are. By whole warps, of which not all
// need have columns that are theirs.
// With an argmax (kBest) they are seen by `best`.
template <typename T, typename S, bool kBest>
__device__ __forceinline__ void StoreColumns(const StreamParams& p, const Tile& tile, int t,
                                             bool mine, int m, int q, const float (&total)[4],
                                             const WayOut& out, StreamCandidate* best) {
  const int side = S::kSides == 1 ? 0 : q / (S::kQuads / 2);
  const int n = tile.column + 4 * q - side * S::kColumns;
  const StreamedProduct& product = p.product[tile.first + side];
  const int count = mine ? product.n - n : 0;
  uint16_t items[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) items[i] = T::FromFloat(total[i]);
  if (product.out_dtype == T::kDType) {
    StoreFour(product.out + m * product.out_m + 2 * n, items, count);
  } else {
    const int64_t item = product.out_dtype == DType::kF32 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) {
        StoreFloat(product.out + m * product.out_m + (n + i) * item, product.out_dtype, total[i]);
      }
    }
  }
  if constexpr (kBest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) See(RoundTo(product.out_dtype, total[i]), n + i, best);
    }
    return;
  }
  if constexpr (S::kSides == 2) {
    uint16_t activated[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float gate = T::ToFloat(items[i]);
      activated[i] = Activated<T>(p, gate, __shfl_down_sync(kAllLanes, gate, S::kQuads / 2));
    }
    if (side == 0) StoreFour(p.activated + m * p.activated_m + 2 * n, activated, count);
    return;
  }
  if (p.residual != nullptr) {
    const uint32_t pairs[2] = {out.residual.x, out.residual.y};
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t residual = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
      items[i] = T::FromFloat(T::ToFloat(residual) + T::ToFloat(items[i]));
      const float v = i < count ? T::ToFloat(items[i]) : 0.0f;
      squares = __fadd_rn(squares, __fmul_rn(v, v));
    }
    StoreFour(p.residual_sum + m * p.residual_sum_m + 2 * n, items, count);
#pragma unroll
    for (int o = S::kQuads / 2; o > 0; o /= 2) squares += __shfl_xor_sync(kAllLanes, squares, o);
    if (mine && q == 0) p.squares_out[t * kMaxFewRows + m] = squares;
  }
  if constexpr (S::kIsHead) StoreHead<T, S>(p, tile, mine, m, q, out, items);
}
#endif

// Registers for three blocks a multiprocessor, so that the next launch's find a place. kBest: an
// argmax follows.
template <typename T, bool kAlongK, bool kPair, bool kBest>
__global__ void __launch_bounds__(kStreamThreads, 3)
    StreamRowsKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  using S = RowShape<kAlongK, kPair>;
  constexpr int kTiles = S::kColumns / kStep;
  static_assert(kMaxFewRows * S::kQuads <= kStreamThreads);
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) uint64_t row_barrier, sum_barrier;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, high = lane / 4;
  const int warp_ring = p.stages * kStageBytes;
  char* ring = shared + warp * warp_ring;
  char* behind = shared + kStreamWarps * warp_ring;
  const int warp_beside = p.stages * BesideBytes(S::kDepth);
  char* beside = behind + warp * warp_beside;
  behind += kStreamWarps * warp_beside;
  const BlockPlace place = PlaceOfBlock(p);
  // The warps' sums take their rings' place where no more tiles come through them.
  const bool single = p.pieces <= place.clusters;
  float* by_warp = single ? reinterpret_cast<float*>(shared) : reinterpret_cast<float*>(behind);
  const int warp_pitch = single ? warp_ring / 4 : p.m * S::kPitch;
  if (!single) behind += kStreamWarps * p.m * S::kPitch * 4;
  // Row m is finished by block m, modulo the cluster's size, which the others send their sums.
  const int most = (p.m + p.splits - 1) >> place.shift;  // rows of a block
  float* by_block = reinterpret_cast<float*>(behind);
  char* rows = behind + (p.splits - 1) * most * S::kWidth * 4;

  RowSupply<S> supply(p, place, ring, beside);
  LetNextStart();
  if (p.splits > 1) {
    if (threadIdx.x == 0) {
      const int own = max((p.m - place.rank + p.splits - 1) >> place.shift, 0);
      ExpectFromCluster(SharedAddress(&sum_barrier),
                        (p.splits - 1) * own * S::kWidth * sizeof(float));
    }
    ArriveInCluster();
  }
  if (!p.fetches_early) WaitForLaunchBefore();
  for (int s = 0; s < p.stages; ++s) supply.StartWithoutRows(s);
  const bool norms_here = p.has_norm && p.squares == nullptr;
  if (norms_here) {
    PrefetchNormWeight(p);
    if (threadIdx.x == 0) InitBarriers(SharedAddress(&row_barrier), 1);
    __syncthreads();
  }
  if (p.splits > 1) WaitForCluster();  // all blocks have started
  WaitForLaunchBefore();
  const Squares parts(p);
  supply.StartFirstRows(place);
  if (norms_here) {
    BringNorms<T>(p, rows, SharedAddress(&row_barrier));
    __syncthreads();
  }
  const bool scales = p.squares != nullptr;
  const float scale = scales ? parts.Scale(p) : 0;

  // Where the lane reads of the weights, the rows and the norm's weight.
  const uint32_t weights_at = SharedAddress(ring) + ReadPlace<S>();
  const uint32_t low = lane % 4 * Held<S>::kBytes;
  const uint32_t norm_at = SharedAddress(beside) + RowBytes(S::kDepth) + low;
  const uint32_t rows_at =
      low + (norms_here ? SharedAddress(rows) + min(high, p.m - 1) * p.row_pitch
                        : SharedAddress(beside) + high * 4 * Held<S>::kBytes);
  const int rows_pitch = norms_here ? 64 : 64 * kMaxFewRows;
  const int first = supply.First(), depth = supply.Depth();

  // What this thread has of a tile when the sums meet.
  const int m = threadIdx.x / S::kQuads, q = threadIdx.x % S::kQuads;
  const int finisher = m & (p.splits - 1);
  const bool mine = m < p.m && finisher == place.rank;
  StreamCandidate best = NoCandidate();
  int stage = 0;
  for (int t = place.cluster; t < p.pieces; t += place.clusters) {
    const Tile tile = TileOf<S>(p, t);
    const bool more = t + place.clusters < p.pieces;
    float sum[S::kSides][kTiles][4] = {};
    for (int i = 0; i < depth; ++i) {
      WaitForCopies(p.stages - 1);
      __syncwarp();  // the other lanes' copies, too
      const int k = first + i * RowSupply<S>::kRound;
      Held<S> held;
      Load<S>(rows_at + (norms_here ? 2 * k : stage * BesideBytes(S::kDepth)), rows_pitch, &held);
      if (scales) {
        Norm<T, S>(p, norm_at + stage * BesideBytes(S::kDepth), scale, &held);
        if (t == 0 && high < p.m) Store<S>(held, p.norm + high * p.norm_m, k, supply.end());
      }
      MultiplyStage<T, S>(weights_at + stage * kStageBytes, held, sum);
      __syncwarp();  // all lanes have read the stage
      supply.Start(stage);
      if (++stage == p.stages) stage = 0;
    }
    WayOut out;
    if (mine) FetchWayOut<S>(p, tile, m, q, &out);
    // A lane holds columns lane / 4 and 8 more, of rows 2 * (lane % 4) and the next.
#pragma unroll
    for (int i = 0; i < S::kSides * kTiles * 4; ++i) {
      const int side = i / (kTiles * 4), c = i / 4 % kTiles, e = i % 4;
      const int to = 2 * (lane % 4) + e % 2;
      const int n = side * S::kColumns + kStep * c + high + e / 2 * 8;
      if (to < p.m) by_warp[warp * warp_pitch + to * S::kPitch + n] = sum[side][c][e];
    }
    __syncthreads();
    float total[4] = {};
    if (m < p.m) AddFour(by_warp + m * S::kPitch + 4 * q, warp_pitch, kStreamWarps, total);
    const auto sent = [&](int from) {
      return by_block + (from * most + (m >> place.shift)) * S::kWidth + 4 * q;
    };
    if (m < p.m && !mine) {
      const int from = place.rank - (place.rank > finisher);
      Send(InBlock(finisher, SharedAddress(sent(from))),
           float4{total[0], total[1], total[2], total[3]},
           InBlock(finisher, SharedAddress(&sum_barrier)));
    }
    if (__any_sync(kAllLanes, mine)) {
      if (p.splits > 1) {
        WaitForClusterBytes(SharedAddress(&sum_barrier));  // all of the sums
        if (mine) AddFour(sent(0), most * S::kWidth, p.splits - 1, total);
      }
      StoreColumns<T, S, kBest>(p, tile, t, mine, m, q, total, out, &best);
    }
    if (more) __syncthreads();  // the sums are read: the next tile's may come
  }
  if constexpr (kBest) {
    best = BestOfWarp<S::kQuads>(best);
    if (mine && q == 0) p.candidates[m * p.places + place.cluster] = best;
  }
#endif
}

template <typename T, bool kAlongK, bool kPair, bool kBest>
struct RowsKernel {
  static inline const KernelInfo kInfo = {
      kAlongK ? "stream_rows_along_k" : "stream_rows_along_n", sizeof(StreamParams), nullptr,
      reinterpret_cast<const void*>(&StreamRowsKernel<T, kAlongK, kPair, kBest>)};
};

// How many clusters of an H200 run at once where each block asks for so much shared memory: some of
// its groups of multiprocessors are smaller than others. Those left over would be a second round.
int64_t ClustersAtOnce(int blocks, int64_t shared_bytes) {
  constexpr int64_t kShared = 228 * 1024, kOwn = 1024 + 128;  // a block's: the system's, barriers
  const int64_t side_by_side = std::min<int64_t>(kShared / (shared_bytes + kOwn), 3);
  return side_by_side * (blocks >= 8 ? 15 : blocks >= 4 ? 31 : 132 / blocks);
}

StagePlan PlanRows(bool along_k, const StreamTuning& tuning, StreamParams* params) {
  StreamParams& p = *params;
  const bool pair = p.activated != nullptr;
  const StageSize stage = StageSizeOf(along_k, pair);
  const int width = (pair ? 2 : 1) * stage.columns;
  StagePlan plan = PlanStages(along_k, tuning, &p);
  const bool single = p.pieces <= plan.clusters;
  // An odd multiple of 16 bytes: the rows fall into different banks.
  p.row_pitch = static_cast<int32_t>(CeilDiv(2 * p.k, 128) * 128 + 16);
  int32_t beside = 0;
  if (p.has_norm && p.squares == nullptr) {
    beside += (p.m + (p.weight != nullptr)) * p.row_pitch +
              kMaxFewRows * kStreamWarps * static_cast<int32_t>(sizeof(float));
  }
  if (!single) beside += kStreamWarps * p.m * (width + 4) * static_cast<int32_t>(sizeof(float));
  const auto owned = static_cast<int32_t>(CeilDiv(p.m, p.splits));
  beside += (p.splits - 1) * owned * width * static_cast<int32_t>(sizeof(float));
  const int32_t one_stage = kStreamWarps * (kStageBytes + BesideBytes(stage.depth));
  const int64_t fitting = (kMaxStreamShared - beside) / one_stage;
  // At least so many that they also hold the warps' sums.
  const int64_t least = CeilDiv(p.m * (width + 4) * sizeof(float), kStageBytes);
  int64_t stages = std::min<int64_t>({plan.stages, tuning.stages, fitting, int64_t{kMaxStages}});
  const auto at_once = [&] { return ClustersAtOnce(p.splits, stages * one_stage + beside); };
  // A ring of one stage would be no ring.
  while (stages > std::max<int64_t>(least, 2) && p.splits > 1 && at_once() < plan.clusters) {
    --stages;
  }
  p.stages = static_cast<int32_t>(std::max(stages, least));
  plan.shared_bytes = p.stages * one_stage + beside;
  return plan;
}

}  // namespace

int32_t RowsTiles(const StreamParams& params, bool along_k) {
  StreamParams cut = params;
  return CutColumns(StageSizeOf(along_k, params.activated != nullptr).columns, &cut);
}

bool FitsStreamRows(StreamParams params, bool along_k, const StreamTuning& tuning) {
  const bool heads = params.heads.cos != nullptr || params.heads.position != nullptr;
  for (int i = 0; i < params.num_products; ++i) {
    const int64_t pitch = params.product[i].pitch;
    if (pitch != static_cast<int32_t>(pitch)) return false;
  }
  return params.m > 1 && params.m <= kMaxFewRows && !(heads && along_k) &&
         PlanRows(along_k, tuning, &params).shared_bytes <= kMaxStreamShared;
}

int32_t LaunchStreamRows(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                         Launches* launches) {
  const StagePlan plan = PlanRows(along_k, tuning, &params);
  params.places = plan.clusters;
  LaunchStages<RowsKernel>(plan, params, dtype, along_k, launches);
  return params.places;
}

}  // namespace jaxgraph
