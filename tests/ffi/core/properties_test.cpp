#include "ffi/core/properties.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

Snapshot Take(const Program& program) {
  Snapshot snapshot{Seal(program), {}};
  for (size_t b = 0; b < program.bases.size(); ++b) {
    snapshot.bases.push_back(reinterpret_cast<char*>((b + 1) << 20));
  }
  return snapshot;
}

TEST(Properties, EqualProgramsDoNotDiffer) {
  const Diff diff = Compare(Take(SampleProgram()), Take(SampleProgram()));
  EXPECT_EQ(diff.change, Change::kNone);
  EXPECT_TRUE(diff.fields.empty());
  EXPECT_EQ(diff.nodes_compared, SampleProgram().nodes.size());
}

struct Mutation {
  Field field;
  Change change;
  std::function<void(Node*)> apply;
};

// Of node 5, a matmul.
const std::vector<Mutation>& NodeMutations() {
  static const std::vector<Mutation> all = {
      {Field::kOp, Change::kStructure, [](Node* n) { n->op = Op::kCopy; }},
      {Field::kParams, Change::kStructure, [](Node* n) { n->params = "x"; }},
      {Field::kFlags, Change::kStructure, [](Node* n) { n->flags ^= 2; }},
      {Field::kRegion, Change::kStructure, [](Node* n) { n->region = 9; }},
      {Field::kBranch, Change::kStructure, [](Node* n) { n->branch = 9; }},
      {Field::kTensorCount, Change::kStructure, [](Node* n) { n->srcs.pop_back(); }},
      {Field::kTensorCount, Change::kStructure, [](Node* n) { n->outs.push_back(n->outs[0]); }},
  };
  return all;
}

// Of one tensor.
const std::vector<std::pair<Field, std::function<void(TensorRef*)>>>& TensorMutations() {
  static const std::vector<std::pair<Field, std::function<void(TensorRef*)>>> all = {
      {Field::kDType, [](TensorRef* t) { t->dtype = DType::kBF16; }},
      {Field::kShape, [](TensorRef* t) { ++t->shape[3]; }},
      {Field::kStrides, [](TensorRef* t) { ++t->strides[3]; }},
      {Field::kAddress, [](TensorRef* t) { t->offset += 4; }},
      {Field::kAddress, [](TensorRef* t) { t->base = 1; }},
  };
  return all;
}

TEST(Properties, EveryFieldMutatedAloneIsDetected) {
  const Snapshot before = Take(SampleProgram());
  for (const Mutation& mutation : NodeMutations()) {
    Program program = SampleProgram();
    mutation.apply(&program.nodes[5]);
    const Diff diff = Compare(before, Take(program));
    ASSERT_EQ(diff.fields.size(), 1u) << NameOf(mutation.field);
    EXPECT_EQ(diff.fields[0].node, 5u);
    EXPECT_EQ(diff.fields[0].field, mutation.field);
    EXPECT_EQ(diff.change, mutation.change);
  }
  for (const auto& [field, apply] : TensorMutations()) {
    for (int which = 0; which < 3; ++which) {  // the output and both sources
      Program program = SampleProgram();
      Node& node = program.nodes[5];
      apply(which == 0 ? &node.outs[0] : &node.srcs[which - 1]);
      const Diff diff = Compare(before, Take(program));
      ASSERT_EQ(diff.fields.size(), 1u) << NameOf(field) << which;
      EXPECT_EQ(diff.fields[0].field, field);
      EXPECT_EQ(diff.fields[0].source, which > 0);
      EXPECT_EQ(diff.fields[0].tensor, which == 2 ? 1 : 0);
      EXPECT_EQ(diff.change, field == Field::kAddress ? Change::kAddresses : Change::kStructure);
    }
  }
}

TEST(Properties, RankCountsThoughTheShapeItCutsIsKept) {
  Program program = SampleProgram();
  --program.nodes[5].outs[0].rank;
  EXPECT_EQ(Compare(Take(SampleProgram()), Take(program)).change, Change::kStructure);
}

TEST(Properties, NumberOfNodesCounts) {
  Program program = SampleProgram();
  program.nodes.pop_back();
  const Diff diff = Compare(Take(SampleProgram()), Take(program));
  ASSERT_EQ(diff.fields.size(), 1u);
  EXPECT_EQ(diff.fields[0].field, Field::kNodeCount);
  EXPECT_EQ(diff.change, Change::kStructure);
  EXPECT_EQ(Summarize(diff, Take(SampleProgram()), Take(program)), "structure: node count 9 -> 8");
}

TEST(Properties, ViewsAreComparedButChangeNothing) {
  Program program = SampleProgram();
  TensorRef& view = program.nodes[2].outs[0];
  view.dtype = DType::kBF16;
  ++view.shape[1];
  ++view.strides[0];
  view.offset += 4;
  const Diff diff = Compare(Take(SampleProgram()), Take(program));
  EXPECT_EQ(diff.fields.size(), 4u);
  EXPECT_EQ(diff.change, Change::kNone);
  // A view that becomes something that launches is a change.
  program = SampleProgram();
  program.nodes[2].op = Op::kCopy;
  EXPECT_EQ(Compare(Take(SampleProgram()), Take(program)).change, Change::kStructure);
}

TEST(Properties, MovedBaseIsSeenInEveryNodeThatUsesItAndNoOther) {
  const Snapshot before = Take(SampleProgram());
  for (size_t base = 0; base < before.bases.size(); ++base) {
    Snapshot after = before;
    after.bases[base] += 256;
    const Diff diff = Compare(before, after);
    size_t uses = 0;
    for (const Node& node : before.program->nodes) {
      for (const TensorRef& t : node.outs) uses += t.base == base;
      for (const TensorRef& t : node.srcs) uses += t.base == base;
    }
    EXPECT_EQ(diff.fields.size(), uses) << base;
    EXPECT_EQ(diff.change, Change::kAddresses);
  }
}

TEST(Properties, SummaryNamesTheNodeAndTheValues) {
  Program program = SampleProgram();
  program.nodes[5].srcs[1].shape[3] = 5;
  const std::string text = Summarize(Compare(Take(SampleProgram()), Take(program)),
                                     Take(SampleProgram()), Take(program));
  EXPECT_EQ(text,
            "structure: node 5 (matmul matmul@model.py:1) source 1 shape [1,1,4,4] -> [1,1,4,5]");
}

}  // namespace
}  // namespace jaxgraph
