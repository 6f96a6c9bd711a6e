// The argmax of a product's rows. The kernel that makes the product sees every element as it stores
// it, so its warps leave the best that each has seen, and a small second launch has only those to
// read.
#pragma once

#include <cstdint>

#include "ffi/core/dtype.h"
#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

// An element of a row, as its dtype rounds it, and where it stands.
struct StreamCandidate {
  float value;
  uint32_t where;
};

// Of `rows` rows, `places` candidates each, one row behind the other; `out` [rows] with `pitch`
// bytes between two of them. The first NaN is the largest, else the first of the largest.
struct StreamArgmaxParams {
  const StreamCandidate* candidates;
  char* out;  // S32 or U32
  int64_t pitch;
  int32_t rows, places;
};
void LaunchStreamArgmax(const StreamArgmaxParams& params, Launches* launches);

}  // namespace jaxgraph
