// ATTENTION of any strides and dtypes. A block owns one query and up to kThreads columns of its
// output; in turns its threads are positions (scores) and columns (the weighted sum).
#include <algorithm>

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

// The same value in all threads; in a fixed order.
template <typename Real, typename F>
__device__ __forceinline__ Real AcrossBlock(Real mine, Real* by_warp, F combine) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    mine = combine(mine, __shfl_xor_sync(kAllLanes, mine, o));
  }
  if (threadIdx.x % kWarp == 0) by_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Real all = by_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = combine(all, by_warp[w]);
  __syncthreads();
  return all;
}

template <typename W, typename Real>
__device__ __forceinline__ W RawBits(Real raw) {
  if constexpr (sizeof(Real) == 8) {
    return static_cast<W>(__double_as_longlong(raw));
  } else {
    return FromFloat<W>(raw);
  }
}
template <typename W, typename Real>
__device__ __forceinline__ Real MaskedValue(DType dtype, W bits) {
  if constexpr (sizeof(Real) == 8) {
    if (dtype == DType::kF64) return __longlong_as_double(static_cast<long long>(bits));
  }
  return AsFloat(bits);
}

template <typename W, typename Real>
__global__ void __launch_bounds__(kThreads)
    AttentionStridedKernel(const __grid_constant__ ProgramParams<AttentionArgs> params) {
  __shared__ uint4 shared_expr[sizeof(ExprParams) / sizeof(uint4)];
  __shared__ Real weights[kThreads];
  __shared__ Real by_warp[kWarps];
  const AttentionArgs& p = params.plan;
  const ExprParams& expr = ToShared(params.program, shared_expr);
  BeginLaunch();

  const int chunks = (p.e + kThreads - 1) / kThreads;
  int64_t unit = blockIdx.x;
  const int column = static_cast<int>(unit % chunks) * kThreads + threadIdx.x;
  unit /= chunks;
  const int g = static_cast<int>(unit % p.g);
  unit /= p.g;
  const int b1 = static_cast<int>(unit % p.b1), b0 = static_cast<int>(unit / p.b1);
  const char* q = p.q + b0 * p.q_strides[0] + b1 * p.q_strides[1] + g * p.q_strides[2];
  const char* k = p.k + b0 * p.k_strides[0] + b1 * p.k_strides[1];
  const char* v = p.v + b0 * p.v_strides[0] + b1 * p.v_strides[1] + column * p.v_strides[3];

  const int end = LastPosition(p, b0, b1, g) + 1;
  Real peak = -INFINITY, total = 0, sum = 0;
  for (int first = 0; first < end; first += kThreads) {
    const int position = first + threadIdx.x;
    Real score = -INFINITY;
    if (position < end) {
      Real raw = 0;
      for (int i = 0; i < p.d; ++i) {
        raw += LoadFloat<Real>(q + i * p.q_strides[3], p.q_dtype) *
               LoadFloat<Real>(k + i * p.k_strides[2] + position * p.k_strides[3], p.k_dtype);
      }
      const ScoreSpace<1> space = {b0, b1, position, {g}};
      const Lanes<W, 1> masked =
          MaskScores<W, 1>(expr, space, Lanes<W, 1>{{RawBits<W, Real>(raw)}});
      score = MaskedValue<W, Real>(p.masked_dtype, masked.lane[0]);
    }
    const Real above = AcrossBlock(score, by_warp, [](Real a, Real b) { return fmax(a, b); });
    const Real next = fmax(peak, above);
    const Real shift = PeakOrZero(next), scale = exp(peak - shift);
    peak = next;
    weights[threadIdx.x] = exp(score - shift);
    total = total * scale +
            AcrossBlock(weights[threadIdx.x], by_warp, [](Real a, Real b) { return a + b; });
    sum *= scale;
    if (column < p.e) {
      const int count = min(kThreads, end - first);
      for (int i = 0; i < count; ++i) {
        sum += weights[i] *
               LoadFloat<Real>(v + static_cast<int64_t>(first + i) * p.v_strides[2], p.v_dtype);
      }
    }
    __syncthreads();  // the weights are read
  }
  if (column >= p.e) return;
  sum *= TakeSink(p, b0, b1, g, peak, &total);
  StoreFloat(p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] + g * p.out_strides[2] +
                 column * p.out_strides[3],
             p.out_dtype, p.s == 0 ? Real(0) : sum / total);
}

template <typename W, typename Real>
const KernelInfo kStrided = {"attention_strided", sizeof(ProgramParams<AttentionArgs>), nullptr,
                             reinterpret_cast<const void*>(&AttentionStridedKernel<W, Real>)};

}  // namespace

void LaunchAttentionStrided(const AttentionNode& node, Launches* launches) {
  const AttentionArgs& args = node.args;
  Launch launch;
  launch.kernel = args.in_double ? &kStrided<uint64_t, double>
                  : args.wide    ? &kStrided<uint64_t, float>
                                 : &kStrided<uint32_t, float>;
  launch.grid[0] = static_cast<uint32_t>(static_cast<int64_t>(args.b0) * args.b1 * args.g *
                                         CeilDiv(args.e, kThreads));
  launch.block[0] = kThreads;
  SetParams(ProgramParams<AttentionArgs>{node.program, args}, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
