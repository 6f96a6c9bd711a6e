// Which weights are asked for ahead. Needs no GPU.
#include "ffi/kernels/cuda/weights_ahead.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {
namespace {

TensorRef Tensor(DType t, const std::vector<int64_t>& shape) {
  TensorRef r;
  r.dtype = t;
  return Viewed(r, shape);
}

// [attention, output, norm, gate, up, activation, down]; memory that is never touched.
class WeightsAheadTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSize = 2048, kHidden = 8192, kBytes = 2 * kSize * kHidden;
  enum : size_t { kAttend, kOutput, kNorm, kGate, kUp, kActivation, kDown, kCount };

  WeightsAheadTest() : nodes_(kCount), resolved_(kCount) {
    const Op ops[] = {Op::kAttention, Op::kMatmul, Op::kRow,   Op::kMatmul,
                      Op::kMatmul,    Op::kExpr,   Op::kMatmul};
    for (size_t n = 0; n < kCount; ++n) {
      nodes_[n].op = ops[n];
      nodes_[n].srcs = {Tensor(DType::kBF16, {1, 1, 1, kSize})};
      if (ops[n] == Op::kMatmul)
        nodes_[n].srcs.push_back(Tensor(DType::kBF16, {1, 1, kSize, kHidden}));
    }
    for (size_t n = 0; n < kCount; ++n) {
      resolved_[n].node = &nodes_[n];
      for (size_t i = 0; i < nodes_[n].srcs.size(); ++i) {
        resolved_[n].srcs.push_back(reinterpret_cast<const char*>(0x10000000 * (2 * n + i + 1)));
      }
      if (ops[n] == Op::kMatmul) resolved_[n].constant_srcs = 2;
    }
  }

  WeightsAhead Find() { return FindWeightsAhead(resolved_, kAttend, &reads_to_); }

  std::vector<Node> nodes_;
  std::vector<ResolvedNode> resolved_;
  uint32_t reads_to_ = 0;
};

TEST_F(WeightsAheadTest, ThoseOfTheSecondProducts) {
  const WeightsAhead ahead = Find();
  ASSERT_EQ(ahead.matrices, 2);
  EXPECT_EQ(ahead.weights[0], resolved_[kGate].srcs[1]);
  EXPECT_EQ(ahead.weights[1], resolved_[kUp].srcs[1]);
  EXPECT_EQ(reads_to_, kUp + 1);
  EXPECT_EQ(ahead.parts * ahead.part_bytes, kBytes);
  EXPECT_EQ(int64_t{ahead.matrices} * ahead.parts * ahead.pieces * kAheadPiece, kAheadBytes);
}

TEST_F(WeightsAheadTest, NothingBehindTheMatrix) {
  for (const int64_t hidden : {8, 16, 24, 40, 1000}) {
    for (const size_t n : {kGate, kUp}) {
      nodes_[n].srcs[1] = Tensor(DType::kBF16, {1, 1, kSize, hidden});
    }
    const WeightsAhead ahead = Find();
    ASSERT_EQ(ahead.matrices, 2) << hidden;
    EXPECT_GT(ahead.pieces, 0);
    EXPECT_EQ(ahead.part_bytes % 16, 0);
    EXPECT_LE(int64_t{ahead.pieces} * kAheadPiece, ahead.part_bytes);
    EXPECT_LE(ahead.parts * ahead.part_bytes, 2 * kSize * hidden);
  }
  nodes_[kGate].srcs[1] = Tensor(DType::kBF16, {1, 1, 8, 8});
  EXPECT_EQ(Find().matrices, 0);
  EXPECT_EQ(reads_to_, kGate + 1);
}

TEST_F(WeightsAheadTest, OnlyConstantOnes) {
  resolved_[kUp].constant_srcs = 0;
  EXPECT_EQ(Find().matrices, 1);
  resolved_[kGate].constant_srcs = 1;  // the row is, so it stands for the weights
  EXPECT_EQ(Find().matrices, 0);
  resolved_[kGate].constant_srcs = 0;
  EXPECT_EQ(Find().matrices, 0);
}

TEST_F(WeightsAheadTest, NoPartOfATensor) {
  nodes_[kGate].srcs[1].strides[2] = 2 * kHidden;
  EXPECT_EQ(Find().matrices, 0);
  nodes_[kGate].srcs[1].strides = {0, 0, 1, kSize};  // the other layout
  EXPECT_EQ(Find().matrices, 2);
  // Where they are not aligned they are not asked for, but looked at all the same.
  resolved_[kUp].srcs[1] += 8;
  EXPECT_EQ(Find().matrices, 1);
  EXPECT_EQ(reads_to_, kUp + 1);
  resolved_[kGate].srcs[1] += 8;
  EXPECT_EQ(Find().matrices, 0);
  EXPECT_EQ(reads_to_, kGate + 1);
}

TEST_F(WeightsAheadTest, NotInRegionsAndNotFarAway) {
  nodes_[kGate].region = 1;
  EXPECT_EQ(Find().matrices, 0);
  nodes_[kGate].region = 0;
  EXPECT_EQ(Find().matrices, 2);
  for (const size_t n : {kGate, kUp}) nodes_[n].op = Op::kView;
  EXPECT_EQ(Find().weights[0], resolved_[kDown].srcs[1]);
  for (const size_t n : {kNorm, kActivation}) nodes_[n].op = Op::kMatmul;
  EXPECT_EQ(Find().matrices, 0);  // all of them are products
}

}  // namespace
}  // namespace jaxgraph::testing
