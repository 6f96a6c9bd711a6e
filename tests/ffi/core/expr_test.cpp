#include "ffi/core/expr.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "tests/ffi/core/sample_program.h"

namespace jaxgraph {
namespace {

Node RowNode() { return SampleProgram().nodes[1]; }

Status DecodeWith(Node node, const ExprProgram& expr) {
  node.params = EncodeExpr(expr);
  ExprProgram out;
  return DecodeExpr(node, &out);
}

TEST(Expr, RoundTrip) {
  const Node node = RowNode();
  ExprProgram out;
  const Status status = DecodeExpr(node, &out);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(EncodeExpr(out), node.params);
  EXPECT_EQ(out.imms[0], 0x3f800000u);
}

TEST(Expr, EmptySectionsMayNameAnyPlace) {
  ExprProgram expr = NormalizeExpr();
  expr.stages[0].scalar_begin = expr.stages[0].scalar_end = 9;
  EXPECT_TRUE(DecodeWith(RowNode(), expr).ok());
}

struct Break {
  const char* name;
  std::function<void(ExprProgram*)> apply;
};

class HostileExpr : public testing::TestWithParam<Break> {};

TEST_P(HostileExpr, IsRefused) {
  ExprProgram expr = NormalizeExpr();
  GetParam().apply(&expr);
  EXPECT_EQ(DecodeWith(RowNode(), expr).code(), Code::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(
    Expr, HostileExpr,
    testing::Values(
        Break{"UnknownOp", [](ExprProgram* e) { e->instrs[7].op = static_cast<ExprOp>(6); }},
        Break{"UnknownDType", [](ExprProgram* e) { e->instrs[7].dtype = static_cast<DType>(13); }},
        Break{"LoadOutside", [](ExprProgram* e) { e->instrs[0].aux = 1; }},
        Break{"LoadDType", [](ExprProgram* e) { e->instrs[0].dtype = DType::kBF16; }},
        Break{"StoreOutside", [](ExprProgram* e) { e->instrs[9].aux = 2; }},
        Break{"IndexOutside", [](ExprProgram* e) { e->instrs[8].aux = 1; }},
        Break{"IndexOverflow", [](ExprProgram* e) { e->indices[0].strides[1] = INT64_MAX / 2; }},
        Break{"ConstOutside", [](ExprProgram* e) { e->instrs[3].aux = 1; }},
        Break{"RegisterOutside", [](ExprProgram* e) { e->instrs[7].a = 64; }},
        Break{"UndefinedRegister", [](ExprProgram* e) { e->instrs[7].a = 5; }},
        Break{"StaleElementRegister", [](ExprProgram* e) { e->instrs[6].dst = 3; }},
        Break{"ReadsUnfinishedReduction",
              [](ExprProgram* e) {
                e->instrs[2] = {ExprOp::kAdd, DType::kF32, 1, 0, 32, 0, 0};
                e->instrs[5] = e->instrs[4];
              }},
        Break{"ScalarSectionWritesElement", [](ExprProgram* e) { e->instrs[3].dst = 0; }},
        Break{"ElementSectionWritesScalar", [](ExprProgram* e) { e->instrs[7].dst = 40; }},
        Break{"ReductionIntoElement", [](ExprProgram* e) { e->instrs[1].dst = 3; }},
        Break{"TwoReductionsIntoOne", [](ExprProgram* e) { e->instrs[2].dst = 32; }},
        Break{"ArgmaxDType", [](ExprProgram* e) { e->instrs[2].aux = 13; }},
        Break{"TypeConfusion", [](ExprProgram* e) { e->instrs[4].b = 33; }},
        Break{"FloatOpOnIntegers",
              [](ExprProgram* e) { e->instrs[7] = {ExprOp::kExp, DType::kS32, 1, 33, 0, 0, 0}; }},
        Break{"BitcastToAnotherSize",
              [](ExprProgram* e) {
                const uint16_t from = static_cast<uint16_t>(DType::kF32);
                e->instrs[7] = {ExprOp::kBitcast, DType::kS64, 1, 0, 0, 0, from};
              }},
        Break{"BitcastFromAnotherType",
              [](ExprProgram* e) {
                const uint16_t from = static_cast<uint16_t>(DType::kU32);
                e->instrs[7] = {ExprOp::kBitcast, DType::kF32, 1, 0, 0, 0, from};
              }},
        Break{
            "BitcastOfUnknownType",
            [](ExprProgram* e) { e->instrs[7] = {ExprOp::kBitcast, DType::kF32, 1, 0, 0, 0, 13}; }},
        Break{"Gap", [](ExprProgram* e) { e->stages[1].elem_begin = 7; }},
        Break{"Overlap", [](ExprProgram* e) { e->stages[1].scalar_begin = 2; }},
        Break{"BehindTheEnd", [](ExprProgram* e) { e->stages[1].elem_end = 11; }},
        Break{"Unreached", [](ExprProgram* e) { e->num_stages = 1; }},
        Break{"NegativeShape", [](ExprProgram* e) { e->shape[0] = -2; }},
        Break{"OtherShape", [](ExprProgram* e) { e->shape[1] = 3; }},
        Break{"OtherRank", [](ExprProgram* e) { e->rank = 1; }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Expr, LimitsAreChecked) {
  const Node node = RowNode();
  for (size_t field = 0; field < 8; ++field) {  // the counts in front
    Node broken = node;
    broken.params[field] = static_cast<char>(0xff);
    ExprProgram out;
    EXPECT_EQ(DecodeExpr(broken, &out).code(), Code::kInvalidArgument) << field;
  }
}

TEST(Expr, PlainExpressionsHaveOneStageWithoutScalarSection) {
  Node node = SampleProgram().nodes[0];
  ExprProgram expr = AddExpr();
  ASSERT_TRUE(DecodeWith(node, expr).ok());
  expr.stages[0] = {0, 1, 1, expr.num_instrs};
  EXPECT_FALSE(DecodeWith(node, expr).ok());
  expr = AddExpr();
  expr.num_stages = 2;
  EXPECT_FALSE(DecodeWith(node, expr).ok());
  expr = AddExpr();
  expr.instrs[2] = {ExprOp::kReduceSum, DType::kF32, 32, 0, 0, 0, 0};
  EXPECT_FALSE(DecodeWith(node, expr).ok());
}

}  // namespace
}  // namespace jaxgraph
