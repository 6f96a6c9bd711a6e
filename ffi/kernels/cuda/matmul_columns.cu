// MATMUL with few rows and b contiguous along k. A group of lanes (a warp, or less where k is
// short, as in q times a key) owns kColumns columns, whose elements it reads 16 bytes at a time;
// the rows of a come out of the first-level cache. Where columns are few, a block's warps share
// them.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;

struct ColumnsParams {
  MatmulParams product;
  int32_t lanes;   // of a group: a power of two up to 32
  int32_t splits;  // warps that share a group's columns: 1, 2 or 4; more than 1 needs 32 lanes
};

// More rows: more arithmetic for a byte of b, so more columns share the reads of a.
__host__ __device__ constexpr int ColumnsOf(int rows) { return rows <= 2 ? 2 : 4; }
__host__ __device__ constexpr int UnrollOf(int rows) { return rows <= 2 ? 4 : 2; }

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads)
    ColumnsKernel(const __grid_constant__ ColumnsParams cp) {
  BeginLaunch();
  constexpr int kColumns = ColumnsOf(kRows), kUnroll = UnrollOf(kRows);
  constexpr int kVector = 16 / T::kSize;
  __shared__ float by_warp[kWarps][kRows][kColumns];
  const MatmulParams& p = cp.product;
  const int lanes = cp.lanes, splits = cp.splits;
  const int lane = threadIdx.x & (lanes - 1), warp = threadIdx.x / kWarp;
  const int split = warp & (splits - 1);
  const int64_t group =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / (lanes * splits);
  const int64_t first_column = group * kColumns;
  const int first_row = blockIdx.y * kRows;
  const int64_t row_bytes = static_cast<int64_t>(p.k) * T::kSize, step = 16 * lanes * splits;
  for (int batch = blockIdx.z; batch < p.batch[0] * p.batch[1]; batch += gridDim.z) {
    // Rows and columns beyond the end repeat the last one and are not stored.
    const char* a[kRows];
    const char* b[kColumns];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      a[m] = p.a + BatchOffset(p, p.a_batch, batch) + min(first_row + m, p.m - 1) * p.a_m;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int64_t column = min(first_column + c, static_cast<int64_t>(p.n - 1));
      b[c] = p.b + MatrixOffset(p, batch) + column * p.b_n;
    }
    float sum[kRows][kColumns] = {};
    for (int64_t at = 16 * (split * lanes + lane); at < row_bytes; at += kUnroll * step) {
      uint4 packed[kUnroll][kColumns];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool inside = at + u * step < row_bytes;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          packed[u][c] = inside ? LoadOnce(b[c] + at + u * step) : uint4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at + u * step >= row_bytes) break;
        float column[kColumns][kVector];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) T::Unpack(packed[u][c], column[c]);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          float row[kVector];
          T::Unpack(*reinterpret_cast<const uint4*>(a[m] + at + u * step), row);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum[m][c] = fmaf(row[i], column[c][i], sum[m][c]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        for (int o = lanes / 2; o > 0; o /= 2) {
          sum[m][c] += __shfl_xor_sync(kAllLanes, sum[m][c], o);
        }
      }
    }
    if (splits > 1) {
      if (lane == 0) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) by_warp[warp][m][c] = sum[m][c];
        }
      }
      __syncthreads();
      if (split == 0 && lane == 0) {
        for (int s = 1; s < splits; ++s) {
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) sum[m][c] += by_warp[warp + s][m][c];
          }
        }
      }
      __syncthreads();
    }
    if (split != 0 || lane != 0) continue;
    char* out = p.out + BatchOffset(p, p.out_batch, batch);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (first_row + m >= p.m || first_column + c >= p.n) continue;
        StoreFloat(out + (first_row + m) * p.out_m + (first_column + c) * p.out_n, p.out_dtype,
                   sum[m][c]);
      }
    }
  }
}

template <typename T, int kRows>
const KernelInfo kColumns = {"matmul_columns", sizeof(ColumnsParams), nullptr,
                             reinterpret_cast<const void*>(&ColumnsKernel<T, kRows>)};

template <typename T>
const KernelInfo* KernelFor(int rows) {
  return rows == 1   ? &kColumns<T, 1>
         : rows == 2 ? &kColumns<T, 2>
         : rows <= 4 ? &kColumns<T, 4>
                     : &kColumns<T, 8>;
}

// 32 for each of Hopper's 132 multiprocessors. A constant, not asked of the device: equal nodes
// must give equal launches.
constexpr int64_t kWantedWarps = 32 * 132;

}  // namespace

void LaunchColumns(const MatmulParams& p, Launches* launches) {
  const int rows = p.m <= 2 ? p.m : p.m <= 4 ? 4 : kMaxRowsAtOnce;
  ColumnsParams params = {p, 1, 1};
  const int64_t vectors = static_cast<int64_t>(p.k) * SizeOf(p.b_dtype) / 16;
  while (params.lanes < kWarp && params.lanes < vectors) params.lanes *= 2;

  const int64_t groups = CeilDiv(p.n, ColumnsOf(rows));
  const int64_t pieces = CeilDiv(p.m, rows);
  const int64_t batches = static_cast<int64_t>(p.batch[0]) * p.batch[1];
  while (params.splits < kWarps && groups * pieces * batches * params.splits < kWantedWarps &&
         vectors >= 2 * kWarp * 2 * params.splits) {
    params.splits *= 2;
  }

  Launch launch;
  launch.kernel = p.b_dtype == DType::kBF16  ? KernelFor<BF16Element>(rows)
                  : p.b_dtype == DType::kF16 ? KernelFor<F16Element>(rows)
                                             : KernelFor<F32Element>(rows);
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(groups * params.lanes * params.splits, kThreads));
  launch.grid[1] = static_cast<uint32_t>(pieces);
  launch.grid[2] = static_cast<uint32_t>(std::min(batches, kMaxGridZ));
  launch.block[0] = kThreads;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
