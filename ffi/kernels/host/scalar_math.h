// Scalar functions of expression programs that the C library does not have, or has otherwise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace jaxgraph {

// Inverse of erf. Start: M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011),
// single precision; then Halley steps on erf, or on erfc where erf is flat, to double precision.
inline double ErfInv(double x) {
  const double ax = std::fabs(x);
  if (!(ax < 1)) return ax == 1 ? std::copysign(std::numeric_limits<double>::infinity(), x) : NAN;
  static constexpr double kCentral[] = {2.81022636e-08,  3.43273939e-07, -3.5233877e-06,
                                        -4.39150654e-06, 0.00021858087,  -0.00125372503,
                                        -0.00417768164,  0.246640727,    1.50140941};
  static constexpr double kTail[] = {-0.000200214257, 0.000100950558, 0.00134934322,
                                     -0.00367342844,  0.00573950773,  -0.0076224613,
                                     0.00943887047,   1.00167406,     2.83297682};
  const double w = -std::log((1 - ax) * (1 + ax));
  const double t = w < 5 ? w - 2.5 : std::sqrt(w) - 3;
  double p = 0;
  for (double c : w < 5 ? kCentral : kTail) p = p * t + c;
  double y = p * ax;
  for (int i = 0; i < 3; ++i) {
    constexpr double kTwoOverSqrtPi = 1.1283791670955126;
    const double error = ax > 0.5 ? (1 - ax) - std::erfc(y) : std::erf(y) - ax;
    const double step = error / (kTwoOverSqrtPi * std::exp(-y * y));
    y -= step / (1 + y * step);
  }
  return std::copysign(y, x);
}

// a ** n by squaring; a negative n gives the reciprocal, as lax.integer_pow has it.
template <typename T>
T IntegerPow(T a, int n) {
  T result = 1;
  for (unsigned e = static_cast<unsigned>(n < 0 ? -n : n); e != 0; e >>= 1) {
    if (e & 1) result *= a;
    a *= a;
  }
  return n < 0 ? T{1} / result : result;
}

}  // namespace jaxgraph
