// EXPR and ROW nodes by kernels that are compiled at run time, one for each distinct expression,
// shape and layout. Whatever cannot be compiled is left to the interpreter.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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

  // Appends the launch of nodes[first], an EXPR or ROW. False: the interpreter must run it, now and
  // always. `upcoming` is asked, where this node is new, for all nodes (this one among them) that
  // may come to Emit: their kernels are compiled together.
  bool Emit(const std::vector<ResolvedNode>& nodes, size_t first,
            const std::function<std::vector<size_t>()>& upcoming, Launches* launches);

 private:
  struct Plan {
    const KernelInfo* kernel = nullptr;  // null: the interpreter
    uint32_t grid = 1, block = 1, cluster = 1;
  };

  void Decide(const std::vector<ResolvedNode>& nodes, const std::vector<size_t>& upcoming);

  const std::string architecture_;
  const bool clusters_;
  std::mutex mutex_;
  std::map<std::string, Plan> plans_;  // by all that decides a node's source; see KeyOf
};

}  // namespace jaxgraph
