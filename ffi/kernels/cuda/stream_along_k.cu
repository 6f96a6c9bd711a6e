// Streaming products of matrices that are contiguous along k. A block makes 8 columns of a product
// at once (4 of each where two products are paired): its warps share k, 512 bytes of each column at
// a time. Each warp streams its bytes through its own ring in shared memory and multiplies them on
// tensor cores, for which up to 16 rows are as much work as one. The warps' sums meet in shared
// memory, in order. The ring runs on from one group of columns to the next.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kColumns = 8;      // of a group
constexpr int kStepBytes = 64;   // of a column, in two tensor-core instructions
constexpr int kFullPiece = 512;  // bytes of a column that a warp takes at once, at most

// Columns lie in the ring at a distance that is an odd multiple of 64 bytes: then the 16 bytes of 4
// lanes in each of two columns fall into different banks.
__host__ __device__ constexpr int PitchOf(int bytes) {
  return bytes % 128 == 0 ? bytes + 64 : bytes;
}

#if __CUDA_ARCH__ >= 900
// Which column of which matrix one of a group's 8 places is.
struct Column {
  const StreamedProduct* product;
  int n;
  bool inside;
};
__device__ __forceinline__ Column ColumnOf(const StreamParams& p, int group, int place) {
  Column column;
  if (p.activated != nullptr) {
    column.product = &p.product[place / 4];
    column.n = group * 4 + place % 4;
  } else {
    int i = 0;
    while (i + 1 < p.num_products && group >= p.product[i].end) ++i;
    column.product = &p.product[i];
    column.n = (group - (i > 0 ? p.product[i - 1].end : 0)) * kColumns + place;
  }
  column.inside = column.n < column.product->n;
  return column;
}

// The order in which a warp's pieces arrive.
class Supply {
 public:
  __device__ Supply(const StreamParams& p, char* ring)
      : p_(p),
        ring_(SharedAddress(ring)),
        row_bytes_(2 * p.k),
        pitch_(PitchOf(p.piece_bytes)),
        per_column_(p.piece_bytes / 16),
        policy_(ReadOncePolicy()),
        group_(blockIdx.x),
        at_(First()) {
    if (at_ >= row_bytes_) group_ = p.pieces;  // k is short: nothing to do
  }

  // Starts the copies of the next piece, if there is one; commits them either way.
  __device__ __forceinline__ void Start(int stage) {
    if (group_ < p_.pieces) {
      const int lane = threadIdx.x % kWarp;
      const uint32_t to = ring_ + stage * kColumns * pitch_;
      // A piece is a power of two.
      const int shift = __ffs(per_column_) - 1;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int i = j * kWarp + lane, place = i >> shift, offset = 16 * (i & (per_column_ - 1));
        if (place >= kColumns) break;
        const Column column = ColumnOf(p_, group_, place);
        const bool inside = column.inside && at_ + offset < row_bytes_;
        const char* from = column.product->weights;
        if (inside) from += column.n * column.product->pitch + at_ + offset;
        CopyAsync(to + place * pitch_ + offset, from, inside, policy_);
      }
      at_ += kStreamWarps * p_.piece_bytes;
      if (at_ >= row_bytes_) {
        group_ += gridDim.x;
        at_ = First();
      }
    }
    CommitCopies();
  }

 private:
  __device__ __forceinline__ int First() const {
    return static_cast<int>(threadIdx.x / kWarp) * p_.piece_bytes;
  }

  const StreamParams& p_;
  const uint32_t ring_;
  const int row_bytes_, pitch_, per_column_;
  const uint64_t policy_;
  int group_, at_;
};

// sum += rows * the piece in the ring, of whose columns `bytes` are there, and zeros up to a step.
template <typename T, bool kTall>
__device__ __forceinline__ void MultiplyPiece(const char* piece, int pitch, const char* rows,
                                              int row_pitch, int num_rows, int bytes,
                                              float (&sum)[2][4]) {
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4;
  const char* column = piece + high * pitch + 16 * low;
  const char* row = rows + high * row_pitch + 16 * low;
  const char* tall_row = row + 8 * row_pitch;
  const bool has_row = high < num_rows, has_tall_row = kTall && high + 8 < num_rows;
  const auto step = [&](int at) {
    // Which 4 of k a lane holds does not matter as long as both operands agree.
    const uint4 zero = {0, 0, 0, 0};
    const uint4 w = *reinterpret_cast<const uint4*>(column + at);
    const uint4 x = has_row ? *reinterpret_cast<const uint4*>(row + at) : zero;
    const uint4 y = has_tall_row ? *reinterpret_cast<const uint4*>(tall_row + at) : zero;
    MultiplyAdd<T>(sum[0], x.x, y.x, x.y, y.y, w.x, w.y);
    MultiplyAdd<T>(sum[1], x.z, y.z, x.w, y.w, w.z, w.w);
  };
  if (bytes == kFullPiece) {
#pragma unroll
    for (int at = 0; at < kFullPiece; at += kStepBytes) step(at);
  } else {
    for (int at = 0; at < bytes; at += kStepBytes) step(at);
  }
}

// Sums what the warps have of a group, rounds, stores; in the block's first warps.
template <typename T, int kRows>
__device__ __forceinline__ void FinishGroup(const StreamParams& p, int group,
                                            const float (*by_warp)[kRows][kColumns]) {
  const int place = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  if (static_cast<int>(threadIdx.x / kWarp * kWarp) >= p.m * kColumns) return;
  const int m = min(row, p.m - 1);
  float total = 0;
#pragma unroll
  for (int w = 0; w < kStreamWarps; ++w) total += by_warp[w][m][place];
  const Column column = ColumnOf(p, group, place);
  const StreamedProduct& product = *column.product;
  const bool stores = row < p.m && column.inside;
  if (stores) {
    const int64_t item = product.out_dtype == DType::kF32 ? 4 : 2;
    StoreFloat(product.out + m * product.out_m + column.n * item, product.out_dtype, total);
  }
  if (p.activated != nullptr) {
    const float gate = Rounded<T>(total), up = __shfl_down_sync(kAllLanes, gate, 4);
    if (stores && place < 4) StoreActivated<T>(p, m, column.n, gate, up);
  }
}
#endif

template <typename T, bool kTall>
__global__ void __launch_bounds__(kStreamThreads, 2)
    StreamAlongKKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRows = kTall ? 16 : 8;
  extern __shared__ __align__(128) char shared[];
  __shared__ float by_warp[2][kStreamWarps][kRows][kColumns];
  __shared__ float squares[kStreamWarps][kMaxStreamRows];
  __shared__ __align__(8) uint64_t row_barrier;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int pitch = PitchOf(p.piece_bytes), stage_bytes = kColumns * pitch;
  char* ring = shared + warp * p.stages * stage_bytes;
  char* rows = shared + kStreamWarps * p.stages * stage_bytes;

  Supply supply(p, ring);
  LetNextStart();
  if (!p.fetches_early) WaitForLaunchBefore();
  if (threadIdx.x == 0) InitBarrier(SharedAddress(&row_barrier));
  for (int s = 0; s < p.stages; ++s) supply.Start(s);
  __syncthreads();
  WaitForLaunchBefore();
  BringRows<T>(p, rows, SharedAddress(&row_barrier), squares);

  const int row_bytes = 2 * p.k;
  int stage = 0, buffer = 0;
  for (int group = blockIdx.x; group < p.pieces; group += gridDim.x) {
    float sum[2][4] = {};
    for (int at = warp * p.piece_bytes; at < row_bytes; at += kStreamWarps * p.piece_bytes) {
      WaitForCopies(p.stages - 1);
      __syncwarp();  // the other lanes' copies, too
      MultiplyPiece<T, kTall>(ring + stage * stage_bytes, pitch, rows + at, p.row_pitch, p.m,
                              min(p.piece_bytes, row_bytes - at), sum);
      __syncwarp();  // all lanes have read the piece
      supply.Start(stage);
      if (++stage == p.stages) stage = 0;
    }
    // A lane holds rows lane / 4 (and 8 more) of columns 2 * (lane % 4) and the next.
    const int high = lane / 4, low = lane % 4;
#pragma unroll
    for (int i = 0; i < (kTall ? 4 : 2); ++i) {
      by_warp[buffer][warp][high + i / 2 * 8][2 * low + i % 2] = sum[0][i] + sum[1][i];
    }
    // Two buffers in turn: a block that is two groups ahead has passed the next barrier, as has the
    // warp that was reading here.
    __syncthreads();
    FinishGroup<T, kRows>(p, group, by_warp[buffer]);
    buffer ^= 1;
  }
#endif
}

template <typename T, bool kTall>
const KernelInfo kAlongK = {"stream_along_k", sizeof(StreamParams), nullptr,
                            reinterpret_cast<const void*>(&StreamAlongKKernel<T, kTall>)};

}  // namespace

void LaunchStreamAlongK(StreamParams params, DType dtype, const StreamTuning& tuning,
                        Launches* launches) {
  const bool pair = params.activated != nullptr;
  params.pieces = 0;
  for (int i = 0; i < params.num_products; ++i) {
    params.pieces += static_cast<int32_t>(CeilDiv(params.product[i].n, kColumns));
    params.product[i].end = params.pieces;
  }
  if (pair) params.pieces = static_cast<int32_t>(CeilDiv(params.product[0].n, 4));

  const int64_t row_bytes = 2 * static_cast<int64_t>(params.k);
  params.piece_bytes = kStepBytes;
  while (params.piece_bytes < kFullPiece && params.piece_bytes * kStreamWarps < row_bytes) {
    params.piece_bytes *= 2;
  }
  params.row_pitch = PitchOf(static_cast<int>(CeilDiv(row_bytes, kStepBytes)) * kStepBytes);
  params.splits = 1;

  const int32_t grid = std::min(params.pieces, tuning.blocks);
  const int64_t pieces_per_warp =
      CeilDiv(row_bytes, kStreamWarps * params.piece_bytes) * CeilDiv(params.pieces, grid);
  params.stages = static_cast<int32_t>(
      std::min<int64_t>({pieces_per_warp, tuning.stages, int64_t{kMaxStages}}));
  const auto shared_bytes = [&] {
    return kStreamWarps * params.stages * kColumns * PitchOf(params.piece_bytes) + RowBytes(params);
  };
  while (params.stages > 1 && shared_bytes() > kMaxStreamShared) --params.stages;

  const bool tall = params.m > 8;
  Launch launch;
  launch.kernel = dtype == DType::kBF16
                      ? (tall ? &kAlongK<StreamBF16, true> : &kAlongK<StreamBF16, false>)
                      : (tall ? &kAlongK<StreamF16, true> : &kAlongK<StreamF16, false>);
  launch.grid[0] = static_cast<uint32_t>(grid);
  launch.block[0] = kStreamThreads;
  launch.shared_bytes = static_cast<uint32_t>(shared_bytes());
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
