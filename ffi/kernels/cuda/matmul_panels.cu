// MATMUL with few rows and b contiguous along n. A block owns a panel of 128 bytes of columns; each
// of its warps reads four rows of the panel at a time, 16 bytes a lane. K is split over the warps
// and over the blocks of a cluster, whose sums meet in the memory of its first block, in order.
#include <cooperative_groups.h>

#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kLanesAcross = 8;                    // 8 x 16 bytes
constexpr int kRowsAtOnce = kWarp / kLanesAcross;  // rows of b that a warp reads in one go
constexpr int kMaxCluster = 8;                     // what every device with clusters grants
constexpr int kMinRowsPerBlock = kWarps * kRowsAtOnce;

struct PanelsParams {
  MatmulParams product;
  int32_t splits;  // blocks of a cluster
  int32_t reserved;
};

__host__ __device__ constexpr int UnrollOf(int rows) { return rows <= 4 ? 4 : 2; }

// Blocks that must fit on a multiprocessor at once: a bound on registers.
__host__ __device__ constexpr int BlocksOf(int rows) { return rows <= 2 ? 4 : 2; }

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, BlocksOf(kRows))
    PanelsKernel(const __grid_constant__ PanelsParams pp) {
  BeginLaunch();
  constexpr int kVector = 16 / T::kSize, kPanel = kLanesAcross * kVector;
  constexpr int kUnroll = UnrollOf(kRows);
  __shared__ float by_warp[kWarps][kRows][kPanel];
  __shared__ float by_block[kRows][kPanel];
  const MatmulParams& p = pp.product;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int split = blockIdx.x % pp.splits;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x / pp.splits) * kPanel;
  const int64_t column = first_column + (lane % kLanesAcross) * kVector;
  const bool inside = column < p.n;
  const int first_row = blockIdx.y * kRows;

  const int per_block = (p.k + pp.splits - 1) / pp.splits;
  const int begin = min(split * per_block, p.k), end = min(begin + per_block, p.k);
  for (int batch = blockIdx.z; batch < p.batch[0] * p.batch[1]; batch += gridDim.z) {
    const char* b = p.b + MatrixOffset(p, batch) + (inside ? column : 0) * T::kSize;
    const char* a[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      a[m] = p.a + BatchOffset(p, p.a_batch, batch) + min(first_row + m, p.m - 1) * p.a_m;
    }
    float sum[kRows][kVector] = {};
    for (int k = begin + warp * kRowsAtOnce * kUnroll + lane / kLanesAcross; k < end;
         k += kWarps * kRowsAtOnce * kUnroll) {
      uint4 packed[kUnroll];
      float x[kUnroll][kRows];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int row = k + u * kRowsAtOnce;
        packed[u] = row < end ? LoadOnce(b + row * p.b_k) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int row = k + u * kRowsAtOnce;
#pragma unroll
        for (int m = 0; m < kRows; ++m) x[u][m] = row < end ? T::Load(a[m] + row * p.a_k) : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float values[kVector];
        T::Unpack(packed[u], values);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[m][i] = fmaf(x[u][m], values[i], sum[m][i]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        float s = sum[m][i];
#pragma unroll
        for (int o = kLanesAcross; o < kWarp; o *= 2) s += __shfl_xor_sync(kAllLanes, s, o);
        if (lane < kLanesAcross) by_warp[warp][m][lane * kVector + i] = s;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kPanel; i += kThreads) {
      float s = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) s += by_warp[w][i / kPanel][i % kPanel];
      by_block[i / kPanel][i % kPanel] = s;
    }
#if __CUDA_ARCH__ >= 900
    if (pp.splits > 1) {
      cooperative_groups::this_cluster().sync();
    } else {
      __syncthreads();
    }
#else
    __syncthreads();
#endif
    if (split == 0) {
      for (int i = threadIdx.x; i < kRows * kPanel; i += kThreads) {
        const int m = i / kPanel, n = i % kPanel;
        float s = by_block[m][n];
#if __CUDA_ARCH__ >= 900
        for (int r = 1; r < pp.splits; ++r) {
          s += *cooperative_groups::this_cluster().map_shared_rank(&by_block[m][n], r);
        }
#endif
        if (first_row + m < p.m && first_column + n < p.n) {
          char* out = p.out + BatchOffset(p, p.out_batch, batch);
          StoreFloat(out + (first_row + m) * p.out_m + (first_column + n) * p.out_n, p.out_dtype,
                     s);
        }
      }
    }
    // The sums are read: only now may a block leave or overwrite them.
#if __CUDA_ARCH__ >= 900
    if (pp.splits > 1) {
      cooperative_groups::this_cluster().sync();
    } else {
      __syncthreads();
    }
#else
    __syncthreads();
#endif
  }
}

template <typename T, int kRows>
const KernelInfo kPanels = {"matmul_panels", sizeof(PanelsParams), nullptr,
                            reinterpret_cast<const void*>(&PanelsKernel<T, kRows>)};

template <typename T>
const KernelInfo* KernelFor(int rows) {
  return rows == 1   ? &kPanels<T, 1>
         : rows == 2 ? &kPanels<T, 2>
         : rows <= 4 ? &kPanels<T, 4>
                     : &kPanels<T, 8>;
}

// Two for each of Hopper's 132 multiprocessors. A constant, not asked of the device: equal nodes
// must give equal launches.
constexpr int64_t kWantedBlocks = 264;

}  // namespace

void LaunchPanels(const MatmulParams& p, bool clusters, Launches* launches) {
  const int rows = p.m <= 2 ? p.m : p.m <= 4 ? 4 : kMaxRowsAtOnce;
  const int64_t panels = CeilDiv(p.n * static_cast<int64_t>(SizeOf(p.b_dtype)), 16 * kLanesAcross);
  const int64_t pieces = CeilDiv(p.m, rows),
                batches = static_cast<int64_t>(p.batch[0]) * p.batch[1];
  PanelsParams params = {p, 1, 0};
  while (clusters && params.splits < kMaxCluster &&
         panels * pieces * batches * params.splits < kWantedBlocks &&
         p.k / (2 * params.splits) >= kMinRowsPerBlock) {
    params.splits *= 2;
  }

  Launch launch;
  launch.kernel = p.b_dtype == DType::kBF16  ? KernelFor<BF16Element>(rows)
                  : p.b_dtype == DType::kF16 ? KernelFor<F16Element>(rows)
                                             : KernelFor<F32Element>(rows);
  launch.grid[0] = static_cast<uint32_t>(panels * params.splits);
  launch.grid[1] = static_cast<uint32_t>(pieces);
  launch.grid[2] = static_cast<uint32_t>(std::min(batches, kMaxGridZ));
  launch.block[0] = kThreads;
  launch.cluster = static_cast<uint32_t>(params.splits);
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
