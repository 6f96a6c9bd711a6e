// SET_ROWS: slices written in place, at starts that index tensors give.
#include <type_traits>

#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/slice_index.h"
#include "ffi/kernels/host/strided_copy.h"

namespace jaxgraph {
namespace {

struct SetRowsParams {
  char* dest;
  const char* updates;
  int64_t update_stride;  // bytes, from slice to slice
  CopyPlan slice;
  SliceIndex index;
};
static_assert(std::has_unique_object_representations_v<SetRowsParams>, "equal nodes, equal bytes");

// On one thread: slices may overlap, and then the last one wins.
void RunSetRows(const void* params, ParallelFor&) {
  const SetRowsParams& p = *static_cast<const SetRowsParams*>(params);
  for (int64_t i = 0; i < p.index.count; ++i) {
    int64_t start;
    if (!p.index.StartOf(i, &start)) continue;
    RunCopy(p.slice, p.dest + start, p.updates + i * p.update_stride);
  }
}

const KernelInfo kSetRows = {"host_set_rows", sizeof(SetRowsParams), RunSetRows};

}  // namespace

Status EmitSetRows(const ResolvedNode& resolved, Launch* launch) {
  const Node& node = *resolved.node;
  if (node.params.size() != sizeof(IndexParams)) {
    return Status(Code::kInvalidArgument, "set_rows: params of another size");
  }
  const IndexParams params = IndexParamsOf(node);
  const TensorRef &dest = node.outs[0], &updates = node.srcs[1];
  SetRowsParams p{};
  p.dest = resolved.outs[0];
  p.updates = resolved.srcs[1];
  p.update_stride = updates.strides[0] * static_cast<int64_t>(SizeOf(updates.dtype));
  p.slice = PlanCopy(dest.rank, SizeOf(dest.dtype), &updates.shape[1], dest.strides.data(),
                     &updates.strides[1]);
  p.index = MakeSliceIndex(resolved, params, dest, updates, 2);
  launch->kernel = &kSetRows;
  launch->set_params(p);
  return Status::Ok();
}

}  // namespace jaxgraph
