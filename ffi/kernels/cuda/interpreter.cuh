// The interpreter that the kernels of EXPR and ROW share.
//
// Decode steps launch hundreds of these on a few thousand elements, so what counts is the latency
// of one thread's walk through the program. The program is fetched into shared memory at once: the
// parameters' constant bank would miss its cache again and again, line by line. A thread takes
// several elements at once (its lanes), so that a dispatch is paid once for all of them; registers
// live in local memory (indexed at run time; they stay in the first-level cache); and LOADs that
// stand in a row are issued together.
#pragma once

#include <cstddef>

#include "ffi/kernels/cuda/expr_math.cuh"
#include "ffi/kernels/cuda/expr_params.h"

namespace jaxgraph {

constexpr int kNumRegs = kExprNumElementRegs + kExprNumScalarRegs;
constexpr int kLoadsInFlight = 4;

// Copies a kernel's parameters to shared memory, as all threads of the block together.
template <typename P>
__device__ __forceinline__ const P& ToShared(const P& params, uint4* shared) {
  static_assert(sizeof(P) % sizeof(uint4) == 0);
  const uint4* from = reinterpret_cast<const uint4*>(&params);
  // As plain memory: through the constant bank, differing addresses would be read one by one.
  asm volatile("" : "+l"(from));
  for (uint32_t i = threadIdx.x; i < sizeof(P) / sizeof(uint4); i += blockDim.x) {
    shared[i] = from[i];
  }
  __syncthreads();
  return *reinterpret_cast<const P*>(shared);
}

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

// Any op that computes a value from values, for integers, bool and f64, rounded to its dtype.
template <typename W>
__device__ __noinline__ W GeneralValue(ExprOp op, DType t, int exponent, W a, W b, W c) {
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

// The less common ops on floats of up to 32 bits, before rounding.
inline __device__ __noinline__ float RareFloat(ExprOp op, float a, float b, float c, int exponent) {
  return FloatValue(op, a, b, c, exponent);
}

// ---- reductions ----

__device__ __forceinline__ bool IsReduce(ExprOp op) { return op >= ExprOp::kReduceSum; }

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
    case ExprOp::kReduceXor:
      return ExprOp::kXor;
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

// ---- the machine ----

// One register of one thread: a value per lane. Scalar registers hold the same value in all lanes.
template <typename W, int kLanes>
struct alignas(sizeof(W) * kLanes < 16 ? sizeof(W) * kLanes : 16) Lanes {
  W lane[kLanes];
};

template <typename W, int kLanes>
struct Registers {
  Lanes<W, kLanes> value[kNumRegs];
};
// ROW only: the best values so far of an argmax whose index accumulates in a scalar register.
template <typename W, int kLanes>
struct Extrema {
  Lanes<W, kLanes> value[kExprNumScalarRegs];
};

template <typename W, int kLanes, typename F>
__device__ __forceinline__ Lanes<W, kLanes> Map(const Lanes<W, kLanes>& a,
                                                const Lanes<W, kLanes>& b, F f) {
  Lanes<W, kLanes> out;
#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    out.lane[j] = FromFloat<W>(f(AsFloat(a.lane[j]), AsFloat(b.lane[j])));
  }
  return out;
}
template <typename W, int kLanes, typename F>
__device__ __forceinline__ Lanes<W, kLanes> Test(const Lanes<W, kLanes>& a,
                                                 const Lanes<W, kLanes>& b, F f) {
  Lanes<W, kLanes> out;
#pragma unroll
  for (int j = 0; j < kLanes; ++j) out.lane[j] = f(AsFloat(a.lane[j]), AsFloat(b.lane[j]));
  return out;
}

template <typename W, int kLanes>
__device__ __forceinline__ Lanes<W, kLanes> Rounded(DType t, const Lanes<W, kLanes>& v) {
  Lanes<W, kLanes> out = v;
  if (t == DType::kF32) return out;
#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    const float f = AsFloat(v.lane[j]);
    out.lane[j] =
        FromFloat<W>(t == DType::kBF16 ? BF16ToFloat(FloatToBF16(f)) : F16ToFloat(FloatToF16(f)));
  }
  return out;
}

// The ops that most instructions are, without branches.
__device__ __forceinline__ bool IsCommon(ExprOp op) {
  return op == kRoundOp || (op >= ExprOp::kAdd && op <= ExprOp::kMul);
}
template <typename W, int kLanes>
__device__ __forceinline__ Lanes<W, kLanes> CommonLanes(ExprOp op, const Lanes<W, kLanes>& a,
                                                        const Lanes<W, kLanes>& b) {
  return Map(a, b, [op](float x, float y) {
    const float sum = x + (op == ExprOp::kSub ? -y : y);
    return op == ExprOp::kMul ? x * y : op == kRoundOp ? x : sum;
  });
}

template <typename W, int kLanes>
__device__ __forceinline__ Lanes<W, kLanes> IndexValue(DType t, int64_t start,
                                                       const int64_t (&offset)[kLanes]) {
  Lanes<W, kLanes> out;
#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    const int64_t position = start + offset[j];
    if (ClassOf<W>(t) == Class::kInteger) {
      out.lane[j] = Wrap(t, static_cast<W>(position));
    } else if (ClassOf<W>(t) == Class::kFloat) {
      out.lane[j] = FromFloat<W>(RoundTo(t, static_cast<float>(position)));
    } else {
      out.lane[j] = static_cast<W>(__double_as_longlong(static_cast<double>(position)));
    }
  }
  return out;
}

// The other ops on floats of up to 32 bits, before rounding.
template <typename W, int kLanes>
__device__ __forceinline__ Lanes<W, kLanes> FloatLanes(const ExprInstr& in,
                                                       const Lanes<W, kLanes>& a,
                                                       const Lanes<W, kLanes>& b,
                                                       const Registers<W, kLanes>& r) {
  switch (in.op) {
    case ExprOp::kDiv:
      return Map(a, b, [](float x, float y) { return x / y; });
    case ExprOp::kMax:
      return Map(a, b, [](float x, float y) { return MaxOf(x, y); });
    case ExprOp::kMin:
      return Map(a, b, [](float x, float y) { return MinOf(x, y); });
    case ExprOp::kNeg:
      return Map(a, b, [](float x, float) { return -x; });
    case ExprOp::kExp:
      return Map(a, b, [](float x, float) { return expf(x); });
    default: {
      const Lanes<W, kLanes> c = r.value[in.c];
      Lanes<W, kLanes> out;
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        out.lane[j] = FromFloat<W>(RareFloat(in.op, AsFloat(a.lane[j]), AsFloat(b.lane[j]),
                                             AsFloat(c.lane[j]), static_cast<int16_t>(in.aux)));
      }
      return out;
    }
  }
}

// One instruction in one access.
__device__ __forceinline__ ExprInstr Fetch(const ExprParams& p, int at) {
  static_assert(offsetof(ExprParams, instrs) % 8 == 0);
  const uint2 word = reinterpret_cast<const uint2*>(p.instrs)[min(at, kExprMaxInstrs - 1)];
  ExprInstr in;
  in.op = static_cast<ExprOp>(word.x & 0xff);
  in.dtype = static_cast<DType>((word.x >> 8) & 0xff);
  in.dst = (word.x >> 16) & 0xff;
  in.a = word.x >> 24;
  in.b = word.y & 0xff;
  in.c = (word.y >> 8) & 0xff;
  in.aux = static_cast<uint16_t>(word.y >> 16);
  return in;
}

// Adds this thread's elements to a reduction.
template <typename W, int kLanes, typename Space>
__device__ __forceinline__ void Accumulate(ExprInstr in, ExprOp op, const Lanes<W, kLanes>& a,
                                           const Space& space, Registers<W, kLanes>& r,
                                           Extrema<W, kLanes>* extrema) {
  in.op = op;
  Lanes<W, kLanes> sum = r.value[in.dst];
  if (!IsArgReduce(op)) {
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      if (space.Active(j)) sum.lane[j] = Step(in, sum.lane[j], a.lane[j]);
    }
  } else {
    Lanes<W, kLanes>& best = extrema->value[in.dst - kExprNumElementRegs];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      const bool first = static_cast<uint32_t>(sum.lane[j]) == kNoIndex;
      if (!space.Active(j) || !(first || TakesOver(in, a.lane[j], best.lane[j]))) continue;
      best.lane[j] = a.lane[j];
      sum.lane[j] = space.Position(j);
    }
  }
  r.value[in.dst] = sum;
}

// Runs instructions [begin, end) on the elements of one thread. Space says where these are:
//   Offsets(strides, offset): their offsets in an operand (inactive lanes name a valid element too)
//   Active(j): whether lane j stores and is reduced; Position(j): its index on the last axis
template <typename W, int kLanes, bool kRow, typename Space>
__device__ __forceinline__ void Run(const ExprParams& p, int begin, int end, const Space& space,
                                    Registers<W, kLanes>& r, Extrema<W, kLanes>* extrema) {
  // The next instruction and its operands are fetched while this one runs; should it read what this
  // one makes, it gets that from here.
  ExprInstr next = Fetch(p, begin);
  Lanes<W, kLanes> next_a = r.value[next.a], next_b = r.value[next.b];
  for (int at = begin; at < end; ++at) {
    const ExprInstr in = next;
    const Lanes<W, kLanes> a = next_a, b = next_b;
    next = Fetch(p, at + 1);
    next_a = r.value[next.a];
    next_b = r.value[next.b];
    Lanes<W, kLanes> out;
    // The common way first and in a straight line: jumps cost more than arithmetic here.
    if (__builtin_expect(IsCommon(in.op), true)) {
      out = Rounded(in.dtype, CommonLanes(in.op, a, b));
      r.value[in.dst] = out;
      if (next.a == in.dst) next_a = out;
      if (next.b == in.dst) next_b = out;
      continue;
    }
    int64_t offset[kLanes];
    if (in.op == ExprOp::kLoad) {
      const int run = min(static_cast<int>(in.c), kLoadsInFlight);
      W bits[kLoadsInFlight][kLanes];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (i >= run) break;
        const ExprInstr load = Fetch(p, at + i);
        const uint32_t size = DeviceSizeOf(load.dtype);
        space.Offsets(p.src_strides[load.aux], offset);
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          bits[i][j] = static_cast<W>(LoadBits(p.srcs[load.aux] + offset[j], size));
        }
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        if (i >= run) break;
        const ExprInstr load = Fetch(p, at + i);
        Lanes<W, kLanes> value;
#pragma unroll
        for (int j = 0; j < kLanes; ++j) value.lane[j] = FromMemory(load.dtype, bits[i][j]);
        r.value[load.dst] = value;
      }
      at += run - 1;
      next = Fetch(p, at + 1);
      next_a = r.value[next.a];
      next_b = r.value[next.b];
      continue;
    }
    switch (in.op) {
      case ExprOp::kIndex:
        space.Offsets(p.indices[in.aux].strides, offset);
        out = IndexValue<W>(in.dtype, p.indices[in.aux].offset, offset);
        break;
      case ExprOp::kConst:
#pragma unroll
        for (int j = 0; j < kLanes; ++j) out.lane[j] = static_cast<W>(p.imms[in.aux]);
        break;
      case ExprOp::kStore:
        space.Offsets(p.out_strides[in.aux], offset);
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          if (!space.Active(j)) continue;
          StoreBits(p.outs[in.aux] + offset[j], DeviceSizeOf(in.dtype),
                    ToMemory(in.dtype, a.lane[j]));
        }
        continue;
      case ExprOp::kConvert:
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          out.lane[j] = Convert(static_cast<DType>(in.aux), in.dtype, a.lane[j]);
        }
        break;
      case ExprOp::kBitcast:
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          const uint64_t kept = ~uint64_t{0} >> (64 - 8 * DeviceSizeOf(in.dtype));
          const W bits = static_cast<W>(ToMemory(static_cast<DType>(in.aux), a.lane[j]) & kept);
          out.lane[j] = FromMemory(in.dtype, bits);
        }
        break;
      case ExprOp::kReduceSum:
      case ExprOp::kReduceMax:
        out = r.value[in.dst];
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          if (!space.Active(j)) continue;
          const float x = AsFloat(out.lane[j]), y = AsFloat(a.lane[j]);
          out.lane[j] = FromFloat<W>(in.op == ExprOp::kReduceSum ? x + y : MaxOf(x, y));
        }
        break;
      case ExprOp::kSelect: {
        const Lanes<W, kLanes> c = r.value[in.c];
#pragma unroll
        for (int j = 0; j < kLanes; ++j) out.lane[j] = a.lane[j] != 0 ? c.lane[j] : b.lane[j];
        break;
      }
      case kGeneralOp: {
        const Lanes<W, kLanes> c = r.value[in.c];
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          out.lane[j] = GeneralValue(p.ops[at], in.dtype, static_cast<int16_t>(in.aux), a.lane[j],
                                     b.lane[j], c.lane[j]);
        }
        break;
      }
      case ExprOp::kEq:
        out = Test(a, b, [](float x, float y) { return x == y; });
        break;
      case ExprOp::kNe:
        out = Test(a, b, [](float x, float y) { return x != y; });
        break;
      case ExprOp::kLt:
        out = Test(a, b, [](float x, float y) { return x < y; });
        break;
      case ExprOp::kLe:
        out = Test(a, b, [](float x, float y) { return x <= y; });
        break;
      case ExprOp::kGt:
        out = Test(a, b, [](float x, float y) { return x > y; });
        break;
      case ExprOp::kGe:
        out = Test(a, b, [](float x, float y) { return x >= y; });
        break;
      case ExprOp::kIsFinite:
        out = Test(a, b, [](float x, float) { return isfinite(x); });
        break;
      default:
        if constexpr (kRow) {
          const bool general = in.op == kGeneralReduceOp || in.op == kGeneralArgReduceOp;
          if (general || (IsReduce(in.op) && in.op < kRoundOp)) {
            Accumulate(in, general ? p.ops[at] : in.op, a, space, r, extrema);
            continue;
          }
        }
        out = Rounded(in.dtype, FloatLanes(in, a, b, r));
    }
    r.value[in.dst] = out;
    if (next.a == in.dst) next_a = out;
    if (next.b == in.dst) next_b = out;
  }
}

}  // namespace jaxgraph
