#include "ffi/kernels/cuda/attention_form.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "ffi/kernels/cuda/launch_params.h"

namespace jaxgraph {
namespace {

constexpr int64_t kSmall = 1 << 20;  // offsets up to this never wrap an index around

enum class Kind : uint8_t {
  kOther,
  kConstant,  // a float
  kInteger,   // linear in s and a position
  kMask,      // of positions
  kHiding,    // 0 where a mask sees, form.fill where it does not
  kBias,      // of source form.bias
  kScore,
};

// What has been done with a score, in the order of ScoreForm.
enum class Step : uint8_t { kRaw, kScaled, kCapIn, kTanh, kCapOut, kBiased, kMasked };

// s_factor * s + p_factor * position + constant
struct Integer {
  int s_factor = 0, p_factor = 0;
  int64_t constant = 0;
  bool moved_position = false;  // something was added to the position: that may wrap around
};

// position - window <= s <= position - offset
struct Mask {
  bool has_offset = false, has_window = false;
  bool opposite = false;  // true where that does not hold
  bool exact = true;      // the offset's side, whatever the position is
  int64_t offset = 0, window = 0;
};

struct Value {
  Kind kind = Kind::kOther;
  float constant = 0;
  Integer integer;
  Mask mask;
  ScoreForm form;
  Step step = Step::kRaw;
};

// A value whose f32 is rounded to `t`; it can be said once only.
bool Round(DType t, DType* rounding) {
  if (t == DType::kF32 || t == *rounding) return true;
  if (*rounding != DType::kF32) return false;
  *rounding = t;
  return true;
}

// By a power of two, which gives the same bits, is a multiplication.
void PreferMultiplying(uint32_t* factor, uint8_t* divides) {
  float value;
  std::memcpy(&value, factor, sizeof value);
  int exponent = 0;
  if (*divides && std::fabs(std::frexp(value, &exponent)) == 0.5f && std::abs(exponent) < 100) {
    *divides = 0;
    *factor = BitsOf(1 / value);
  }
}

class Matcher {
 public:
  explicit Matcher(const Attention& attention)
      : attention_(attention), program_(attention.program) {}

  ScoreForm Match() {
    const ExprStage& stage = program_.stages[0];
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      const ExprInstr& instr = program_.instrs[i];
      if (instr.dtype == DType::kF64) return {};
      if (instr.op != ExprOp::kStore) {
        registers_[instr.dst] = Result(instr);
        continue;
      }
      const Value& stored = registers_[instr.a];
      if (stored.kind != Kind::kScore || stored.step == Step::kCapIn) return {};
      ScoreForm form = stored.form;
      // A window's side may wrap around where positions are absurd; the other then hides all.
      if (form.position >= 0 && !(stored.mask.has_offset && stored.mask.exact)) return {};
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
      case ExprOp::kTanh:
        return Tanh(in, a);
      case ExprOp::kAdd:
        if (a.kind == Kind::kInteger) return Sum(in, a, b, 1);
        return a.kind == Kind::kScore ? AddTo(in, a, b) : AddTo(in, b, a);
      case ExprOp::kSub:
        return Sum(in, a, b, -1);
      case ExprOp::kLe:
        return Compare(a, b, 0);
      case ExprOp::kLt:
        return Compare(a, b, 1);
      case ExprOp::kGe:
        return Compare(b, a, 0);
      case ExprOp::kGt:
        return Compare(b, a, 1);
      case ExprOp::kNot:
        return Opposite(a);
      case ExprOp::kAnd:
        return Both(a, b);
      case ExprOp::kOr:
        return Opposite(Both(Opposite(a), Opposite(b)));
      case ExprOp::kSelect:
        return IsShown(c) ? Hide(a, c, b) : Hide(Opposite(a), b, c);
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
    } else if (IsFloat(in.dtype)) {
      v.kind = Kind::kBias;
      v.form.bias = in.aux;
      v.form.bias_dtype = in.dtype;
    } else if (IsSigned(in.dtype) &&
               !MovesAlong(attention_.scores.srcs[in.aux].strides.data(), 3)) {
      v.kind = Kind::kInteger;
      v.integer.p_factor = 1;
      v.form.position = in.aux;
      v.form.position_dtype = in.dtype;
    }
    return v;
  }

  Value Index(const ExprInstr& in) const {
    const ExprIndex& index = program_.indices[in.aux];
    const bool moves = MovesAlong(index.strides, 0) || MovesAlong(index.strides, 1) ||
                       MovesAlong(index.strides, 2);
    if (moves || index.strides[3] != 1 || std::llabs(index.offset) > kSmall) return {};
    if (in.dtype != DType::kS32 && in.dtype != DType::kS64) return {};
    Value v;
    v.kind = Kind::kInteger;
    v.integer.s_factor = 1;
    v.integer.constant = index.offset;
    return v;
  }

  Value Constant(const ExprInstr& in) const {
    Value v;
    if (IsFloat(in.dtype)) {
      v.kind = Kind::kConstant;
      std::memcpy(&v.constant, &program_.imms[in.aux], sizeof v.constant);
    } else if (in.dtype == DType::kS32 || in.dtype == DType::kS64) {
      std::memcpy(&v.integer.constant, &program_.imms[in.aux], sizeof v.integer.constant);
      if (std::llabs(v.integer.constant) <= kSmall) v.kind = Kind::kInteger;
    }
    return v;
  }

  static DType* RoundingOf(Value* score) {
    switch (score->step) {
      case Step::kRaw:
        return &score->form.raw;
      case Step::kScaled:
        return &score->form.scaled;
      case Step::kCapOut:  // as if 0 were added
      case Step::kBiased:
        return &score->form.biased;
      case Step::kMasked:
        return &score->form.masked;
      default:
        return nullptr;
    }
  }

  Value Convert(const ExprInstr& in, Value v) const {
    const DType from = static_cast<DType>(in.aux);
    switch (v.kind) {
      case Kind::kInteger:
        return IsSigned(in.dtype) && SizeOf(in.dtype) >= SizeOf(from) ? v : Value{};
      case Kind::kConstant:
      case Kind::kBias:
        return in.dtype == DType::kF32 ? v : Value{};
      case Kind::kHiding:  // where that does not change its fill
        return in.dtype == DType::kF32 || v.form.fill == BitsOf(-INFINITY) ||
                       (in.dtype == DType::kBF16 && (v.form.fill & 0xffff) == 0)
                   ? v
                   : Value{};
      case Kind::kScore: {
        DType* const rounding = RoundingOf(&v);
        const bool same =
            in.dtype == DType::kF32 || (rounding == nullptr && in.dtype == v.form.cap);
        if (!IsFloat(in.dtype) || !(same || (rounding != nullptr && Round(in.dtype, rounding)))) {
          return {};
        }
        return v;
      }
      default:
        return {};
    }
  }

  Value Scale(const ExprInstr& in, Value score, const Value& factor) const {
    if (score.kind != Kind::kScore || factor.kind != Kind::kConstant) return {};
    ScoreForm& form = score.form;
    const uint8_t divides = in.op == ExprOp::kDiv;
    switch (score.step) {
      case Step::kRaw:
        form.factor = BitsOf(factor.constant);
        form.scaled = in.dtype;
        form.divides = divides;
        PreferMultiplying(&form.factor, &form.divides);
        score.step = Step::kScaled;
        return score;
      case Step::kScaled:
        form.cap_in = BitsOf(factor.constant);
        form.cap = in.dtype;
        form.cap_divides = divides;
        PreferMultiplying(&form.cap_in, &form.cap_divides);
        score.step = Step::kCapIn;
        return score;
      case Step::kTanh:
        if (divides || in.dtype != form.cap) return {};
        form.cap_out = BitsOf(factor.constant);
        score.step = Step::kCapOut;
        return score;
      default:
        return {};
    }
  }

  Value Tanh(const ExprInstr& in, Value score) const {
    if (score.kind != Kind::kScore || score.step > Step::kCapIn) return {};
    if (score.step == Step::kCapIn && in.dtype != score.form.cap) return {};
    score.form.cap = in.dtype;
    score.form.capped = 1;
    score.step = Step::kTanh;
    return score;
  }

  Value AddTo(const ExprInstr& in, Value score, const Value& other) const {
    if (score.kind != Kind::kScore || score.step == Step::kCapIn) return {};
    if (other.kind == Kind::kBias && score.step < Step::kBiased) {
      if (score.step == Step::kCapOut && score.form.biased != DType::kF32) return {};
      score.form.bias = other.form.bias;
      score.form.bias_dtype = other.form.bias_dtype;
      score.form.biased = in.dtype;
      score.step = Step::kBiased;
      return score;
    }
    if (other.kind == Kind::kHiding && score.step < Step::kMasked) {
      if (!TakeMask(other, &score)) return {};
      score.form.fill = other.form.fill;
      score.form.adds_fill = 1;
      score.form.masked = in.dtype;
      return score;
    }
    return {};
  }

  // a + sign * b
  static Value Sum(const ExprInstr& in, const Value& a, const Value& b, int sign) {
    if (a.kind != Kind::kInteger || b.kind != Kind::kInteger) return {};
    if (in.dtype != DType::kS32 && in.dtype != DType::kS64) return {};
    if (a.integer.p_factor != 0 && b.integer.p_factor != 0) return {};
    Value v = a.integer.p_factor != 0 ? a : b;  // has the position, if any
    v.integer.s_factor = a.integer.s_factor + sign * b.integer.s_factor;
    v.integer.p_factor = a.integer.p_factor + sign * b.integer.p_factor;
    v.integer.constant = a.integer.constant + sign * b.integer.constant;
    v.integer.moved_position = v.integer.p_factor != 0;
    if (std::abs(v.integer.s_factor) > 1 || std::llabs(v.integer.constant) > kSmall) return {};
    return v;
  }

  // a <= b (`strict`: a < b)
  static Value Compare(const Value& a, const Value& b, int strict) {
    if (a.kind != Kind::kInteger || b.kind != Kind::kInteger) return {};
    if (a.integer.p_factor != 0 && b.integer.p_factor != 0) return {};
    const Value& with_position = a.integer.p_factor != 0 ? a : b;
    const int s_factor = a.integer.s_factor - b.integer.s_factor;
    const int p_factor = a.integer.p_factor - b.integer.p_factor;
    const int64_t constant = a.integer.constant - b.integer.constant + strict;
    if (s_factor * p_factor != -1 || std::llabs(constant) > kSmall) return {};
    Value v;
    v.kind = Kind::kMask;
    v.form.position = with_position.form.position;
    v.form.position_dtype = with_position.form.position_dtype;
    v.mask.exact = !with_position.integer.moved_position;
    if (s_factor == 1) {  // s - position + constant <= 0
      v.mask.has_offset = true;
      v.mask.offset = constant;
    } else {  // position - s + constant <= 0
      v.mask.has_window = true;
      v.mask.window = -constant;
    }
    return v;
  }

  // Of a mask with one side, one with the other: not (s <= p - offset) is p - (offset - 1) <= s.
  static Value Opposite(Value v) {
    if (v.kind != Kind::kMask) return {};
    Mask& m = v.mask;
    if (m.has_offset && m.has_window) {
      m.opposite = !m.opposite;
      return v;
    }
    std::swap(m.has_offset, m.has_window);
    if (m.has_window) {
      m.window = m.offset - 1;
    } else {
      m.offset = m.window + 1;
    }
    return v;
  }

  static bool Merge(const Value& from, Value* to) {
    const Mask& m = from.mask;
    if (to->form.position >= 0 &&
        (to->form.position != from.form.position || (to->mask.has_offset && m.has_offset) ||
         (to->mask.has_window && m.has_window))) {
      return false;
    }
    to->form.position = from.form.position;
    to->form.position_dtype = from.form.position_dtype;
    if (m.has_offset) {
      to->mask.has_offset = true;
      to->mask.offset = m.offset;
      to->mask.exact = m.exact;
    }
    if (m.has_window) {
      to->mask.has_window = true;
      to->mask.window = m.window;
    }
    return true;
  }

  static Value Both(const Value& a, const Value& b) {
    if (a.kind != Kind::kMask || b.kind != Kind::kMask) return {};
    if (a.mask.opposite || b.mask.opposite) return {};
    Value v = a;
    return Merge(b, &v) ? v : Value{};
  }

  static bool TakeMask(const Value& mask, Value* score) {
    if (!Merge(mask, score)) return false;
    if (score->mask.has_offset) score->form.offset = static_cast<int32_t>(score->mask.offset);
    if (score->mask.has_window) score->form.window = static_cast<int32_t>(score->mask.window);
    score->step = Step::kMasked;
    return true;
  }

  static bool IsShown(const Value& v) {
    return v.kind == Kind::kScore || (v.kind == Kind::kConstant && v.constant == 0);
  }
  // `shown` where the mask holds, `hidden` elsewhere.
  static Value Hide(const Value& mask, Value shown, const Value& hidden) {
    if (mask.kind != Kind::kMask || mask.mask.opposite) return {};
    if (!IsShown(shown) || hidden.kind != Kind::kConstant) return {};
    const uint32_t fill = BitsOf(hidden.constant);
    if (shown.kind == Kind::kConstant) {
      Value v = mask;
      v.kind = Kind::kHiding;
      v.form.fill = fill;
      return v;
    }
    if (shown.step == Step::kCapIn) return {};
    if (shown.step == Step::kMasked &&
        (shown.form.fill != fill || shown.form.adds_fill || shown.form.masked != DType::kF32)) {
      return {};
    }
    if (!TakeMask(mask, &shown)) return {};
    shown.form.fill = fill;
    return shown;
  }

  const Attention& attention_;
  const ExprProgram& program_;
  std::array<Value, kExprNumElementRegs> registers_;
};

}  // namespace

ScoreForm MatchScoreForm(const Attention& attention) { return Matcher(attention).Match(); }

}  // namespace jaxgraph
