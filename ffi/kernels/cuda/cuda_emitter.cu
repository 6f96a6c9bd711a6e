#include <algorithm>
#include <climits>

#include "ffi/device/cuda/cuda_query.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/stream_group.h"

namespace jaxgraph {
namespace {

// The virtual architectures of this build; the driver takes the newest that a device can run.
constexpr int kCompiledFor[] = {__CUDA_ARCH_LIST__};

// Whether the kernels' code for this device has Hopper's clusters in it.
bool HasClusters(int compute_capability) {
  int newest = 0;
  for (const int arch : kCompiledFor) {
    if (arch / 10 <= compute_capability) newest = std::max(newest, arch / 10);
  }
  const int major = compute_capability / 10;
  return (major == 9 || major == 10) && newest >= 90;
}

int OldestComputeCapability() {
  int oldest = INT_MAX;
  for (int i = 0; i < CudaDeviceCount(); ++i) {
    int capability = 0;
    if (CudaComputeCapability(i, &capability).ok()) oldest = std::min(oldest, capability);
  }
  return oldest == INT_MAX ? kMinComputeCapability : oldest;
}

class CudaEmitterImpl final : public Emitter {
 public:
  explicit CudaEmitterImpl(bool clusters) : clusters_(clusters) {}

  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    *covered = 0;
    const size_t before = launches->size();
    const Node& node = *nodes[first].node;
    if (clusters_) {
      JAXGRAPH_RETURN_IF_ERROR(EmitStreamGroup(nodes, first, fusion, launches, covered));
    }
    if (*covered == 0) {
      *covered = 1;
      JAXGRAPH_RETURN_IF_ERROR(EmitOne(nodes[first], launches));
    }
    for (size_t i = before; i < launches->size(); ++i) {
      Launch& launch = (*launches)[i];
      launch.first_node = static_cast<uint32_t>(first);
      launch.node_count = static_cast<uint32_t>(*covered);
      launch.region = node.region;
      launch.branch = node.branch;
    }
    return Status::Ok();
  }

  Status EmitSlotCopies(const std::vector<SlotCopy>& copies,
                        std::vector<Launch>* launches) const override {
    EmitSlotCopyLaunches(copies, launches);
    return Status::Ok();
  }

  bool Capturable(const Node& node) const override {
    return (node.flags & kFlagNotCapturable) == 0;
  }

 private:
  Status EmitOne(const ResolvedNode& node, std::vector<Launch>* launches) const {
    switch (node.node->op) {
      case Op::kView:
        return Status::Ok();
      case Op::kExpr:
        return EmitExpr(node, launches);
      case Op::kRow:
        return EmitRow(node, clusters_, launches);
      case Op::kMatmul:
        return EmitMatmul(node, clusters_, launches);
      case Op::kGather:
        return EmitGather(node, launches);
      case Op::kSetRows:
        return EmitSetRows(node, launches);
      case Op::kCopy:
        return EmitCopy(node, launches);
      case Op::kAttention:
        break;
    }
    return Status(Code::kUnsupported, "no CUDA kernel for this kind of node");
  }

  const bool clusters_;
};

}  // namespace

const Emitter& CudaEmitter(int compute_capability) {
  static const CudaEmitterImpl with_clusters(true), without_clusters(false);
  return HasClusters(compute_capability) ? with_clusters : without_clusters;
}

const Emitter& CudaEmitter() {
  static const Emitter& emitter = CudaEmitter(OldestComputeCapability());
  return emitter;
}

}  // namespace jaxgraph
