// Streaming products of matrices that are contiguous along n. A block makes a tile of 64 columns
// (64 of each where two products are paired) from its cluster's share of k; its warps share that,
// 4 KB at a time, each through its own ring in shared memory. Tensor cores multiply; they read the
// weights transposed. The warps' sums meet in shared memory and those of the cluster's blocks in
// the first block's, both in order. The ring runs on from one tile to the next.
#include <cooperative_groups.h>

#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kTile = 64;   // columns: 128 bytes
constexpr int kLines = 32;  // of 128 bytes, in a stage
constexpr int kLineBytes = 2 * kTile;
constexpr int kStageBytes = kLines * kLineBytes;

#if __CUDA_ARCH__ >= 900
constexpr int kDepth = 16;  // of k, in one tensor-core instruction

__device__ __forceinline__ void LoadTransposed(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

// A place in a stage. Lines would all start in the same bank, so their 16-byte pieces are turned.
__device__ __forceinline__ uint32_t PlaceOf(int line, int piece) {
  return line * kLineBytes + ((piece ^ (line & 7)) << 4);
}

// The share of k of one block of the cluster.
struct Share {
  int begin, end;
};
__device__ __forceinline__ Share ShareOf(const StreamParams& p) {
  const int rank = blockIdx.x % p.splits;
  const int size = (p.k + p.splits * kLines - 1) / (p.splits * kLines) * kLines;
  const int begin = min(rank * size, p.k);
  return {begin, min(begin + size, p.k)};
}

struct Tile {
  int first;  // matrix
  int column;
};
__device__ __forceinline__ Tile TileOf(const StreamParams& p, int tile) {
  int i = 0;
  if (p.activated == nullptr) {
    while (i + 1 < p.num_products && tile >= p.product[i].end) ++i;
  }
  return {i, (tile - (i > 0 ? p.product[i - 1].end : 0)) * kTile};
}

// The order in which a warp's stages arrive.
template <bool kPair>
class Supply {
 public:
  static constexpr int kRows = kPair ? kLines / 2 : kLines;  // of k

  __device__ Supply(const StreamParams& p, char* ring)
      : p_(p),
        share_(ShareOf(p)),
        ring_(SharedAddress(ring)),
        policy_(ReadOncePolicy()),
        tile_(blockIdx.x / p.splits) {
    if (First() >= share_.end) tile_ = p.pieces;  // k is short: nothing to do
    at_ = First();
  }

  // Starts the copies of the next stage, if there is one; commits them either way.
  __device__ __forceinline__ void Start(int stage) {
    if (tile_ < p_.pieces) {
      const Tile tile = TileOf(p_, tile_);
      const int lane = threadIdx.x % kWarp, piece = lane % 8;
      const int n = tile.column + 8 * piece;
#pragma unroll
      for (int j = 0; j < kLines / 4; ++j) {
        const int line = j * 4 + lane / 8;
        const StreamedProduct& product = p_.product[tile.first + (kPair ? line / kRows : 0)];
        const int k = at_ + line % kRows;
        const bool inside = k < share_.end && n < product.n;
        const char* from = product.weights + (inside ? k * product.pitch + 2 * n : 0);
        CopyAsync(ring_ + stage * kStageBytes + PlaceOf(line, piece), from, inside, policy_);
      }
      at_ += kStreamWarps * kRows;
      if (at_ >= share_.end) {
        tile_ += gridDim.x / p_.splits;
        at_ = First();
      }
    }
    CommitCopies();
  }

  __device__ __forceinline__ int First() const {
    return share_.begin + static_cast<int>(threadIdx.x / kWarp) * kRows;
  }
  __device__ __forceinline__ int end() const { return share_.end; }

 private:
  const StreamParams& p_;
  const Share share_;
  const uint32_t ring_;
  const uint64_t policy_;
  int tile_, at_;
};

// sum += the stage (as 64 columns by k) * rows, for one half of its lines.
template <typename T, int kRowTiles>
__device__ __forceinline__ void MultiplyHalf(uint32_t stage, int half, const char* rows,
                                             int row_pitch, int num_rows,
                                             float (&sum)[kTile / 16][kRowTiles][4]) {
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4;
  uint32_t x[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const char* row = rows + (high + 8 * r) * row_pitch + 4 * low;
    const bool inside = high + 8 * r < num_rows;
    x[r][0] = inside ? *reinterpret_cast<const uint32_t*>(row) : 0;
    x[r][1] = inside ? *reinterpret_cast<const uint32_t*>(row + 16) : 0;
  }
  const int line = half * kDepth + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int c = 0; c < kTile / 16; ++c) {
    uint32_t w[4];
    LoadTransposed(stage + PlaceOf(line, 2 * c + lane / 8 % 2), w);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      MultiplyAdd<T>(sum[c][r], w[0], w[1], w[2], w[3], x[r][0], x[r][1]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void StoreColumn(const StreamParams& p, const Tile& tile, int m, int n,
                                            float first, float second) {
  const StreamedProduct& product = p.product[tile.first];
  if (n >= product.n) return;
  const auto store = [&](const StreamedProduct& to, float v) {
    const int64_t item = to.out_dtype == DType::kF32 ? 4 : 2;
    StoreFloat(to.out + m * to.out_m + n * item, to.out_dtype, v);
  };
  store(product, first);
  if (p.activated == nullptr) return;
  store(p.product[1], second);
  StoreActivated<T>(p, m, n, Rounded<T>(first), Rounded<T>(second));
}
#endif

template <typename T, bool kPair, bool kTall>
__global__ void __launch_bounds__(kStreamThreads, 2)
    StreamAlongNKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  namespace cg = cooperative_groups;
  constexpr int kSides = kPair ? 2 : 1, kWidth = kSides * kTile, kRowTiles = kTall ? 2 : 1;
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares[kStreamWarps][kMaxStreamRows];
  __shared__ __align__(8) uint64_t row_barrier;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  char* ring = shared + warp * p.stages * kStageBytes;
  float* by_warp = reinterpret_cast<float*>(shared + kStreamWarps * p.stages * kStageBytes);
  float* by_block = by_warp + kStreamWarps * p.m * kWidth;
  char* rows = reinterpret_cast<char*>(by_block + p.m * kWidth);

  Supply<kPair> supply(p, ring);
  LetNextStart();
  if (!p.fetches_early) WaitForLaunchBefore();
  if (threadIdx.x == 0) InitBarrier(SharedAddress(&row_barrier));
  for (int s = 0; s < p.stages; ++s) supply.Start(s);
  __syncthreads();
  WaitForLaunchBefore();
  BringRows<T>(p, rows, SharedAddress(&row_barrier), squares);

  const int sums = p.m * kWidth;
  int stage = 0;
  for (int t = blockIdx.x / p.splits; t < p.pieces; t += gridDim.x / p.splits) {
    float sum[kSides][kTile / 16][kRowTiles][4] = {};
    for (int k = supply.First(); k < supply.end(); k += kStreamWarps * Supply<kPair>::kRows) {
      WaitForCopies(p.stages - 1);
      __syncwarp();  // the other lanes' copies, too
      const uint32_t from = SharedAddress(ring) + stage * kStageBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = kPair ? k : k + half * kDepth;
        MultiplyHalf<T, kRowTiles>(from, half, rows + 2 * at, p.row_pitch, p.m,
                                   sum[kPair ? half : 0]);
      }
      __syncwarp();  // all lanes have read the stage
      supply.Start(stage);
      if (++stage == p.stages) stage = 0;
    }
    // A lane holds columns lane / 4 and 8 more, of rows 2 * (lane % 4) and the next.
#pragma unroll
    for (int i = 0; i < kSides * (kTile / 16) * kRowTiles * 4; ++i) {
      const int side = i / (kTile / 16 * kRowTiles * 4), c = i / (kRowTiles * 4) % (kTile / 16);
      const int r = i / 4 % kRowTiles, e = i % 4;
      const int m = 8 * r + 2 * (lane % 4) + e % 2;
      const int n = side * kTile + 16 * c + lane / 4 + e / 2 * 8;
      if (m < p.m) by_warp[(warp * p.m + m) * kWidth + n] = sum[side][c][r][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < sums; i += kStreamThreads) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kStreamWarps; ++w) total += by_warp[w * sums + i];
      by_block[i] = total;
    }
    if (p.splits > 1) {
      cg::this_cluster().sync();
    } else {
      __syncthreads();
    }
    if (blockIdx.x % p.splits == 0) {
      const Tile tile = TileOf(p, t);
      for (int i = threadIdx.x; i < p.m * kTile; i += kStreamThreads) {
        const int m = i / kTile, n = i % kTile;
        float total[2] = {};
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
          float* from = &by_block[m * kWidth + side * kTile + n];
          total[side] = *from;
          for (int r = 1; r < p.splits; ++r) {
            total[side] += *cg::this_cluster().map_shared_rank(from, r);
          }
        }
        StoreColumn<T>(p, tile, m, tile.column + n, total[0], total[1]);
      }
    }
    // The sums are read: only now may a block leave or overwrite them. (Alone, the block's threads
    // that write by_block again have passed the barrier before it.)
    if (p.splits > 1) {
      cg::this_cluster().sync();
    } else {
      __syncthreads();
    }
  }
#endif
}

template <typename T, bool kPair, bool kTall>
const KernelInfo kAlongN = {"stream_along_n", sizeof(StreamParams), nullptr,
                            reinterpret_cast<const void*>(&StreamAlongNKernel<T, kPair, kTall>)};

template <typename T>
const KernelInfo* KernelFor(bool pair, bool tall) {
  if (pair) return tall ? &kAlongN<T, true, true> : &kAlongN<T, true, false>;
  return tall ? &kAlongN<T, false, true> : &kAlongN<T, false, false>;
}

}  // namespace

void LaunchStreamAlongN(StreamParams params, DType dtype, const StreamTuning& tuning,
                        Launches* launches) {
  const bool pair = params.activated != nullptr;
  params.pieces = 0;
  for (int i = 0; i < params.num_products; ++i) {
    params.pieces += static_cast<int32_t>(CeilDiv(params.product[i].n, kTile));
    params.product[i].end = params.pieces;
  }
  if (pair) params.pieces = params.product[0].end;

  const int rows = pair ? kLines / 2 : kLines;  // of k, in a stage
  params.splits = 1;
  while (params.splits < tuning.cluster && params.pieces * params.splits * 2 <= tuning.blocks &&
         params.k >= 2 * params.splits * 2 * kLines) {
    params.splits *= 2;
  }
  const int32_t clusters = std::min(params.pieces, std::max(tuning.blocks / params.splits, 1));
  const int64_t share = CeilDiv(params.k, params.splits * kLines) * kLines;
  const int64_t stages =
      CeilDiv(CeilDiv(share, rows), kStreamWarps) * CeilDiv(params.pieces, clusters);
  params.stages =
      static_cast<int32_t>(std::min<int64_t>({stages, tuning.stages, int64_t{kMaxStages}}));
  params.piece_bytes = kLineBytes;
  // An odd multiple of 16 bytes: the rows fall into different banks.
  params.row_pitch =
      static_cast<int32_t>(CeilDiv(2 * static_cast<int64_t>(params.k), 128) * 128 + 16);
  const auto shared_bytes = [&] {
    const int32_t sums = params.m * (pair ? 2 : 1) * kTile * static_cast<int32_t>(sizeof(float));
    return kStreamWarps * params.stages * kStageBytes + (kStreamWarps + 1) * sums +
           RowBytes(params);
  };
  while (params.stages > 1 && shared_bytes() > kMaxStreamShared) --params.stages;

  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? KernelFor<StreamBF16>(pair, params.m > 8)
                                        : KernelFor<StreamF16>(pair, params.m > 8);
  launch.grid[0] = static_cast<uint32_t>(clusters * params.splits);
  launch.block[0] = kStreamThreads;
  launch.cluster = static_cast<uint32_t>(params.splits);
  launch.shared_bytes = static_cast<uint32_t>(shared_bytes());
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
