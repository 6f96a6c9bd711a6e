// The score program that is recognised, and what is not it. Needs no GPU.
#include "ffi/kernels/cuda/attention_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/device/host/serial_for.h"
#include "ffi/kernels/host/host_emitter.h"
#include "tests/ffi/kernels/random_attention.h"

namespace jaxgraph::testing {
namespace {

ScoreForm FormOf(const AttentionSpec& spec, void (*change)(ExprProgram*) = nullptr) {
  Rng rng(1);
  NodeCase c = MakeAttention(rng, spec);
  Attention attention;
  EXPECT_TRUE(DecodeAttention(c.node, &attention).ok());
  if (change != nullptr) change(&attention.program);
  return MatchScoreForm(attention);
}

ExprInstr& Find(ExprProgram* p, ExprOp op) {
  for (ExprInstr& instr : p->instrs)
    if (instr.op == op && &instr < p->instrs + p->num_instrs) return instr;
  ADD_FAILURE() << "no such instruction";
  return p->instrs[0];
}

TEST(ScoreForm, ScaledCausalScoresAreRecognised) {
  AttentionSpec spec;
  spec.raw = DType::kBF16;
  spec.masked_value = -3e4;
  const ScoreForm form = FormOf(spec);
  EXPECT_TRUE(form.known);
  EXPECT_EQ(form.raw, DType::kBF16);
  EXPECT_EQ(form.scaled, DType::kF32);
  EXPECT_EQ(form.factor, FloatBits(0.25f));
  EXPECT_EQ(form.fill, FloatBits(-3e4f));
  EXPECT_EQ(form.position, 1);
  EXPECT_EQ(form.position_dtype, DType::kS32);
  EXPECT_EQ(form.offset, 0);
  spec.causal = false;
  EXPECT_EQ(FormOf(spec).position, -1);
}

TEST(ScoreForm, EverySpellingOfTheComparison) {
  // Select takes its second branch where the comparison of s and the position holds.
  const auto offset = [](void (*change)(ExprProgram*)) {
    const ScoreForm form = FormOf(AttentionSpec(), change);
    return form.known ? form.offset : -99;
  };
  EXPECT_EQ(offset([](ExprProgram* p) { Find(p, ExprOp::kLe).op = ExprOp::kLt; }), 1);
  EXPECT_EQ(offset([](ExprProgram* p) {
              ExprInstr& in = Find(p, ExprOp::kLe);
              std::swap(in.a, in.b);
              in.op = ExprOp::kGe;
            }),
            0);
  EXPECT_EQ(offset([](ExprProgram* p) {
              ExprInstr& in = Find(p, ExprOp::kLe);
              std::swap(in.a, in.b);
              in.op = ExprOp::kGt;
            }),
            1);
  EXPECT_EQ(offset([](ExprProgram* p) {
              ExprInstr& select = Find(p, ExprOp::kSelect);
              std::swap(select.b, select.c);
              Find(p, ExprOp::kLe).op = ExprOp::kGt;
            }),
            0);
  EXPECT_EQ(offset([](ExprProgram* p) {
              ExprInstr& select = Find(p, ExprOp::kSelect);
              std::swap(select.b, select.c);
              Find(p, ExprOp::kLe).op = ExprOp::kGe;
            }),
            1);
  EXPECT_EQ(offset([](ExprProgram* p) {
              ExprInstr& select = Find(p, ExprOp::kSelect);
              std::swap(select.b, select.c);
              ExprInstr& in = Find(p, ExprOp::kLe);
              std::swap(in.a, in.b);
            }),
            1);
  EXPECT_EQ(offset([](ExprProgram* p) {
              ExprInstr& select = Find(p, ExprOp::kSelect);
              std::swap(select.b, select.c);
              ExprInstr& in = Find(p, ExprOp::kLe);
              std::swap(in.a, in.b);
              in.op = ExprOp::kLt;
            }),
            0);
  EXPECT_EQ(offset([](ExprProgram* p) { p->indices[0].offset = 7; }), 7);
}

TEST(ScoreForm, CapBiasAndWindow) {
  AttentionSpec spec;
  EXPECT_TRUE(FormOf(spec).simple());
  spec.soft_cap = spec.bias = true;
  spec.window = 5;
  const ScoreForm form = FormOf(spec);
  ASSERT_TRUE(form.known);
  EXPECT_FALSE(form.simple());
  EXPECT_TRUE(form.capped);
  EXPECT_EQ(form.cap_in, FloatBits(0.5f));  // divided by 2
  EXPECT_EQ(form.cap_out, FloatBits(2.0f));
  EXPECT_EQ(form.bias, 0);
  EXPECT_EQ(form.offset, 0);
  EXPECT_EQ(form.window, 4);
}

// Programs in the spellings of models, random ones.
class Writer {
 public:
  Writer(Rng& rng, int64_t s) : rng_(rng) {
    p_.rank = 4;
    const int64_t shape[] = {1, 1, 1, s};
    std::copy_n(shape, 4, p_.shape);
    p_.num_outs = p_.num_stages = 1;
    p_.num_srcs = 3;  // raw, position, bias
  }

  const ExprProgram& Write() {
    DType t = Chance(rng_, 0.5) ? DType::kF32 : DType::kBF16;
    uint8_t x = Instr(ExprOp::kLoad, raw = t);
    const auto widen = [&](double chance) {
      if (t == DType::kF32 || !Chance(rng_, chance)) return;
      x = Instr(ExprOp::kConvert, DType::kF32, x, 0, 0, static_cast<uint16_t>(t));
      t = DType::kF32;
    };
    widen(0.5);
    if (Chance(rng_, 0.7)) x = Scale(t, x, UniformReal(rng_, 0.05, 0.3));
    widen(0.3);
    if (Chance(rng_, 0.5)) {
      if (Chance(rng_, 0.8)) x = Scale(t, x, UniformReal(rng_, 0.1, 2));
      x = Instr(ExprOp::kTanh, t, x);
      if (Chance(rng_, 0.8)) x = Instr(ExprOp::kMul, t, x, Float(t, UniformReal(rng_, 1, 9)));
    }
    widen(0.3);
    if (Chance(rng_, 0.4)) {
      uint8_t bias = Instr(ExprOp::kLoad, DType::kBF16, 0, 0, 0, 2);
      if (t == DType::kF32) bias = Instr(ExprOp::kConvert, t, bias, 0, 0, kBF16);
      x = Chance(rng_, 0.5) ? Instr(ExprOp::kAdd, t, x, bias) : Instr(ExprOp::kAdd, t, bias, x);
    }
    widen(0.5);
    const uint8_t fill = Float(t, Chance(rng_, 0.5) ? -HUGE_VAL : -1024);
    switch (UniformInt(rng_, 0, 4)) {
      case 0:
        break;
      case 1: {  // an additive mask
        bool sees = false;
        const uint8_t mask = Upper(&sees), zero = Float(t, 0);
        x = Instr(ExprOp::kAdd, t, x, Select(t, mask, sees, zero, fill));
        break;
      }
      case 2: {  // one mask, or two, one after the other
        bool sees = false;
        const uint8_t mask = Upper(&sees);
        x = Select(t, mask, sees, x, fill);
        if (Chance(rng_, 0.5)) break;
        const uint8_t window = Lower(&sees);
        x = Select(t, window, sees, x, fill);
        break;
      }
      default: {  // both at once
        bool upper = false, lower = false;
        uint8_t a = Upper(&upper), b = Lower(&lower);
        if (upper != lower) b = Instr(ExprOp::kNot, DType::kPred, b);
        const uint8_t both =
            Instr(upper ? ExprOp::kAnd : ExprOp::kOr, DType::kPred, std::min(a, b), std::max(a, b));
        x = Select(t, both, upper, x, fill);
      }
    }
    Instr(ExprOp::kStore, t, x);
    masked = t;
    p_.stages[0] = {0, 0, 0, p_.num_instrs};
    return p_;
  }

  DType raw = DType::kF32, masked = DType::kF32;

 private:
  static constexpr uint16_t kBF16 = static_cast<uint16_t>(DType::kBF16);

  uint8_t Instr(ExprOp op, DType t, uint8_t a = 0, uint8_t b = 0, uint8_t c = 0, uint16_t aux = 0) {
    const uint8_t dst = op == ExprOp::kStore ? 0 : next_++;
    p_.instrs[p_.num_instrs++] = {op, t, dst, a, b, c, aux};
    return dst;
  }
  uint8_t Float(DType t, double value) {
    const float f = RoundTo(t, static_cast<float>(value));
    std::memcpy(&p_.imms[p_.num_imms], &f, sizeof f);
    return Instr(ExprOp::kConst, t, 0, 0, 0, p_.num_imms++);
  }
  uint8_t Integer(int64_t value) {
    std::memcpy(&p_.imms[p_.num_imms], &value, sizeof value);
    return Instr(ExprOp::kConst, DType::kS32, 0, 0, 0, p_.num_imms++);
  }
  uint8_t Scale(DType t, uint8_t x, double factor) {
    if (Chance(rng_, 0.3)) return Instr(ExprOp::kDiv, t, x, Float(t, 1 / factor));
    if (Chance(rng_, 0.2)) return Instr(ExprOp::kDiv, t, x, Float(t, 8));
    const uint8_t by = Float(t, factor);
    return Chance(rng_, 0.5) ? Instr(ExprOp::kMul, t, x, by) : Instr(ExprOp::kMul, t, by, x);
  }
  uint8_t Index() {
    p_.indices[0].strides[3] = 1;
    p_.num_indices = 1;
    return Instr(ExprOp::kIndex, DType::kS32);
  }
  uint8_t Position() { return Instr(ExprOp::kLoad, DType::kS32, 0, 0, 0, 1); }

  // s <= position, or its opposite; *sees: which.
  uint8_t Upper(bool* sees) {
    const uint8_t s = Index(), p = Position();
    *sees = Chance(rng_, 0.5);
    if (*sees) return Chance(rng_, 0.5) ? Is(ExprOp::kLe, s, p) : Is(ExprOp::kGe, p, s);
    return Chance(rng_, 0.5) ? Is(ExprOp::kGt, s, p) : Is(ExprOp::kLt, p, s);
  }
  // position - s < window, or its opposite
  uint8_t Lower(bool* sees) {
    const uint8_t s = Index(), p = Position(), w = Integer(UniformInt(rng_, 1, 20));
    *sees = Chance(rng_, 0.5);
    const ExprOp less = *sees ? ExprOp::kLt : ExprOp::kGe;
    const ExprOp more = *sees ? ExprOp::kGt : ExprOp::kLe;
    switch (UniformInt(rng_, 0, 3)) {
      case 0:
        return Is(less, Minus(p, s), w);
      case 1:
        return Is(more, s, Minus(p, w));
      case 2:
        return Is(less, p, Instr(ExprOp::kAdd, DType::kS32, s, w));
      default:
        return Is(less, Minus(p, w), s);
    }
  }
  uint8_t Minus(uint8_t a, uint8_t b) { return Instr(ExprOp::kSub, DType::kS32, a, b); }
  uint8_t Is(ExprOp op, uint8_t a, uint8_t b) { return Instr(op, DType::kS32, a, b); }
  uint8_t Select(DType t, uint8_t mask, bool sees, uint8_t shown, uint8_t hidden) {
    return sees ? Instr(ExprOp::kSelect, t, mask, hidden, shown)
                : Instr(ExprOp::kSelect, t, mask, shown, hidden);
  }
  static float RoundTo(DType t, float v) { return t == DType::kBF16 ? ToFloat(ToBF16(v)) : v; }

  Rng& rng_;
  ExprProgram p_;
  uint8_t next_ = 0;
};

float RoundAs(DType t, float v) { return t == DType::kBF16 ? ToFloat(ToBF16(v)) : v; }
float FloatOf(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// What ScoreForm says that it means.
float Apply(const ScoreForm& form, float x, float bias, int64_t s, int64_t position) {
  const float factor = FloatOf(form.factor), fill = FloatOf(form.fill);
  x = RoundAs(form.raw, x);
  x = RoundAs(form.scaled, form.divides ? x / factor : x * factor);
  if (form.capped) {
    const float in = FloatOf(form.cap_in);
    x = RoundAs(form.cap, form.cap_divides ? x / in : x * in);
    x = RoundAs(form.cap, std::tanh(x));
    x = RoundAs(form.cap, x * FloatOf(form.cap_out));
  }
  if (form.bias >= 0) x += bias;
  x = RoundAs(form.biased, x);
  const bool seen =
      form.position < 0 || (s <= position - form.offset &&
                            (form.window == ScoreForm::kNoWindow || s >= position - form.window));
  if (!seen) x = form.adds_fill ? x + fill : fill;
  return RoundAs(form.masked, x);
}

TEST(ScoreForm, RandomProgramsMeanTheSame) {
  constexpr int64_t kS = 40;
  int recognised = 0;
  constexpr int kPrograms = 2000;
  for (int seed = 0; seed < kPrograms; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    Writer writer(rng, kS);
    Attention attention;
    attention.program = writer.Write();
    attention.params.raw_source = 0;
    const auto row = [](DType t, int64_t stride) {
      TensorRef r;
      r.dtype = t;
      r.rank = 4;
      r.shape = {1, 1, 1, kS};
      r.strides = {0, 0, 0, stride};
      return r;
    };
    Node& scores = attention.scores;
    scores.op = Op::kExpr;
    scores.params = EncodeExpr(attention.program);
    scores.srcs = {row(writer.raw, 1), row(DType::kS32, 0), row(DType::kBF16, 1)};
    scores.outs = {row(writer.masked, 1)};
    const ScoreForm form = MatchScoreForm(attention);
    recognised += form.known;
    if (!form.known) continue;

    Buffers buffers(4, std::vector<char>(4 * kS));
    for (int64_t s = 0; s < kS; ++s) {
      WriteElement(writer.raw, {UniformReal(rng, -30, 30), 0},
                   &buffers[0][s * static_cast<int64_t>(SizeOf(writer.raw))]);
      WriteElement(DType::kBF16, {UniformReal(rng, -2, 2), 0}, &buffers[2][s * 2]);
    }
    for (const int32_t position : {-30, -1, 0, 1, 17, 39, 40, 55, 1 << 30, -(1 << 30)}) {
      std::memcpy(buffers[1].data(), &position, sizeof position);
      ResolvedNode node;
      node.node = &scores;
      node.srcs = {buffers[0].data(), buffers[1].data(), buffers[2].data()};
      node.outs = {buffers[3].data()};
      std::vector<Launch> launches;
      size_t covered = 0;
      ASSERT_TRUE(HostEmitter().Emit({node}, 0, true, &launches, &covered).ok());
      SerialFor serial;
      for (const Launch& launch : launches) {
        launch.kernel->host_function(launch.params.data(), serial);
      }
      for (int64_t s = 0; s < kS; ++s) {
        const auto read = [&](int buffer, DType t) {
          return ReadElement(t, &buffers[buffer][s * static_cast<int64_t>(SizeOf(t))]).f;
        };
        const double want = read(3, writer.masked);
        const double got = Apply(form, static_cast<float>(read(0, writer.raw)),
                                 static_cast<float>(read(2, DType::kBF16)), s, position);
        const double narrow =
            writer.masked == DType::kBF16 || form.cap == DType::kBF16 ? 1e-2 : 2e-6;
        ASSERT_TRUE(got == want || (form.capped && std::abs(got - want) <=
                                                       narrow * std::max(10.0, std::abs(want))))
            << "s " << s << ", position " << position << ": " << got << ", not " << want;
      }
    }
  }
  EXPECT_GT(recognised, kPrograms * 9 / 10);
}

TEST(ScoreForm, NearMisses) {
  const auto known = [](void (*change)(ExprProgram*)) {
    return FormOf(AttentionSpec(), change).known != 0;
  };
  EXPECT_FALSE(known([](ExprProgram* p) { Find(p, ExprOp::kLe).op = ExprOp::kEq; }));
  EXPECT_FALSE(
      known([](ExprProgram* p) { Find(p, ExprOp::kLe).op = ExprOp::kGe; }));  // sees the rest
  EXPECT_FALSE(known([](ExprProgram* p) { Find(p, ExprOp::kMul).op = ExprOp::kAdd; }));
  EXPECT_FALSE(known([](ExprProgram* p) { p->indices[0].strides[3] = 2; }));
  EXPECT_FALSE(known([](ExprProgram* p) { p->indices[0].strides[3] = 0; }));
  AttentionSpec spec;
  spec.window = 5;  // alone, it would hold for positions that wrap around
  EXPECT_FALSE(FormOf(spec, [](ExprProgram* p) { Find(p, ExprOp::kLe).op = ExprOp::kGe; }).known);
  spec = AttentionSpec();
  spec.soft_cap = true;
  EXPECT_FALSE(
      FormOf(spec, [](ExprProgram* p) { Find(p, ExprOp::kTanh).op = ExprOp::kSin; }).known);
  spec = AttentionSpec();
  spec.position = DType::kU32;
  EXPECT_FALSE(FormOf(spec).known);
  spec = AttentionSpec();
  spec.masked = DType::kF64;
  EXPECT_FALSE(FormOf(spec).known);
}

}  // namespace
}  // namespace jaxgraph::testing
