// Streaming products of one row and matrices that are contiguous along k. A warp takes whole
// columns, or its slice of k of them where they are long, and streams them through a ring of its
// own in shared memory: one bulk copy of up to 4 KB a piece, announced by the stage's barrier. One
// row is too little for tensor cores, and asks little enough of the others. Slices meet in shared
// memory at the end of the block, in order; nothing else holds a warp up.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kPieceBytes = 4096;  // at most
constexpr int kMostStages = 16;
constexpr int kMostSumBytes = 32 * 1024;  // of slices, in a block

#if __CUDA_ARCH__ >= 900
// One column of a matrix, or of both matrices of a pair.
struct Column {
  const StreamedProduct* product;
  int n;
};
template <bool kPair>
__device__ __forceinline__ Column ColumnOf(const StreamParams& p, int column) {
  int i = 0;
  if (!kPair) {
    while (i + 1 < p.num_products && column >= p.product[i].end) ++i;
  }
  return {&p.product[i], column - (i > 0 ? p.product[i - 1].end : 0)};
}

// The order in which a warp's pieces arrive: of each of its columns one, of a pair two.
template <bool kPair>
class Supply {
 public:
  __device__ Supply(const StreamParams& p, int column, int step, int begin)
      : p_(p), step_(step), begin_(begin), column_(column) {}

  // Where the next piece lies; null behind the last.
  __device__ __forceinline__ const char* Next() {
    if (column_ >= p_.pieces) return nullptr;
    const Column column = ColumnOf<kPair>(p_, column_);
    const StreamedProduct& product = column.product[kPair ? side_ : 0];
    const char* from = product.weights + column.n * product.pitch + begin_;
    if (kPair) side_ ^= 1;
    if (side_ == 0) column_ += step_;
    return from;
  }

 private:
  const StreamParams& p_;
  const int step_, begin_;
  int column_, side_ = 0;
};

// A lane's part of a slice of a column times the row.
template <typename T>
__device__ __forceinline__ float MultiplySlice(const char* piece, const char* row, int bytes) {
  float sum[4] = {};
  const auto step = [&](int at) {
    const Eight w = LoadEight(piece + at), x = LoadEight(row + at);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum[j % 4] = fmaf(T::ToFloat(w.bits[j]), T::ToFloat(x.bits[j]), sum[j % 4]);
    }
  };
  constexpr int kStride = 16 * kWarp;
  const int first = 16 * static_cast<int>(threadIdx.x % kWarp);
  if (bytes == kPieceBytes) {
#pragma unroll
    for (int i = 0; i < kPieceBytes / kStride; ++i) step(first + i * kStride);
  } else {
#pragma unroll 4
    for (int at = first; at < bytes; at += kStride) step(at);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Rounds and stores a column, or a pair of them.
template <typename T, bool kPair>
__device__ __forceinline__ void StoreColumn(const StreamParams& p, int column,
                                            const float (&total)[kPair ? 2 : 1]) {
  const Column at = ColumnOf<kPair>(p, column);
#pragma unroll
  for (int side = 0; side < (kPair ? 2 : 1); ++side) {
    const StreamedProduct& product = at.product[side];
    const int64_t item = product.out_dtype == DType::kF32 ? 4 : 2;
    StoreFloat(product.out + at.n * item, product.out_dtype, total[side]);
  }
  if constexpr (kPair) {
    StoreActivated<T>(p, 0, at.n, Rounded<T>(total[0]), Rounded<T>(total[1]));
  }
}
#endif

template <typename T, bool kPair>
__global__ void __launch_bounds__(kStreamThreads, 3)
    StreamVectorKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSides = kPair ? 2 : 1;
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares[kStreamWarps][kMaxTileRows];
  __shared__ __align__(8) uint64_t barriers[kStreamWarps][kMostStages];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int shift = __ffs(p.splits) - 1;  // a power of two, as is the number of teams
  const int teams = kStreamWarps >> shift, slice = warp & (p.splits - 1);
  const int first = static_cast<int>(blockIdx.x) * teams + (warp >> shift);
  const int step = static_cast<int>(gridDim.x) * teams;
  const int begin = slice * p.slice_bytes, bytes = min(p.slice_bytes, 2 * p.k - begin);
  char* ring = shared + warp * p.stages * p.slice_bytes;
  char* row = shared + kStreamWarps * p.stages * p.slice_bytes;
  float* sums = reinterpret_cast<float*>(row + p.row_pitch);

  LetNextStart();
  PrefetchNormWeight(p);
  if (!p.fetches_early) WaitForLaunchBefore();
  Supply<kPair> supply(p, first, step, begin);
  const uint32_t ring_address = SharedAddress(ring), barrier = SharedAddress(barriers[warp]);
  const uint64_t policy = ReadOncePolicy();
  const auto start = [&](int stage) {
    const char* from = supply.Next();
    if (from == nullptr) return;
    Expect(barrier + 8 * stage, bytes);
    BulkCopyOnce(ring_address + stage * p.slice_bytes, from, bytes, barrier + 8 * stage, policy);
  };
  if (lane == 0) {
    InitBarriers(barrier, p.stages);
    for (int s = 0; s < p.stages; ++s) start(s);
  }
  WaitForLaunchBefore();
  BringRow<T>(p, row, 0, p.k / 8, squares);

  int stage = 0;
  uint32_t parity = 0;
  float* team_sums = sums + (warp >> shift) * (kSides * p.splits) + slice;
  for (int column = first; column < p.pieces; column += step) {
    float total[kSides];
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      WaitForBytes(barrier + 8 * stage, parity);
      total[side] = MultiplySlice<T>(ring + stage * p.slice_bytes, row + begin, bytes);
      __syncwarp();  // all lanes have read the piece
      if (lane == 0) start(stage);
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int side = 0; side < kSides; ++side) total[side] = SumOfWarp(total[side]);
    if (p.splits == 1) {
      if (lane == 0) StoreColumn<T, kPair>(p, column, total);
    } else {
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        if (lane == 0) team_sums[side * p.splits] = total[side];
      }
      team_sums += kStreamWarps * kSides;
    }
  }
  if (p.splits == 1) return;
  __syncthreads();
  // Thread i takes the column that is the i-th in the order of `sums`.
  for (int i = threadIdx.x;; i += kStreamThreads) {
    const int before = (i * p.splits / kStreamWarps) * step;
    const int column = before + static_cast<int>(blockIdx.x) * teams + (i & (teams - 1));
    if (before >= p.pieces) break;
    if (column >= p.pieces) continue;
    float total[kSides] = {};
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      const float* from = sums + (i * kSides + side) * p.splits;
      for (int s = 0; s < p.splits; ++s) total[side] += from[s];
    }
    StoreColumn<T, kPair>(p, column, total);
  }
#endif
}

template <typename T, bool kPair>
const KernelInfo kVector = {"stream_vector", sizeof(StreamParams), nullptr,
                            reinterpret_cast<const void*>(&StreamVectorKernel<T, kPair>)};

// Warps that share a column. It depends on k alone, so that a product has the same bits whatever
// stands around it.
int32_t SlicesOf(int64_t k) {
  int32_t slices = 1;
  while (slices < kStreamWarps && 2 * k > int64_t{slices} * kPieceBytes) slices *= 2;
  return slices;
}

int64_t ColumnsOf(const StreamParams& p) {
  if (p.activated != nullptr) return p.product[0].n;
  int64_t columns = 0;
  for (int i = 0; i < p.num_products; ++i) columns += p.product[i].n;
  return columns;
}

// Shared memory for the sums of slices.
int64_t SumBytes(int64_t columns, int64_t slices, int64_t grid, bool pair) {
  if (slices == 1) return 0;
  const int64_t teams = kStreamWarps / slices;
  return CeilDiv(columns, grid * teams) * kStreamWarps * (pair ? 2 : 1) * 4;
}

}  // namespace

bool FitsStreamVector(const StreamParams& p) {
  const int32_t slices = SlicesOf(p.k);
  return p.m == 1 && 2 * int64_t{p.k} <= int64_t{slices} * kPieceBytes &&
         SumBytes(ColumnsOf(p), slices, 132, p.activated != nullptr) <= kMostSumBytes;
}

void LaunchStreamVector(StreamParams params, DType dtype, const StreamTuning& tuning,
                        Launches* launches) {
  const bool pair = params.activated != nullptr;
  params.pieces = 0;
  for (int i = 0; i < params.num_products; ++i) {
    params.pieces += params.product[i].n;
    params.product[i].end = params.pieces;
  }
  if (pair) params.pieces = params.product[0].n;
  params.splits = SlicesOf(params.k);
  params.slice_bytes = static_cast<int32_t>(16 * CeilDiv(params.k / 8, params.splits));
  params.row_pitch = 2 * params.k;

  const int64_t teams = kStreamWarps / params.splits;
  const int64_t grid = std::min<int64_t>(CeilDiv(params.pieces, teams), tuning.blocks);
  const int64_t pieces_per_warp = CeilDiv(params.pieces, grid * teams) * (pair ? 2 : 1);
  params.stages = static_cast<int32_t>(std::min<int64_t>(
      {pieces_per_warp, int64_t{tuning.stages} * kPieceBytes / params.slice_bytes, kMostStages}));

  Launch launch;
  launch.kernel = dtype == DType::kBF16
                      ? (pair ? &kVector<StreamBF16, true> : &kVector<StreamBF16, false>)
                      : (pair ? &kVector<StreamF16, true> : &kVector<StreamF16, false>);
  launch.grid[0] = static_cast<uint32_t>(grid);
  launch.block[0] = kStreamThreads;
  launch.shared_bytes =
      static_cast<uint32_t>(kStreamWarps * params.stages * params.slice_bytes + params.row_pitch +
                            SumBytes(params.pieces, params.splits, grid, pair));
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
