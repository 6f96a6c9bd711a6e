// MATMUL with few rows, any strides and any float dtypes: the kernels that are always right. Which
// of the two takes a product decides alone how well its reads of b coalesce.
#include <algorithm>
#include <cstdlib>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

// A warp an element of the output: its lanes walk along k.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) AlongKKernel(const __grid_constant__ MatmulParams p) {
  BeginLaunch();
  const int lane = threadIdx.x % kWarp, m = blockIdx.y;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (n >= p.n) return;
  for (int batch = blockIdx.z; batch < p.batch[0] * p.batch[1]; batch += gridDim.z) {
    const char* a = p.a + BatchOffset(p, p.a_batch, batch) + m * p.a_m;
    const char* b = p.b + MatrixOffset(p, batch) + n * p.b_n;
    Acc sum = 0;
    for (int k = lane; k < p.k; k += kWarp) {
      sum += LoadFloat<Acc>(a + k * p.a_k, p.a_dtype) * LoadFloat<Acc>(b + k * p.b_k, p.b_dtype);
    }
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
    char* out = p.out + BatchOffset(p, p.out_batch, batch) + m * p.out_m + n * p.out_n;
    if (lane == 0) StoreFloat(out, p.out_dtype, sum);
  }
}

// A lane an element of the output: the warps of a block share k.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) AlongNKernel(const __grid_constant__ MatmulParams p) {
  BeginLaunch();
  __shared__ Acc by_warp[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, m = blockIdx.y;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const bool inside = n < p.n;
  for (int batch = blockIdx.z; batch < p.batch[0] * p.batch[1]; batch += gridDim.z) {
    const char* a = p.a + BatchOffset(p, p.a_batch, batch) + m * p.a_m;
    const char* b = p.b + MatrixOffset(p, batch) + (inside ? n : 0) * p.b_n;
    Acc sum = 0;
#pragma unroll 4
    for (int k = warp; k < p.k; k += kWarps) {
      sum += LoadFloat<Acc>(a + k * p.a_k, p.a_dtype) * LoadFloat<Acc>(b + k * p.b_k, p.b_dtype);
    }
    by_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && inside) {
      Acc total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += by_warp[w][lane];
      char* out = p.out + BatchOffset(p, p.out_batch, batch) + m * p.out_m + n * p.out_n;
      StoreFloat(out, p.out_dtype, total);
    }
    __syncthreads();
  }
}

template <typename Acc>
const KernelInfo kAlongK = {"matmul_along_k", sizeof(MatmulParams), nullptr,
                            reinterpret_cast<const void*>(&AlongKKernel<Acc>)};
template <typename Acc>
const KernelInfo kAlongN = {"matmul_along_n", sizeof(MatmulParams), nullptr,
                            reinterpret_cast<const void*>(&AlongNKernel<Acc>)};

}  // namespace

void LaunchStrided(const MatmulParams& p, Launches* launches) {
  const bool f64 =
      p.a_dtype == DType::kF64 || p.b_dtype == DType::kF64 || p.out_dtype == DType::kF64;
  const bool along_k = std::abs(p.b_k) <= std::abs(p.b_n) || p.n == 1;
  Launch launch;
  launch.kernel = along_k ? (f64 ? &kAlongK<double> : &kAlongK<float>)
                          : (f64 ? &kAlongN<double> : &kAlongN<float>);
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(p.n, along_k ? kWarps : kWarp));
  launch.grid[1] = static_cast<uint32_t>(p.m);
  launch.grid[2] =
      static_cast<uint32_t>(std::min(static_cast<int64_t>(p.batch[0]) * p.batch[1], kMaxGridZ));
  launch.block[0] = kThreads;
  SetParams(p, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
