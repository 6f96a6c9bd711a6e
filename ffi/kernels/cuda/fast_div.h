// Division of 32-bit numbers by a divisor known at emission: a multiplication and a shift.
#pragma once

#include <cstdint>

#include "ffi/core/host_device.h"

namespace jaxgraph {

// Exact for 0 <= n < 2^31, 1 <= divisor < 2^31 (Granlund and Montgomery).
struct FastDiv {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  static FastDiv By(uint32_t divisor) {
    FastDiv d;
    d.divisor = divisor;
    while ((uint64_t{1} << d.shift) < divisor) ++d.shift;
    d.multiplier = static_cast<uint32_t>(
        ((uint64_t{1} << 32) * ((uint64_t{1} << d.shift) - divisor)) / divisor + 1);
    return d;
  }

  JAXGRAPH_HOST_DEVICE uint32_t Quotient(uint32_t n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
    return (high + n) >> shift;
  }
};

}  // namespace jaxgraph
