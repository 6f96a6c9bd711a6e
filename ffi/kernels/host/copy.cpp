// COPY, and the executor's copies into slots and out of them.
#include <algorithm>
#include <cstring>
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

void RunSlotFill(const void* params, ParallelFor&) {
  const SlotFill& p = *static_cast<const SlotFill*>(params);
  for (uint64_t i = 0; i < p.num_copies; ++i) {
    std::memcpy(p.copies[i].dst, p.copies[i].src, p.copies[i].bytes);
  }
  if (p.num_addresses > 0) std::memcpy(p.table, p.addresses, p.num_addresses * sizeof(char*));
}

const KernelInfo kSlotFill = {"host_slot_fill", sizeof(SlotFill), RunSlotFill};

void RunSlotDrain(const void* params, ParallelFor&) {
  const SlotDrain& p = *static_cast<const SlotDrain*>(params);
  for (uint64_t i = 0; i < p.num_sources; ++i) {
    char* dst;
    std::memcpy(&dst, p.table + i * sizeof dst, sizeof dst);
    std::memcpy(dst, p.sources[i].src, p.sources[i].bytes);
  }
}

const KernelInfo kSlotDrain = {"host_slot_drain", sizeof(SlotDrain), RunSlotDrain};

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

void EmitHostSlotFill(const SlotFill& fill, Launch* launch) {
  launch->kernel = &kSlotFill;
  launch->set_params(fill);
}

void EmitHostSlotDrain(const SlotDrain& drain, Launch* launch) {
  launch->kernel = &kSlotDrain;
  launch->set_params(drain);
}

}  // namespace jaxgraph
