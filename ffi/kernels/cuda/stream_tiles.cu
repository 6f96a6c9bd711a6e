// Streaming products of one row on tensor cores. A block makes the columns of a tile from its
// cluster's share of k; its warps share that, a stage at a time, each through its own ring in
// shared memory. The warps' sums meet in shared memory and those of the cluster's blocks in the
// first block's, both in order. The ring runs on from one tile to the next; a cluster makes one.
#include <algorithm>

#include "ffi/kernels/cuda/stream_candidate.cuh"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/stream_stage.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

#if __CUDA_ARCH__ >= 900
// The order in which a warp's stages arrive; the pieces of their lines lie at PlaceOf.
template <bool kAlongK, bool kPair>
class Supply {
 public:
  using S = Shape<kAlongK, kPair>;

  __device__ Supply(const StreamParams& p, const BlockPlace& place, char* ring)
      : p_(p),
        share_(ShareOf<kAlongK>(p, place)),
        ring_(SharedAddress(ring)),
        policy_(ReadOncePolicy()),
        clusters_(place.clusters),
        tile_(place.cluster) {
    if (First() >= share_.end) tile_ = p.pieces;  // k is short: nothing to do
    at_ = First();
  }

  // Starts the copies of the next stage, if there is one; commits them either way.
  __device__ __forceinline__ void Start(int stage) {
    if (tile_ < p_.pieces) {
      const Tile tile = TileOf<S>(p_, tile_);
      const int lane = threadIdx.x % kWarp, piece = lane % 8, line = lane / 8;
      const int along = (kAlongK ? at_ : tile.column) + 8 * piece;  // lines
      const int across = (kAlongK ? tile.column : at_) + line;
      const uint32_t to = ring_ + stage * kStageBytes;
#pragma unroll
      for (int side = 0; side < S::kSides; ++side) {
        const StreamedProduct& product = p_.product[tile.first + side];
        const int end_along = kAlongK ? share_.end : product.n;
        const int end_across = kAlongK ? product.n : share_.end;
        const char* from = product.weights + across * product.pitch + 2 * along;
        const int64_t step = 4 * product.pitch;
#pragma unroll
        for (int j = 0; j < S::kSideLines; j += 4) {
          const bool inside = along < end_along && across + j < end_across;
          CopyAsync(to + PlaceOf(side * S::kSideLines + j + line, piece),
                    inside ? from : product.weights, inside, policy_);
          from += step;
        }
      }
      at_ += kStreamWarps * S::kDepth;
      if (at_ >= share_.end) {
        tile_ += clusters_;
        at_ = First();
      }
    }
    CommitCopies();
  }

  __device__ __forceinline__ int First() const {
    return share_.begin + static_cast<int>(threadIdx.x / kWarp) * S::kDepth;
  }
  __device__ __forceinline__ const Share& share() const { return share_; }

 private:
  const StreamParams& p_;
  const Share share_;
  const uint32_t ring_;
  const uint64_t policy_;
  const int clusters_;
  int tile_, at_;
};

// sum += the stage (as columns by k) * row, the first of a tensor-core instruction's eight.
template <typename T, bool kAlongK, typename S>
__device__ __forceinline__ void MultiplyStage(uint32_t stage, const char* from,
                                              float (&sum)[S::kSides][S::kColumns / kStep][4]) {
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4;
#pragma unroll
  for (int step = 0; step < S::kDepth / kStep; ++step) {
    const char* row = from + 2 * step * kStep + 4 * low;
    const uint32_t x0 = high == 0 ? *reinterpret_cast<const uint32_t*>(row) : 0;
    const uint32_t x1 = high == 0 ? *reinterpret_cast<const uint32_t*>(row + 16) : 0;
#pragma unroll
    for (int side = 0; side < S::kSides; ++side) {
#pragma unroll
      for (int c = 0; c < S::kColumns / kStep; ++c) {
        const int line = side * S::kSideLines + (kAlongK ? c * kStep + lane % 16
                                                         : step * kStep + lane / 16 * 8 + lane % 8);
        const int piece = kAlongK ? 2 * step + lane / 16 : 2 * c + lane / 8 % 2;
        uint32_t w[4];
        LoadMatrix<kAlongK>(stage + PlaceOf(line, piece), w);
        MultiplyAdd<T>(sum[side][c], w[0], w[1], w[2], w[3], x0, x1);
      }
    }
  }
}

// With an argmax (kBest) the column is seen by `best`.
template <typename T, bool kBest>
__device__ __forceinline__ void StoreColumn(const StreamParams& p, const Tile& tile, int n,
                                            float first, float second, StreamCandidate* best) {
  const StreamedProduct& product = p.product[tile.first];
  if (n >= product.n) return;
  const auto store = [&](const StreamedProduct& to, float v) {
    const int64_t item = to.out_dtype == DType::kF32 ? 4 : 2;
    StoreFloat(to.out + n * item, to.out_dtype, v);
  };
  store(product, first);
  if constexpr (kBest) See(RoundTo(product.out_dtype, first), n, best);
  if (p.activated == nullptr) return;
  store(p.product[1], second);
  *reinterpret_cast<uint16_t*>(p.activated + 2 * n) =
      Activated<T>(p, Rounded<T>(first), Rounded<T>(second));
}
#endif

// Registers for three blocks a multiprocessor, so that the next launch's find a place, if they
// last. kBest: an argmax follows.
template <typename T, bool kAlongK, bool kPair, bool kBest>
__global__ void __launch_bounds__(kStreamThreads, 3)
    StreamTilesKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  using S = Shape<kAlongK, kPair>;
  constexpr int kTiles = S::kColumns / kStep;
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares[kStreamWarps];
  __shared__ __align__(8) uint64_t sum_barrier;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  constexpr int sums = S::kWidth;
  char* ring = shared + warp * p.stages * kStageBytes;
  float* by_warp = reinterpret_cast<float*>(shared + kStreamWarps * p.stages * kStageBytes);
  float* by_block = by_warp + kStreamWarps * sums;  // of a cluster's blocks, in its first
  char* row = reinterpret_cast<char*>(by_block + (p.splits > 1 ? p.splits * sums : 0));

  const BlockPlace place = PlaceOfBlock(p);
  Supply<kAlongK, kPair> supply(p, place, ring);
  LetNextStart();
  if (p.splits > 1) {
    if (threadIdx.x == 0) {
      ExpectFromCluster(SharedAddress(&sum_barrier), p.splits * sums * sizeof(float));
    }
    ArriveInCluster();
  }
  PrefetchNormWeight(p);
  if (!p.fetches_early) WaitForLaunchBefore();
  for (int s = 0; s < p.stages; ++s) supply.Start(s);
  WaitForLaunchBefore();
  // A norm takes the whole row, a product the block's share.
  const Share share = supply.share();
  const int begin = p.has_norm ? 0 : share.begin, end = p.has_norm ? p.k : share.end;
  BringRow<T>(p, row, begin / 8, end / 8, squares);

  StreamCandidate best = NoCandidate();
  int stage = 0;
  for (int t = place.cluster; t < p.pieces; t += place.clusters) {
    float sum[S::kSides][kTiles][4] = {};
    for (int k = supply.First(); k < share.end; k += kStreamWarps * S::kDepth) {
      WaitForCopies(p.stages - 1);
      __syncwarp();  // the other lanes' copies, too
      MultiplyStage<T, kAlongK, S>(SharedAddress(ring) + stage * kStageBytes, row + 2 * (k - begin),
                                   sum);
      __syncwarp();  // all lanes have read the stage
      supply.Start(stage);
      if (++stage == p.stages) stage = 0;
    }
    // A lane holds columns lane / 4 and 8 more, of rows 2 * (lane % 4) and the next.
#pragma unroll
    for (int i = 0; i < S::kSides * kTiles * 2; ++i) {
      const int side = i / (kTiles * 2), c = i / 2 % kTiles, e = i % 2;
      const int n = side * S::kColumns + kStep * c + lane / 4 + e * 8;
      if (lane % 4 == 0) by_warp[warp * sums + n] = sum[side][c][2 * e];
    }
    __syncthreads();
    const auto sum_of = [&](const float* from, int count, int i) {
      float total = 0;
#pragma unroll
      for (int j = 0; j < kStreamWarps; ++j) {
        if (j < count) total += from[j * sums + i];
      }
      return total;
    };
    const float* parts = by_warp;
    int num_parts = kStreamWarps;
    if (p.splits > 1) {
      WaitForCluster();  // the first block has started
      const uint32_t to = InBlock(0, SharedAddress(by_block + place.rank * sums));
      const uint32_t barrier = InBlock(0, SharedAddress(&sum_barrier));
      for (int i = threadIdx.x; i < sums; i += kStreamThreads) {
        Send(to + 4 * i, sum_of(by_warp, kStreamWarps, i), barrier);
      }
      if (place.rank != 0) return;
      WaitForClusterBytes(SharedAddress(&sum_barrier));  // all of the sums
      parts = by_block;
      num_parts = p.splits;
    }
    const Tile tile = TileOf<S>(p, t);
    if (threadIdx.x < S::kColumns) {
      const int n = threadIdx.x;
      float total[2] = {};
#pragma unroll
      for (int side = 0; side < S::kSides; ++side) {
        total[side] = sum_of(parts, num_parts, side * S::kColumns + n);
      }
      StoreColumn<T, kBest>(p, tile, tile.column + n, total[0], total[1], &best);
    }
    __syncthreads();  // the sums are read: the next tile's may come
  }
  if constexpr (kBest) {
    constexpr int kWarpsOfRow = S::kColumns / kWarp;
    if (warp < kWarpsOfRow) {
      best = BestOfWarp(best);
      if (lane == 0) p.candidates[place.cluster * kWarpsOfRow + warp] = best;
    }
  }
#endif
}

template <typename T, bool kAlongK, bool kPair, bool kBest>
struct TilesKernel {
  static inline const KernelInfo kInfo = {
      kAlongK ? "stream_along_k" : "stream_along_n", sizeof(StreamParams), nullptr,
      reinterpret_cast<const void*>(&StreamTilesKernel<T, kAlongK, kPair, kBest>)};
};

StagePlan PlanTiles(bool along_k, const StreamTuning& tuning, StreamParams* params) {
  StreamParams& p = *params;
  StagePlan plan = PlanStages(along_k, tuning, &p);
  const bool pair = p.activated != nullptr;
  const int64_t row = p.has_norm ? p.k : plan.share;
  p.row_pitch = static_cast<int32_t>(CeilDiv(2 * row, 128) * 128 + 16);
  const int32_t sums =
      (pair ? 2 : 1) * StageSizeOf(along_k, pair).columns * static_cast<int32_t>(sizeof(float));
  const int32_t beside = (kStreamWarps + (p.splits > 1 ? p.splits : 0)) * sums + p.row_pitch;
  constexpr int32_t kOneStage = kStreamWarps * kStageBytes;
  const int64_t fitting = std::max((kMaxStreamShared - beside) / kOneStage, 1);
  p.stages = static_cast<int32_t>(
      std::min<int64_t>({plan.stages, tuning.stages, fitting, int64_t{kMaxStages}}));
  plan.shared_bytes = p.stages * kOneStage + beside;
  return plan;
}

}  // namespace

bool FitsStreamTiles(StreamParams params, bool along_k, const StreamTuning& tuning) {
  return params.m == 1 && PlanTiles(along_k, tuning, &params).shared_bytes <= kMaxStreamShared;
}

int32_t LaunchStreamTiles(StreamParams params, DType dtype, bool along_k,
                          const StreamTuning& tuning, Launches* launches) {
  const StagePlan plan = PlanTiles(along_k, tuning, &params);
  params.places = plan.clusters * StageSizeOf(along_k, false).columns / kWarp;  // never of a pair
  LaunchStages<TilesKernel>(plan, params, dtype, along_k, launches);
  return params.places;
}

}  // namespace jaxgraph
