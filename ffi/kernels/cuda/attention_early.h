// What of its cache an ATTENTION may read before the launch in front of it has ended. With
// dependent launch several launches of a program run at once; but most rows of a cache are of
// earlier steps, and the few that this step writes are known from the SET_ROWS that writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/core/attention.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// Rows that a SET_ROWS before it writes: `count` from the one on that the index says, which is at
// least 0 and at most last_start. The index may be read behind the wait.
struct RewrittenRows {
  const char* index = nullptr;  // null: none
  int32_t last_start = 0, count = 0;
  DType index_dtype = DType::kS32;
  uint8_t reserved[7] = {};
};

struct EarlyCache {
  RewrittenRows keys, values;
  uint8_t position = 0;  // the position and the bound may be read early
  uint8_t cache = 0;     // and so may the cache, but for the rows above
  uint8_t reserved[6] = {};
};

// Of nodes[first], an ATTENTION. `position`: the program's source that the known form reads as one;
// negative if there is none.
EarlyCache FindEarlyCache(const std::vector<ResolvedNode>& nodes, size_t first,
                          const Attention& attention, int position);

}  // namespace jaxgraph
