// From nodes to the source of the kernel that covers them, and to what that source depends on.
#pragma once

#include <string>
#include <vector>

#include "ffi/kernels/cuda/jit/node_group.h"
#include "ffi/kernels/cuda/jit/source.h"

namespace jaxgraph {

// An EXPR or ROW, which has a kernel of its own where it stands alone.
bool IsExpression(const Node& node);

// All that decides the source of a group at nodes[first]: its nodes, how their addresses are
// aligned, and which of them share bytes; no address. A group of one is an expression.
std::string KeyOf(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
                  bool clusters);

// The kernel takes one struct: node by node the addresses of the sources, then those of the
// outputs. False: there is no such kernel.
bool SourceOf(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
              bool clusters, KernelSource* source);

}  // namespace jaxgraph
