// Conversions between the 16-bit float formats and float: rounded to nearest even, NaN stays NaN.
// Branch-free where it matters, so that loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxgraph {

// The 16-bit formats as types of their own, so that templates and overloads can tell them apart.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline uint32_t FloatBits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}

inline float FloatFromBits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

inline float ToFloat(BF16 x) { return FloatFromBits(static_cast<uint32_t>(x.bits) << 16); }

inline BF16 ToBF16(float f) {
  const uint32_t u = FloatBits(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return BF16{static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

inline float ToFloat(F16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;  // the fields where float has them
  const uint32_t normal = magnitude + (112u << 23);     // exponent bias 15 -> 127
  const uint32_t inf_or_nan = magnitude | 0x7f800000u;
  // Subnormal: the mantissa behind an implicit one of weight 2^-14, minus that one.
  const uint32_t subnormal =
      FloatBits(FloatFromBits(magnitude + (113u << 23)) - FloatFromBits(113u << 23));
  const uint32_t finite = magnitude < 0x00800000u ? subnormal : normal;
  return FloatFromBits(sign | (magnitude >= 0x0f800000u ? inf_or_nan : finite));
}

inline F16 ToF16(float f) {
  const uint32_t u = FloatBits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  // Normal results: rebias, round on the 13 bits that go; a carry may reach infinity, rightly.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: the addition aligns the mantissa to units of 2^-24 and rounds it.
  const uint32_t subnormal = FloatBits(FloatFromBits(magnitude) + 0.5f) - FloatBits(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  const uint32_t not_nan = magnitude >= (143u << 23) ? 0x7c00u : finite;
  return F16{static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : not_nan))};
}

}  // namespace jaxgraph
