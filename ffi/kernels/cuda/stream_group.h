// Which run of nodes one streaming kernel covers.
#pragma once

#include <cstddef>
#include <vector>

#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

// Appends the launches for nodes[first..) that a streaming kernel covers and gives their number; 0
// where no such kernel takes nodes[first]. With `fusion` these are, as far as they stand together:
//   [ROW: an RMS norm]  MATMUL of the same rows, up to 4  [EXPR: silu of the first times the
//   second]  or  [ROW: the argmax of the only product], as a second launch
// and every node's outputs are stored all the same. No output of the run overlaps what else the run
// reads or writes: blocks run in any order.
size_t EmitStreamGroup(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                       Launches* launches);

}  // namespace jaxgraph
