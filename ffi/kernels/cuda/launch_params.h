// Parameters of a launch: equal nodes must give equal bytes, so a struct may have no hidden
// padding.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/device/launch.h"

namespace jaxgraph {

// How parameters hold a float: floats have two zeros, which are equal but not the same bytes.
inline uint32_t BitsOf(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

template <typename P>
void SetParams(const P& params, Launch* launch) {
  static_assert(std::has_unique_object_representations_v<P>, "padding has no defined bytes");
  static_assert(sizeof(P) <= 4096, "a kernel's parameters");
  launch->set_params(params);
}

}  // namespace jaxgraph
