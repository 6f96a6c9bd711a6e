// Data movement without arithmetic (GATHER, SET_ROWS, COPY): slices of one tensor, the whole, to or
// from a stack of slices.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/program.h"
#include "ffi/kernels/cuda/fast_div.h"
#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

constexpr int kMaxComponents = 8;

// Moves words of `word` bytes (1 to 16): the widest that divides everything below. Strides in
// bytes.
struct MoveParams {
  char* whole;                        // GATHER and COPY: the source; SET_ROWS: the destination
  char* slices;                       // GATHER and COPY: the destination; SET_ROWS: the updates
  int64_t whole_outer, slices_outer;  // from one slice to the next (whole_outer: COPY alone)
  int64_t whole_strides[kMaxRank], slices_strides[kMaxRank];
  FastDiv divide[kMaxRank];  // dimensions of a slice, in words
  // Where slice i starts along component c: index[c][i], clamped to [0, limit[c]].
  const char* index[kMaxComponents];
  int64_t index_stride[kMaxComponents];
  int64_t component_stride[kMaxComponents];  // of the whole
  int64_t limit[kMaxComponents];
  int64_t extent[kMaxComponents];  // of the slice
  uint64_t fill;                   // repeated to eight bytes
  int32_t num_slices;
  uint32_t words;  // a slice
  DType index_dtype[kMaxComponents];
  uint8_t component_dim[kMaxComponents];  // of the slice as it is walked
  uint8_t rank;                           // of a slice; >= 1
  uint8_t num_components;
  IndexMode mode;
  // Extents are 1, or all of their dimension: slices are the same place or apart, never half over
  // each other.
  bool single;
  uint32_t word;
};

// The sources of a GATHER or SET_ROWS that hold the components, in the order of MoveParams.
std::vector<int> IndexSources(const Node& node);

// No work (an empty tensor): num_slices or words is 0.
Status PrepareGather(const ResolvedNode& node, MoveParams* params);
Status PrepareSetRows(const ResolvedNode& node, MoveParams* params);
Status PrepareCopy(const ResolvedNode& node, MoveParams* params);

}  // namespace jaxgraph
