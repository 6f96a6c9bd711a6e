// The second launch of an ATTENTION whose blocks left what they have in a workspace: puts it
// together, in a fixed order. A block takes one query; its threads share the parts, 4 columns each.
#include <algorithm>

#include "ffi/kernels/cuda/attention_parts.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kSlices = 8;  // of the parts, for which threads of their own care
constexpr int kAtOnce = 5;  // parts that a thread waits for together

struct CombinePlan {
  AttentionArgs args;  // of the outputs
  float* workspace;
  int32_t splits, pieces, heads;  // as in attention_decode.cu
  uint8_t vectors_out;
  uint8_t reserved[3];
};

template <typename Math, int kWidth>
__global__ void __launch_bounds__(kSlices* kWidth / 4)
    AttentionCombineKernel(const __grid_constant__ CombinePlan plan) {
  constexpr int kUnits = kWidth / 4;
  __shared__ Part slices[kSlices][kUnits];
  const AttentionArgs& p = plan.args;
  BeginLaunch();
  const int group = blockIdx.x / plan.heads, head = blockIdx.x % plan.heads;
  const int batch = group / plan.pieces, query = group % plan.pieces * kMmaHeads + head;
  if (query >= p.g) return;
  const int unit = threadIdx.x % kUnits, slice = threadIdx.x / kUnits, column = 4 * unit;
  Part all = NoPart();
  for (int first = slice; first < plan.splits; first += kSlices * kAtOnce) {
    Part parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = first + i * kSlices;
      const int64_t block = static_cast<int64_t>(group) * plan.splits + split;
      parts[i] =
          split < plan.splits
              ? PartRow(plan.workspace, kWidth, block * plan.heads + head).Load(kWidth, column)
              : NoPart();
    }
    all = Combined({all, Combined(parts)});
  }
  slices[slice][unit] = all;
  __syncthreads();
  if (slice > 0) return;
  all = Combined<kSlices>(kSlices, [&](int i) { return slices[i][unit]; });
  const int b0 = batch / p.b1;
  Store<Math>(p, plan.vectors_out, b0, batch - b0 * p.b1, query, column, all);
}

template <typename Math, int kWidth>
const KernelInfo kCombine = {"attention_combine", sizeof(CombinePlan), nullptr,
                             reinterpret_cast<const void*>(&AttentionCombineKernel<Math, kWidth>)};

template <typename Math>
const KernelInfo* KernelFor(const AttentionArgs& args) {
  return args.d == 64 ? &kCombine<Math, 64> : &kCombine<Math, 128>;
}

}  // namespace

void LaunchAttentionCombine(const AttentionArgs& args, const Workspace& workspace, int32_t splits,
                            Launches* launches) {
  CombinePlan plan = {};
  // No address but the outputs' and the sink's: an operand that moves changes one launch only.
  plan.args.out = args.out;
  std::copy(args.out_strides, args.out_strides + 4, plan.args.out_strides);
  plan.args.out_dtype = args.out_dtype;
  plan.args.sink = args.sink;
  std::copy(args.sink_strides, args.sink_strides + 3, plan.args.sink_strides);
  plan.args.sink_dtype = args.sink_dtype;
  plan.args.b1 = args.b1;
  plan.args.g = args.g;
  plan.workspace = reinterpret_cast<float*>(workspace.address);
  plan.splits = splits;
  plan.heads = std::min(args.g, kMmaHeads);
  plan.pieces = static_cast<int32_t>(CeilDiv(args.g, kMmaHeads));
  plan.vectors_out = StoresVectors(args);

  Launch launch;
  launch.kernel =
      args.k_dtype == DType::kBF16 ? KernelFor<BF16Math>(args) : KernelFor<F16Math>(args);
  launch.grid[0] =
      static_cast<uint32_t>(static_cast<int64_t>(args.b0) * args.b1 * plan.pieces * plan.heads);
  launch.block[0] = static_cast<uint32_t>(kSlices * args.d / 4);
  SetParams(plan, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
