// Every 16-bit pattern, and every way a float can lie between two of them.
#include "ffi/kernels/host/float_convert.h"

#include <gtest/gtest.h>

#include <cmath>

namespace jaxgraph {
namespace {

// The value of a pattern with `exponent_bits` and `mantissa_bits`, from the definition.
double ValueOf(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <typename T, typename Narrow>
void CheckFormat(int exponent_bits, int mantissa_bits, Narrow narrow) {
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const T x{static_cast<uint16_t>(u)};
    const double want = ValueOf(x.bits, exponent_bits, mantissa_bits);
    const float got = ToFloat(x);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << u;
      ASSERT_TRUE(std::isnan(ToFloat(narrow(got)))) << u;
      continue;
    }
    ASSERT_EQ(got, static_cast<float>(want)) << u;
    ASSERT_EQ(std::signbit(got), std::signbit(want)) << u;
    ASSERT_EQ(narrow(got).bits, x.bits) << u;

    // Towards the next greater magnitude: below, at and above the middle. What lies beyond the
    // greatest finite value rounds as if the exponent went on.
    if (std::isinf(want)) continue;
    const uint16_t up = static_cast<uint16_t>(u + 1);
    double next = ValueOf(up, exponent_bits, mantissa_bits);
    if (std::isinf(next))
      next = 2 * want - ValueOf(static_cast<uint16_t>(u - 1), exponent_bits, mantissa_bits);
    const float middle = static_cast<float>(want / 2 + next / 2);
    ASSERT_EQ(static_cast<double>(middle), want / 2 + next / 2);
    const uint16_t even = u % 2 == 0 ? x.bits : up;
    ASSERT_EQ(narrow(middle).bits, even) << u;
    ASSERT_EQ(narrow(std::nextafterf(middle, 0)).bits, x.bits) << u;
    ASSERT_EQ(narrow(std::nextafterf(middle, std::signbit(want) ? -INFINITY : INFINITY)).bits, up)
        << u;
  }
}

TEST(FloatConvert, HalfRoundsToNearestEven) {
  CheckFormat<F16>(5, 10, [](float f) { return ToF16(f); });
}
TEST(FloatConvert, BrainFloatRoundsToNearestEven) {
  CheckFormat<BF16>(8, 7, [](float f) { return ToBF16(f); });
}
TEST(FloatConvert, BeyondTheRangeIsInfinity) {
  EXPECT_EQ(ToF16(1e30f).bits, 0x7c00);
  EXPECT_EQ(ToF16(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(ToF16(1e-30f).bits, 0);
  EXPECT_EQ(ToF16(-0.0f).bits, 0x8000);
  EXPECT_EQ(ToBF16(3.4e38f).bits, 0x7f80);
}
TEST(FloatConvert, NaNWhosePayloadIsCutOffStaysNaN) {
  const float nan = FloatFromBits(0x7f800001u);
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(nan))));
  EXPECT_TRUE(std::isnan(ToFloat(ToF16(nan))));
}

}  // namespace
}  // namespace jaxgraph
