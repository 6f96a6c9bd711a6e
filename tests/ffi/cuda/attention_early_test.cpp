// What may be read before the wait, and what may not. Needs no GPU.
#include "ffi/kernels/cuda/attention_early.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {
namespace {

TensorRef Tensor(DType t, uint32_t base, const std::vector<int64_t>& shape) {
  TensorRef r;
  r.dtype = t;
  r.base = base;
  return Viewed(r, shape);
}

// [index computed, keys written, values written, attention]; memory that is never touched.
class Step : public ::testing::Test {
 protected:
  static constexpr int64_t kHeads = 2, kRows = 32, kWidth = 16, kCacheBytes = 2048;
  enum Base : uint32_t { kArena, kKeys, kValues, kPosition };

  Step() : nodes_(4) {
    nodes_[0].op = Op::kExpr;
    nodes_[0].outs = {Tensor(DType::kS32, kArena, {})};
    nodes_[0].outs[0].offset = 512;
    nodes_[1] = SetRows(kKeys);
    nodes_[2] = SetRows(kValues);
    Node& attention = nodes_[3];
    attention.op = Op::kAttention;
    const TensorRef q = Tensor(DType::kBF16, kArena, {1, kHeads, 1, kWidth});
    TensorRef k = Tensor(DType::kBF16, kKeys, {1, kHeads, kRows, kWidth});
    std::swap(k.shape[2], k.shape[3]);
    std::swap(k.strides[2], k.strides[3]);
    TensorRef position = Tensor(DType::kS32, kPosition, {1, kHeads, 1, kRows});
    position.strides = {};
    attention.srcs = {q, k, Tensor(DType::kBF16, kValues, {1, kHeads, kRows, kWidth}), position};
    attention.outs = {q};
    attention.outs[0].offset = 256;
    decoded_.params.bound_source = 3;
  }

  static Node SetRows(uint32_t base) {
    Node node;
    node.op = Op::kSetRows;
    IndexParams params;
    params.num_components = 1;
    params.dim[0] = 2;
    node.params.assign(reinterpret_cast<const char*>(&params), sizeof params);
    const TensorRef whole = Tensor(DType::kBF16, base, {1, kHeads, kRows, kWidth});
    TensorRef index = Tensor(DType::kS32, kArena, {1});
    index.offset = 512;
    node.outs = {whole};
    node.srcs = {whole, Tensor(DType::kBF16, kArena, {1, 1, kHeads, 1, kWidth}), index};
    node.srcs[1].offset = 1024;
    return node;
  }

  EarlyCache Find() {
    std::vector<ResolvedNode> resolved;
    for (const Node& node : nodes_) {
      ResolvedNode& r = resolved.emplace_back();
      r.node = &node;
      for (const TensorRef& t : node.outs) r.outs.push_back(At(t));
      for (const TensorRef& t : node.srcs) r.srcs.push_back(At(t));
    }
    resolved.back().constant_srcs = constant_;
    index_ = memory_ + 512;
    return FindEarlyCache(resolved, nodes_.size() - 1, decoded_, 1);
  }
  char* At(const TensorRef& t) { return memory_ + 4096 * t.base + t.offset; }

  char memory_[4 * 4096] = {};
  const char* index_ = nullptr;
  std::vector<Node> nodes_;
  Attention decoded_;
  uint32_t constant_ = 1u << 3;
};

TEST_F(Step, RowsThatAreWritten) {
  const EarlyCache early = Find();
  EXPECT_TRUE(early.position);
  ASSERT_TRUE(early.cache);
  for (const RewrittenRows* rows : {&early.keys, &early.values}) {
    EXPECT_EQ(rows->index, index_);
    EXPECT_EQ(rows->index_dtype, DType::kS32);
    EXPECT_EQ(rows->count, 1);
    EXPECT_EQ(rows->last_start, kRows - 1);
  }
}

TEST_F(Step, SeveralRows) {
  nodes_[1].srcs[1].shape[3] = 5;
  const EarlyCache early = Find();
  ASSERT_TRUE(early.cache);
  EXPECT_EQ(early.keys.count, 5);
  EXPECT_EQ(early.keys.last_start, kRows - 5);
}

TEST_F(Step, ACacheThatNobodyWrites) {
  nodes_.erase(nodes_.begin() + 1, nodes_.begin() + 3);
  const EarlyCache early = Find();
  ASSERT_TRUE(early.cache);
  EXPECT_EQ(early.keys.index, nullptr);
  EXPECT_EQ(early.values.index, nullptr);
}

TEST_F(Step, ConstantKeysNeedNoLook) {
  constant_ |= 1u << 1;
  const EarlyCache early = Find();
  ASSERT_TRUE(early.cache);
  EXPECT_EQ(early.keys.index, nullptr);
  EXPECT_EQ(early.values.index, index_);
}

TEST_F(Step, APositionThatIsComputed) {
  constant_ = 0;
  const EarlyCache early = Find();
  EXPECT_FALSE(early.position);
  EXPECT_FALSE(early.cache);
}

TEST_F(Step, ASecondWriter) {
  nodes_.insert(nodes_.begin() + 2, nodes_[1]);
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, AWriterOfAnotherKind) {
  nodes_[1].op = Op::kCopy;
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, AViewWritesNothing) {
  nodes_.insert(nodes_.begin() + 2, nodes_[1]);
  nodes_[2].op = Op::kView;
  EXPECT_TRUE(Find().cache);
}

TEST_F(Step, RowsOfSomethingElse) {
  // As many bytes, but what is a row there is no row here.
  nodes_[1].outs[0] = Tensor(DType::kBF16, kKeys, {1, 1, kRows, kHeads * kWidth});
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, AnotherDimension) {
  IndexParams params;
  params.num_components = 1;
  params.dim[0] = 1;
  nodes_[1].params.assign(reinterpret_cast<const char*>(&params), sizeof params);
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, APartOfTheCache) {
  nodes_[1].outs[0].offset = kWidth * 2;
  nodes_[1].outs[0].shape[2] = kRows - 1;
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, SeveralSlices) {
  nodes_[1].srcs[1].shape[0] = 2;
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, RowsThatOverlap) {
  for (TensorRef* t : {&nodes_[1].outs[0], &nodes_[1].srcs[0]}) t->strides[2] = kWidth / 2;
  nodes_[3].srcs[1].strides[3] = kWidth / 2;
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, AnIndexThatIsOverwritten) {
  nodes_[3].outs[0].offset = 512;  // by the attention's own output
  EXPECT_FALSE(Find().cache);
}

TEST_F(Step, AnIndexThatMovesByItself) {
  nodes_[1].srcs[2].base = 7;  // looks for a base that is none of the attention's
  nodes_[1].srcs[2].offset = 512 - 7 * 4096;
  EXPECT_FALSE(Find().cache);
  nodes_[1].srcs[2].base = kPosition;
  nodes_[1].srcs[2].offset = 512 - kPosition * 4096;
  EXPECT_TRUE(Find().cache);
}

TEST_F(Step, InARegionNothingIsReadEarly) {
  nodes_[3].region = 1;
  EXPECT_FALSE(Find().cache);
}

}  // namespace
}  // namespace jaxgraph::testing
