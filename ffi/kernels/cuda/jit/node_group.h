// Which run of small nodes one compiled kernel covers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// Output `out` of the EXPR `expr` is (a part of) the rows that the SET_ROWS `rows` writes: its
// first element is byte `offset` of them. Both count from the group's first node.
struct GroupFeed {
  size_t expr = 0;
  int out = 0;
  size_t rows = 0;
  int64_t offset = 0;
};

// Source `src` of the node `user`, an index of a GATHER or SET_ROWS, is output `out` of the EXPR
// `expr`, element by element.
struct GroupIndex {
  size_t user = 0;
  int src = 0;
  size_t expr = 0;
  int out = 0;
};

struct NodeGroup {
  size_t count = 1;  // nodes, one after the other
  std::vector<GroupFeed> feeds;
  std::vector<GroupIndex> indices;
};

// The group that starts at nodes[first]; of one node if that is no EXPR, GATHER, SET_ROWS or COPY,
// or stands alone. In a group all nodes may run at once: none touches what another writes. But the
// rows of a SET_ROWS may be the outputs of one EXPR (who computes an element stores it twice), and
// an index may be an output of one (who needs it computes it again).
// Depends on the group's own nodes and the one behind them alone.
NodeGroup FindGroup(const std::vector<ResolvedNode>& nodes, size_t first);

}  // namespace jaxgraph
