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
  int32_t units, slice;    // hidden units of a block, of its cluster
  int32_t words, threads;  // of a message to all blocks; a word is two units
  int32_t row, hidden, wide_sums, down_sums, bytes;
  int32_t reserved = 0;

  explicit MlpPlan(const LayerMlpParams& params) : p(params) {
    units = p.hidden / (p.clusters * kLayerCluster);
    slice = units * kLayerCluster;
    words = units % 8 == 0 ? 4 : units % 4 == 0 ? 2 : 1;
    threads = kLayerCluster * std::min(words, 2);
    // Gate and up take turns, 8 columns each: a unit's two numbers are 8 rows apart.
    wide = RowsLayout::Of(RoundUp(units, 8) * 2, p.in.size);
    down = RowsLayout::Of(p.in.size / kLayerCluster, slice);
    wide.first = kBehindBarriers;
    down.first = wide.first + wide.bytes();
    row = down.first + down.bytes();
    hidden = row + wide.chunks * 64;
    // Apart, so that blocks need not meet between the one product and the other.
    wide_sums = hidden + down.chunks * 64;
    down_sums = wide_sums + wide.sum_bytes();
    bytes = down_sums + down.sum_bytes();
  }
  bool fits() const { return wide.fits() && down.fits() && bytes <= kMaxLayerShared; }
};
// Chunks of weights that a warp holds in registers.
constexpr int kHeldWide = 9, kHeldDown = 6;

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ int GateRow(int unit) { return unit / 8 * 16 + unit % 8; }
__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + Exp(-x)); }

// `words` neighbouring lanes, 1, 2 or 4, have a word each. The first of them, of four the first
// two, sends them all at once: a message takes its time, whatever its size.
__device__ __forceinline__ void SendTogether(uint32_t word, int words, bool sends, uint32_t to,
                                             uint32_t barrier) {
  const float2 two = WordsOfTwo(__uint_as_float(word));
  const float4 all = {two.x, two.y, __shfl_xor_sync(kAllLanes, two.x, 2),
                      __shfl_xor_sync(kAllLanes, two.y, 2)};
  if (!sends) return;
  if (words == 4) {
    Send(to, all, barrier);
  } else if (words == 2) {
    Send(to, two, barrier);
  } else {
    Send(to, __uint_as_float(word), barrier);
  }
}
#endif

template <typename Math>
__global__ void __launch_bounds__(kLayerThreads, 2)
    LayerMlpKernel(const __grid_constant__ MlpPlan plan) {
#if __CUDA_ARCH__ >= 900
  LetNextStart();
  extern __shared__ uint4 shared_memory[];
  char* const shared = reinterpret_cast<char*>(shared_memory);
  const LayerMlpParams& p = plan.p;
  const uint32_t weights_there = SharedAddress(shared + kBarriers), sent = weights_there + 8;
  const int thread = threadIdx.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = blockIdx.x % kLayerCluster, cluster = blockIdx.x / kLayerCluster;
  if (thread == 0) {
    ExpectFromCluster(weights_there,
                      2 * (2 * plan.units * p.in.size + plan.down.rows * plan.slice));
    ExpectFromCluster(sent, 2 * plan.slice);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  // A warp's lanes ask one after the other, so all warps do.
  const int asker = lane * kLayerWarps + warp;
  const uint64_t policy = ReadOncePolicy();
  const int64_t first_unit = cluster * plan.slice + rank * plan.units;
  for (int unit = asker; unit < plan.units; unit += kLayerThreads) {
    char* const to = shared + plan.wide.first + GateRow(unit) * plan.wide.pitch;
    FetchRow(to, p.gate.weights + (first_unit + unit) * p.gate.pitch, p.in.size, plan.wide.chunks,
             weights_there, policy);
    FetchRow(to + 8 * plan.wide.pitch, p.up.weights + (first_unit + unit) * p.up.pitch, p.in.size,
             plan.wide.chunks, weights_there, policy);
  }
  const char* const down_weights = p.down.weights + 2 * cluster * plan.slice;
  for (int r = asker; r < plan.down.rows; r += kLayerThreads) {
    FetchRow(shared + plan.down.first + r * plan.down.pitch,
             down_weights + (rank * plan.down.rows + r) * p.down.pitch, plan.slice,
             plan.down.chunks, weights_there, policy);
  }
  ArriveWithBarriers();

  const RowNorm<Math, kMaxLayerParts> norm(p.in);
  // Zeros behind the slice, up to a whole chunk.
  for (int i = plan.slice + thread; i < plan.down.chunks * kChunk; i += kLayerThreads) {
    *reinterpret_cast<uint16_t*>(shared + plan.hidden + 2 * i) = 0;
  }
  RowProduct<kHeldWide> wide(plan.wide, shared, plan.row, plan.wide_sums);
  // Neighbours compute the words of a message, and all of them again for every block, or two, that
  // it goes to.
  const int words = plan.words, message = thread / plan.threads, lane_of = thread % plan.threads;
  const int word = lane_of % words, senders = (words + 1) / 2;
  const int unit = (message * words + word) * 2;
  const int to = (lane_of / words * senders + word) % kLayerCluster;  // who does not send, too
  int sends = unit < plan.units && word < senders;
  int gate_row = GateRow(unit);  // and the next row
  uint32_t place = InBlock(
      to, SharedAddress(shared + plan.hidden + 2 * (rank * plan.units + message * words * 2)));
  uint32_t counter = InBlock(to, sent);
  float* part = p.parts + cluster * kMaxLayerRow + rank * plan.down.rows + thread;
  ComputeNow(sends);
  ComputeNow(gate_row);
  ComputeNow(place);
  ComputeNow(counter);
  ComputeNow(part);
  wide.ComputeNow();
  WaitForCluster();
  WaitForBytes(weights_there, 0);
  wide.Hold();
  WaitForLaunchBefore();

  norm.Bring(blockIdx.x == gridDim.x - 1, shared, shared + plan.row);
  wide.Run<Math>();
  __syncthreads();
  uint32_t units = 0;
  if (unit < plan.units) {
    float2 sum[2];
    SumsOf(plan.wide, shared + plan.wide_sums, gate_row, sum);
    const float2 gate = Widened<Math>(Math::NarrowPair(sum[0].x, sum[0].y));
    const float2 up = Widened<Math>(Math::NarrowPair(sum[1].x, sum[1].y));
    float2 sigmoid = {Sigmoid(gate.x), Sigmoid(gate.y)};
    if (p.silu_rounds) sigmoid = Widened<Math>(Math::NarrowPair(sigmoid.x, sigmoid.y));
    float2 silu = {__fmul_rn(gate.x, sigmoid.x), __fmul_rn(gate.y, sigmoid.y)};
    if (p.silu_rounds) silu = Widened<Math>(Math::NarrowPair(silu.x, silu.y));
    units = Math::NarrowPair(__fmul_rn(silu.x, up.x), __fmul_rn(silu.y, up.y));
  }
  SendTogether(units, words, sends, place, counter);
  RowProduct<kHeldDown> down(plan.down, shared, plan.hidden, plan.down_sums);
  down.ComputeNow();
  down.Hold();
  WaitForClusterBytes(sent);
  down.Run<Math>();
  __syncthreads();
  if (thread < plan.down.rows) {
    float sum[1];
    SumsOf(plan.down, shared + plan.down_sums, thread, sum);
    __stcg(part, sum[0]);
  }
#endif
}

template <typename Math>
__global__ void LayerEndKernel(const __grid_constant__ LayerEndParams p) {
  BeginLaunch();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.size) return;
  float sum = p.parts[i];
  for (int n = 1; n < p.num_parts; ++n) sum += p.parts[n * kMaxLayerRow + i];
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
  const int messages = plan.units / (2 * plan.words);
  return messages * plan.threads <= kLayerThreads && plan.fits();
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
