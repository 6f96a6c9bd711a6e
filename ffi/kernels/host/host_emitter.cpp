#include "ffi/kernels/host/host_emitter.h"

#include "ffi/kernels/host/ops.h"

namespace jaxgraph {
namespace {

Status EmitNode(const ResolvedNode& node, Launch* launch) {
  switch (node.node->op) {
    case Op::kExpr:
    case Op::kRow:
      return EmitExpr(node, launch);
    case Op::kMatmul:
      return EmitMatmul(node, launch);
    case Op::kGather:
      return EmitGather(node, launch);
    case Op::kSetRows:
      return EmitSetRows(node, launch);
    case Op::kCopy:
      return EmitCopy(node, launch);
    case Op::kAttention:
      return EmitAttention(node, launch);
    case Op::kSort:
      return EmitSort(node, launch);
    case Op::kView:
      break;
  }
  return Status(Code::kUnsupported,
                std::string("the host has no kernel for ") + NameOf(node.node->op));
}

class HostEmitterImpl final : public Emitter {
 public:
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool /*fusion*/,
              std::vector<Launch>* launches, size_t* covered) const override {
    *covered = 1;
    const ResolvedNode& node = nodes[first];
    if (node.node->op == Op::kView) return Status::Ok();
    Launch launch;
    JAXGRAPH_RETURN_IF_ERROR(EmitNode(node, &launch));
    launch.first_node = static_cast<uint32_t>(first);
    launch.node_count = 1;
    launch.region = node.node->region;
    launch.branch = node.node->branch;
    launches->push_back(std::move(launch));
    return Status::Ok();
  }

  Status EmitSlotFill(const SlotFill& fill, Launch* launch) const override {
    EmitHostSlotFill(fill, launch);
    return Status::Ok();
  }

  Status EmitSlotDrain(const SlotDrain& drain, Launch* launch) const override {
    EmitHostSlotDrain(drain, launch);
    return Status::Ok();
  }

  bool Capturable(const Node& node) const override {
    return (node.flags & kFlagNotCapturable) == 0;
  }
};

}  // namespace

const Emitter& HostEmitter() {
  static const HostEmitterImpl emitter;
  return emitter;
}

}  // namespace jaxgraph
