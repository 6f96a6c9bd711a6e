// Which run of nodes the kernels of a small model's layers cover (layer.h).
#pragma once

#include <cstddef>
#include <vector>

#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

// Appends the launches for nodes[first..) if a whole layer, or several one after the other, start
// there, and gives the number of their nodes; else 0. A layer of one row is
//   ROW: an RMS norm, of the sum of the layer before it     MATMUL: query, key and value
//   EXPR: rotation of the query and of the key              SET_ROWS: both into the cache
//   ATTENTION over it                                       MATMUL: the output
//   ROW: an RMS norm of that and the row so far             MATMUL: gate and up
//   EXPR: silu of the one times the other                   MATMUL: down
// Only what is left for the nodes behind is stored: the cache, the last layer's row so far and its
// down product. So nothing else that the layers would write may be read by anybody.
size_t EmitLayers(const std::vector<ResolvedNode>& nodes, size_t first, Launches* launches);

}  // namespace jaxgraph
