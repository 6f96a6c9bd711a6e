// Heads: pieces of a tensor, each contiguous, that lie at one distance from each other, in whatever
// dimensions the tensor has them.
#pragma once

#include <cstdint>

#include "ffi/core/program.h"

namespace jaxgraph {

// `heads` pieces of `size` elements each, `pitch` elements apart.
inline bool IsHeads(const TensorRef& t, int64_t heads, int64_t size, int64_t pitch) {
  int64_t count = 1;
  bool inner = true;  // inside a piece
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.shape[d] == 1) continue;
    if (inner && count == size) {
      inner = false;
      count = 1;
    }
    if (t.strides[d] != (inner ? count : count * pitch)) return false;
    count *= t.shape[d];
  }
  return heads == 1 ? count == size : !inner && count == heads;
}
// The same piece for every head.
inline bool IsOneForHeads(const TensorRef& t, int64_t size) {
  int64_t count = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.shape[d] == 1) continue;
    const bool inside = count < size;  // the piece
    if (t.strides[d] != (inside ? count : 0)) return false;
    if (inside) count *= t.shape[d];
  }
  return count == size;
}

}  // namespace jaxgraph
