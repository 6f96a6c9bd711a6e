// What of a decode layer stands between its query, key and value products and its attention.
#pragma once

#include <cstddef>
#include <vector>

#include "ffi/kernels/cuda/memory_range.h"
#include "ffi/kernels/cuda/stream.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// What the nodes read and write, but for what the kernel does not read from memory.
struct HeadsFootprint {
  std::vector<MemoryRange> reads, writes;
};

// If nodes[first..) are two rotations and two SET_ROWS that write one row for every head, one
// position for all, in any order in which each reads what it should, and what they read are
// `params->product`s of `dtype` whose columns are their heads: says so in `params->heads` and gives
// their number, else 0.
size_t TakeHeads(const std::vector<ResolvedNode>& nodes, size_t first, DType dtype,
                 StreamParams* params, HeadsFootprint* footprint);

}  // namespace jaxgraph
