// The plain reference: every node computed element by element in double and int64, with no thought
// of speed. It rounds to the dtype after each instruction, as ffi/core/expr.h asks.
#pragma once

#include "ffi/core/attention.h"
#include "ffi/core/expr.h"
#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {

// `v` as a value of type t: rounded, or wrapped.
inline Value InType(DType t, Value v) {
  if (t == DType::kF64) return v;
  if (t == DType::kPred) return {0, v.i != 0};
  if (IsFloat(t)) v.f = static_cast<float>(v.f);  // XLA, too, rounds to f16 and bf16 through float
  char raw[8];
  WriteElement(t, v, raw);
  return ReadElement(t, raw);
}

inline double ReferenceErfInv(double x) {
  if (x == 0 || !(std::abs(x) < 1)) {
    return x == 0 ? x : x == 1 ? HUGE_VAL : x == -1 ? -HUGE_VAL : NAN;
  }
  if (std::abs(x) < 1e-4) {  // the series' first terms
    constexpr double kPi = 3.14159265358979323846;
    return std::sqrt(kPi) / 2 * (x + kPi / 12 * x * x * x);
  }
  double lo = 0, hi = 6;  // bisection on erfc, which stays exact where erf is flat
  const double ax = std::abs(x);
  for (int i = 0; i < 100; ++i) {
    const double mid = (lo + hi) / 2;
    (ax < 0.5 ? std::erf(mid) < ax : std::erfc(mid) > 1 - ax) ? lo = mid : hi = mid;
  }
  return std::copysign((lo + hi) / 2, x);
}

inline double ReferenceUnary(ExprOp op, double x) {
  switch (op) {
    case ExprOp::kNeg:
      return -x;
    case ExprOp::kAbs:
      return std::fabs(x);
    case ExprOp::kSign:
      return x == 0 || std::isnan(x) ? x : x > 0 ? 1 : -1;
    case ExprOp::kFloor:
      return std::floor(x);
    case ExprOp::kCeil:
      return std::ceil(x);
    case ExprOp::kRoundAway:
      return std::round(x);
    case ExprOp::kRoundEven:
      return x - std::remainder(x, 1) == 0 ? std::copysign(0, x) : x - std::remainder(x, 1);
    case ExprOp::kExp:
      return std::exp(x);
    case ExprOp::kExp2:
      return std::exp2(x);
    case ExprOp::kExpm1:
      return std::expm1(x);
    case ExprOp::kLog:
      return std::log(x);
    case ExprOp::kLog1p:
      return std::log1p(x);
    case ExprOp::kSqrt:
      return std::sqrt(x);
    case ExprOp::kRsqrt:
      return 1 / std::sqrt(x);
    case ExprOp::kCbrt:
      return std::cbrt(x);
    case ExprOp::kSin:
      return std::sin(x);
    case ExprOp::kCos:
      return std::cos(x);
    case ExprOp::kTan:
      return std::tan(x);
    case ExprOp::kAsin:
      return std::asin(x);
    case ExprOp::kAcos:
      return std::acos(x);
    case ExprOp::kAtan:
      return std::atan(x);
    case ExprOp::kSinh:
      return std::sinh(x);
    case ExprOp::kCosh:
      return std::cosh(x);
    case ExprOp::kTanh:
      return std::tanh(x);
    case ExprOp::kAsinh:
      return std::asinh(x);
    case ExprOp::kAcosh:
      return std::acosh(x);
    case ExprOp::kAtanh:
      return std::atanh(x);
    case ExprOp::kLogistic:
      return 1 / (1 + std::exp(-x));
    case ExprOp::kErf:
      return std::erf(x);
    case ExprOp::kErfc:
      return std::erfc(x);
    case ExprOp::kErfInv:
      return ReferenceErfInv(x);
    default:
      ADD_FAILURE() << "no unary " << static_cast<int>(op);
      return 0;
  }
}

inline int64_t ReferenceUnary(ExprOp op, DType t, int64_t x) {
  const int bits = static_cast<int>(8 * SizeOf(t));
  auto bit = [&](int i) { return (static_cast<uint64_t>(x) >> i) & 1; };
  switch (op) {
    case ExprOp::kNeg:
      return static_cast<int64_t>(0 - static_cast<uint64_t>(x));
    case ExprOp::kAbs:
      return x < 0 && IsSigned(t) ? static_cast<int64_t>(0 - static_cast<uint64_t>(x)) : x;
    case ExprOp::kSign:
      return x == 0 ? 0 : x < 0 && IsSigned(t) ? -1 : 1;
    case ExprOp::kNot:
      return t == DType::kPred ? !x : ~x;
    case ExprOp::kPopcnt: {
      int64_t n = 0;
      for (int i = 0; i < bits; ++i) n += static_cast<int64_t>(bit(i));
      return n;
    }
    case ExprOp::kClz: {
      int64_t n = 0;
      for (int i = bits - 1; i >= 0 && !bit(i); --i) ++n;
      return n;
    }
    default:
      ADD_FAILURE() << "no unary " << static_cast<int>(op);
      return 0;
  }
}

inline double ReferenceMax(double x, double y) {
  if (std::isnan(x) || std::isnan(y)) return NAN;
  if (x == y) return std::signbit(x) ? y : x;
  return x > y ? x : y;
}
inline double ReferenceMin(double x, double y) { return -ReferenceMax(-x, -y); }

inline double ReferenceBinary(ExprOp op, double x, double y) {
  switch (op) {
    case ExprOp::kAdd:
      return x + y;
    case ExprOp::kSub:
      return x - y;
    case ExprOp::kMul:
      return x * y;
    case ExprOp::kDiv:
      return x / y;
    case ExprOp::kRem:
      return std::fmod(x, y);
    case ExprOp::kPow:
      return std::pow(x, y);
    case ExprOp::kAtan2:
      return std::atan2(x, y);
    case ExprOp::kMax:
      return ReferenceMax(x, y);
    case ExprOp::kMin:
      return ReferenceMin(x, y);
    default:
      ADD_FAILURE() << "no binary " << static_cast<int>(op);
      return 0;
  }
}

inline bool Less(DType t, Value x, Value y) {
  if (IsFloat(t)) return x.f < y.f;
  return t == DType::kU64 ? static_cast<uint64_t>(x.i) < static_cast<uint64_t>(y.i) : x.i < y.i;
}
inline bool Equal(DType t, Value x, Value y) { return IsFloat(t) ? x.f == y.f : x.i == y.i; }

inline int64_t ReferenceBinary(ExprOp op, DType t, int64_t x, int64_t y) {
  using U = uint64_t;
  const U bits = 8 * SizeOf(t), ux = static_cast<U>(x), uy = static_cast<U>(y);
  const U field = bits == 64 ? ux : ux & ((U{1} << bits) - 1);
  const bool top = (field >> (bits - 1)) & 1;
  switch (op) {
    case ExprOp::kAdd:
      return static_cast<int64_t>(ux + uy);
    case ExprOp::kSub:
      return static_cast<int64_t>(ux - uy);
    case ExprOp::kMul:
      return static_cast<int64_t>(ux * uy);
    case ExprOp::kDiv:
      if (y == 0) return -1;
      if (t == DType::kU64) return static_cast<int64_t>(ux / uy);
      return y == -1 ? static_cast<int64_t>(0 - ux) : x / y;
    case ExprOp::kRem:
      if (y == 0) return x;
      if (t == DType::kU64) return static_cast<int64_t>(ux % uy);
      return y == -1 ? 0 : x % y;
    case ExprOp::kMax:
      return Less(t, {0, x}, {0, y}) ? y : x;
    case ExprOp::kMin:
      return Less(t, {0, x}, {0, y}) ? x : y;
    case ExprOp::kAnd:
      return x & y;
    case ExprOp::kOr:
      return x | y;
    case ExprOp::kXor:
      return x ^ y;
    case ExprOp::kShl:
      return uy >= bits ? 0 : static_cast<int64_t>(ux << uy);
    case ExprOp::kShrLogical:
      return uy >= bits ? 0 : static_cast<int64_t>(field >> uy);
    case ExprOp::kShrArithmetic: {
      int64_t r = static_cast<int64_t>(field);
      for (U i = 0; i < std::min(uy, bits); ++i)  // bit by bit, the top bit filled again
        r = static_cast<int64_t>((static_cast<U>(r) >> 1) | (top ? U{1} << (bits - 1) : 0));
      return r;
    }
    default:
      ADD_FAILURE() << "no binary " << static_cast<int>(op);
      return 0;
  }
}

inline Value ReferenceConvert(DType from, DType to, Value v) {
  if (to == DType::kPred) return {0, IsFloat(from) ? v.f != 0 : v.i != 0};
  if (IsFloat(to)) {
    if (IsFloat(from)) return InType(to, v);
    const bool is_u64 = from == DType::kU64;
    if (to == DType::kF64)
      return {is_u64 ? static_cast<double>(static_cast<uint64_t>(v.i)) : static_cast<double>(v.i),
              0};
    return InType(
        to, {is_u64 ? static_cast<float>(static_cast<uint64_t>(v.i)) : static_cast<float>(v.i), 0});
  }
  if (!IsFloat(from)) return InType(to, v);
  if (std::isnan(v.f)) return {0, 0};
  const double x = std::trunc(v.f);
  if (to == DType::kU64) {
    if (x >= std::ldexp(1, 64)) return {0, -1};
    return {0, x <= 0 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(x))};
  }
  if (x >= static_cast<double>(IntMax(to))) return {0, IntMax(to)};
  if (x <= static_cast<double>(IntMin(to))) return {0, IntMin(to)};
  return {0, static_cast<int64_t>(x)};
}

class ReferenceExpr {
 public:
  ReferenceExpr(const Node& node, Buffers* buffers) : node_(node), buffers_(*buffers) {
    const Status status = DecodeExpr(node, &p_);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  void Run() {
    if (node_.op == Op::kExpr) {
      ForEachIndex(p_.shape, p_.rank, [&](const int64_t* index) {
        Section(p_.stages[0].elem_begin, p_.stages[0].elem_end, index);
      });
      return;
    }
    ForEachIndex(p_.shape, p_.rank - 1, [&](const int64_t* row) { RunRow(row); });
  }

 private:
  void RunRow(const int64_t* row) {
    int64_t index[kMaxRank + 1] = {};
    std::copy_n(row, p_.rank - 1, index);
    for (int s = 0; s < p_.num_stages; ++s) {
      const ExprStage& stage = p_.stages[s];
      index[p_.rank - 1] = 0;
      Section(stage.scalar_begin, stage.scalar_end, index);
      std::vector<std::vector<Value>> reduced(kExprMaxInstrs);
      reduced_ = &reduced;
      for (int64_t i = 0; i < p_.shape[p_.rank - 1]; ++i) {
        index[p_.rank - 1] = i;
        Section(stage.elem_begin, stage.elem_end, index);
      }
      for (int i = stage.elem_begin; i < stage.elem_end; ++i)
        if (p_.instrs[i].op >= ExprOp::kReduceSum)
          regs_[p_.instrs[i].dst] = Reduced(p_.instrs[i], reduced[i]);
    }
  }

  void Section(int begin, int end, const int64_t* index) {
    for (int i = begin; i < end; ++i) Execute(i, index);
  }

  void Execute(int at, const int64_t* index) {
    const ExprInstr& in = p_.instrs[at];
    const DType t = in.dtype;
    const Value a = regs_[in.a], b = regs_[in.b], c = regs_[in.c];
    Value& dst = regs_[in.dst];
    if (in.op >= ExprOp::kReduceSum) {
      (*reduced_)[at].push_back(a);
      return;
    }
    switch (in.op) {
      case ExprOp::kLoad:
        dst = Read(buffers_, node_.srcs[in.aux], index);
        return;
      case ExprOp::kStore:
        Write(buffers_, node_.outs[in.aux], index, a);
        return;
      case ExprOp::kIndex: {
        const ExprIndex& x = p_.indices[in.aux];
        int64_t v = x.offset;
        for (int d = 0; d < p_.rank; ++d) v += x.strides[d] * index[d];
        dst = ReferenceConvert(DType::kS64, t, {0, v});
        return;
      }
      case ExprOp::kConst: {
        const char* bits = reinterpret_cast<const char*>(&p_.imms[in.aux]);
        if (t == DType::kF64) {
          dst.f = LoadAs<double>(bits);
        } else if (IsFloat(t)) {
          dst.f = LoadAs<float>(bits);
        } else {
          dst.i = LoadAs<int64_t>(bits);
        }
        return;
      }
      case ExprOp::kConvert:
        dst = ReferenceConvert(static_cast<DType>(in.aux), t, a);
        return;
      case ExprOp::kBitcast: {
        char bits[8] = {};
        WriteElement(static_cast<DType>(in.aux), a, bits);
        dst = ReadElement(t, bits);
        return;
      }
      case ExprOp::kIsFinite:
        dst = {0, std::isfinite(a.f)};
        return;
      case ExprOp::kEq:
        dst = {0, Equal(t, a, b)};
        return;
      case ExprOp::kNe:
        dst = {0, !Equal(t, a, b)};
        return;
      case ExprOp::kLt:
        dst = {0, Less(t, a, b)};
        return;
      case ExprOp::kLe:
        dst = {0, Less(t, a, b) || Equal(t, a, b)};
        return;
      case ExprOp::kGt:
        dst = {0, Less(t, b, a)};
        return;
      case ExprOp::kGe:
        dst = {0, Less(t, b, a) || Equal(t, a, b)};
        return;
      case ExprOp::kSelect:
        dst = a.i ? c : b;
        return;
      case ExprOp::kClamp:
        dst = IsFloat(t) ? Value{ReferenceMin(ReferenceMax(b.f, a.f), c.f), 0}
              : Less(t, Less(t, b, a) ? a : b, c) ? (Less(t, b, a) ? a : b)
                                                  : c;
        return;
      case ExprOp::kIntegerPow: {
        const int n = static_cast<int16_t>(in.aux);
        if (IsFloat(t)) {
          dst = InType(t, {std::pow(a.f, n), 0});
        } else {
          uint64_t r = 1;
          for (int i = 0; i < n; ++i) r *= static_cast<uint64_t>(a.i);
          dst = InType(t, {0, static_cast<int64_t>(r)});
        }
        return;
      }
      default:
        break;
    }
    const bool unary = in.op < ExprOp::kAdd;
    Value r;
    if (IsFloat(t)) {
      r.f = unary ? ReferenceUnary(in.op, a.f) : ReferenceBinary(in.op, a.f, b.f);
    } else {
      r.i = unary ? ReferenceUnary(in.op, t, a.i) : ReferenceBinary(in.op, t, a.i, b.i);
    }
    dst = InType(t, r);
  }

  static Value Reduced(const ExprInstr& in, const std::vector<Value>& values) {
    const DType t = in.dtype;
    const bool max = in.op == ExprOp::kReduceMax || in.op == ExprOp::kReduceArgmax;
    switch (in.op) {
      case ExprOp::kReduceSum: {
        Value r;
        for (Value v : values)
          r = {r.f + v.f,
               static_cast<int64_t>(static_cast<uint64_t>(r.i) + static_cast<uint64_t>(v.i))};
        return InType(t, r);
      }
      case ExprOp::kReduceProd: {
        Value r{1, 1};
        for (Value v : values)
          r = {r.f * v.f,
               static_cast<int64_t>(static_cast<uint64_t>(r.i) * static_cast<uint64_t>(v.i))};
        return InType(t, r);
      }
      case ExprOp::kReduceAnd: {
        Value r{0, -1};
        for (Value v : values) r.i &= v.i;
        return InType(t, r);
      }
      case ExprOp::kReduceOr: {
        Value r;
        for (Value v : values) r.i |= v.i;
        return r;
      }
      case ExprOp::kReduceXor: {
        Value r;
        for (Value v : values) r.i ^= v.i;
        return r;
      }
      case ExprOp::kReduceMax:
      case ExprOp::kReduceMin: {
        if (values.empty()) {
          if (IsFloat(t)) return {max ? -HUGE_VAL : HUGE_VAL, 0};
          return {0, max ? IntMin(t) : t == DType::kU64 ? -1 : IntMax(t)};
        }
        Value r = values[0];
        for (Value v : values) {
          if (IsFloat(t)) {
            r.f = max ? ReferenceMax(r.f, v.f) : ReferenceMin(r.f, v.f);
          } else if (max ? Less(t, r, v) : Less(t, v, r)) {
            r = v;
          }
        }
        return r;
      }
      default: {
        int64_t best = 0;
        for (size_t i = 0; i < values.size(); ++i) {
          const Value v = values[i], b = values[best];
          if (IsFloat(t) && std::isnan(b.f)) break;
          if ((IsFloat(t) && std::isnan(v.f)) || (max ? Less(t, b, v) : Less(t, v, b)))
            best = static_cast<int64_t>(i);
        }
        return {0, best};
      }
    }
  }

  const Node& node_;
  Buffers& buffers_;
  ExprProgram p_;
  std::array<Value, 64> regs_{};
  std::vector<std::vector<Value>>* reduced_ = nullptr;  // operands of reductions, per instruction
};

inline void ReferenceMatmul(const Node& node, Buffers* buffers) {
  const TensorRef &out = node.outs[0], &lhs = node.srcs[0], &rhs = node.srcs[1];
  ForEachIndex(out, [&](const int64_t* i) {
    double sum = 0;
    int64_t b0 = i[0], b1 = i[1];
    if (node.srcs.size() == 3) {
      const TensorRef& index = node.srcs[2];
      const Value at = Read(*buffers, index, i);
      const bool beyond = index.dtype == DType::kU64 && at.i < 0;
      b0 = beyond ? rhs.shape[0] - 1 : std::min(std::max<int64_t>(at.i, 0), rhs.shape[0] - 1);
      b1 = 0;
    }
    for (int64_t k = 0; k < lhs.shape[3]; ++k) {
      const int64_t a[] = {i[0], i[1], i[2], k}, b[] = {b0, b1, k, i[3]};
      sum += Read(*buffers, lhs, a).f * Read(*buffers, rhs, b).f;
    }
    Write(*buffers, out, i, {sum, 0});
  });
}

inline void ReferenceIndexed(const Node& node, Buffers* buffers) {
  const bool gather = node.op == Op::kGather;
  const TensorRef& whole = node.srcs[0];
  const TensorRef& part = gather ? node.outs[0] : node.srcs[1];
  IndexParams p;
  std::memcpy(&p, node.params.data(), sizeof p);
  ForEachIndex(part, [&](const int64_t* at) {
    int64_t index[kMaxRank + 1] = {};
    bool outside = false;
    for (int d = 0; d < whole.rank; ++d) index[d] = at[d + 1];
    for (int c = 0; c < p.num_components; ++c) {
      int64_t start = Read(*buffers, node.srcs[(gather ? 1 : 2) + c], at).i;
      const int64_t last = whole.shape[p.dim[c]] - part.shape[p.dim[c] + 1];
      outside = outside || start < 0 || start > last;
      index[p.dim[c]] += std::min(std::max<int64_t>(start, 0), last);
    }
    outside = outside && p.mode == IndexMode::kFillOrDrop;
    if (!gather) {
      if (!outside) Write(*buffers, whole, index, Read(*buffers, part, at));
    } else if (outside) {
      Write(*buffers, part, at, ReadElement(part.dtype, reinterpret_cast<const char*>(&p.fill)));
    } else {
      Write(*buffers, part, at, Read(*buffers, whole, index));
    }
  });
}

inline void ReferenceCopy(const Node& node, Buffers* buffers) {
  ForEachIndex(node.outs[0], [&](const int64_t* index) {
    Write(*buffers, node.outs[0], index, Read(*buffers, node.srcs[0], index));
  });
}

// Does a come before b, as lax.sort or lax.top_k have it?
inline bool ReferenceBefore(SortOrder order, DType t, Value a, Value b) {
  const bool descending = order == SortOrder::kDescending;
  if (!IsFloat(t)) {
    if (t == DType::kU64) {
      const uint64_t x = static_cast<uint64_t>(a.i), y = static_cast<uint64_t>(b.i);
      return descending ? x > y : x < y;
    }
    return descending ? a.i > b.i : a.i < b.i;
  }
  if (!descending) return !std::isnan(a.f) && (std::isnan(b.f) || a.f < b.f);
  auto total = [](double x) {  // -NaN, -inf, .., -0, 0, .., inf, NaN as (coarse, fine)
    const double sign = std::signbit(x) ? -1 : 1;
    return std::isnan(x) ? std::pair(2 * sign, 0.0)
                         : std::pair(x == 0 ? 0.25 * sign : sign, x == 0 ? 0 : x);
  };
  return total(a.f) > total(b.f);
}

inline void ReferenceSort(const Node& node, Buffers* buffers) {
  SortParams p;
  std::memcpy(static_cast<void*>(&p), node.params.data(), sizeof p);
  const TensorRef& keys = node.srcs[0];
  const int64_t n = keys.shape[1], kept = node.outs[0].shape[1];
  for (int64_t row = 0; row < keys.shape[0]; ++row) {
    for (int64_t c = 0; c < p.chunks; ++c) {
      std::vector<int64_t> places;
      for (int64_t i = c * n / p.chunks; i < (c + 1) * n / p.chunks; ++i) places.push_back(i);
      std::stable_sort(places.begin(), places.end(), [&](int64_t i, int64_t j) {
        const int64_t a[] = {row, i}, b[] = {row, j};
        return ReferenceBefore(p.order, keys.dtype, Read(*buffers, keys, a),
                               Read(*buffers, keys, b));
      });
      const int64_t first = kept == n ? c * n / p.chunks : c * (kept / p.chunks);
      if (kept != n) places.resize(kept / p.chunks);
      for (size_t o = 0; o < node.outs.size(); ++o) {
        for (size_t j = 0; j < places.size(); ++j) {
          const int64_t to[] = {row, first + static_cast<int64_t>(j)}, from[] = {row, places[j]};
          const bool position = p.source[o] == kSortPositions;
          Write(*buffers, node.outs[o], to,
                position ? Value{0, places[j]} : Read(*buffers, node.srcs[p.source[o]], from));
        }
      }
    }
  }
}

// A dense tensor like `like` on a new buffer.
inline TensorRef AddDense(const TensorRef& like, Buffers* buffers) {
  TensorRef t = like;
  int64_t size = static_cast<int64_t>(SizeOf(t.dtype));
  for (int64_t d = t.rank - 1, stride = 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.shape[d];
    size *= t.shape[d];
  }
  t.base = static_cast<uint32_t>(buffers->size());
  t.offset = 0;
  buffers->emplace_back(size);
  return t;
}

// All scores are laid out, the program runs over them as a node of its own.
inline void ReferenceAttention(const Node& node, Buffers* buffers) {
  const TensorRef &out = node.outs[0], &q = node.srcs[0], &k = node.srcs[1], &v = node.srcs[2];
  Attention attention;
  const Status status = DecodeAttention(node, &attention);
  ASSERT_TRUE(status.ok()) << status.message();
  const size_t num_buffers = buffers->size();
  Node& scores = attention.scores;
  TensorRef& raw = scores.srcs[attention.params.raw_source];
  raw = AddDense(raw, buffers);
  scores.outs[0] = AddDense(scores.outs[0], buffers);
  ForEachIndex(raw, [&](const int64_t* i) {
    double sum = 0;
    for (int64_t d = 0; d < q.shape[3]; ++d) {
      const int64_t a[] = {i[0], i[1], i[2], d}, b[] = {i[0], i[1], d, i[3]};
      sum += Read(*buffers, q, a).f * Read(*buffers, k, b).f;
    }
    Write(*buffers, raw, i, {sum, 0});
  });
  ReferenceExpr(scores, buffers).Run();

  ForEachIndex(out, [&](const int64_t* i) {
    const int64_t s = v.shape[2];
    int64_t at[] = {i[0], i[1], i[2], 0};
    const auto score = [&](int64_t j) {
      at[3] = j;
      return Read(*buffers, scores.outs[0], at).f;
    };
    double peak = -HUGE_VAL, total = 0, sum = 0, sink = 0;
    if (attention.has_sink()) {
      const int64_t query[] = {i[0], i[1], i[2], 0};
      peak = sink = Read(*buffers, node.srcs.back(), query).f;
    }
    for (int64_t j = 0; j < s; ++j) peak = ReferenceMax(peak, score(j));
    if (attention.has_sink()) total = std::exp(sink - peak);
    for (int64_t j = 0; j < s; ++j) {
      const double weight = std::exp(score(j) - peak);
      const int64_t b[] = {i[0], i[1], j, i[3]};
      total += weight;
      sum += weight * Read(*buffers, v, b).f;
    }
    Write(*buffers, out, i, {s == 0 ? 0 : sum / total, 0});
  });
  buffers->resize(num_buffers);
}

// Runs the case's node on a copy of its buffers.
inline Buffers RunReference(const NodeCase& c) {
  Buffers buffers = c.buffers;
  switch (c.node.op) {
    case Op::kExpr:
    case Op::kRow:
      ReferenceExpr(c.node, &buffers).Run();
      break;
    case Op::kMatmul:
      ReferenceMatmul(c.node, &buffers);
      break;
    case Op::kGather:
    case Op::kSetRows:
      ReferenceIndexed(c.node, &buffers);
      break;
    case Op::kCopy:
      ReferenceCopy(c.node, &buffers);
      break;
    case Op::kAttention:
      ReferenceAttention(c.node, &buffers);
      break;
    case Op::kSort:
      ReferenceSort(c.node, &buffers);
      break;
    case Op::kView:
      break;
  }
  return buffers;
}

}  // namespace jaxgraph::testing
