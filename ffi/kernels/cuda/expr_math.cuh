// The values of the expression ops: what each computes, for every class of dtype. No rounding here.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ffi/core/dtype.h"
#include "ffi/core/expr.h"
#include "ffi/kernels/cuda/scalar.cuh"

namespace jaxgraph {

__device__ __forceinline__ bool IsCompare(ExprOp op) {
  return op >= ExprOp::kEq && op <= ExprOp::kGe;
}

template <typename T>
__device__ __forceinline__ bool Compare(ExprOp op, T a, T b) {
  switch (op) {
    case ExprOp::kEq:
      return a == b;
    case ExprOp::kNe:
      return a != b;
    case ExprOp::kLt:
      return a < b;
    case ExprOp::kLe:
      return a <= b;
    case ExprOp::kGt:
      return a > b;
    default:
      return a >= b;
  }
}

// ---- float and double ----

template <typename F>
__device__ __forceinline__ F MaxOf(F a, F b) {  // NaN wins
  return a != a || a > b ? a : b;
}
template <typename F>
__device__ __forceinline__ F MinOf(F a, F b) {
  return a != a || a < b ? a : b;
}

template <typename F>
__device__ F IntegerPower(F base, int exponent) {
  F result = 1;
  for (uint32_t n = static_cast<uint32_t>(abs(exponent)); n != 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return exponent < 0 ? F(1) / result : result;
}

// Not inlined: their code is long, and a call costs little beside it.
template <typename F>
__device__ __noinline__ F LongFunction(ExprOp op, F a, F b) {
  switch (op) {
    case ExprOp::kExp2:
      return exp2(a);
    case ExprOp::kExpm1:
      return expm1(a);
    case ExprOp::kLog:
      return log(a);
    case ExprOp::kLog1p:
      return log1p(a);
    case ExprOp::kCbrt:
      return cbrt(a);
    case ExprOp::kSin:
      return sin(a);
    case ExprOp::kCos:
      return cos(a);
    case ExprOp::kTan:
      return tan(a);
    case ExprOp::kAsin:
      return asin(a);
    case ExprOp::kAcos:
      return acos(a);
    case ExprOp::kAtan:
      return atan(a);
    case ExprOp::kSinh:
      return sinh(a);
    case ExprOp::kCosh:
      return cosh(a);
    case ExprOp::kTanh:
      return tanh(a);
    case ExprOp::kAsinh:
      return asinh(a);
    case ExprOp::kAcosh:
      return acosh(a);
    case ExprOp::kAtanh:
      return atanh(a);
    case ExprOp::kErf:
      return erf(a);
    case ExprOp::kErfc:
      return erfc(a);
    case ExprOp::kErfInv:
      return erfinv(a);
    case ExprOp::kRem:
      return fmod(a, b);
    case ExprOp::kPow:
      return pow(a, b);
    case ExprOp::kAtan2:
      return atan2(a, b);
    default:
      return a;
  }
}

template <typename F>
__device__ __forceinline__ F FloatValue(ExprOp op, F a, F b, F c, int exponent) {
  switch (op) {
    case ExprOp::kNeg:
      return -a;
    case ExprOp::kAbs:
      return fabs(a);
    case ExprOp::kSign:
      return a > 0 ? F(1) : a < 0 ? F(-1) : a;  // keeps NaN and -0
    case ExprOp::kFloor:
      return floor(a);
    case ExprOp::kCeil:
      return ceil(a);
    case ExprOp::kRoundAway:
      return round(a);
    case ExprOp::kRoundEven:
      return rint(a);
    case ExprOp::kExp:
      return exp(a);
    case ExprOp::kSqrt:
      return sqrt(a);
    case ExprOp::kRsqrt:
      return F(1) / sqrt(a);
    case ExprOp::kLogistic:
      return F(1) / (F(1) + exp(-a));
    case ExprOp::kAdd:
      return a + b;
    case ExprOp::kSub:
      return a - b;
    case ExprOp::kMul:
      return a * b;
    case ExprOp::kDiv:
      return a / b;
    case ExprOp::kMax:
      return MaxOf(a, b);
    case ExprOp::kMin:
      return MinOf(a, b);
    case ExprOp::kClamp:
      return MinOf(MaxOf(b, a), c);
    case ExprOp::kIntegerPow:
      return IntegerPower(a, exponent);
    default:
      return LongFunction(op, a, b);
  }
}

// ---- integers and bool ----
// W is the register: uint32_t or uint64_t. Values are sign- or zero-extended from their dtype.

__device__ __forceinline__ uint32_t WidthOf(DType t) {
  return t == DType::kPred ? 1 : 8 * DeviceSizeOf(t);
}
__device__ __forceinline__ bool IsUnsignedOrBool(DType t) {
  return t == DType::kPred || (t >= DType::kU8 && t <= DType::kU64);
}

// Only the bits of the dtype, zero-extended.
template <typename W>
__device__ __forceinline__ W Masked(DType t, W v) {
  const uint32_t width = WidthOf(t);
  return width >= 8 * sizeof(W) ? v : v & ((W(1) << width) - 1);
}
template <typename W>
__device__ __forceinline__ W SignExtended(DType t, W v) {
  const uint32_t spare = 8 * sizeof(W) - WidthOf(t);
  return static_cast<W>(static_cast<std::make_signed_t<W>>(v << spare) >> spare);
}

// Wraps a result to its dtype. bool: anything but 0 is true.
template <typename W>
__device__ __forceinline__ W Wrap(DType t, W v) {
  if (t == DType::kPred) return v != 0;
  return IsUnsignedOrBool(t) ? Masked(t, v) : SignExtended(t, v);
}

template <typename W>
__device__ __forceinline__ bool Less(DType t, W a, W b) {
  using Signed = std::make_signed_t<W>;
  return IsUnsignedOrBool(t) ? a < b : static_cast<Signed>(a) < static_cast<Signed>(b);
}

template <typename W>
__device__ __noinline__ W Quotient(DType t, W a, W b, bool remainder) {
  using Signed = std::make_signed_t<W>;
  if (b == 0) return remainder ? a : ~W(0);  // as XLA defines
  if (IsUnsignedOrBool(t)) return remainder ? a % b : a / b;
  if (b == ~W(0)) return remainder ? W(0) : W(0) - a;  // the smallest integer / -1 wraps
  const Signed x = static_cast<Signed>(a), y = static_cast<Signed>(b);
  return static_cast<W>(remainder ? x % y : x / y);
}

template <typename W>
__device__ __noinline__ W IntegerPower(DType t, W base, W exponent) {
  if (!IsUnsignedOrBool(t) && static_cast<std::make_signed_t<W>>(exponent) < 0) {
    // 1 / base^n, truncated.
    if (base == 1) return 1;
    if (base == ~W(0)) return exponent & 1 ? ~W(0) : W(1);
    return 0;
  }
  W result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

template <typename W>
__device__ __forceinline__ W Shift(ExprOp op, DType t, W a, W by) {
  const uint32_t width = WidthOf(t);
  const W amount = Masked(t, by);
  const bool beyond = amount >= width;
  if (op == ExprOp::kShl) return beyond ? W(0) : a << amount;
  if (op == ExprOp::kShrLogical) return beyond ? W(0) : Masked(t, a) >> amount;
  const auto value = static_cast<std::make_signed_t<W>>(SignExtended(t, a));
  return static_cast<W>(value >> (beyond ? W(width - 1) : amount));
}

template <typename W>
__device__ __forceinline__ W IntegerValue(ExprOp op, DType t, W a, W b, W c, int exponent) {
  switch (op) {
    case ExprOp::kNeg:
      return W(0) - a;
    case ExprOp::kAbs:
      return Less(t, a, W(0)) ? W(0) - a : a;
    case ExprOp::kSign:
      return Less(t, a, W(0)) ? ~W(0) : W(a != 0);
    case ExprOp::kNot:
      return t == DType::kPred ? a ^ 1 : ~a;
    case ExprOp::kPopcnt:
      return __popcll(Masked(t, a));
    case ExprOp::kClz:
      return __clzll(Masked(t, a)) - (64 - WidthOf(t));
    case ExprOp::kAdd:
      return a + b;
    case ExprOp::kSub:
      return a - b;
    case ExprOp::kMul:
      return a * b;
    case ExprOp::kDiv:
      return Quotient(t, a, b, false);
    case ExprOp::kRem:
      return Quotient(t, a, b, true);
    case ExprOp::kPow:
      return IntegerPower(t, a, b);
    case ExprOp::kMax:
      return Less(t, a, b) ? b : a;
    case ExprOp::kMin:
      return Less(t, b, a) ? b : a;
    case ExprOp::kAnd:
      return a & b;
    case ExprOp::kOr:
      return a | b;
    case ExprOp::kXor:
      return a ^ b;
    case ExprOp::kShl:
    case ExprOp::kShrLogical:
    case ExprOp::kShrArithmetic:
      return Shift(op, t, a, b);
    case ExprOp::kIntegerPow:
      return IntegerPower(t, a, static_cast<W>(exponent));
    case ExprOp::kClamp: {
      const W low = Less(t, b, a) ? a : b;
      return Less(t, c, low) ? c : low;
    }
    default:
      return a;
  }
}

template <typename W>
__device__ __forceinline__ bool CompareIntegers(ExprOp op, DType t, W a, W b) {
  using Signed = std::make_signed_t<W>;
  if (IsUnsignedOrBool(t)) return Compare(op, a, b);
  return Compare(op, static_cast<Signed>(a), static_cast<Signed>(b));
}

// Float to integer: toward zero, saturating, NaN gives 0.
template <typename W, typename F>
__device__ W FloatToInteger(F v, DType to) {
  if (to == DType::kPred) return v != 0;  // NaN is true
  if (v != v) return 0;
  const uint32_t width = WidthOf(to);
  if (IsUnsignedOrBool(to)) {
    const uint64_t largest = width == 64 ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    if (v <= 0) return 0;
    if (v >= static_cast<F>(18446744073709551616.0)) return static_cast<W>(largest);
    return static_cast<W>(
        min(static_cast<unsigned long long>(v), static_cast<unsigned long long>(largest)));
  }
  const int64_t largest = static_cast<int64_t>(~uint64_t{0} >> (65 - width));
  if (v >= static_cast<F>(9223372036854775808.0)) return static_cast<W>(largest);
  if (v < static_cast<F>(-9223372036854775808.0)) return static_cast<W>(-largest - 1);
  const long long whole = static_cast<long long>(v);
  return static_cast<W>(
      min(max(whole, static_cast<long long>(-largest - 1)), static_cast<long long>(largest)));
}

template <typename W, typename F>
__device__ __forceinline__ F IntegerToFloat(W v, DType from) {
  if (IsUnsignedOrBool(from)) return static_cast<F>(v);
  return static_cast<F>(static_cast<std::make_signed_t<W>>(v));
}

}  // namespace jaxgraph
