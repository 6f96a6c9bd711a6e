// Random expression programs over every instruction, for EXPR and ROW nodes.
//
// The generator follows the interval [lo, hi] that each register can lie in and a bound `err` on
// how far two right implementations may differ there, and only takes instructions whose operands
// are in a safe domain. Discontinuous instructions (comparisons, rounding, conversion to integers,
// ...) take only operands with err == 0: values made by correctly rounded operations alone, which
// are the same bits everywhere.
#pragma once

#include <optional>

#include "ffi/core/expr.h"
#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {

inline const std::vector<DType>& FloatTypes() {
  static const std::vector<DType> types = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  return types;
}
inline const std::vector<DType>& IntTypes() {
  static const std::vector<DType> types = {DType::kS8, DType::kS16, DType::kS32, DType::kS64,
                                           DType::kU8, DType::kU16, DType::kU32, DType::kU64};
  return types;
}

// The spacing of a type's values around 1.
inline double UnitOf(DType t) {
  switch (t) {
    case DType::kF16:
      return std::ldexp(1, -10);
    case DType::kBF16:
      return std::ldexp(1, -7);
    case DType::kF32:
      return std::ldexp(1, -23);
    case DType::kF64:
      return std::ldexp(1, -52);
    default:
      return 0;
  }
}

class ExprGenerator {
 public:
  // A program of `op` (kExpr or kRow) over `shape`, with tensors laid out as `layout` allows.
  ExprGenerator(Rng& rng, Op op, std::vector<int64_t> shape, Layout layout)
      : rng_(rng), shape_(std::move(shape)), layout_(layout) {
    case_.node.op = op;
    program_.rank = static_cast<uint8_t>(shape_.size());
    std::copy(shape_.begin(), shape_.end(), program_.shape);
  }

  NodeCase Make() {
    const bool row = case_.node.op == Op::kRow;
    program_.num_stages = static_cast<uint8_t>(row ? UniformInt(rng_, 1, 4) : 1);
    for (int s = 0; s < program_.num_stages; ++s) {
      ExprStage& stage = program_.stages[s];
      stage.scalar_begin = program_.num_instrs;
      in_scalar_ = true;
      if (row)
        for (int64_t n = UniformInt(rng_, 0, 5); n > 0; --n) AddInstruction();
      if (row && Chance(rng_, 0.3)) AddStore();
      stage.scalar_end = stage.elem_begin = program_.num_instrs;
      in_scalar_ = false;
      elem_begin_ = program_.num_instrs;
      elements_.assign(kExprNumElementRegs, Reg{});
      const bool last = s + 1 == program_.num_stages;
      if (!row || !Chance(rng_, 0.15)) {
        AddLoad();
        for (int64_t n = UniformInt(rng_, 2, 14); n > 0; --n) AddInstruction();
        if (!last)
          for (int64_t n = UniformInt(rng_, 1, 2); n > 0; --n) AddReduction();
        if (!row || last || Chance(rng_, 0.3))
          for (int64_t n = UniformInt(rng_, 1, 2); n > 0; --n) AddStore();
      }
      for (const auto& [reg, value] : reduced_) scalars_[reg] = value;  // complete from here on
      reduced_.clear();
      stage.elem_end = program_.num_instrs;
    }
    if (case_.node.outs.empty()) {  // a last stage whose only task is a result
      ExprStage& stage = program_.stages[program_.num_stages++];
      in_scalar_ = true;
      stage.scalar_begin = program_.num_instrs;
      AddConst();
      AddStore();
      stage.scalar_end = stage.elem_begin = stage.elem_end = program_.num_instrs;
    }
    program_.num_srcs = static_cast<uint8_t>(case_.node.srcs.size());
    program_.num_outs = static_cast<uint8_t>(case_.node.outs.size());
    case_.node.params = EncodeExpr(program_);
    return std::move(case_);
  }

 private:
  struct Reg {
    bool live = false;
    DType dtype = DType::kF32;
    double lo = 0, hi = 0, err = 0;
    double reach() const { return std::max(std::abs(lo), std::abs(hi)); }
  };
  using Operand = uint8_t;

  // ---- registers ----

  const Reg& At(Operand r) const { return r < 32 ? elements_[r] : scalars_[r - 32]; }

  // A random live register that the present section may read and that satisfies `want`.
  template <typename Want>
  std::optional<Operand> Find(Want want) {
    std::vector<Operand> found;
    for (int r = in_scalar_ ? 32 : 0; r < 64; ++r) {
      const Reg& reg = At(static_cast<Operand>(r));
      if (reg.live && want(reg)) found.push_back(static_cast<Operand>(r));
    }
    if (found.empty()) return std::nullopt;
    return Pick(rng_, found);
  }
  std::optional<Operand> FindType(DType t) {
    return Find([t](const Reg& r) { return r.dtype == t; });
  }

  // Writes an instruction whose result is `value`, into a random register of the section's file.
  void Emit(ExprOp op, DType dtype, Operand a, Operand b, Operand c, uint16_t aux, Reg value) {
    if (!Fits(value)) return;
    value.live = true;
    const uint8_t dst = static_cast<uint8_t>(UniformInt(rng_, 0, 31) + (in_scalar_ ? 32 : 0));
    (in_scalar_ ? scalars_[dst - 32] : elements_[dst]) = value;
    Append({op, dtype, dst, a, b, c, aux});
  }
  void Append(const ExprInstr& instr) {
    if (program_.num_instrs < kExprMaxInstrs) program_.instrs[program_.num_instrs++] = instr;
  }

  // Finite in its type, and not so inexact that a comparison of results says nothing.
  static bool Fits(const Reg& r) {
    if (!IsFloat(r.dtype)) return true;
    const double limit = r.dtype == DType::kF16 ? 1e3 : 1e5;
    return r.reach() <= limit && r.err <= 0.05 * std::max(1.0, r.reach());
  }

  // The result of a smooth instruction with Lipschitz constants folded into `spread`.
  static Reg Smooth(DType t, double lo, double hi, double spread) {
    Reg r{true, t, std::min(lo, hi), std::max(lo, hi), 0};
    r.err = spread + 4 * UnitOf(t) * r.reach();
    return r;
  }
  // The result of a correctly rounded one: exact on exact operands.
  static Reg Rounded(DType t, double lo, double hi, double spread) {
    Reg r = Smooth(t, lo, hi, spread);
    if (spread == 0) r.err = 0;
    const double slack = UnitOf(t) * r.reach();
    r.lo -= slack;
    r.hi += slack;
    return r;
  }
  static Reg AnyInt(DType t) {
    const double lo = t == DType::kU64 ? 0 : static_cast<double>(IntMin(t));
    const double hi = t == DType::kU64 ? std::ldexp(1, 64) : static_cast<double>(IntMax(t));
    return {true, t, lo, hi, 0};
  }

  DType RandomType() {
    const double p = UniformReal(rng_, 0, 1);
    if (p < 0.7) return Chance(rng_, 0.7) ? main_ : Pick(rng_, FloatTypes());
    return p < 0.95 ? Pick(rng_, IntTypes()) : DType::kPred;
  }

  // ---- instructions ----

  void AddInstruction() {
    switch (UniformInt(rng_, 0, 16)) {
      case 0:
        return AddConst();
      case 1:
        return AddIndex();
      case 2:
      case 3:
        return AddLoad();
      case 4:
      case 5:
        return AddConvert();
      case 6:
      case 7:
      case 8:
        return AddUnary();
      case 9:
        return AddTernary();
      case 10:
        return AddBitcast();
      default:
        return AddBinary();
    }
  }

  void AddConst() {
    if (program_.num_imms == kExprMaxImms) return;
    const DType t = RandomType();
    Reg r{true, t, 0, 0, 0};
    uint64_t bits = 0;
    if (t == DType::kF64) {
      const double v = UniformReal(rng_, -2, 2);
      std::memcpy(&bits, &v, 8);
      r.lo = r.hi = v;
    } else if (IsFloat(t)) {
      char raw[8];
      WriteElement(t, {UniformReal(rng_, -2, 2), 0}, raw);  // a value of the type
      const float v = static_cast<float>(ReadElement(t, raw).f);
      std::memcpy(&bits, &v, 4);
      r.lo = r.hi = v;
    } else {
      const int64_t v = UniformInt(rng_, IsSigned(t) ? -9 : 0, t == DType::kPred ? 1 : 9);
      bits = static_cast<uint64_t>(v);
      r.lo = r.hi = static_cast<double>(v);
    }
    program_.imms[program_.num_imms] = bits;
    Emit(ExprOp::kConst, t, 0, 0, 0, program_.num_imms++, r);
  }

  void AddIndex() {
    if (program_.num_indices == kExprMaxIndices) return;
    ExprIndex& index = program_.indices[program_.num_indices];
    index.offset = UniformInt(rng_, 0, 20);
    double lo = static_cast<double>(index.offset), hi = lo;
    for (int d = 0; d < program_.rank; ++d) {
      index.strides[d] = UniformInt(rng_, -1, 2);
      const double end =
          static_cast<double>(index.strides[d] * std::max<int64_t>(shape_[d] - 1, 0));
      (end < 0 ? lo : hi) += end;
    }
    const DType t = Pick(rng_, std::vector<DType>{DType::kS32, DType::kS64, DType::kU32, main_});
    const bool exact = t != DType::kF16 && t != DType::kBF16;
    Reg r{true, t, lo, hi, exact ? 0 : UnitOf(t) * std::max(std::abs(lo), std::abs(hi))};
    if (t == DType::kU32) r = AnyInt(t);
    Emit(ExprOp::kIndex, t, 0, 0, 0, program_.num_indices++, r);
  }

  // The shape of a tensor that the present section reads or writes.
  std::vector<int64_t> TensorShape() const {
    std::vector<int64_t> shape = shape_;
    if (in_scalar_ && !shape.empty()) shape.back() = 1;
    return shape;
  }

  void AddLoad() {
    auto& srcs = case_.node.srcs;
    if (srcs.size() == kExprMaxSrcs) return;
    const DType t = RandomType();
    Reg r{true, t, -2, 2, 0};
    if (!IsFloat(t)) {
      r.lo = IsSigned(t) ? -100 : 0;
      r.hi = t == DType::kPred ? 1 : 100;
    } else if (Chance(rng_, 0.4)) {
      r.lo = 0.25;
    }
    srcs.push_back(MakeTensor(rng_, &case_, t, TensorShape(), layout_));
    FillRandom(rng_, &case_, srcs.back(), r.lo, r.hi);
    r.lo -= UnitOf(t) * std::abs(r.lo);
    r.hi += UnitOf(t) * std::abs(r.hi);
    Emit(ExprOp::kLoad, t, 0, 0, 0, static_cast<uint16_t>(srcs.size() - 1), r);
  }

  void AddStore() {
    auto& outs = case_.node.outs;
    if (outs.size() == kExprMaxOuts) return;
    if (program_.num_instrs >= kExprMaxInstrs) return;
    const auto a = Find([](const Reg&) { return true; });
    if (!a) return;
    const Layout layout = layout_ == Layout::kBroadcast ? Layout::kStrided : layout_;
    outs.push_back(MakeTensor(rng_, &case_, At(*a).dtype, TensorShape(), layout));
    case_.tolerance.push_back(2 * At(*a).err);
    Append({ExprOp::kStore, At(*a).dtype, 0, *a, 0, 0, static_cast<uint16_t>(outs.size() - 1)});
  }

  void AddConvert() {
    const DType to = RandomType();
    const auto a = Find([to](const Reg& r) { return IsFloat(to) || r.err == 0; });
    if (!a) return;
    const Reg from = At(*a);
    Reg r{true, to, from.lo, from.hi, from.err};
    if (IsFloat(to)) {
      r = Rounded(to, from.lo, from.hi, from.err);
    } else if (to == DType::kPred) {
      r.lo = 0;
      r.hi = 1;
    } else if (from.lo < static_cast<double>(IntMin(to)) ||
               from.hi > static_cast<double>(IntMax(to))) {
      r = AnyInt(to);
    }
    Emit(ExprOp::kConvert, to, *a, 0, 0, static_cast<uint16_t>(from.dtype), r);
  }

  // Exact values as integers of their size, and floats back again.
  void AddBitcast() {
    const auto a = Find([](const Reg& r) { return r.dtype != DType::kPred && r.err == 0; });
    if (!a) return;
    const Reg from = At(*a);
    std::vector<DType> fitting;
    for (DType t : IntTypes()) {
      if (SizeOf(t) == SizeOf(from.dtype)) fitting.push_back(t);
    }
    const DType to = Pick(rng_, fitting);
    const int before = program_.num_instrs;
    Emit(ExprOp::kBitcast, to, *a, 0, 0, static_cast<uint16_t>(from.dtype), AnyInt(to));
    if (program_.num_instrs == before || !Chance(rng_, 0.5)) return;
    const uint8_t bits = program_.instrs[before].dst;
    Emit(ExprOp::kBitcast, from.dtype, bits, 0, 0, static_cast<uint16_t>(to), from);
  }

  void AddUnary() {
    const auto op = static_cast<ExprOp>(
        UniformInt(rng_, static_cast<int>(ExprOp::kNeg), static_cast<int>(ExprOp::kClz)));
    const auto a = Find([](const Reg&) { return true; });
    if (!a) return;
    const Reg x = At(*a);
    const auto r = IsFloat(x.dtype) ? FloatUnary(op, x) : IntUnary(op, x.dtype);
    if (r) Emit(op, x.dtype, *a, 0, 0, 0, *r);
  }

  static std::optional<Reg> IntUnary(ExprOp op, DType t) {
    if (op == ExprOp::kNot) return AnyInt(t);
    if (t == DType::kPred) return std::nullopt;
    switch (op) {
      case ExprOp::kNeg:
      case ExprOp::kAbs:
      case ExprOp::kSign:
      case ExprOp::kPopcnt:
      case ExprOp::kClz:
        return AnyInt(t);
      default:
        return std::nullopt;
    }
  }

  static std::optional<Reg> FloatUnary(ExprOp op, const Reg& x) {
    const DType t = x.dtype;
    const double lo = x.lo, hi = x.hi, e = x.err, m = x.reach();
    auto rising = [&](double (*f)(double), double slope) {
      return Smooth(t, f(lo), f(hi), e * slope);
    };
    switch (op) {
      case ExprOp::kNeg:
        return Rounded(t, -hi, -lo, e);
      case ExprOp::kAbs:
        return Rounded(t, lo <= 0 && hi >= 0 ? 0 : std::min(std::abs(lo), std::abs(hi)), m, e);
      case ExprOp::kSign:
        if (e == 0) return Rounded(t, -1, 1, 0);
        break;
      case ExprOp::kFloor:
        if (e == 0) return Rounded(t, std::floor(lo), std::floor(hi), 0);
        break;
      case ExprOp::kCeil:
        if (e == 0) return Rounded(t, std::ceil(lo), std::ceil(hi), 0);
        break;
      case ExprOp::kRoundAway:
      case ExprOp::kRoundEven:
        if (e == 0) return Rounded(t, std::floor(lo), std::ceil(hi), 0);
        break;
      case ExprOp::kIsFinite:
        return Reg{true, DType::kPred, 0, 1, 0};
      case ExprOp::kExp:
        if (hi <= 6) return rising(std::exp, std::exp(hi));
        break;
      case ExprOp::kExp2:
        if (hi <= 8) return rising(std::exp2, std::exp2(hi));
        break;
      case ExprOp::kExpm1:
        if (hi <= 6) return rising(std::expm1, std::exp(hi));
        break;
      case ExprOp::kLog:
        if (lo >= 0.1) return rising(std::log, 1 / lo);
        break;
      case ExprOp::kLog1p:
        if (lo >= -0.8) return rising(std::log1p, 1 / (1 + lo));
        break;
      case ExprOp::kSqrt:
        if (lo >= 0.1) return Rounded(t, std::sqrt(lo), std::sqrt(hi), e * 2);
        break;
      case ExprOp::kRsqrt:
        if (lo >= 0.1) return Smooth(t, 1 / std::sqrt(hi), 1 / std::sqrt(lo), e * 16);
        break;
      case ExprOp::kCbrt:
        if (lo >= 0.1) return rising(std::cbrt, 2);
        break;
      case ExprOp::kSin:
      case ExprOp::kCos:
        if (m <= 100) return Smooth(t, -1, 1, e);
        break;
      case ExprOp::kTan:
        if (m <= 1.2) return rising(std::tan, 8);
        break;
      case ExprOp::kAsin:
        if (m <= 0.9) return rising(std::asin, 2.5);
        break;
      case ExprOp::kAcos:
        if (m <= 0.9) return rising(std::acos, 2.5);
        break;
      case ExprOp::kAtan:
        return rising(std::atan, 1);
      case ExprOp::kSinh:
        if (m <= 5) return rising(std::sinh, std::cosh(m));
        break;
      case ExprOp::kCosh:
        if (m <= 5) return Smooth(t, 1, std::cosh(m), e * std::cosh(m));
        break;
      case ExprOp::kTanh:
        return rising(std::tanh, 1);
      case ExprOp::kAsinh:
        return rising(std::asinh, 1);
      case ExprOp::kAcosh:
        if (lo >= 1.1) return rising(std::acosh, 2.5);
        break;
      case ExprOp::kAtanh:
        if (m <= 0.9) return rising(std::atanh, 6);
        break;
      case ExprOp::kLogistic:
        return Smooth(t, 0, 1, e);
      case ExprOp::kErf:
        return rising(std::erf, 1.2);
      case ExprOp::kErfc:
        return rising(std::erfc, 1.2);
      case ExprOp::kErfInv:
        if (m <= 0.9) return Smooth(t, -1.17, 1.17, e * 4);
        break;
      default:
        break;
    }
    return std::nullopt;
  }

  void AddBinary() {
    const auto a = Find([](const Reg&) { return true; });
    if (!a) return;
    const Reg x = At(*a);
    if (IsFloat(x.dtype) && Chance(rng_, 0.1)) return AddIntegerPow(*a);
    const auto b = FindType(x.dtype);
    if (!b) return;
    const Reg y = At(*b);
    const auto op = static_cast<ExprOp>(
        UniformInt(rng_, static_cast<int>(ExprOp::kAdd), static_cast<int>(ExprOp::kGe)));
    std::optional<Reg> r;
    if (op >= ExprOp::kEq && op <= ExprOp::kGe) {
      if (x.err == 0 && y.err == 0) r = Reg{true, DType::kPred, 0, 1, 0};
    } else if (IsFloat(x.dtype)) {
      r = FloatBinary(op, x, y);
    } else {
      r = IntBinary(op, x.dtype);
    }
    if (r) Emit(op, x.dtype, *a, *b, 0, 0, *r);
  }

  void AddIntegerPow(Operand a) {
    const Reg x = At(a);
    const int64_t n = UniformInt(rng_, x.lo > 0.2 ? -3 : 0, 4);
    const double ends[] = {std::pow(x.lo, n), std::pow(x.hi, n)};
    const double slope = n == 0 ? 0
                                : std::abs(n) * std::max(std::pow(x.reach(), n - 1),
                                                         n < 0 ? std::pow(x.lo, n - 1) : 0);
    const double lo = n % 2 == 0 && n >= 0 ? 0 : std::min(ends[0], ends[1]);
    Emit(ExprOp::kIntegerPow, x.dtype, a, 0, 0, static_cast<uint16_t>(static_cast<int16_t>(n)),
         Smooth(x.dtype, lo, std::max({1.0, ends[0], ends[1]}), x.err * slope));
  }

  static std::optional<Reg> IntBinary(ExprOp op, DType t) {
    const bool logic = op == ExprOp::kAnd || op == ExprOp::kOr || op == ExprOp::kXor ||
                       op == ExprOp::kMax || op == ExprOp::kMin;
    if (t == DType::kPred && !logic) return std::nullopt;
    if (op == ExprOp::kPow || op == ExprOp::kAtan2) return std::nullopt;
    return AnyInt(t);
  }

  static std::optional<Reg> FloatBinary(ExprOp op, const Reg& x, const Reg& y) {
    const DType t = x.dtype;
    const double e = x.err + y.err;
    auto hull = [&](double p, double q, double r, double s, double spread) {
      return Rounded(t, std::min({p, q, r, s}), std::max({p, q, r, s}), spread);
    };
    const bool away_from_zero = y.lo > 0.1 || y.hi < -0.1;
    switch (op) {
      case ExprOp::kAdd:
        return Rounded(t, x.lo + y.lo, x.hi + y.hi, e);
      case ExprOp::kSub:
        return Rounded(t, x.lo - y.hi, x.hi - y.lo, e);
      case ExprOp::kMul:
        return hull(x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi,
                    x.err * y.reach() + y.err * x.reach());
      case ExprOp::kDiv:
        if (!away_from_zero) break;
        return hull(x.lo / y.lo, x.lo / y.hi, x.hi / y.lo, x.hi / y.hi,
                    10 * x.err + 100 * y.err * x.reach());
      case ExprOp::kRem:
        if (!away_from_zero || e != 0) break;
        return Rounded(t, -y.reach(), y.reach(), 0);
      case ExprOp::kPow: {
        if (x.lo < 0.2 || x.hi > 4 || y.reach() > 4) break;
        const double p = std::max(std::pow(std::max(x.hi, 1.0), y.reach()),
                                  std::pow(1 / std::min(x.lo, 1.0), y.reach()));
        return Smooth(t, 0, p, p * (20 * x.err + 2 * y.err));
      }
      case ExprOp::kAtan2:
        if (y.lo < 0.1) break;
        return Smooth(t, -1.6, 1.6, 10 * e);
      case ExprOp::kMax:
        return Rounded(t, std::max(x.lo, y.lo), std::max(x.hi, y.hi), e);
      case ExprOp::kMin:
        return Rounded(t, std::min(x.lo, y.lo), std::min(x.hi, y.hi), e);
      default:
        break;
    }
    return std::nullopt;
  }

  void AddTernary() {
    const auto b = Find([](const Reg&) { return true; });
    if (!b) return;
    const DType t = At(*b).dtype;
    const auto c = FindType(t);
    if (Chance(rng_, 0.5)) {
      const auto a = FindType(DType::kPred);
      if (!a) return;
      const Reg x = At(*b), y = At(*c);
      Emit(ExprOp::kSelect, t, *a, *b, *c, 0,
           {true, t, std::min(x.lo, y.lo), std::max(x.hi, y.hi), std::max(x.err, y.err)});
    } else if (t != DType::kPred) {
      const auto a = FindType(t);
      const Reg x = At(*a), y = At(*b), z = At(*c);
      Emit(ExprOp::kClamp, t, *a, *b, *c, 0,
           {true, t, std::min({x.lo, y.lo, z.lo}), std::max({x.hi, y.hi, z.hi}),
            x.err + y.err + z.err});
    }
  }

  void AddReduction() {
    const auto a = Find([](const Reg&) { return true; });
    const uint8_t dst = static_cast<uint8_t>(UniformInt(rng_, 32, 63));
    if (!a || reduced_.size() > 8) return;
    for (const auto& [reg, value] : reduced_)
      if (reg == dst - 32) return;
    for (const auto& reg : ReadScalars())
      if (reg == dst) return;  // the element section still reads the old value
    const Reg x = At(*a);
    if (*a >= 32) return;
    const double n = static_cast<double>(shape_.back());
    const auto op = static_cast<ExprOp>(UniformInt(rng_, static_cast<int>(ExprOp::kReduceSum),
                                                   static_cast<int>(ExprOp::kReduceXor)));
    const bool is_float = IsFloat(x.dtype), is_pred = x.dtype == DType::kPred;
    uint16_t aux = 0;
    Reg r{true, x.dtype, x.lo, x.hi, x.err};
    switch (op) {
      case ExprOp::kReduceSum:
        if (is_pred) return;
        r = is_float ? Smooth(x.dtype, n * x.lo, n * x.hi, n * x.err + 2e-7 * n * x.reach())
                     : AnyInt(x.dtype);
        break;
      case ExprOp::kReduceProd: {
        if (is_pred || n == 0) return;
        if (!is_float) {
          r = AnyInt(x.dtype);
          break;
        }
        const double most = std::pow(std::max(x.reach(), 1.0), n);
        if (most > 100) return;
        r = Smooth(x.dtype, -most, most, n * most * (x.err + 1e-6));
        break;
      }
      case ExprOp::kReduceMax:
      case ExprOp::kReduceMin:
        if (is_pred || n == 0) return;
        break;
      case ExprOp::kReduceAnd:
      case ExprOp::kReduceOr:
      case ExprOp::kReduceXor:
        if (is_float) return;
        r = AnyInt(x.dtype);
        break;
      default:
        if (x.err != 0 || is_pred || n == 0) return;
        r = {true, Chance(rng_, 0.5) ? DType::kS32 : DType::kS64, 0, n, 0};
        aux = static_cast<uint16_t>(r.dtype);
    }
    if (!Fits(r)) return;
    scalars_[dst - 32].live = false;  // not to be read before the stage ends
    reduced_.emplace_back(dst - 32, r);
    Append({op, x.dtype, dst, *a, 0, 0, aux});
  }

  // Scalar registers that the present stage's element section reads.
  std::vector<uint8_t> ReadScalars() const {
    std::vector<uint8_t> read;
    for (int i = elem_begin_; i < program_.num_instrs; ++i)
      for (uint8_t r : {program_.instrs[i].a, program_.instrs[i].b, program_.instrs[i].c})
        if (r >= 32) read.push_back(r);
    return read;
  }

  Rng& rng_;
  std::vector<int64_t> shape_;
  Layout layout_;
  DType main_ = Pick(rng_, FloatTypes());
  NodeCase case_;
  ExprProgram program_;
  bool in_scalar_ = true;
  int elem_begin_ = 0;  // of the present stage
  std::vector<Reg> elements_ = std::vector<Reg>(kExprNumElementRegs);
  std::vector<Reg> scalars_ = std::vector<Reg>(kExprNumScalarRegs);
  std::vector<std::pair<int, Reg>> reduced_;  // scalar registers that the present stage completes
};

}  // namespace jaxgraph::testing
