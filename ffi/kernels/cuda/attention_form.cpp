#include "ffi/kernels/cuda/attention_form.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

namespace jaxgraph {
namespace {

enum class Kind : uint8_t {
  kOther,
  kConstant,  // a float
  kIndex,     // s + form.offset
  kPosition,  // of source form.position
  kVisible,   // s + form.offset <= position
  kHidden,    // the opposite
  kScore,
};

struct Value {
  Kind kind = Kind::kOther;
  float constant = 0;
  ScoreForm form;
  bool has_factor = false, has_mask = false;  // of a score
};

uint32_t BitsOf(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

// A value whose f32 is rounded to `t`; it can be said once only.
bool Round(DType t, DType* rounding) {
  if (t == DType::kF32 || t == *rounding) return true;
  if (*rounding != DType::kF32) return false;
  *rounding = t;
  return true;
}

class Matcher {
 public:
  explicit Matcher(const Attention& attention)
      : attention_(attention), program_(attention.program) {}

  ScoreForm Match() {
    const ExprStage& stage = program_.stages[0];
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      const ExprInstr& instr = program_.instrs[i];
      if (IsFloat(instr.dtype) && instr.dtype == DType::kF64) return {};
      if (instr.op != ExprOp::kStore) {
        registers_[instr.dst] = Result(instr);
        continue;
      }
      const Value& stored = registers_[instr.a];
      if (stored.kind != Kind::kScore) return {};
      ScoreForm form = stored.form;
      form.known = 1;
      return form;
    }
    return {};
  }

 private:
  Value Result(const ExprInstr& in) const {
    const Value &a = registers_[in.a & 31], &b = registers_[in.b & 31], &c = registers_[in.c & 31];
    switch (in.op) {
      case ExprOp::kLoad:
        return Load(in);
      case ExprOp::kIndex:
        return Index(in);
      case ExprOp::kConst:
        return Constant(in);
      case ExprOp::kConvert:
        return Convert(in, a);
      case ExprOp::kMul:
        return a.kind == Kind::kScore ? Scale(in, a, b) : Scale(in, b, a);
      case ExprOp::kDiv:
        return Scale(in, a, b);
      case ExprOp::kLe:
        return Compare(a, b, 0, Kind::kVisible);
      case ExprOp::kLt:
        return Compare(a, b, 1, Kind::kVisible);
      case ExprOp::kGt:
        return Compare(a, b, 0, Kind::kHidden);
      case ExprOp::kGe:
        return Compare(a, b, 1, Kind::kHidden);
      case ExprOp::kSelect:
        if (a.kind == Kind::kVisible) return Mask(a, c, b);
        if (a.kind == Kind::kHidden) return Mask(a, b, c);
        return {};
      default:
        return {};
    }
  }

  // A dimension of size 1 is not walked, whatever its stride.
  bool MovesAlong(const int64_t* strides, int d) const {
    return program_.shape[d] > 1 && strides[d] != 0;
  }

  Value Load(const ExprInstr& in) const {
    Value v;
    if (in.aux == attention_.params.raw_source) {
      v.kind = Kind::kScore;
      v.form.raw = in.dtype;
    } else if (IsSigned(in.dtype) &&
               !MovesAlong(attention_.scores.srcs[in.aux].strides.data(), 3)) {
      v.kind = Kind::kPosition;
      v.form.position = in.aux;
      v.form.position_dtype = in.dtype;
    }
    return v;
  }

  Value Index(const ExprInstr& in) const {
    constexpr int64_t kSmall = 1 << 20;
    const ExprIndex& index = program_.indices[in.aux];
    const bool moves = MovesAlong(index.strides, 0) || MovesAlong(index.strides, 1) ||
                       MovesAlong(index.strides, 2);
    if (moves || index.strides[3] != 1 || std::llabs(index.offset) > kSmall) return {};
    if (in.dtype != DType::kS32 && in.dtype != DType::kS64) return {};
    Value v;
    v.kind = Kind::kIndex;
    v.form.offset = static_cast<int32_t>(index.offset);
    return v;
  }

  Value Constant(const ExprInstr& in) const {
    Value v;
    if (!IsFloat(in.dtype)) return v;
    v.kind = Kind::kConstant;
    std::memcpy(&v.constant, &program_.imms[in.aux], sizeof v.constant);
    return v;
  }

  Value Convert(const ExprInstr& in, Value v) const {
    const DType from = static_cast<DType>(in.aux);
    if (v.kind == Kind::kIndex || v.kind == Kind::kPosition) {
      return IsSigned(in.dtype) && SizeOf(in.dtype) >= SizeOf(from) ? v : Value{};
    }
    if (v.kind == Kind::kConstant) return in.dtype == DType::kF32 ? v : Value{};
    if (v.kind != Kind::kScore || !IsFloat(in.dtype)) return {};
    DType* rounding = v.has_mask ? &v.form.masked : v.has_factor ? &v.form.scaled : &v.form.raw;
    return Round(in.dtype, rounding) ? v : Value{};
  }

  Value Scale(const ExprInstr& in, Value score, const Value& factor) const {
    if (score.kind != Kind::kScore || factor.kind != Kind::kConstant) return {};
    if (score.has_factor || score.has_mask) return {};
    score.has_factor = true;
    score.form.factor = BitsOf(factor.constant);
    score.form.scaled = in.dtype;
    score.form.divides = in.op == ExprOp::kDiv;
    int exponent = 0;
    if (score.form.divides && std::fabs(std::frexp(factor.constant, &exponent)) == 0.5f &&
        std::abs(exponent) < 100) {
      score.form.divides = 0;  // by a power of two: the same bits
      score.form.factor = BitsOf(1 / factor.constant);
    }
    return score;
  }

  // a <= b (`strict`: a < b) is `kind`, where a is the index; or its opposite, where b is.
  static Value Compare(const Value& a, const Value& b, int strict, Kind kind) {
    Value v;
    if (a.kind == Kind::kIndex && b.kind == Kind::kPosition) {
      // s <= p; s < p; not (s > p) = s <= p; not (s >= p) = s < p
      v.kind = kind;
      v.form.position = b.form.position;
      v.form.position_dtype = b.form.position_dtype;
      v.form.offset = a.form.offset + strict;
    } else if (a.kind == Kind::kPosition && b.kind == Kind::kIndex) {
      // p <= s = not (s < p); p < s = not (s <= p); p > s = s < p; p >= s = s <= p
      v.kind = kind == Kind::kVisible ? Kind::kHidden : Kind::kVisible;
      v.form.position = a.form.position;
      v.form.position_dtype = a.form.position_dtype;
      v.form.offset = b.form.offset + (strict ? 0 : 1);
    }
    return v;
  }

  static Value Mask(const Value& mask, Value score, const Value& fill) {
    if (score.kind != Kind::kScore || score.has_mask || fill.kind != Kind::kConstant) return {};
    score.has_mask = true;
    score.form.position = mask.form.position;
    score.form.position_dtype = mask.form.position_dtype;
    score.form.offset = mask.form.offset;
    score.form.fill = BitsOf(fill.constant);
    return score;
  }

  const Attention& attention_;
  const ExprProgram& program_;
  std::array<Value, kExprNumElementRegs> registers_;
};

}  // namespace

ScoreForm MatchScoreForm(const Attention& attention) { return Matcher(attention).Match(); }

}  // namespace jaxgraph
