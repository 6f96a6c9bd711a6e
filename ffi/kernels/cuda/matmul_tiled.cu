// MATMUL with many rows, any strides and any float dtypes: tiles of 64 x 64 through shared memory,
// 4 x 4 sums a thread. Plain arithmetic, no tensor cores: large products are better left to XLA.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kTile = 64;
constexpr int kDepth = 16;  // of k at once
constexpr int kSide = 4;    // sums of a thread in each direction
constexpr int kAcross = kTile / kSide;
constexpr int kThreads = kAcross * kAcross;

struct TiledParams {
  MatmulParams product;
  bool a_along_k, b_along_k;  // in which direction neighbouring threads read
  uint8_t reserved[2];
  int32_t tiles_n;
};

// Reads a tile of kTile x kDepth elements (zero beyond the ends) as tile[k][i].
template <typename Acc>
__device__ __forceinline__ void LoadTile(const char* from, DType dtype, int64_t stride_i,
                                         int64_t stride_k, int size_i, int size_k, bool along_k,
                                         Acc (&tile)[kDepth][kTile + 1]) {
  for (int e = threadIdx.x; e < kTile * kDepth; e += kThreads) {
    const int i = along_k ? e / kDepth : e % kTile, k = along_k ? e % kDepth : e / kTile;
    tile[k][i] = i < size_i && k < size_k
                     ? LoadFloat<Acc>(from + i * stride_i + k * stride_k, dtype)
                     : Acc(0);
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kThreads) TiledKernel(const __grid_constant__ TiledParams tp) {
  BeginLaunch();
  __shared__ Acc tile_a[kDepth][kTile + 1];
  __shared__ Acc tile_b[kDepth][kTile + 1];
  const MatmulParams& p = tp.product;
  const int m0 = static_cast<int>(blockIdx.x / tp.tiles_n) * kTile;
  const int n0 = static_cast<int>(blockIdx.x % tp.tiles_n) * kTile;
  const int mi = threadIdx.x / kAcross, ni = threadIdx.x % kAcross;
  for (int batch = blockIdx.z; batch < p.batch[0] * p.batch[1]; batch += gridDim.z) {
    const char* a = p.a + BatchOffset(p, p.a_batch, batch) + m0 * p.a_m;
    const char* b = p.b + MatrixOffset(p, batch) + n0 * p.b_n;
    Acc sum[kSide][kSide] = {};
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
      const int depth = static_cast<int>(min(static_cast<int64_t>(kDepth), p.k - k0));
      LoadTile(a + k0 * p.a_k, p.a_dtype, p.a_m, p.a_k, p.m - m0, depth, tp.a_along_k, tile_a);
      LoadTile(b + k0 * p.b_k, p.b_dtype, p.b_n, p.b_k, p.n - n0, depth, tp.b_along_k, tile_b);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        Acc x[kSide], y[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) x[i] = tile_a[k][mi + i * kAcross];
#pragma unroll
        for (int i = 0; i < kSide; ++i) y[i] = tile_b[k][ni + i * kAcross];
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) sum[i][j] += x[i] * y[j];
        }
      }
      __syncthreads();
    }
    char* out = p.out + BatchOffset(p, p.out_batch, batch);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const int m = m0 + mi + i * kAcross, n = n0 + ni + j * kAcross;
        if (m < p.m && n < p.n) {
          StoreFloat(out + m * p.out_m + n * p.out_n, p.out_dtype, sum[i][j]);
        }
      }
    }
  }
}

template <typename Acc>
const KernelInfo kTiled = {"matmul_tiled", sizeof(TiledParams), nullptr,
                           reinterpret_cast<const void*>(&TiledKernel<Acc>)};

}  // namespace

void LaunchTiled(const MatmulParams& p, Launches* launches) {
  const bool f64 =
      p.a_dtype == DType::kF64 || p.b_dtype == DType::kF64 || p.out_dtype == DType::kF64;
  TiledParams params = {};
  params.product = p;
  params.a_along_k = std::abs(p.a_k) <= std::abs(p.a_m);
  params.b_along_k = std::abs(p.b_k) <= std::abs(p.b_n);
  params.tiles_n = static_cast<int32_t>(CeilDiv(p.n, kTile));
  Launch launch;
  launch.kernel = f64 ? &kTiled<double> : &kTiled<float>;
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(p.m, kTile) * params.tiles_n);
  launch.grid[2] =
      static_cast<uint32_t>(std::min(static_cast<int64_t>(p.batch[0]) * p.batch[1], kMaxGridZ));
  launch.block[0] = kThreads;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
