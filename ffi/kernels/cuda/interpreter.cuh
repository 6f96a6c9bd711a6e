// The interpreter that the kernels of EXPR and ROW share.
//
// Decode steps launch hundreds of these on a few thousand elements, so what counts is the latency
// of one thread's walk through the program: instructions come from the parameters' constant bank
// and are decoded uniformly, registers live in local memory (indexed at run time; they stay in the
// first-level cache), and LOADs that stand in a row are issued together.
#pragma once

#include "ffi/kernels/cuda/expr_math.cuh"
#include "ffi/kernels/cuda/expr_params.h"

namespace jaxgraph {

constexpr int kNumRegs = kExprNumElementRegs + kExprNumScalarRegs;
constexpr int kLoadsInFlight = 4;

// A register: the bits of a float, a double, an integer or a bool. 32 bits suffice for programs
// without 64-bit dtypes.
template <typename W>
__device__ __forceinline__ float AsFloat(W v) {
  return __uint_as_float(static_cast<uint32_t>(v));
}
template <typename W>
__device__ __forceinline__ W FromFloat(float v) {
  return __float_as_uint(v);
}

enum class Class { kFloat, kDouble, kInteger };
template <typename W>
__device__ __forceinline__ Class ClassOf(DType t) {
  if (sizeof(W) == 8 && t == DType::kF64) return Class::kDouble;
  return t >= DType::kF16 ? Class::kFloat : Class::kInteger;
}

template <typename W>
__device__ __forceinline__ W FromMemory(DType t, W bits) {
  switch (t) {
    case DType::kBF16:
      return bits << 16;
    case DType::kF16:
      return FromFloat<W>(F16ToFloat(static_cast<uint16_t>(bits)));
    case DType::kPred:
      return bits != 0;
    case DType::kS8:
      return SignExtended(t, bits);
    case DType::kS16:
      return SignExtended(t, bits);
    case DType::kS32:
      return SignExtended(t, bits);
    default:
      return bits;
  }
}
template <typename W>
__device__ __forceinline__ W ToMemory(DType t, W v) {
  if (t == DType::kBF16) return FloatToBF16(AsFloat(v));
  if (t == DType::kF16) return FloatToF16(AsFloat(v));
  return v;
}

template <typename W>
__device__ __noinline__ W Convert(DType from, DType to, W v) {
  const Class source = ClassOf<W>(from), target = ClassOf<W>(to);
  if (source == Class::kFloat && target == Class::kFloat) {
    return FromFloat<W>(RoundTo(to, AsFloat(v)));
  }
  if (source == Class::kInteger && target == Class::kInteger) return Wrap(to, v);
  if (source == Class::kFloat && target == Class::kInteger) {
    return FloatToInteger<W>(AsFloat(v), to);
  }
  if (source == Class::kInteger && target == Class::kFloat) {
    return FromFloat<W>(RoundTo(to, IntegerToFloat<W, float>(v, from)));
  }
  if constexpr (sizeof(W) == 8) {
    if (source == Class::kDouble) {
      const double d = __longlong_as_double(static_cast<long long>(v));
      if (target == Class::kDouble) return v;
      if (target == Class::kInteger) return FloatToInteger<W>(d, to);
      return FromFloat<W>(RoundTo(to, static_cast<float>(d)));
    }
    return __double_as_longlong(source == Class::kFloat ? static_cast<double>(AsFloat(v))
                                                        : IntegerToFloat<W, double>(v, from));
  }
  return v;
}

// Every op that computes a value from values, rounded to its dtype.
template <typename W>
__device__ __forceinline__ W ValueOf(const ExprInstr& in, W a, W b, W c) {
  const ExprOp op = in.op;
  const DType t = in.dtype;
  const int exponent = static_cast<int16_t>(in.aux);
  if (ClassOf<W>(t) == Class::kFloat) {
    const float x = AsFloat(a), y = AsFloat(b);
    if (IsCompare(op)) return Compare(op, x, y);
    if (op == ExprOp::kIsFinite) return isfinite(x);
    return FromFloat<W>(RoundTo(t, FloatValue(op, x, y, AsFloat(c), exponent)));
  }
  if constexpr (sizeof(W) == 8) {
    if (ClassOf<W>(t) == Class::kDouble) {
      const double x = __longlong_as_double(static_cast<long long>(a));
      const double y = __longlong_as_double(static_cast<long long>(b));
      if (IsCompare(op)) return Compare(op, x, y);
      if (op == ExprOp::kIsFinite) return isfinite(x);
      const double z = __longlong_as_double(static_cast<long long>(c));
      return __double_as_longlong(FloatValue(op, x, y, z, exponent));
    }
  }
  if (IsCompare(op)) return CompareIntegers(op, t, a, b);
  return Wrap(t, IntegerValue(op, t, a, b, c, exponent));
}

// --- reductions
// -----------------------------------------------------------------------------------

__device__ __forceinline__ bool IsReduce(ExprOp op) { return op >= ExprOp::kReduceSum; }
__device__ __forceinline__ bool IsArgReduce(ExprOp op) { return op >= ExprOp::kReduceArgmax; }

// The elementwise op that a reduction repeats.
__device__ __forceinline__ ExprOp StepOf(ExprOp op) {
  switch (op) {
    case ExprOp::kReduceSum:
      return ExprOp::kAdd;
    case ExprOp::kReduceMax:
      return ExprOp::kMax;
    case ExprOp::kReduceMin:
      return ExprOp::kMin;
    case ExprOp::kReduceProd:
      return ExprOp::kMul;
    case ExprOp::kReduceAnd:
      return ExprOp::kAnd;
    default:
      return ExprOp::kOr;
  }
}

// One step of a reduction. Sums of f16 and bf16 are rounded once, at the end: so the steps are f32.
template <typename W>
__device__ __forceinline__ W Step(const ExprInstr& in, W a, W b) {
  const ExprOp op = StepOf(in.op);
  switch (ClassOf<W>(in.dtype)) {
    case Class::kFloat: {
      const float x = AsFloat(a), y = AsFloat(b);
      return FromFloat<W>(op == ExprOp::kAdd   ? x + y
                          : op == ExprOp::kMul ? x * y
                          : op == ExprOp::kMax ? MaxOf(x, y)
                                               : MinOf(x, y));
    }
    case Class::kDouble:
      if constexpr (sizeof(W) == 8) {
        const double x = __longlong_as_double(static_cast<long long>(a));
        const double y = __longlong_as_double(static_cast<long long>(b));
        return __double_as_longlong(op == ExprOp::kAdd   ? x + y
                                    : op == ExprOp::kMul ? x * y
                                    : op == ExprOp::kMax ? MaxOf(x, y)
                                                         : MinOf(x, y));
      }
      return a;
    default:
      return Wrap(in.dtype, IntegerValue(op, in.dtype, a, b, W(0), 0));
  }
}

// What leaves the other operand of the step as it is.
template <typename W>
__device__ __forceinline__ W Identity(const ExprInstr& in) {
  const DType t = in.dtype;
  const Class cls = ClassOf<W>(t);
  const bool max = in.op == ExprOp::kReduceMax, min = in.op == ExprOp::kReduceMin;
  if (cls == Class::kInteger) {
    if (in.op == ExprOp::kReduceProd) return 1;
    const W largest = IsUnsignedOrBool(t) ? Masked(t, ~W(0)) : Masked(t, ~W(0)) >> 1;
    if (max) return IsUnsignedOrBool(t) ? W(0) : ~largest;
    if (min) return largest;
    return in.op == ExprOp::kReduceAnd ? Wrap(t, ~W(0)) : W(0);
  }
  const float v = max ? -INFINITY : min ? INFINITY : (in.op == ExprOp::kReduceProd ? 1.0f : 0.0f);
  if constexpr (sizeof(W) == 8) {
    if (cls == Class::kDouble) return __double_as_longlong(v);
  }
  return FromFloat<W>(v);
}

// Argmax and argmin: does `later` take over from `earlier`, which stands before it in the row? The
// first NaN wins, else the first extremum.
template <typename F>
__device__ __forceinline__ bool TakesOver(bool max, F later, F earlier) {
  if (earlier != earlier) return false;
  return later != later || (max ? later > earlier : later < earlier);
}
template <typename W>
__device__ __forceinline__ bool TakesOver(const ExprInstr& in, W later, W earlier) {
  const bool max = in.op == ExprOp::kReduceArgmax;
  switch (ClassOf<W>(in.dtype)) {
    case Class::kFloat:
      return TakesOver(max, AsFloat(later), AsFloat(earlier));
    case Class::kDouble:
      return TakesOver(max, __longlong_as_double(static_cast<long long>(later)),
                       __longlong_as_double(static_cast<long long>(earlier)));
    default:
      return max ? Less(in.dtype, earlier, later) : Less(in.dtype, later, earlier);
  }
}

constexpr uint32_t kNoIndex = ~uint32_t{0};  // rows are shorter

// --- the machine
// ----------------------------------------------------------------------------------

template <typename W>
struct Registers {
  W value[kNumRegs];
};
// ROW only: the best value so far of an argmax whose index accumulates in a scalar register.
template <typename W>
struct Extrema {
  W value[kExprNumScalarRegs];
};

__device__ __forceinline__ int64_t OffsetOf(const int64_t (&strides)[kExprMaxRank], int rank,
                                            const uint32_t (&index)[kExprMaxRank]) {
  int64_t offset = 0;
#pragma unroll
  for (int d = 0; d < kExprMaxRank; ++d) {
    if (d < rank) offset += static_cast<int64_t>(index[d]) * strides[d];
  }
  return offset;
}

// Runs instructions [begin, end) at one index. `store` false: STOREs are left to another thread.
template <typename W, bool kRow>
__device__ __forceinline__ void Run(const ExprParams& p, int begin, int end,
                                    const uint32_t (&index)[kExprMaxRank], bool store,
                                    Registers<W>& r, Extrema<W>* extrema) {
  for (int at = begin; at < end; ++at) {
    const ExprInstr in = p.instrs[at];
    if (in.op == ExprOp::kLoad) {
      const int run = min(static_cast<int>(in.c), kLoadsInFlight);
      W bits[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (i >= run) break;
        const ExprInstr load = p.instrs[at + i];
        const int64_t offset = OffsetOf(p.src_strides[load.aux], p.rank, index);
        bits[i] = static_cast<W>(LoadBits(p.srcs[load.aux] + offset, DeviceSizeOf(load.dtype)));
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (i >= run) break;
        const ExprInstr load = p.instrs[at + i];
        r.value[load.dst] = FromMemory(load.dtype, bits[i]);
      }
      at += run - 1;
      continue;
    }
    const W a = r.value[in.a];
    const W b = r.value[in.b];
    switch (in.op) {
      case ExprOp::kIndex: {
        const ExprIndex& x = p.indices[in.aux];
        const int64_t position = x.offset + OffsetOf(x.strides, p.rank, index);
        W value;
        if (ClassOf<W>(in.dtype) == Class::kInteger) {
          value = Wrap(in.dtype, static_cast<W>(position));
        } else if (ClassOf<W>(in.dtype) == Class::kFloat) {
          value = FromFloat<W>(RoundTo(in.dtype, static_cast<float>(position)));
        } else {
          value = static_cast<W>(__double_as_longlong(static_cast<double>(position)));
        }
        r.value[in.dst] = value;
        break;
      }
      case ExprOp::kConst:
        r.value[in.dst] = static_cast<W>(p.imms[in.aux]);
        break;
      case ExprOp::kStore:
        if (store) {
          const int64_t offset = OffsetOf(p.out_strides[in.aux], p.rank, index);
          StoreBits(p.outs[in.aux] + offset, DeviceSizeOf(in.dtype), ToMemory(in.dtype, a));
        }
        break;
      case ExprOp::kConvert:
        r.value[in.dst] = Convert(static_cast<DType>(in.aux), in.dtype, a);
        break;
      case ExprOp::kSelect:
        r.value[in.dst] = a != 0 ? r.value[in.c] : b;
        break;
      case ExprOp::kClamp:
        r.value[in.dst] = ValueOf(in, a, b, r.value[in.c]);
        break;
      default:
        if constexpr (kRow) {
          if (IsArgReduce(in.op)) {
            W& best = extrema->value[in.dst - kExprNumElementRegs];
            W& where = r.value[in.dst];
            if (static_cast<uint32_t>(where) == kNoIndex || TakesOver(in, a, best)) {
              best = a;
              where = index[p.rank - 1];
            }
            break;
          }
          if (IsReduce(in.op)) {
            r.value[in.dst] = Step(in, r.value[in.dst], a);
            break;
          }
        }
        r.value[in.dst] = ValueOf(in, a, b, W(0));
    }
  }
}

}  // namespace jaxgraph
