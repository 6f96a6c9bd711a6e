// The loop nest of one launch over several strided operands, made as flat as it can be, and how
// operands lie.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/core/program.h"

namespace jaxgraph {

// Merges neighbouring dimensions that every operand walks as one, and drops those of size 1, in
// dimensions [0, *rank). shape[d] and strides[operand][d] are changed in place. At least one
// dimension is left (of size 1, with strides 0, if all were dropped).
inline void Flatten(int* rank, int64_t* shape, const std::vector<int64_t*>& strides) {
  int kept = 0;
  for (int d = 0; d < *rank; ++d) {
    if (shape[d] == 1) continue;
    bool merges = kept > 0;
    for (int64_t* s : strides) merges = merges && s[kept - 1] == s[d] * shape[d];
    if (!merges) ++kept;
    const int to = kept - 1;
    shape[to] = merges ? shape[to] * shape[d] : shape[d];
    for (int64_t* s : strides) s[to] = s[d];
  }
  if (kept == 0) {
    kept = 1;
    shape[0] = 1;
    for (int64_t* s : strides) s[0] = 0;
  }
  *rank = kept;
}

inline int64_t CeilDiv(int64_t n, int64_t by) { return (n + by - 1) / by; }

inline bool IsAligned(const void* address, uint64_t to) {
  return reinterpret_cast<uintptr_t>(address) % to == 0;
}

// The dimensions in which a tensor moves, as (stride, size).
using Dims = std::vector<std::pair<int64_t, int64_t>>;
inline Dims DimsOf(const TensorRef& t) {
  Dims dims;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] != 1) dims.emplace_back(t.strides[d], t.shape[d]);
  }
  return dims;
}

// `size` elements one after the other, in the order of the indices.
inline bool IsDense(const TensorRef& t, int64_t size) {
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.shape[d] == 1) continue;
    if (t.strides[d] != stride) return false;
    stride *= t.shape[d];
  }
  return stride == size;
}

}  // namespace jaxgraph
