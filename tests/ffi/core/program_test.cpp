#include "ffi/core/program.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>

#include "tests/ffi/core/sample_program.h"

namespace jaxgraph {
namespace {

Status DecodeOnly(const Program& program) {
  Program out;
  return Decode(Encode(program), &out);
}

TEST(Program, RoundTrip) {
  const Program program = SampleProgram();
  const std::string bytes = Encode(program);
  Program decoded;
  const Status status = Decode(bytes, &decoded);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(Encode(decoded), bytes);
  EXPECT_EQ(decoded.id, HashBytes(bytes));
  EXPECT_EQ(decoded.function, program.function);
  EXPECT_EQ(decoded.bases[5].alias, 1);
  EXPECT_EQ(decoded.options.max_failures, 5u);
  EXPECT_FALSE(decoded.options.fusion);
  EXPECT_TRUE(decoded.options.rewarm_on_address_change);
  EXPECT_EQ(decoded.options.update_depth, UpdateDepth::kInstantiate);
  EXPECT_EQ(decoded.options.idle_ms, 6u);
  EXPECT_EQ(decoded.options.sweep_ms, 7u);
  EXPECT_EQ(decoded.options.max_executables, 8u);
  EXPECT_EQ(decoded.options.memory_budget, 9u);
  EXPECT_EQ(decoded.nodes[2].outs[0].strides[1], -1);
}

TEST(Program, HashIsMurmur3) {
  const Hash128 hello = {0x02, 0x9b, 0xbd, 0x41, 0xb3, 0xa7, 0xd8, 0xcb,
                         0x19, 0x1d, 0xae, 0x48, 0x6a, 0x90, 0x1e, 0x5b};
  EXPECT_EQ(HashBytes("hello"), hello);
  EXPECT_EQ(HashBytes(""), Hash128{});
}

TEST(Program, EveryTruncationIsRefused) {
  const std::string bytes = Encode(SampleProgram());
  for (size_t n = 0; n < bytes.size(); ++n) {
    Program out;
    EXPECT_EQ(Decode(std::string_view(bytes).substr(0, n), &out).code(), Code::kInvalidArgument)
        << n;
  }
  Program out;
  EXPECT_EQ(Decode(bytes + '\0', &out).code(), Code::kInvalidArgument);
}

TEST(Program, EveryByteFlippedIsRefusedOrStaysConsistent) {
  const std::string bytes = Encode(SampleProgram());
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      Program out;
      const Status status = Decode(flipped, &out);
      if (status.ok()) {
        EXPECT_EQ(Encode(out), flipped) << at;  // the change was understood, not overlooked
      } else {
        EXPECT_EQ(status.code(), Code::kInvalidArgument);
      }
    }
  }
}

TEST(Program, RandomCorruptionNeverCrashes) {
  const std::string bytes = Encode(SampleProgram());
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string corrupt = bytes;
    const int changes = 1 + static_cast<int>(random() % 6);
    for (int i = 0; i < changes; ++i) {
      const size_t at = 8 + random() % (corrupt.size() - 8);  // behind magic and version
      static constexpr uint8_t kNasty[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
      corrupt[at] = static_cast<char>(random() % 2 ? kNasty[random() % 5] : random() % 256);
    }
    Program out;
    const Status status = Decode(corrupt, &out);
    if (!status.ok()) {
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
    }
  }
}

void SetScores(Program* p, const std::function<void(ExprProgram*)>& change) {
  ExprProgram scores = CausalExpr();
  change(&scores);
  p->nodes[7].params = EncodeAttentionParams(scores);
}

// Of the sample's attention: one score more for each of its queries.
void AddSink(Program* p) {
  Node& attention = p->nodes[7];
  attention.params[2] = static_cast<char>(attention.srcs.size());
  attention.srcs.push_back(Dense(DType::kF32, 0, 64, {1, 1, 2, 1}));
}

// One way to break the sample, each of which Decode must refuse.
struct Break {
  const char* name;
  std::function<void(Program*)> apply;
};

class Hostile : public testing::TestWithParam<Break> {};

TEST_P(Hostile, IsRefused) {
  Program program = SampleProgram();
  GetParam().apply(&program);
  EXPECT_EQ(DecodeOnly(program).code(), Code::kInvalidArgument);
}

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    Program, Hostile,
    testing::Values(
        Break{"NoArena", [](Program* p) { p->bases.clear(); }},
        Break{"OperandIndex", [](Program* p) { p->bases[2].index = 0; }},
        Break{"ResultBeforeOperand", [](Program* p) { std::swap(p->bases[4], p->bases[5]); }},
        Break{"AliasOutside", [](Program* p) { p->bases[5].alias = 4; }},
        Break{"AliasOfOperand", [](Program* p) { p->bases[2].alias = 0; }},
        Break{"AliasOfAnotherSize", [](Program* p) { p->bases[5].alias = 0; }},
        Break{"BaseOutside", [](Program* p) { p->nodes[0].srcs[0].base = 7; }},
        Break{"ArenaTooSmall", [](Program* p) { p->arena_bytes = 287; }},
        Break{"OperandTooSmall", [](Program* p) { p->bases[1].nbytes = 31; }},
        Break{"BeforeBase", [](Program* p) { p->nodes[2].outs[0].offset = 8; }},
        Break{"NegativeOffset", [](Program* p) { p->nodes[2].srcs[0].offset = -4; }},
        Break{"Misaligned", [](Program* p) { p->nodes[2].srcs[0].offset = 2; }},
        Break{"HugeOffset", [](Program* p) { p->nodes[2].srcs[0].offset = kHuge - 3; }},
        Break{"HugeStride", [](Program* p) { p->nodes[2].srcs[0].strides[0] = kHuge; }},
        Break{"HugeNegativeStride", [](Program* p) { p->nodes[2].srcs[0].strides[0] = -kHuge; }},
        Break{"WrappingStrides",
              [](Program* p) {
                p->nodes[2].srcs[0].strides[0] = int64_t{1} << 62;
                p->nodes[2].srcs[0].strides[1] = int64_t{1} << 62;
              }},
        Break{"HugeShape",
              [](Program* p) {
                TensorRef& t = p->nodes[2].srcs[0];
                t.shape = {int64_t{1} << 32, int64_t{1} << 32};
                t.strides = {0, 0};
              }},
        Break{"NegativeShape", [](Program* p) { p->nodes[2].srcs[0].shape[0] = -1; }},
        Break{"UnmarkedWrite",
              [](Program* p) {
                p->bases[2].written = false;
                p->nodes[4].outs[0].base = 2;
              }},
        Break{"SplitRegion", [](Program* p) { p->nodes[6].region = 1; }},
        Break{"MatmulShapes", [](Program* p) { p->nodes[5].srcs[0].shape[3] = 3; }},
        Break{"MatmulRank", [](Program* p) { p->nodes[5].outs[0].rank = 3; }},
        Break{"MatmulOfIntegers", [](Program* p) { p->nodes[5].srcs[0].dtype = DType::kS32; }},
        Break{"GatherParams", [](Program* p) { p->nodes[3].params.pop_back(); }},
        Break{"GatherMode", [](Program* p) { p->nodes[3].params[0] = 3; }},
        Break{"GatherComponents", [](Program* p) { p->nodes[3].params[1] = 2; }},
        Break{"GatherDim", [](Program* p) { p->nodes[3].params[8] = 2; }},
        Break{"GatherSlice", [](Program* p) { p->nodes[3].srcs[0].shape[1] = 3; }},
        Break{"GatherFloatIndex", [](Program* p) { p->nodes[3].srcs[1].dtype = DType::kF32; }},
        Break{"SetRowsElsewhere", [](Program* p) { p->nodes[4].outs[0].base = 6; }},
        Break{"CopyShape", [](Program* p) { p->nodes[6].srcs[0].shape[1] = 3; }},
        Break{"CopyDType", [](Program* p) { p->nodes[6].srcs[0].dtype = DType::kS32; }},
        Break{"AttentionParams", [](Program* p) { p->nodes[7].params.resize(7); }},
        Break{"AttentionWithoutProgram", [](Program* p) { p->nodes[7].params.resize(8); }},
        Break{"AttentionShapes", [](Program* p) { p->nodes[7].srcs[1].shape[2] = 3; }},
        Break{"AttentionLengths", [](Program* p) { p->nodes[7].srcs[2].shape[2] = 3; }},
        Break{"AttentionOutput", [](Program* p) { p->nodes[7].outs[0].shape[3] = 3; }},
        Break{"AttentionRank", [](Program* p) { p->nodes[7].srcs[0].rank = 3; }},
        Break{"AttentionOfIntegers", [](Program* p) { p->nodes[7].srcs[2].dtype = DType::kS32; }},
        Break{"AttentionOutputs",
              [](Program* p) { p->nodes[7].outs.push_back(p->nodes[7].outs[0]); }},
        Break{"AttentionWorkspaces",
              [](Program* p) {
                p->nodes[7].outs.insert(p->nodes[7].outs.end(), 2, Dense(DType::kF32, 0, 64, {8}));
              }},
        Break{"AttentionWorkspaceOfIntegers",
              [](Program* p) {
                p->nodes[7].outs.push_back(Dense(DType::kS32, 0, 64, {8}));
              }},
        Break{"AttentionSinkIsNoSource", [](Program* p) { p->nodes[7].params[2] = 4; }},
        Break{"AttentionSinkIsNotTheLastSource",
              [](Program* p) {
                AddSink(p);
                p->nodes[7].params[2] = 3;
              }},
        Break{"AttentionSinkIsAnOperand", [](Program* p) { p->nodes[7].params[2] = 2; }},
        Break{"AttentionSinkOfIntegers",
              [](Program* p) {
                AddSink(p);
                p->nodes[7].srcs[4].dtype = DType::kS32;
              }},
        Break{"AttentionSinkForEveryScore",
              [](Program* p) {
                AddSink(p);
                p->nodes[7].srcs[4].shape[3] = 4;
              }},
        Break{"AttentionSinkForOtherQueries",
              [](Program* p) {
                AddSink(p);
                p->nodes[7].srcs[4].shape[2] = 1;
              }},
        Break{"AttentionWorkspaceWithGaps",
              [](Program* p) {
                p->nodes[7].outs.push_back(Dense(DType::kF32, 0, 64, {8}));
                p->nodes[7].outs[1].strides[0] = 2;
              }},
        Break{"AttentionWithoutValues", [](Program* p) { p->nodes[7].srcs.resize(2); }},
        Break{"AttentionSources", [](Program* p) { p->nodes[7].srcs.pop_back(); }},
        Break{"AttentionSourceShape", [](Program* p) { p->nodes[7].srcs[3].shape[2] = 1; }},
        Break{"AttentionRawSource", [](Program* p) { p->nodes[7].params[0] = 2; }},
        Break{"AttentionRawSourceOfIntegers", [](Program* p) { p->nodes[7].params[0] = 1; }},
        Break{"AttentionBoundOutside", [](Program* p) { p->nodes[7].params[1] = 4; }},
        Break{"AttentionBoundIsValues", [](Program* p) { p->nodes[7].params[1] = 2; }},
        Break{"AttentionProgramShape",
              [](Program* p) { SetScores(p, [](ExprProgram* e) { e->shape[3] = 3; }); }},
        Break{"AttentionProgramStages",
              [](Program* p) { SetScores(p, [](ExprProgram* e) { e->num_stages = 2; }); }},
        Break{"AttentionWithoutStore",
              [](Program* p) {
                SetScores(p, [](ExprProgram* e) { e->stages[0].elem_end = --e->num_instrs; });
              }},
        Break{"AttentionStoresTwice",
              [](Program* p) {
                SetScores(p, [](ExprProgram* e) {
                  e->instrs[e->num_instrs] = e->instrs[e->num_instrs - 1];
                  e->stages[0].elem_end = ++e->num_instrs;
                });
              }},
        Break{"AttentionIntegerScores",
              [](Program* p) {
                SetScores(p, [](ExprProgram* e) {
                  e->instrs[6] = {ExprOp::kStore, DType::kS32, 0, 2, 0, 0, 0};
                });
              }},
        Break{"AttentionReduces",
              [](Program* p) {
                SetScores(p, [](ExprProgram* e) {
                  e->instrs[6] = {ExprOp::kReduceSum, DType::kF32, 32, 5, 0, 0, 0};
                });
              }},
        Break{"SortParams", [](Program* p) { p->nodes[8].params.pop_back(); }},
        Break{"SortOrder", [](Program* p) { p->nodes[8].params[4] = 2; }},
        Break{"SortWithoutPieces", [](Program* p) { p->nodes[8].params[0] = 0; }},
        Break{"SortPiecesTooShort",
              [](Program* p) {
                p->nodes[8].params[0] = 4;
                p->nodes[8].outs[0].shape[1] = 8;
                p->nodes[8].outs[0].strides[1] = 0;
              }},
        Break{"SortPiecesTooLong",
              [](Program* p) {
                p->nodes[8].srcs[0].shape[1] = kSortMaxLength + 1;
                p->nodes[8].srcs[0].strides = {0, 0};
              }},
        Break{"SortMergesOne", [](Program* p) { p->nodes[8].params[5] = 1; }},
        Break{"SortMergesTooMany", [](Program* p) { p->nodes[8].params[5] = kSortMaxMerged + 1; }},
        Break{"SortMergesEmptyPieces", [](Program* p) { p->nodes[8].params[5] = 5; }},
        Break{"SortUnevenly", [](Program* p) { p->nodes[8].params[0] = 3; }},
        Break{"SortRows", [](Program* p) { p->nodes[8].outs[0].shape[0] = 1; }},
        Break{"SortSource", [](Program* p) { p->nodes[8].params[8] = 1; }},
        Break{"SortDType", [](Program* p) { p->nodes[8].params[8] = 0; }},
        Break{"SortRank", [](Program* p) { p->nodes[8].srcs[0].rank = 1; }},
        Break{"ExprParams", [](Program* p) { p->nodes[0].params.pop_back(); }},
        Break{"ExprSources", [](Program* p) { p->nodes[0].srcs.pop_back(); }}),
    [](const auto& info) { return std::string(info.param.name); });

// The product of the sample reads its matrix from a table: the index is what `index` makes.
Program Chosen(const TensorRef& index) {
  Program program = SampleProgram();
  program.nodes[5].srcs.push_back(index);
  return program;
}

TEST(Program, ProductsMayChooseTheirMatrix) {
  const Status status = DecodeOnly(Chosen(Dense(DType::kS32, 3, 0, {1, 1})));
  EXPECT_TRUE(status.ok()) << status.message();
  for (const TensorRef& index : {Dense(DType::kS32, 3, 0, {1}), Dense(DType::kS32, 3, 0, {1, 2}),
                                 Dense(DType::kS32, 3, 0, {2, 1}), Dense(DType::kF32, 1, 0, {1, 1}),
                                 Dense(DType::kPred, 3, 0, {1, 1})}) {
    EXPECT_FALSE(DecodeOnly(Chosen(index)).ok());
  }
  Program table = Chosen(Dense(DType::kS32, 3, 0, {1, 1}));
  table.nodes[5].srcs[1].strides[1] = 0;
  table.nodes[5].srcs[1].shape[1] = 2;
  EXPECT_FALSE(DecodeOnly(table).ok());
  table.nodes[5].srcs[1].shape[1] = 1;
  table.nodes[5].srcs[1].shape[0] = 0;
  EXPECT_FALSE(DecodeOnly(table).ok());
}

TEST(Program, AttentionNeedsNoBound) {
  Program program = SampleProgram();
  program.nodes[7].params[1] = static_cast<char>(0xff);
  const Status status = DecodeOnly(program);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(Program, AttentionMayBringAWorkspace) {
  Program program = SampleProgram();
  program.nodes[7].outs.push_back(Dense(DType::kF32, 0, 64, {8}));
  EXPECT_EQ(DecodeOnly(program).message(), "");
}

TEST(Program, AttentionMayHaveASink) {
  Program program = SampleProgram();
  AddSink(&program);
  EXPECT_EQ(DecodeOnly(program).message(), "");
  program.nodes[7].srcs[4].dtype = DType::kBF16;
  EXPECT_EQ(DecodeOnly(program).message(), "");
}

TEST(Program, ABoundThatMovesAlongTheCacheIsNamed) {
  Program program = SampleProgram();
  TensorRef& position = program.nodes[7].srcs[3];
  position.base = 4;  // 16 elements, room for strides of its own
  position.strides = {0, 0, 0, 1};
  EXPECT_NE(DecodeOnly(program).message().find("moves along s"), std::string::npos);
}

TEST(Program, EmptyTensorsMayLieAtTheEnd) {
  Program program = SampleProgram();
  program.nodes = {MakeNode(Op::kCopy, {Dense(DType::kF32, 0, 512, {0, 4})},
                            {Dense(DType::kF32, 1, 32, {0, 4})})};
  const Status status = DecodeOnly(program);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace jaxgraph
