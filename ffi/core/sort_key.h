// Keys of SORT: unsigned numbers whose ascending order is the order that is asked for.
#pragma once

#include <cstdint>

#include "ffi/core/dtype.h"
#include "ffi/core/host_device.h"
#include "ffi/core/program.h"

namespace jaxgraph {

// `bits`: an element as it lies in memory, zero-extended; `size`: its bytes. The key is as wide.
JAXGRAPH_HOST_DEVICE inline uint64_t SortKey(SortOrder order, DType t, uint32_t size,
                                             uint64_t bits) {
  const uint64_t all = ~uint64_t{0} >> (64 - 8 * size);
  const uint64_t top = all ^ (all >> 1);  // the sign
  uint64_t key = bits;
  if (t >= DType::kF16) {  // a float; IsFloat is a function of the host
    if (order == SortOrder::kAscending) {
      const uint64_t infinity = t == DType::kF32    ? 0x7f800000u
                                : t == DType::kBF16 ? 0x7f80u
                                : t == DType::kF16  ? 0x7c00u
                                                    : uint64_t{0x7ff} << 52;
      const uint64_t magnitude = bits & ~top;
      if (magnitude > infinity) return all;
      if (magnitude == 0) bits = 0;
    }
    key = (bits & top) != 0 ? ~bits & all : bits | top;
  } else if (t >= DType::kS8 && t <= DType::kS64) {
    key = bits ^ top;
  }
  return order == SortOrder::kDescending ? ~key & all : key;
}

// Where piece `c` of a row of n begins.
JAXGRAPH_HOST_DEVICE inline int64_t SortPieceBegin(int64_t c, int64_t n, int64_t chunks) {
  return c * n / chunks;
}

// The piece that element `i` of a row is in: the inverse.
JAXGRAPH_HOST_DEVICE inline int64_t SortPieceOf(int64_t i, int64_t n, int64_t chunks) {
  return ((i + 1) * chunks - 1) / n;
}

}  // namespace jaxgraph
