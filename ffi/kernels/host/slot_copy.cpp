// The executor's copies into slots and out of them.
#include <cstring>

#include "ffi/kernels/host/ops.h"

namespace jaxgraph {
namespace {

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

void EmitHostSlotFill(const SlotFill& fill, Launch* launch) {
  launch->kernel = &kSlotFill;
  launch->set_params(fill);
}

void EmitHostSlotDrain(const SlotDrain& drain, Launch* launch) {
  launch->kernel = &kSlotDrain;
  launch->set_params(drain);
}

}  // namespace jaxgraph
