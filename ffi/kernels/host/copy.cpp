// COPY.
#include <type_traits>

#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/parallel.h"
#include "ffi/kernels/host/strided_copy.h"

namespace jaxgraph {
namespace {

struct CopyParams {
  char* dst;
  const char* src;
  CopyPlan plan;
};
static_assert(std::has_unique_object_representations_v<CopyParams>, "equal nodes, equal bytes");

void RunCopyNode(const void* params, ParallelFor& pool) {
  const CopyParams& p = *static_cast<const CopyParams*>(params);
  // Cut along the first dimension, whose pieces never share an element.
  ParallelRanges(pool, p.plan.shape[0], 1, p.plan.num_bytes(), [&](int64_t begin, int64_t end) {
    CopyPlan part = p.plan;
    part.shape[0] = end - begin;
    RunCopy(part, p.dst + begin * part.dst_strides[0], p.src + begin * part.src_strides[0]);
  });
}

const KernelInfo kCopy = {"host_copy", sizeof(CopyParams), RunCopyNode};

}  // namespace

Status EmitCopy(const ResolvedNode& resolved, Launch* launch) {
  const TensorRef &dst = resolved.node->outs[0], &src = resolved.node->srcs[0];
  CopyParams p{resolved.outs[0], resolved.srcs[0],
               PlanCopy(dst.rank, SizeOf(dst.dtype), dst.shape.data(), dst.strides.data(),
                        src.strides.data())};
  launch->kernel = &kCopy;
  launch->set_params(p);
  return Status::Ok();
}

}  // namespace jaxgraph
