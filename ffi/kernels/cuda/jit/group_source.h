// The CUDA C++ of one kernel for several small nodes, each with blocks of its own. No address is in
// it. Pure: equal parts give equal text.
#pragma once

#include <vector>

#include "ffi/kernels/cuda/jit/source.h"
#include "ffi/kernels/cuda/moves.h"

namespace jaxgraph {

// Where a component of a move is found: in the node's source `src`; or, if `expr` is not negative,
// as output `out` of the EXPR parts[expr], computed again.
struct PartIndex {
  int src = 0;
  int expr = -1, out = 0;
};

// One node: an expression where `expr` has a piece, else a move.
struct GroupPart {
  int num_srcs = 0, num_outs = 0;  // of the node
  KernelRequest expr;              // an EXPR
  MoveParams move = {};            // GATHER or COPY, or SET_ROWS if `sets`; no address is read
  std::vector<PartIndex> indices;  // of a move: one for each component
  bool sets = false;
  bool fed = false;  // SET_ROWS whose rows an EXPR of the group stores: it has no blocks
};

// The function of the kernel that says where a byte of the rows of parts[part], a SET_ROWS, goes.
std::string PlaceName(size_t part);

// The kernel takes one struct: part by part the addresses of the node's sources, then those of its
// outputs. False: an expression has something in it that only the interpreter runs.
bool GenerateGroup(const std::vector<GroupPart>& parts, KernelSource* source);

}  // namespace jaxgraph
