// Streaming products on tensor cores, for which up to 8 rows are as much work as one. A stage is
// 32 lines of 128 bytes of a matrix: 64 columns of each of 32 k where it is contiguous along n, 64
// k of each of 32 columns where it is along k; of two matrices that are paired, half the lines
// each. A block makes the columns of such a stage from its cluster's share of k; its warps share
// that, a stage at a time, each through its own ring in shared memory. The warps' sums meet in
// shared memory and those of the cluster's blocks in the first block's, both in order. The ring
// runs on from one tile to the next; a cluster makes one.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_candidate.cuh"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kLines = 32;  // in a stage
constexpr int kLineItems = kLineBytes / 2;
constexpr int kStageBytes = kLines * kLineBytes;

// What a stage holds of each of its matrices.
template <bool kAlongK, bool kPair>
struct Shape {
  static constexpr int kSides = kPair ? 2 : 1;
  static constexpr int kSideLines = kLines / kSides;
  static constexpr int kColumns = kAlongK ? kSideLines : kLineItems;
  static constexpr int kDepth = kAlongK ? kLineItems : kSideLines;  // of k
  static constexpr int kWidth = kSides * kColumns;
};
// Shares of k are multiples of this.
__host__ __device__ constexpr int ShareStep(bool along_k) { return along_k ? kLineItems : kLines; }

#if __CUDA_ARCH__ >= 900
constexpr int kStep = 16;  // of k and of columns, in one tensor-core instruction

// The share of k of one block of the cluster.
struct Share {
  int begin, end;
};
template <bool kAlongK>
__device__ __forceinline__ Share ShareOf(const StreamParams& p, const BlockPlace& place) {
  constexpr int kUnit = ShareStep(kAlongK);
  const int rank = place.rank;
  const int size = (((p.k + kUnit - 1) / kUnit + p.splits - 1) >> place.shift) * kUnit;
  const int begin = min(rank * size, p.k);
  return {begin, min(begin + size, p.k)};
}

struct Tile {
  int first;  // matrix
  int column;
};
template <typename S>
__device__ __forceinline__ Tile TileOf(const StreamParams& p, int tile) {
  int i = 0;
  if (p.activated == nullptr) {
    while (i + 1 < p.num_products && tile >= p.product[i].end) ++i;
  }
  return {i, (tile - (i > 0 ? p.product[i - 1].end : 0)) * S::kColumns};
}

// The order in which a warp's stages arrive.
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

// sum += the stage (as columns by k) * rows.
template <typename T, bool kAlongK, typename S>
__device__ __forceinline__ void MultiplyStage(uint32_t stage, const char* rows, int row_pitch,
                                              int num_rows,
                                              float (&sum)[S::kSides][S::kColumns / kStep][4]) {
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4;
#pragma unroll
  for (int step = 0; step < S::kDepth / kStep; ++step) {
    const char* row = rows + high * row_pitch + 2 * step * kStep + 4 * low;
    const uint32_t x0 = high < num_rows ? *reinterpret_cast<const uint32_t*>(row) : 0;
    const uint32_t x1 = high < num_rows ? *reinterpret_cast<const uint32_t*>(row + 16) : 0;
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
__device__ __forceinline__ void StoreColumn(const StreamParams& p, const Tile& tile, int m, int n,
                                            float first, float second, StreamCandidate* best) {
  const StreamedProduct& product = p.product[tile.first];
  if (n >= product.n) return;
  const auto store = [&](const StreamedProduct& to, float v) {
    const int64_t item = to.out_dtype == DType::kF32 ? 4 : 2;
    StoreFloat(to.out + m * to.out_m + n * item, to.out_dtype, v);
  };
  store(product, first);
  if constexpr (kBest) See(RoundTo(product.out_dtype, first), n, best);
  if (p.activated == nullptr) return;
  store(p.product[1], second);
  StoreActivated<T>(p, m, n, Rounded<T>(first), Rounded<T>(second));
}
#endif

// One row has kernels of its own: code that is not run need not be fetched, and a decode step comes
// by each of them for a few microseconds only. Registers for three blocks a multiprocessor, so that
// the next launch's find a place, if they last. kBest: an argmax follows.
template <typename T, bool kAlongK, bool kPair, bool kOneRow, bool kBest>
__global__ void __launch_bounds__(kStreamThreads, 3)
    StreamTilesKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  using S = Shape<kAlongK, kPair>;
  constexpr int kTiles = S::kColumns / kStep;
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares[kStreamWarps][kMaxTileRows];
  __shared__ __align__(8) uint64_t row_barrier, sum_barrier;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_rows = kOneRow ? 1 : p.m;
  const int sums = num_rows * S::kWidth;
  char* ring = shared + warp * p.stages * kStageBytes;
  float* by_warp = reinterpret_cast<float*>(shared + kStreamWarps * p.stages * kStageBytes);
  float* by_block = by_warp + kStreamWarps * sums;  // of a cluster's blocks, in its first
  char* rows = reinterpret_cast<char*>(by_block + (p.splits > 1 ? p.splits * sums : 0));

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
  if (!kOneRow) {
    if (threadIdx.x == 0) InitBarriers(SharedAddress(&row_barrier), 1);
    __syncthreads();
  }
  WaitForLaunchBefore();
  // A norm takes the whole row, a product the block's share.
  const Share share = supply.share();
  const int begin = p.has_norm ? 0 : share.begin, end = p.has_norm ? p.k : share.end;
  if (kOneRow) {
    BringRow<T>(p, rows, begin / 8, end / 8, squares);
  } else {
    BringRows<T>(p, rows, begin / 8, end / 8, SharedAddress(&row_barrier), squares);
  }

  // Threads that store columns: which ones, and of which rows, is the same for all tiles.
  constexpr int kMost = (kOneRow ? 1 : kMaxTileRows) * S::kColumns;
  constexpr int kRounds = (kMost + kStreamThreads - 1) / kStreamThreads;
  StreamCandidate best[kRounds];
  if constexpr (kBest) {
#pragma unroll
    for (int j = 0; j < kRounds; ++j) best[j] = NoCandidate();
  }
  int stage = 0;
  for (int t = place.cluster; t < p.pieces; t += place.clusters) {
    float sum[S::kSides][kTiles][4] = {};
    for (int k = supply.First(); k < share.end; k += kStreamWarps * S::kDepth) {
      WaitForCopies(p.stages - 1);
      __syncwarp();  // the other lanes' copies, too
      MultiplyStage<T, kAlongK, S>(SharedAddress(ring) + stage * kStageBytes,
                                   rows + 2 * (k - begin), p.row_pitch, num_rows, sum);
      __syncwarp();  // all lanes have read the stage
      supply.Start(stage);
      if (++stage == p.stages) stage = 0;
    }
    // A lane holds columns lane / 4 and 8 more, of rows 2 * (lane % 4) and the next.
#pragma unroll
    for (int i = 0; i < S::kSides * kTiles * 4; ++i) {
      const int side = i / (kTiles * 4), c = i / 4 % kTiles, e = i % 4;
      const int m = 2 * (lane % 4) + e % 2;
      const int n = side * S::kColumns + kStep * c + lane / 4 + e / 2 * 8;
      if (m < num_rows) by_warp[(warp * num_rows + m) * S::kWidth + n] = sum[side][c][e];
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
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int i = threadIdx.x + j * kStreamThreads;
      if (i >= num_rows * S::kColumns) break;
      const int m = i / S::kColumns, n = i % S::kColumns;
      float total[2] = {};
#pragma unroll
      for (int side = 0; side < S::kSides; ++side) {
        total[side] = sum_of(parts, num_parts, m * S::kWidth + side * S::kColumns + n);
      }
      StoreColumn<T, kBest>(p, tile, m, tile.column + n, total[0], total[1], &best[j]);
    }
    __syncthreads();  // the sums are read: the next tile's may come
  }
  if constexpr (kBest) {
    constexpr int kWarpsOfRow = S::kColumns / kWarp;
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int m = (warp + j * kStreamWarps) / kWarpsOfRow;
      best[j] = BestOfWarp(best[j]);
      if (lane != 0 || m >= num_rows) continue;
      p.candidates[m * p.places + place.cluster * kWarpsOfRow + warp % kWarpsOfRow] = best[j];
    }
  }
#endif
}

template <typename T, bool kAlongK, bool kPair, bool kOneRow, bool kBest>
const KernelInfo kTilesKernel = {
    kAlongK ? "stream_along_k" : "stream_along_n", sizeof(StreamParams), nullptr,
    reinterpret_cast<const void*>(&StreamTilesKernel<T, kAlongK, kPair, kOneRow, kBest>)};

template <typename T, bool kPair, bool kOneRow, bool kBest>
const KernelInfo* KernelFor(bool along_k) {
  return along_k ? &kTilesKernel<T, true, kPair, kOneRow, kBest>
                 : &kTilesKernel<T, false, kPair, kOneRow, kBest>;
}
template <typename T, bool kOneRow>
const KernelInfo* KernelFor(const StreamParams& p, bool along_k) {
  if (p.activated != nullptr) return KernelFor<T, true, kOneRow, false>(along_k);
  return p.candidates != nullptr ? KernelFor<T, false, kOneRow, true>(along_k)
                                 : KernelFor<T, false, kOneRow, false>(along_k);
}
template <typename T>
const KernelInfo* KernelFor(const StreamParams& p, bool along_k) {
  return p.m == 1 ? KernelFor<T, true>(p, along_k) : KernelFor<T, false>(p, along_k);
}

// What a launch needs beside `params`, which get their sizes from it.
struct Plan {
  int32_t clusters;
  int32_t shared_bytes;
};
Plan PlanTiles(bool along_k, const StreamTuning& tuning, StreamParams* params) {
  StreamParams& p = *params;
  const bool pair = p.activated != nullptr;
  const int side_lines = pair ? kLines / 2 : kLines;
  const int columns = along_k ? side_lines : kLineItems, depth = along_k ? kLineItems : side_lines;
  p.pieces = CutColumns(columns, &p);
  const int share_step = ShareStep(along_k);
  const int32_t clusters = ShareAmongBlocks(tuning, share_step, &p);
  const int64_t share = CeilDiv(p.k, p.splits * share_step) * share_step;
  const int64_t stages = CeilDiv(CeilDiv(share, depth), kStreamWarps) * CeilDiv(p.pieces, clusters);
  // An odd multiple of 16 bytes: the rows fall into different banks.
  const int64_t row = p.has_norm ? p.k : share;
  p.row_pitch = static_cast<int32_t>(CeilDiv(2 * row, 128) * 128 + 16);
  const int32_t sums = p.m * (pair ? 2 : 1) * columns * static_cast<int32_t>(sizeof(float));
  const int32_t beside = (kStreamWarps + (p.splits > 1 ? p.splits : 0)) * sums + RowBytes(p);
  constexpr int32_t kOneStage = kStreamWarps * kStageBytes;
  const int64_t fitting = std::max((kMaxStreamShared - beside) / kOneStage, 1);
  p.stages = static_cast<int32_t>(
      std::min<int64_t>({stages, tuning.stages, fitting, int64_t{kMaxStages}}));
  return {clusters, p.stages * kOneStage + beside};
}

}  // namespace

bool FitsStreamTiles(StreamParams params, bool along_k, const StreamTuning& tuning) {
  return params.m <= kMaxTileRows &&
         PlanTiles(along_k, tuning, &params).shared_bytes <= kMaxStreamShared;
}

int32_t LaunchStreamTiles(StreamParams params, DType dtype, bool along_k,
                          const StreamTuning& tuning, Launches* launches) {
  const Plan plan = PlanTiles(along_k, tuning, &params);
  const int columns = along_k ? kLines : kLineItems;  // where there is no pair
  params.places = plan.clusters * columns / kWarp;
  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? KernelFor<StreamBF16>(params, along_k)
                                        : KernelFor<StreamF16>(params, along_k);
  launch.grid[0] = static_cast<uint32_t>(plan.clusters * params.splits);
  launch.block[0] = kStreamThreads;
  launch.cluster = static_cast<uint32_t>(params.splits);
  launch.shared_bytes = static_cast<uint32_t>(plan.shared_bytes);
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
  return params.places;
}

}  // namespace jaxgraph
