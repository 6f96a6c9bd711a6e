// Streaming products of one row and matrices that are contiguous along k, of as many columns as a
// head has. A warp takes whole columns, or its slice of k of them where they are long, and streams
// them through a ring of its own in shared memory: one bulk copy of up to 4 KB a piece, announced
// by the stage's barrier. Short columns without gaps come several in a piece, since the work around
// a copy would take longer than the copy. One row is too little for tensor cores, and asks little
// enough of the others. Slices meet in shared memory at the end of the block, in order; nothing
// else holds a warp up.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_candidate.cuh"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kPieceBytes = 4096;  // at most
constexpr int kMostStages = 16;
constexpr int kMostColumns = 4;                   // of a piece
constexpr int kMostShortBytes = kPieceBytes / 2;  // of a column that others may share a piece with
constexpr int kMostSumBytes = 32 * 1024;          // of slices, in a block

#if __CUDA_ARCH__ >= 900
// The columns of a piece: `count` from `n` on.
struct Piece {
  const StreamedProduct* product;
  int n, count;
};
__device__ __forceinline__ Piece PieceAt(const StreamParams& p, int piece) {
  int i = 0;
  while (i + 1 < p.num_products && piece >= p.product[i].end) ++i;
  const int n = (piece - (i > 0 ? p.product[i - 1].end : 0)) * p.columns;
  return {&p.product[i], n, min(p.columns, p.product[i].n - n)};
}

// A piece, or a warp's slice of it.
struct Source {
  const char* from;  // null: none
  int bytes;
};
// The order in which a warp's pieces arrive.
class Supply {
 public:
  __device__ Supply(const StreamParams& p, int piece, int step, int begin, int bytes)
      : p_(p), step_(step), begin_(begin), bytes_(bytes), piece_(piece) {}

  __device__ __forceinline__ Source Next() {
    if (piece_ >= p_.pieces) return {nullptr, 0};
    const Piece piece = PieceAt(p_, piece_);
    piece_ += step_;
    return {piece.product->weights + piece.n * piece.product->pitch + begin_, piece.count * bytes_};
  }

 private:
  const StreamParams& p_;
  const int step_, begin_, bytes_;
  int piece_;
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

// What a lane has of the row to multiply short columns by.
template <typename T>
struct LaneRow {
  static constexpr int kStride = 16 * kWarp, kSteps = kMostShortBytes / kStride;
  float x[kSteps][8];

  __device__ __forceinline__ LaneRow(const char* row, int bytes) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = 16 * static_cast<int>(threadIdx.x % kWarp) + i * kStride;
      const Eight eight = at < bytes ? LoadEight(row + at) : Eight{};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = T::ToFloats(eight.pairs[j]);
        x[i][2 * j] = two.x;
        x[i][2 * j + 1] = two.y;
      }
    }
  }
  // As MultiplySlice, bit by bit.
  __device__ __forceinline__ float Multiply(const char* column, int bytes) const {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = 16 * static_cast<int>(threadIdx.x % kWarp) + i * kStride;
      if (at >= bytes) break;
      const Eight w = LoadEight(column + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = T::ToFloats(w.pairs[j]);
        sum[2 * j % 4] = fmaf(two.x, x[i][2 * j], sum[2 * j % 4]);
        sum[2 * j % 4 + 1] = fmaf(two.y, x[i][2 * j + 1], sum[2 * j % 4 + 1]);
      }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

// SumOfWarp of four numbers at once, bit by bit: lanes 8 i to 8 i + 7 have the i-th.
__device__ __forceinline__ float SumsOfWarp(const float (&v)[kMostColumns]) {
  static_assert(kMostColumns == 4);
  const int lane = threadIdx.x % kWarp;
  const bool high = (lane & 16) != 0, odd = (lane & 8) != 0;
  float two[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    two[i] = (high ? v[2 + i] : v[i]) + __shfl_xor_sync(kAllLanes, high ? v[i] : v[2 + i], 16);
  }
  float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, odd ? two[0] : two[1], 8);
#pragma unroll
  for (int o = 4; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
  return sum;
}

// Rounds and stores a column; with an argmax, which is of the only product, it is seen by `best`.
__device__ __forceinline__ void StoreColumn(const StreamParams& p, const StreamedProduct& product,
                                            int n, float total, StreamCandidate* best) {
  const int64_t item = product.out_dtype == DType::kF32 ? 4 : 2;
  StoreFloat(product.out + n * item, product.out_dtype, total);
  if (p.candidates != nullptr) See(RoundTo(product.out_dtype, total), n, best);
}
#endif

template <typename T>
__global__ void __launch_bounds__(kStreamThreads, 3)
    StreamVectorKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares[kStreamWarps];
  __shared__ __align__(8) uint64_t barriers[kStreamWarps][kMostStages];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int shift = __ffs(p.splits) - 1;  // a power of two, as is the number of teams
  const int teams = kStreamWarps >> shift, slice = warp & (p.splits - 1);
  const int first = static_cast<int>(blockIdx.x) * teams + (warp >> shift);
  const int step = static_cast<int>(gridDim.x) * teams;
  const int begin = slice * p.slice_bytes,
            bytes = min(2 * p.k - begin, p.columns > 1 ? 2 * p.k : p.slice_bytes);
  char* ring = shared + warp * p.stages * p.slice_bytes;
  char* row = shared + kStreamWarps * p.stages * p.slice_bytes;
  float* sums = reinterpret_cast<float*>(row + p.row_pitch);

  LetNextStart();
  PrefetchNormWeight(p);
  if (!p.fetches_early) WaitForLaunchBefore();
  Supply supply(p, first, step, begin, bytes);
  const uint32_t ring_address = SharedAddress(ring), barrier = SharedAddress(barriers[warp]);
  const uint64_t policy = ReadOncePolicy();
  const auto start = [&](int stage) {
    const Source next = supply.Next();
    if (next.from == nullptr) return;
    Expect(barrier + 8 * stage, next.bytes);
    BulkCopyOnce(ring_address + stage * p.slice_bytes, next.from, next.bytes, barrier + 8 * stage,
                 policy);
  };
  if (lane == 0) {
    InitBarriers(barrier, p.stages);
    for (int s = 0; s < p.stages; ++s) start(s);
  }
  WaitForLaunchBefore();
  BringRow<T>(p, row, 0, p.k / 8, squares);

  int stage = 0;
  uint32_t parity = 0;
  StreamCandidate best = NoCandidate();  // of this thread's columns
  // The stage's piece has been read by all lanes.
  const auto go_on = [&] {
    __syncwarp();
    if (lane == 0) start(stage);
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (p.columns > 1) {
    const LaneRow<T> lane_row(row, bytes);
    for (int i = first; i < p.pieces; i += step) {
      const Piece piece = PieceAt(p, i);
      WaitForBytes(barrier + 8 * stage, parity);
      float totals[kMostColumns] = {};
#pragma unroll
      for (int c = 0; c < kMostColumns; ++c) {
        if (c < piece.count) {
          totals[c] = lane_row.Multiply(ring + stage * p.slice_bytes + c * bytes, bytes);
        }
      }
      go_on();
      const float total = SumsOfWarp(totals);
      const int c = lane / 8;
      if (lane % 8 == 0 && c < piece.count) {
        StoreColumn(p, *piece.product, piece.n + c, total, &best);
      }
    }
    if (p.candidates != nullptr) best = BestOfWarp(best);
  } else {
    float* team_sums = sums + (warp >> shift) * p.splits + slice;
    for (int i = first; i < p.pieces; i += step) {
      WaitForBytes(barrier + 8 * stage, parity);
      float total = MultiplySlice<T>(ring + stage * p.slice_bytes, row + begin, bytes);
      go_on();
      total = SumOfWarp(total);
      if (lane != 0) continue;
      if (p.splits == 1) {
        const Piece piece = PieceAt(p, i);
        StoreColumn(p, *piece.product, piece.n, total, &best);
      } else {
        *team_sums = total;
        team_sums += kStreamWarps;
      }
    }
  }
  if (p.splits > 1) {
    __syncthreads();
    // Thread i takes the column that is the i-th in the order of `sums`.
    for (int i = threadIdx.x;; i += kStreamThreads) {
      const int before = (i * p.splits / kStreamWarps) * step;
      const int column = before + static_cast<int>(blockIdx.x) * teams + (i & (teams - 1));
      if (before >= p.pieces) break;
      if (column >= p.pieces) continue;
      float total = 0;
      for (int s = 0; s < p.splits; ++s) total += sums[i * p.splits + s];
      const Piece piece = PieceAt(p, column);
      StoreColumn(p, *piece.product, piece.n, total, &best);
    }
    if (p.candidates != nullptr) best = BestOfWarp(best);
  }
  if (p.candidates != nullptr && lane == 0) {
    p.candidates[blockIdx.x * kStreamWarps + warp] = best;
  }
#endif
}

template <typename T>
const KernelInfo kVector = {"stream_vector", sizeof(StreamParams), nullptr,
                            reinterpret_cast<const void*>(&StreamVectorKernel<T>)};

// Warps that share a column. It depends on k alone, so that a product has the same bits in every
// group that this kernel takes.
int32_t SlicesOf(int64_t k) {
  int32_t slices = 1;
  while (slices < kStreamWarps && 2 * k > int64_t{slices} * kPieceBytes) slices *= 2;
  return slices;
}

// Columns of a piece: as many as it has room for, if they are whole and have no gaps.
int32_t ColumnsOfPiece(const StreamParams& p) {
  if (2 * p.k > kMostShortBytes) return 1;
  for (int i = 0; i < p.num_products; ++i) {
    if (p.product[i].pitch != 2 * int64_t{p.k}) return 1;
  }
  return std::min(kPieceBytes / (2 * p.k), kMostColumns);
}

// Shared memory for the sums of slices.
int64_t SumBytes(int64_t columns, int64_t slices, int64_t grid) {
  if (slices == 1) return 0;
  const int64_t teams = kStreamWarps / slices;
  return CeilDiv(columns, grid * teams) * kStreamWarps * 4;
}

}  // namespace

bool FitsStreamVector(const StreamParams& p) {
  const int32_t slices = SlicesOf(p.k);
  return p.m == 1 && p.activated == nullptr && 2 * int64_t{p.k} <= int64_t{slices} * kPieceBytes &&
         SumBytes(ColumnsOf(p), slices, 132) <= kMostSumBytes;
}

int32_t LaunchStreamVector(StreamParams params, DType dtype, const StreamTuning& tuning,
                           Launches* launches) {
  params.columns = ColumnsOfPiece(params);
  params.pieces = CutColumns(params.columns, &params);
  params.splits = SlicesOf(params.k);
  params.slice_bytes =
      params.columns * static_cast<int32_t>(16 * CeilDiv(params.k / 8, params.splits));
  params.row_pitch = 2 * params.k;

  const int64_t teams = kStreamWarps / params.splits;
  const int64_t grid = std::min<int64_t>(CeilDiv(params.pieces, teams), tuning.blocks);
  const int64_t pieces_per_warp = CeilDiv(params.pieces, grid * teams);
  params.stages = static_cast<int32_t>(std::min<int64_t>(
      {pieces_per_warp, int64_t{tuning.stages} * kPieceBytes / params.slice_bytes, kMostStages}));

  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? &kVector<StreamBF16> : &kVector<StreamF16>;
  params.places = static_cast<int32_t>(grid * kStreamWarps);
  launch.grid[0] = static_cast<uint32_t>(grid);
  launch.block[0] = kStreamThreads;
  launch.shared_bytes =
      static_cast<uint32_t>(kStreamWarps * params.stages * params.slice_bytes + params.row_pitch +
                            SumBytes(params.pieces, params.splits, grid));
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
  return params.places;
}

}  // namespace jaxgraph
