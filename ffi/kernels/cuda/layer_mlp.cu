// The second half of a small model's layer; see layer.h. Each cluster has a slice of the hidden
// units: its blocks compute their shares, send them to one another, and each block multiplies all
// of the slice by its own rows of the down matrix. All weights are on their way before the wait.
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/layer_device.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

// A block's shared memory, in bytes, and its share.
struct MlpPlan {
  LayerMlpParams p;
  RowsLayout wide, down;
  int32_t units, slice;  // hidden units of a block, of its cluster
  int32_t row, hidden, sums, by_warp, barriers, bytes;

  explicit MlpPlan(const LayerMlpParams& params) : p(params) {
    units = p.hidden / (p.clusters * kLayerCluster);
    slice = units * kLayerCluster;
    // Gate and up take turns, 8 columns each: a unit's two numbers are 8 rows apart.
    wide = RowsLayout::Of(RoundUp(units, 8) * 2, p.in.size);
    down = RowsLayout::Of(p.in.size / kLayerCluster, slice);
    down.first = wide.first + wide.bytes();
    row = down.first + down.bytes();
    hidden = row + wide.chunks * 64;
    sums = hidden + down.chunks * 64;
    by_warp = sums + std::max(wide.sum_bytes(), down.sum_bytes());
    barriers = by_warp + kLayerWarps * 4;
    bytes = barriers + 16;
  }
  bool fits() const { return wide.fits() && down.fits() && bytes <= kMaxLayerShared; }
};
__device__ __forceinline__ int GateRow(int unit) { return unit / 8 * 16 + unit % 8; }
__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <typename Math>
__global__ void __launch_bounds__(kLayerThreads, 2)
    LayerMlpKernel(const __grid_constant__ MlpPlan plan) {
#if __CUDA_ARCH__ >= 900
  LetNextStart();
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const LayerMlpParams& p = plan.p;
  float* const sums = reinterpret_cast<float*>(shared + plan.sums);
  const uint32_t weights_there = SharedAddress(shared + plan.barriers), sent = weights_there + 8;
  const int thread = threadIdx.x, lane = thread % kWarp;
  const int rank = blockIdx.x % kLayerCluster, cluster = blockIdx.x / kLayerCluster;
  if (thread < kWarp) {
    if (lane == 0) {
      ExpectFromCluster(weights_there,
                        2 * (2 * plan.units * p.in.size + plan.down.rows * plan.slice));
      ExpectFromCluster(sent, 2 * plan.slice);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    const uint64_t policy = ReadOncePolicy();
    const int64_t first_unit = cluster * plan.slice + rank * plan.units;
    for (int unit = lane; unit < plan.units; unit += kWarp) {
      char* const to = shared + plan.wide.first + GateRow(unit) * plan.wide.pitch;
      FetchRow(to, p.gate.weights + (first_unit + unit) * p.gate.pitch, p.in.size, plan.wide.chunks,
               weights_there, policy);
      FetchRow(to + 8 * plan.wide.pitch, p.up.weights + (first_unit + unit) * p.up.pitch, p.in.size,
               plan.wide.chunks, weights_there, policy);
    }
    const char* const down = p.down.weights + 2 * cluster * plan.slice;
    for (int r = lane; r < plan.down.rows; r += kWarp) {
      FetchRow(shared + plan.down.first + r * plan.down.pitch,
               down + (rank * plan.down.rows + r) * p.down.pitch, plan.slice, plan.down.chunks,
               weights_there, policy);
    }
  }
  ArriveInCluster();

  const uint2 weight = LoadWeight<Math>(p.in);
  // Zeros behind the slice, up to a whole chunk.
  for (int i = plan.slice + thread; i < plan.down.chunks * kChunk; i += kLayerThreads) {
    *reinterpret_cast<uint16_t*>(shared + plan.hidden + PlaceOfElement(i)) = 0;
  }
  RowProduct wide(plan.wide, shared, plan.row, plan.sums);
  RowProduct down(plan.down, shared, plan.hidden, plan.sums);
  const int unit = thread / kLayerCluster * 2, to = thread % kLayerCluster;
  int gate_row = GateRow(unit);  // and the next row
  uint32_t place =
      InBlock(to, SharedAddress(shared + plan.hidden + PlaceOfElement(rank * plan.units + unit)));
  uint32_t counter = InBlock(to, sent);
  float* part = p.parts + int64_t{cluster} * p.in.size + rank * plan.down.rows + thread;
  ComputeNow(gate_row);
  ComputeNow(place);
  ComputeNow(counter);
  ComputeNow(part);
  wide.ComputeNow();
  down.ComputeNow();
  WaitForCluster();
  WaitForLaunchBefore();

  BringNorm<Math, kMaxLayerParts>(p.in, weight, blockIdx.x == gridDim.x - 1, shared + plan.row,
                                  reinterpret_cast<float*>(shared + plan.by_warp));
  WaitForBytes(weights_there, 0);
  wide.Run<Math>();
  __syncthreads();
  if (unit < plan.units) {
    const float2 gates = SumOf<float2>(plan.wide, sums, gate_row);
    const float2 ups = SumOf<float2>(plan.wide, sums, gate_row + 8);
    const float2 gate = Widened<Math>(Math::NarrowPair(gates.x, gates.y));
    const float2 up = Widened<Math>(Math::NarrowPair(ups.x, ups.y));
    float2 sigmoid = {Sigmoid(gate.x), Sigmoid(gate.y)};
    if (p.silu_rounds) sigmoid = Widened<Math>(Math::NarrowPair(sigmoid.x, sigmoid.y));
    float2 silu = {__fmul_rn(gate.x, sigmoid.x), __fmul_rn(gate.y, sigmoid.y)};
    if (p.silu_rounds) silu = Widened<Math>(Math::NarrowPair(silu.x, silu.y));
    const uint32_t units = Math::NarrowPair(__fmul_rn(silu.x, up.x), __fmul_rn(silu.y, up.y));
    Send(place, __uint_as_float(units), counter);
  }
  WaitForClusterBytes(sent);
  __syncthreads();  // the sums have been read
  down.Run<Math>();
  __syncthreads();
  if (thread < plan.down.rows) {
    *part = SumOf<float>(plan.down, sums, thread);
  }
#endif
}

template <typename Math>
__global__ void LayerEndKernel(const __grid_constant__ LayerEndParams p) {
  BeginLaunch();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.size) return;
  float sum = p.parts[i];
  for (int n = 1; n < p.num_parts; ++n) sum += p.parts[int64_t{n} * p.size + i];
  *reinterpret_cast<uint16_t*>(p.out + 2 * i) = Math::Narrow(sum);
  *reinterpret_cast<uint16_t*>(p.sum + 2 * i) = *reinterpret_cast<const uint16_t*>(p.row + 2 * i);
}

template <typename Math>
const KernelInfo kMlp = {"layer_mlp", sizeof(MlpPlan), nullptr,
                         reinterpret_cast<const void*>(&LayerMlpKernel<Math>)};
template <typename Math>
const KernelInfo kEnd = {"layer_end", sizeof(LayerEndParams), nullptr,
                         reinterpret_cast<const void*>(&LayerEndKernel<Math>)};

}  // namespace

bool FitsLayerMlp(const LayerMlpParams& p) {
  if (p.in.size % kChunk != 0 || p.in.size > kMaxLayerRow || p.clusters > kMaxLayerClusters ||
      p.hidden % (2 * kLayerCluster * p.clusters) != 0) {
    return false;
  }
  const MlpPlan plan(p);
  // Two units, sent to one block, have a thread.
  return plan.units / 2 * kLayerCluster <= kLayerThreads && plan.fits();
}

void LaunchLayerMlp(const LayerMlpParams& p, DType dtype, Launches* launches) {
  const MlpPlan plan(p);
  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? &kMlp<BF16Math> : &kMlp<F16Math>;
  launch.grid[0] = static_cast<uint32_t>(p.clusters * kLayerCluster);
  launch.block[0] = kLayerThreads;
  launch.cluster = kLayerCluster;
  launch.shared_bytes = static_cast<uint32_t>(plan.bytes);
  SetParams(plan, &launch);
  launches->push_back(std::move(launch));
}

void LaunchLayerEnd(const LayerEndParams& p, DType dtype, Launches* launches) {
  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? &kEnd<BF16Math> : &kEnd<F16Math>;
  launch.block[0] = 128;
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(p.size, launch.block[0]));
  SetParams(p, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
