// TestEmitter: host kernels small enough to check by eye, so that the executor's tests do not
// depend on the real ones. It reads EXPR as out = a * k + b over dense f32, with k in the params.
#pragma once

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "ffi/kernels/emitter.h"
#include "ffi/kernels/host/ops.h"

namespace jaxgraph {

struct AxpyParams {
  float* out;
  const float* a;
  const float* b;
  float k;
  int n;
};

inline void RunAxpy(const AxpyParams& p) {
  for (int i = 0; i < p.n; ++i) p.out[i] = p.a[i] * p.k + p.b[i];
}

inline const KernelInfo kAxpy = {"axpy", sizeof(AxpyParams), [](const void* params, ParallelFor&) {
                                   RunAxpy(*static_cast<const AxpyParams*>(params));
                                 }};

// The same for addresses that are a multiple of 64: alignment chooses the kernel, as on CUDA.
inline const KernelInfo kAlignedAxpy = {"aligned_axpy", sizeof(AxpyParams), kAxpy.host_function};

struct FusedParams {
  AxpyParams first, second;
};

inline const KernelInfo kFusedAxpy = {"fused_axpy", sizeof(FusedParams),
                                      [](const void* params, ParallelFor&) {
                                        const auto* p = static_cast<const FusedParams*>(params);
                                        RunAxpy(p->first);
                                        RunAxpy(p->second);
                                      }};

// What the alignment of the output decides: nothing, the grid (which an update takes), the kernel
// (which it refuses), or whether a node is fused with the one before it.
enum class ByAlignment { kNothing, kGrid, kKernel, kFusion };

class TestEmitter final : public Emitter {
 public:
  explicit TestEmitter(ByAlignment by_alignment = ByAlignment::kNothing)
      : by_alignment_(by_alignment) {}

  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    if (fail) return Status(Code::kUnsupported, "told to fail");
    ++emissions;
    *covered = 1;
    const Node& node = *nodes[first].node;
    if (node.op == Op::kView) return Status::Ok();
    if (node.op != Op::kExpr) return Status(Code::kUnsupported, "no kernel for this op");
    Launch launch;
    launch.dependent = true;
    launch.first_node = static_cast<uint32_t>(first);
    if (fusion && first + 1 < nodes.size() && Fusable(nodes[first], nodes[first + 1])) {
      *covered = 2;
      FusedParams params = {};
      params.first = ParamsOf(nodes[first]);
      params.second = ParamsOf(nodes[first + 1]);
      launch.kernel = &kFusedAxpy;
      launch.set_params(params);
    } else {
      const bool aligned = Aligned(nodes[first]);
      launch.kernel = by_alignment_ == ByAlignment::kKernel && aligned ? &kAlignedAxpy : &kAxpy;
      launch.grid[0] = by_alignment_ == ByAlignment::kGrid && aligned ? 1 : 2;
      launch.set_params(ParamsOf(nodes[first]));
    }
    launch.node_count = static_cast<uint32_t>(*covered);
    launches->push_back(std::move(launch));
    return Status::Ok();
  }

  // As on the host.
  Status EmitSlotFill(const SlotFill& fill, Launch* launch) const override {
    if (fail) return Status(Code::kUnsupported, "told to fail");
    EmitHostSlotFill(fill, launch);
    return Status::Ok();
  }
  Status EmitSlotDrain(const SlotDrain& drain, Launch* launch) const override {
    if (fail) return Status(Code::kUnsupported, "told to fail");
    EmitHostSlotDrain(drain, launch);
    launch->dependent = true;
    return Status::Ok();
  }

  bool Capturable(const Node& node) const override { return node.op != Op::kGather; }

  bool fail = false;  // every emission from now on
  mutable std::atomic<uint64_t> emissions{0};

 private:
  static bool Aligned(const ResolvedNode& r) {
    return reinterpret_cast<uintptr_t>(r.outs[0]) % 64 == 0;
  }
  bool Fusable(const ResolvedNode& first, const ResolvedNode& second) const {
    const Node& a = *first.node;
    const Node& b = *second.node;
    if (by_alignment_ == ByAlignment::kFusion && !Aligned(second)) return false;
    return a.op == Op::kExpr && b.op == Op::kExpr && a.region == b.region && a.branch == b.branch;
  }
  static AxpyParams ParamsOf(const ResolvedNode& r) {
    AxpyParams p = {};  // padding too: equal input gives equal bytes
    p.out = reinterpret_cast<float*>(r.outs[0]);
    p.a = reinterpret_cast<const float*>(r.srcs[0]);
    p.b = reinterpret_cast<const float*>(r.srcs[1]);
    std::memcpy(&p.k, r.node->params.data(), sizeof p.k);
    p.n = static_cast<int>(r.node->outs[0].num_elements());
    return p;
  }

  const ByAlignment by_alignment_;
};

}  // namespace jaxgraph
