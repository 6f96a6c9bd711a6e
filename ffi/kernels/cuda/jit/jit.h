// EXPR and ROW nodes, and groups of small nodes, by kernels that are compiled at run time, one for
// each distinct expression, shape and layout. Whatever cannot be compiled is left to the
// interpreter and the nodes' own kernels.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/kernels/cuda/jit/node_group.h"
#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

class Jit {
 public:
  // `architecture`: "sm_90", or "compute_75" for several kinds of device. `clusters`: see EmitRow.
  Jit(std::string architecture, bool clusters)
      : architecture_(std::move(architecture)), clusters_(clusters) {}

  // Whether this process compiles at all: NVRTC is there, and JAXGRAPH_DISABLE_JIT does not say
  // otherwise. Decided once, at first use.
  static bool Available();
  // The same for people, with what was compiled so far; one line.
  static std::string Describe();

  // Appends the launch of nodes[first..) that one compiled kernel covers, and returns their number:
  // with `fusion` a group of small nodes (node_group.h), else nodes[first] if it is an EXPR or ROW.
  // 0: other kernels must run nodes[first], now and always. `upcoming` is asked, where a kernel is
  // new, for all nodes (this one among them) that may come to Emit: what they need is compiled
  // together.
  size_t Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              const std::function<std::vector<size_t>()>& upcoming, Launches* launches);

 private:
  struct Plan {
    const KernelInfo* kernel = nullptr;  // null: not compiled
    uint32_t grid = 1, block = 1, cluster = 1;
  };

  bool EmitGroup(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
                 bool fusion, const std::function<std::vector<size_t>()>& upcoming,
                 Launches* launches);
  void Decide(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
              bool fusion, const std::vector<size_t>& upcoming);

  const std::string architecture_;
  const bool clusters_;
  std::mutex mutex_;
  std::map<std::string, Plan> plans_;  // by all that decides a source; see KeyOf
};

}  // namespace jaxgraph
