// How registers of expression programs hold values; see ffi/core/expr.h.
#pragma once

#include <cstdint>

#include "ffi/core/dtype.h"

namespace jaxgraph {

enum class RegKind : uint8_t { kF32, kF64, kS64, kU64 };

// u64 is kept apart only because its comparisons, division and conversions differ; narrower
// unsigned integers are non-negative int64s.
constexpr RegKind KindOf(DType t) {
  if (t == DType::kF64) return RegKind::kF64;
  if (IsFloat(t)) return RegKind::kF32;
  return t == DType::kU64 ? RegKind::kU64 : RegKind::kS64;
}
constexpr int RegBytes(DType t) { return KindOf(t) == RegKind::kF32 ? 4 : 8; }

// Bits of an integer type; bool counts as one byte.
constexpr int BitsOf(DType t) { return static_cast<int>(8 * SizeOf(t)); }

// An integer as its type holds it, in 64 bits.
inline int64_t WrapInteger(DType t, int64_t v) {
  switch (t) {
    case DType::kPred:
      return v != 0;
    case DType::kS8:
      return static_cast<int8_t>(v);
    case DType::kS16:
      return static_cast<int16_t>(v);
    case DType::kS32:
      return static_cast<int32_t>(v);
    case DType::kU8:
      return static_cast<uint8_t>(v);
    case DType::kU16:
      return static_cast<uint16_t>(v);
    case DType::kU32:
      return static_cast<uint32_t>(v);
    default:
      return v;
  }
}

}  // namespace jaxgraph
