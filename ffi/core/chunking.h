// Chunking: cuts the launches of a program into runs that become one graph each.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/program.h"

namespace jaxgraph {

// A run of nodes that one emission covered: never cut.
struct Group {
  uint32_t first_node = 0;
  uint32_t node_count = 0;
};

struct ChunkRange {  // of groups
  size_t begin = 0;
  size_t end = 0;
};

// Cuts where at least `chunk_size` nodes (0: all) are together and neither a group nor a region is
// cut. Gives at least one chunk, also for no groups.
std::vector<ChunkRange> CutChunks(const Program& program, const std::vector<Group>& groups,
                                  uint32_t chunk_size);

}  // namespace jaxgraph
