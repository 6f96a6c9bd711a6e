// MATMUL with few rows and b contiguous along k. A group of lanes (a warp, or less where k is
// short, as in q times a key) owns kColumns columns, whose elements it reads 16 bytes at a time,
// and the rows of a come out of the first-level cache. No barrier, no shared memory.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kThreads = 128;

struct ColumnsParams {
  MatmulParams product;
  int32_t lanes;  // of a group: a power of two up to 32
  int32_t reserved;
};

// More rows: more arithmetic for a byte of b, so more columns share the reads of a.
__host__ __device__ constexpr int ColumnsOf(int rows) { return rows <= 2 ? 2 : 4; }
__host__ __device__ constexpr int UnrollOf(int rows) { return rows <= 2 ? 4 : 2; }

template <typename T, int kRows, int kColumns, int kUnroll>
__device__ __forceinline__ void MultiplyAdd(const char* const (&a)[kRows],
                                            const char* const (&b)[kColumns], int64_t offset,
                                            int64_t step, float (&sum)[kRows][kColumns]) {
  constexpr int kVector = 16 / T::kSize;
  uint4 packed[kUnroll][kColumns];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) packed[u][c] = LoadOnce(b[c] + offset + u * step);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float column[kColumns][kVector];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) T::Unpack(packed[u][c], column[c]);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      float row[kVector];
      T::Unpack(*reinterpret_cast<const uint4*>(a[m] + offset + u * step), row);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[m][c] = fmaf(row[i], column[c][i], sum[m][c]);
      }
    }
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads)
    ColumnsKernel(const __grid_constant__ ColumnsParams cp) {
  constexpr int kColumns = ColumnsOf(kRows), kUnroll = UnrollOf(kRows);
  const MatmulParams& p = cp.product;
  const int lanes = cp.lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  const int64_t first_column = group * kColumns;
  const int first_row = blockIdx.y * kRows;
  const int64_t row_bytes = static_cast<int64_t>(p.k) * T::kSize, step = 16 * lanes;
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
      b[c] = p.b + BatchOffset(p, p.b_batch, batch) + column * p.b_n;
    }
    float sum[kRows][kColumns] = {};
    int64_t offset = 16 * lane;
    for (; offset + (kUnroll - 1) * step < row_bytes; offset += kUnroll * step) {
      MultiplyAdd<T, kRows, kColumns, kUnroll>(a, b, offset, step, sum);
    }
    for (; offset < row_bytes; offset += step) {
      MultiplyAdd<T, kRows, kColumns, 1>(a, b, offset, step, sum);
    }
    char* out = p.out + BatchOffset(p, p.out_batch, batch);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float s = sum[m][c];
        for (int o = lanes / 2; o > 0; o /= 2) s += __shfl_xor_sync(kAllLanes, s, o);
        if (lane == 0 && first_row + m < p.m && first_column + c < p.n) {
          StoreFloat(out + (first_row + m) * p.out_m + (first_column + c) * p.out_n, p.out_dtype,
                     s);
        }
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

}  // namespace

void LaunchColumns(const MatmulParams& p, Launches* launches) {
  const int rows = p.m <= 2 ? p.m : p.m <= 4 ? 4 : kMaxRowsAtOnce;
  ColumnsParams params = {p, 1, 0};
  const int64_t vectors = static_cast<int64_t>(p.k) * SizeOf(p.b_dtype) / 16;
  while (params.lanes < kWarp && params.lanes < vectors) params.lanes *= 2;

  Launch launch;
  launch.kernel = p.b_dtype == DType::kBF16  ? KernelFor<BF16Element>(rows)
                  : p.b_dtype == DType::kF16 ? KernelFor<F16Element>(rows)
                                             : KernelFor<F32Element>(rows);
  const int64_t groups = CeilDiv(p.n, ColumnsOf(rows));
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(groups * params.lanes, kThreads));
  launch.grid[1] = static_cast<uint32_t>(CeilDiv(p.m, rows));
  launch.grid[2] =
      static_cast<uint32_t>(std::min(static_cast<int64_t>(p.batch[0]) * p.batch[1], kMaxGridZ));
  launch.block[0] = kThreads;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
