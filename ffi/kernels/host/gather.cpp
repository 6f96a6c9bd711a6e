// GATHER: slices of an operand, at starts that index tensors give.
#include <type_traits>

#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/parallel.h"
#include "ffi/kernels/host/slice_index.h"
#include "ffi/kernels/host/strided_copy.h"

namespace jaxgraph {
namespace {

struct GatherParams {
  char* out;
  const char* operand;
  int64_t out_stride;  // bytes, from slice to slice
  uint64_t fill;
  CopyPlan slice;
  SliceIndex index;
};
static_assert(std::has_unique_object_representations_v<GatherParams>, "equal nodes, equal bytes");

void RunGather(const void* params, ParallelFor& pool) {
  const GatherParams& p = *static_cast<const GatherParams*>(params);
  CopyPlan fill = p.slice;  // the same element everywhere
  std::memset(fill.src_strides, 0, sizeof fill.src_strides);
  const int64_t cost = p.index.count * p.slice.num_bytes();
  ParallelRanges(pool, p.index.count, 1, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* out = p.out + i * p.out_stride;
      int64_t start;
      if (p.index.StartOf(i, &start)) {
        RunCopy(p.slice, out, p.operand + start);
      } else {
        RunCopy(fill, out, reinterpret_cast<const char*>(&p.fill));
      }
    }
  });
}

const KernelInfo kGather = {"host_gather", sizeof(GatherParams), RunGather};

}  // namespace

Status EmitGather(const ResolvedNode& resolved, Launch* launch) {
  const Node& node = *resolved.node;
  if (node.params.size() != sizeof(IndexParams)) {
    return Status(Code::kInvalidArgument, "gather: params of another size");
  }
  const IndexParams params = IndexParamsOf(node);
  const TensorRef &out = node.outs[0], &operand = node.srcs[0];
  GatherParams p{};
  p.out = resolved.outs[0];
  p.operand = resolved.srcs[0];
  p.out_stride = out.strides[0] * static_cast<int64_t>(SizeOf(out.dtype));
  p.fill = params.fill;
  p.slice = PlanCopy(operand.rank, SizeOf(out.dtype), &out.shape[1], &out.strides[1],
                     operand.strides.data());
  p.index = MakeSliceIndex(resolved, params, operand, out, 1);
  launch->kernel = &kGather;
  launch->set_params(p);
  return Status::Ok();
}

}  // namespace jaxgraph
