#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_argmax.h"
#include "ffi/kernels/cuda/stream_candidate.cuh"

namespace jaxgraph {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kAtOnce = 5;  // candidates of a thread that are on their way together

// A block a row.
__global__ void __launch_bounds__(kThreads)
    ArgmaxKernel(const __grid_constant__ StreamArgmaxParams p) {
  __shared__ StreamCandidate by_warp[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const StreamCandidate* const row = p.candidates + static_cast<int64_t>(blockIdx.x) * p.places;
  BeginLaunch();
  StreamCandidate best = NoCandidate();
  for (int first = threadIdx.x; first < p.places; first += kAtOnce * kThreads) {
    StreamCandidate some[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kThreads;
      some[j] = NoCandidate();
      if (i >= p.places) continue;
      const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(row) + i);
      some[j] = {__uint_as_float(bits.x), bits.y};
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) best = Better(best, some[j]);
  }
  best = BestOfWarp(best);
  if (lane == 0) by_warp[warp] = best;
  __syncthreads();
  if (warp != 0) return;
  best = BestOfWarp<kWarps>(by_warp[lane % kWarps]);
  if (lane == 0) *reinterpret_cast<uint32_t*>(p.out + blockIdx.x * p.pitch) = best.where;
}

const KernelInfo kArgmax = {"stream_argmax", sizeof(StreamArgmaxParams), nullptr,
                            reinterpret_cast<const void*>(&ArgmaxKernel)};

}  // namespace

void LaunchStreamArgmax(const StreamArgmaxParams& params, Launches* launches) {
  Launch launch;
  launch.kernel = &kArgmax;
  launch.grid[0] = static_cast<uint32_t>(params.rows);
  launch.block[0] = kThreads;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
