// The score program that is recognised, and what is not it. Needs no GPU.
#include "ffi/kernels/cuda/attention_form.h"

#include <gtest/gtest.h>

#include <utility>

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
  spec.soft_cap = true;
  EXPECT_FALSE(FormOf(spec).known);
  spec = AttentionSpec();
  spec.bias = true;
  EXPECT_FALSE(FormOf(spec).known);
  spec = AttentionSpec();
  spec.window = 5;
  EXPECT_FALSE(FormOf(spec).known);
  spec = AttentionSpec();
  spec.position = DType::kU32;
  EXPECT_FALSE(FormOf(spec).known);
  spec = AttentionSpec();
  spec.masked = DType::kF64;
  EXPECT_FALSE(FormOf(spec).known);
}

}  // namespace
}  // namespace jaxgraph::testing
