// Weights that are brought into L2 while a launch leaves memory idle: those of the products behind
// the next launch, which fetches its own. That reads nothing and computes nothing, and of weights
// that no node writes it may happen at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

constexpr int kMostAhead = 2;             // matrices
constexpr int32_t kAheadPiece = 4096;     // bytes asked for at once
constexpr int64_t kAheadBytes = 4 << 20;  // of all matrices

// From each matrix some pieces at the beginning of each of its parts, so that all who share the
// matrix among themselves find some of theirs.
struct WeightsAhead {
  const char* weights[kMostAhead];
  int64_t part_bytes;
  int32_t parts, pieces;  // pieces of a part
  int32_t matrices;       // 0: there is nothing to be asked for
  uint32_t reserved;
};

// What the launch of nodes[first], an ATTENTION, may ask for: the first products behind those that
// read its outputs. `*reads_to`: see Launch; it is behind all whose addresses were looked at.
WeightsAhead FindWeightsAhead(const std::vector<ResolvedNode>& nodes, size_t first,
                              uint32_t* reads_to);

}  // namespace jaxgraph
