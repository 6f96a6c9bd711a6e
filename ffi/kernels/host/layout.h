// Iteration spaces over several strided tensors, reduced to as few dimensions as they allow.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace jaxgraph {

// One tensor's strides over the space, one per dimension.
using Strides = std::array<int64_t, 8>;

struct Space {
  int rank = 0;
  std::array<int64_t, 8> shape{};
};

// Drops dimensions of length 1 and merges neighbours that every tensor walks as one. The last
// `fixed` dimensions stay as they are.
inline void Collapse(Space* space, const std::vector<Strides*>& tensors, int fixed = 0) {
  int rank = 0;
  auto move = [&](int from, int to) {
    space->shape[to] = space->shape[from];
    for (Strides* t : tensors) (*t)[to] = (*t)[from];
  };
  const int movable = space->rank - fixed;
  for (int d = 0; d < movable; ++d) {
    if (space->shape[d] == 1) continue;
    bool merges = rank > 0;
    for (const Strides* t : tensors) merges = merges && (*t)[rank - 1] == (*t)[d] * space->shape[d];
    if (merges) {
      const int64_t outer = space->shape[rank - 1];
      move(d, rank - 1);
      space->shape[rank - 1] *= outer;
    } else {
      move(d, rank++);
    }
  }
  for (int d = movable; d < space->rank; ++d) move(d, rank++);
  space->rank = rank;
}

}  // namespace jaxgraph
