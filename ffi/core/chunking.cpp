#include "ffi/core/chunking.h"

namespace jaxgraph {

std::vector<ChunkRange> CutChunks(const Program& program, const std::vector<Group>& groups,
                                  uint32_t chunk_size) {
  std::vector<ChunkRange> chunks;
  size_t begin = 0;
  uint64_t nodes = 0;
  for (size_t g = 0; g + 1 < groups.size(); ++g) {
    nodes += groups[g].node_count;
    if (chunk_size == 0 || nodes < chunk_size) continue;
    const uint32_t next = groups[g + 1].first_node;
    const uint32_t region = program.nodes[next].region;
    if (region != 0 && region == program.nodes[next - 1].region) continue;
    chunks.push_back({begin, g + 1});
    begin = g + 1;
    nodes = 0;
  }
  chunks.push_back({begin, groups.size()});
  return chunks;
}

}  // namespace jaxgraph
