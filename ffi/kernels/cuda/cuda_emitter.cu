#include <algorithm>
#include <climits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/device/cuda/cuda_query.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "ffi/kernels/cuda/jit/jit.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/layer_group.h"
#include "ffi/kernels/cuda/stream_group.h"

namespace jaxgraph {
namespace {

// The virtual architectures of this build; the driver takes the newest that a device can run.
constexpr int kCompiledFor[] = {__CUDA_ARCH_LIST__};

// Whether the kernels' code for this device has Hopper's instructions in it: a kernel that may
// start before its predecessor has ended can wait for it.
bool HasDependentLaunch(int compute_capability) {
  int newest = 0;
  for (const int arch : kCompiledFor) {
    if (arch / 10 <= compute_capability) newest = std::max(newest, arch / 10);
  }
  return newest >= 90;
}
bool HasClusters(int compute_capability) {
  const int major = compute_capability / 10;
  return (major == 9 || major == 10) && HasDependentLaunch(compute_capability);
}

struct Capabilities {
  int oldest = INT_MAX, newest = 0;  // of this machine's GPUs
  bool any() const { return newest > 0; }
};
Capabilities FindCapabilities() {
  Capabilities found;
  for (int i = 0; i < CudaDeviceCount(); ++i) {
    int capability = 0;
    if (!CudaComputeCapability(i, &capability).ok()) continue;
    found.oldest = std::min(found.oldest, capability);
    found.newest = std::max(found.newest, capability);
  }
  return found;
}
const Capabilities& Machine() {
  static const Capabilities machine = FindCapabilities();
  return machine;
}

// What NVRTC compiles for: machine code, or what every GPU here can make machine code of.
std::string ArchitectureFor(int compute_capability) {
  const bool same =
      Machine().oldest == compute_capability && Machine().newest == compute_capability;
  return (same ? "sm_" : "compute_") + std::to_string(compute_capability);
}

class CudaEmitterImpl final : public Emitter {
 public:
  CudaEmitterImpl(int compute_capability, bool compiles)
      : clusters_(HasClusters(compute_capability)),
        dependent_(HasDependentLaunch(compute_capability)),
        compiles_(compiles && Machine().any()),
        jit_(ArchitectureFor(compute_capability), clusters_) {}

  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    const size_t before = launches->size();
    const Node& node = *nodes[first].node;
    *covered = EmitStreamed(nodes, first, fusion, launches);
    if (*covered == 0) *covered = EmitCompiled(nodes, first, fusion, launches);
    if (*covered == 0) {
      *covered = 1;
      JAXGRAPH_RETURN_IF_ERROR(EmitOne(nodes, first, launches));
    }
    for (size_t i = before; i < launches->size(); ++i) {
      Launch& launch = (*launches)[i];
      launch.first_node = static_cast<uint32_t>(first);
      launch.node_count = static_cast<uint32_t>(*covered);
      launch.region = node.region;
      launch.branch = node.branch;
      launch.dependent = dependent_;  // every kernel here waits before it touches what nodes write
    }
    return Status::Ok();
  }

  Status EmitSlotFill(const SlotFill& fill, Launch* launch) const override {
    EmitSlotFillLaunch(fill, launch);
    return Status::Ok();
  }

  Status EmitSlotDrain(const SlotDrain& drain, Launch* launch) const override {
    EmitSlotDrainLaunch(drain, launch);
    launch->dependent = dependent_;
    return Status::Ok();
  }

  bool Capturable(const Node& node) const override {
    return (node.flags & kFlagNotCapturable) == 0;
  }

 private:
  // How many nodes Hopper's kernels cover: whole layers, or products and what stands around them.
  size_t EmitStreamed(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                      std::vector<Launch>* launches) const {
    if (!clusters_) return 0;
    const size_t covered = fusion ? EmitLayers(nodes, first, launches) : 0;
    return covered > 0 ? covered : EmitStreamGroup(nodes, first, fusion, launches);
  }

  // Appends the launch of a kernel that was compiled for nodes[first..), if there is one, and
  // returns how many nodes it covers.
  size_t EmitCompiled(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                      std::vector<Launch>* launches) const {
    if (!compiles_ || !Jit::Available()) return 0;
    return jit_.Emit(nodes, first, fusion, [&] { return Alone(nodes, first, fusion); }, launches);
  }

  // The nodes from `first` on that none of these covers.
  std::vector<size_t> Alone(const std::vector<ResolvedNode>& nodes, size_t first,
                            bool fusion) const {
    std::vector<size_t> alone;
    std::vector<Launch> unused;
    for (size_t n = first; n < nodes.size();) {
      const size_t covered = EmitStreamed(nodes, n, fusion, &unused);
      if (covered == 0) alone.push_back(n);
      n += std::max<size_t>(covered, 1);
    }
    return alone;
  }

  Status EmitOne(const std::vector<ResolvedNode>& nodes, size_t first,
                 std::vector<Launch>* launches) const {
    const ResolvedNode& node = nodes[first];
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
        return EmitAttention(nodes, first, clusters_, launches);
      case Op::kSort:
        return EmitSort(node, launches);
    }
    return Status(Code::kUnsupported, "no CUDA kernel for this kind of node");
  }

  const bool clusters_, dependent_, compiles_;
  mutable Jit jit_;  // remembers what it compiled, and gives the same for ever
};

const Emitter& EmitterFor(int compute_capability, bool compiles) {
  static std::mutex mutex;
  static auto* emitters = new std::map<std::pair<int, bool>, std::unique_ptr<CudaEmitterImpl>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<CudaEmitterImpl>& emitter = (*emitters)[{compute_capability, compiles}];
  if (emitter == nullptr) {
    emitter = std::make_unique<CudaEmitterImpl>(compute_capability, compiles);
  }
  return *emitter;
}

int OldestComputeCapability() { return Machine().any() ? Machine().oldest : kMinComputeCapability; }

}  // namespace

const Emitter& CudaEmitter(int compute_capability) { return EmitterFor(compute_capability, true); }

const Emitter& CudaEmitter() {
  static const Emitter& emitter = CudaEmitter(OldestComputeCapability());
  return emitter;
}

const Emitter& InterpretingCudaEmitter() {
  static const Emitter& emitter = EmitterFor(OldestComputeCapability(), false);
  return emitter;
}

}  // namespace jaxgraph
