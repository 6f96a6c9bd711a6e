// ATTENTION on CUDA: what the random nodes of kernels_test.cpp meet too seldom.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/kernels/random_attention.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

class CudaAttentionTest : public CudaTest {
 protected:
  // Eager, or captured and replayed.
  Buffers Run(const NodeCase& c, bool captured, const Emitter& emitter = CudaEmitter()) {
    return RunAll({c.node}, {0}, c.buffers, captured, emitter);
  }

  // Nodes that follow one another; constants[i]: the sources of nodes[i] that no node writes.
  Buffers RunAll(const std::vector<Node>& nodes, const std::vector<uint32_t>& constants,
                 const Buffers& buffers, bool captured, const Emitter& emitter = CudaEmitter()) {
    std::vector<DeviceBytes> memory;
    std::vector<char*> addresses;
    for (const auto& buffer : buffers) {
      memory.emplace_back(buffer.size(), stream());
      memory.back().Upload(buffer);
      addresses.push_back(memory.back().data());
    }
    std::vector<ResolvedNode> resolved;
    for (size_t i = 0; i < nodes.size(); ++i) {
      resolved.push_back(Resolve(nodes[i], addresses));
      resolved.back().constant_srcs = constants[i];
    }
    std::vector<Launch> launches;
    for (size_t first = 0; first < nodes.size();) {
      size_t covered = 0;
      EXPECT_TRUE(emitter.Emit(resolved, first, true, &launches, &covered).ok());
      first += std::max<size_t>(covered, 1);
    }
    launches.front().dependent = false;
    if (captured) {
      Recording recorded;
      EXPECT_TRUE(Record(launches, &recorded).ok());
      for (int i = 0; i < 2; ++i) {
        // The first replay's rows in the caches would hide that the second reads too early.
        for (size_t m = 0; m < memory.size(); ++m) memory[m].Upload(buffers[m]);
        EXPECT_TRUE(device_->LaunchGraph(recorded.exec, stream_).ok());
      }
      EXPECT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
    } else {
      for (const Launch& launch : launches) {
        EXPECT_TRUE(device_->LaunchKernel(launch, stream_).ok());
      }
    }
    Buffers result;
    for (const DeviceBytes& m : memory) result.push_back(m.Download());
    return result;
  }

  void Check(const NodeCase& c) {
    const Buffers got = Run(c, false);
    ASSERT_TRUE(SameResult(c, got, RunHost(c)));
    ASSERT_TRUE(Run(c, true) == got) << "replay differs from the eager run: " << Describe(c);
  }
};

TEST_F(CudaAttentionTest, RandomNodes) {
  const char* cases = std::getenv("JAXGRAPH_TEST_CASES");
  for (int seed = 0; seed < (cases != nullptr ? std::atoi(cases) : 600); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    ASSERT_NO_FATAL_FAILURE(Check(RandomAttention(rng)));
  }
}

AttentionSpec Decode(DType t, int64_t heads, int64_t group, int64_t width, int64_t s,
                     int64_t position) {
  AttentionSpec spec;
  spec.b1 = heads;
  spec.g = group;
  spec.d = spec.e = width;
  spec.s = s;
  spec.q = spec.k = spec.v = spec.out = t;
  spec.keys = spec.values = CacheLayout::kHeadsLast;
  spec.first_position = spec.last_position = position;
  return spec;
}

TEST_F(CudaAttentionTest, ModelsDecodeSteps) {
  Rng rng(1);
  for (DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int64_t group : {1, 2, 3, 4, 8, 9, 16}) {
      for (int64_t width : {64, 80, 128, 256}) {
        AttentionSpec spec = Decode(t, 3, group, width, 1000, UniformInt(rng, 0, 1001));
        spec.raw = Chance(rng, 0.5) ? t : DType::kF32;
        ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
        spec.sink = true;
        spec.sink_dtype = Chance(rng, 0.5) ? t : DType::kF32;
        ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
        spec.bias = true;  // another form, or the interpreter
        ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
      }
    }
  }
}

TEST_F(CudaAttentionTest, BoundsChangeNoBit) {
  Rng rng(2);
  for (int64_t batch : {1, 5, 64}) {
    for (int64_t position : {-1, 0, 31, 32, 33, 511, 512, 1023, 1024}) {
      AttentionSpec spec = Decode(DType::kBF16, 2, 4, 64, 1024, position);
      spec.b0 = batch;
      spec.per_query = true;
      if (position > 3) spec.first_position = position - 3;
      NodeCase c = MakeAttention(rng, spec);
      const Buffers with = Run(c, false);
      reinterpret_cast<AttentionParams*>(c.node.params.data())->bound_source = 0xff;
      ASSERT_TRUE(with == Run(c, false)) << "position " << position;
    }
  }
}

TEST_F(CudaAttentionTest, OlderDevicesGiveTheSameNumbers) {
  Rng rng(3);
  for (int64_t position : {5, 700}) {
    const NodeCase c = MakeAttention(rng, Decode(DType::kBF16, 2, 4, 64, 1024, position));
    ASSERT_TRUE(SameResult(c, Run(c, false, CudaEmitter(kMinComputeCapability)), RunHost(c)));
  }
}

TEST_F(CudaAttentionTest, ARowThatSeesNothingIsNan) {
  Rng rng(4);
  for (DType t : FloatTypes()) {
    const NodeCase c = MakeAttention(rng, Decode(t, 2, 4, 64, 200, -1));
    const Buffers got = Run(c, false);
    ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
      EXPECT_TRUE(std::isnan(Read(got, c.node.outs[0], i).f));
    });
  }
}

// Its sink, if it has one, takes the whole weight; one that is NaN makes its row NaN.
TEST_F(CudaAttentionTest, SinksOfRowsThatSeeNothing) {
  Rng rng(5);
  for (const DType t : {DType::kBF16, DType::kF32, DType::kF64}) {
    for (const int64_t s : {20, 200, 5000}) {
      NodeCase c = MakeAttention(rng, Decode(t, 2, 4, 64, s, -1));
      const TensorRef sink = AddSink(rng, &c, DType::kF32, Layout::kStrided);
      ForEachIndex(sink, [&](const int64_t* i) { Write(c.buffers, sink, i, {1.5, 0}); });
      const int64_t odd[] = {0, 1, 2, 0};
      Write(c.buffers, sink, odd, {NAN, 0});
      const Buffers got = Run(c, false);
      ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
        const double value = Read(got, c.node.outs[0], i).f;
        if (i[1] == 1 && i[2] == 2) {
          EXPECT_TRUE(std::isnan(value));
        } else {
          EXPECT_EQ(value, 0);
        }
      });
    }
  }
}

TEST_F(CudaAttentionTest, OfNothingIsZero) {
  Rng rng(5);
  AttentionSpec spec = Decode(DType::kBF16, 2, 4, 64, 0, 0);
  spec.causal = false;
  ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
}

TEST_F(CudaAttentionTest, WideRows) {  // wider than the streaming kernel takes
  Rng rng(6);
  for (DType t : {DType::kBF16, DType::kF64}) {
    ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, Decode(t, 2, 2, 320, 300, 123))));
  }
}

// A decode step's attention with what stands before it: launches that take their time, then the
// new keys and values.
struct Step {
  NodeCase attention;
  std::vector<Node> nodes;
  std::vector<uint32_t> constants;
};

Node WriteRows(NodeCase* c, Rng& rng, const TensorRef& cache, int along, int64_t rows,
               const TensorRef& index) {
  Node node;
  node.op = Op::kSetRows;
  TensorRef whole = cache;  // [b0, b1, s, width]
  if (along == 3) {
    std::swap(whole.shape[2], whole.shape[3]);
    std::swap(whole.strides[2], whole.strides[3]);
  }
  const TensorRef slices =
      MakeTensor(rng, c, cache.dtype, {1, whole.shape[0], whole.shape[1], rows, whole.shape[3]},
                 Layout::kDense);
  FillRandom(rng, c, slices, -1, 1);
  IndexParams params;
  params.num_components = 1;
  params.dim[0] = 2;
  node.params.assign(reinterpret_cast<const char*>(&params), sizeof params);
  node.outs = {whole};
  node.srcs = {whole, slices, index};
  return node;
}

// Few numbers, and long work on them that is exact: x = c / x, again and again.
Node Slow(Rng& rng, NodeCase* c) {
  ExprProgram p;
  p.rank = 1;
  p.shape[0] = 32;
  p.num_stages = p.num_srcs = p.num_outs = 1;
  const auto add = [&p](ExprOp op, uint8_t dst, uint8_t a, uint8_t b) {
    p.instrs[p.num_instrs++] = {op, DType::kS64, dst, a, b, 0, 0};
  };
  p.imms[p.num_imms++] = 1000003;
  add(ExprOp::kLoad, 0, 0, 0);
  add(ExprOp::kConst, 1, 0, 0);
  for (int i = 0; i < 50; ++i) add(ExprOp::kDiv, 0, 1, 0);
  add(ExprOp::kStore, 0, 0, 0);
  p.stages[0] = {0, 0, 0, p.num_instrs};
  Node node;
  node.op = Op::kExpr;
  node.params = EncodeExpr(p);
  node.srcs = {MakeTensor(rng, c, DType::kS64, {32}, Layout::kDense)};
  FillRandom(rng, c, node.srcs[0], 1, 1000);  // no quotient is 0
  node.outs = {MakeTensor(rng, c, DType::kS64, {32}, Layout::kDense)};
  return node;
}

Step MakeStep(Rng& rng, const AttentionSpec& spec, int64_t rows, int32_t row) {
  Step step{MakeAttention(rng, spec), {}, {}};
  NodeCase& c = step.attention;
  const Node slow = Slow(rng, &c);
  const TensorRef& k = c.node.srcs[1];
  const TensorRef& v = c.node.srcs[2];
  TensorRef index;  // where the position lies, and behind it
  index.dtype = DType::kS32;
  index.rank = 1;
  index.shape[0] = 1;
  index.base = c.node.srcs[3].base;
  std::vector<char>& bytes = c.buffers[index.base];
  bytes.resize((bytes.size() + 3) / 4 * 4);
  index.offset = static_cast<int64_t>(bytes.size());
  bytes.insert(bytes.end(), reinterpret_cast<const char*>(&row),
               reinterpret_cast<const char*>(&row) + sizeof row);
  step.nodes.assign(6, slow);
  step.nodes.push_back(WriteRows(&c, rng, k, 3, rows, index));
  step.nodes.push_back(WriteRows(&c, rng, v, 2, rows, index));
  step.nodes.push_back(c.node);
  step.constants.resize(step.nodes.size());
  step.constants.back() = 1u << 3;
  return step;
}

TEST_F(CudaAttentionTest, RowsThatTheLaunchBeforeWrites) {
  Rng rng(7);
  for (const int64_t width : {64, 128}) {
    for (const int64_t position : {0, 32, 511, 1023}) {
      for (const int64_t row : {position, position / 2, int64_t{5}, int64_t{-3}, int64_t{4000}}) {
        const int64_t rows = UniformInt(rng, 1, 40);
        const DType t = Chance(rng, 0.7) ? DType::kBF16 : DType::kF16;
        AttentionSpec spec = Decode(t, 3, 4, width, 1024, position);
        if (row == 5) {  // a long cache
          spec.s = 5000;
          spec.workspace = 100000;
        }
        if (Chance(rng, 0.5)) spec.keys = spec.values = CacheLayout::kHeadsFirst;
        const Step step = MakeStep(rng, spec, rows, static_cast<int32_t>(row));
        const Buffers got = RunAll(step.nodes, step.constants, step.attention.buffers, true);
        NodeCase after = step.attention;
        after.buffers = RunHost(step.nodes, step.attention.buffers);
        ASSERT_TRUE(SameResult(after, got, after.buffers))
            << "position " << position << ", " << rows << " rows from " << row;
        ASSERT_TRUE(got == RunAll(step.nodes, std::vector<uint32_t>(step.nodes.size()),
                                  step.attention.buffers, false))
            << "reading early changes bits";
      }
    }
  }
}

// What every split of the cache has in common: an odd end, nothing seen, all heads of a piece.
TEST_F(CudaAttentionTest, DecodeShapes) {
  Rng rng(8);
  for (const DType t : {DType::kBF16, DType::kF16}) {
    for (const int64_t width : {64, 128}) {
      for (const int64_t s : {1, 15, 33, 128, 1000, 5000, 20000}) {
        for (const int64_t group : {1, 3, 4, 8, 11}) {
          AttentionSpec spec = Decode(t, s > 1000 ? 1 : UniformInt(rng, 1, 5), group, width, s, 0);
          spec.b0 = s > 1000 ? 1 : UniformInt(rng, 1, 2);
          spec.per_query = Chance(rng, 0.5);
          spec.last_position = UniformInt(rng, 0, s);
          spec.first_position = Chance(rng, 0.5) ? 0 : spec.last_position;
          if (Chance(rng, 0.3)) spec.masked_value = -3e4;
          if (Chance(rng, 0.3)) spec.keys = spec.values = CacheLayout::kHeadsFirst;
          if (Chance(rng, 0.3)) spec.raw = t;
          if (Chance(rng, 0.2)) spec.causal = false;
          spec.soft_cap = Chance(rng, 0.2);
          spec.bias = Chance(rng, 0.2);
          if (Chance(rng, 0.3)) spec.window = UniformInt(rng, 1, s + 2);
          spec.sink = Chance(rng, 0.3);
          spec.sink_dtype = Chance(rng, 0.5) ? t : DType::kF32;
          ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
        }
      }
    }
  }
}

// Long caches, whose blocks meet in a workspace: from one that is too small to those that hold more
// than is used. At a low position most blocks have nothing.
TEST_F(CudaAttentionTest, LongCachesInAWorkspace) {
  Rng rng(10);
  for (const DType t : {DType::kBF16, DType::kF16}) {
    for (const int64_t width : {64, 128}) {
      for (const int64_t heads : {1, 3, 8}) {
        for (const int64_t position : {-1, 700, 5000, 5999}) {
          const int64_t group = Pick(rng, std::vector<int64_t>{1, 3, 4, 11});
          AttentionSpec spec = Decode(t, heads, group, width, 6000, position);
          spec.per_query = Chance(rng, 0.3);
          spec.workspace = Pick(rng, std::vector<int64_t>{100, 20000, 500000});
          if (Chance(rng, 0.3)) spec.keys = spec.values = CacheLayout::kHeadsFirst;
          if (Chance(rng, 0.3)) spec.window = UniformInt(rng, 1, 5000);
          spec.sink = Chance(rng, 0.3);
          spec.bias = Chance(rng, 0.2);
          ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
        }
      }
    }
  }
}

// Infinite values come out as the formula has it: infinite where they are seen, and where weights
// of both signs of infinity meet, NaN. Behind the bound they are not there.
TEST_F(CudaAttentionTest, InfiniteValues) {
  Rng rng(9);
  for (const DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t width : {16, 64, 80, 128, 256}) {
      for (const bool bias : {false, true}) {
        const int64_t s = 300, position = 200;
        AttentionSpec spec = Decode(t, 2, 3, width, s, position);
        spec.bias = bias;  // another form, or the interpreter
        NodeCase c = MakeAttention(rng, spec);
        const TensorRef& v = c.node.srcs[2];
        const auto put = [&](int64_t head, int64_t at, int64_t column, double value) {
          const int64_t index[] = {0, head, at, column};
          Write(c.buffers, v, index, {value, 0});
        };
        put(0, 3, 5, HUGE_VAL);
        put(0, 150, 7, -HUGE_VAL);
        put(1, 200, 0, HUGE_VAL);
        put(1, 20, 1, HUGE_VAL);
        put(1, 30, 1, -HUGE_VAL);
        put(1, 201, 3, HUGE_VAL);  // not seen
        put(1, 299, 4, HUGE_VAL);
        const Buffers got = Run(c, false);
        SCOPED_TRACE("width " + std::to_string(width) + (bias ? ", bias" : ""));
        ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
          const double value = Read(got, c.node.outs[0], i).f;
          if (i[1] == 0 && i[3] == 5) {
            EXPECT_EQ(value, HUGE_VAL);
          } else if (i[1] == 0 && i[3] == 7) {
            EXPECT_EQ(value, -HUGE_VAL);
          } else if (i[1] == 1 && i[3] == 0) {
            EXPECT_EQ(value, HUGE_VAL);
          } else if (i[1] == 1 && i[3] == 1) {
            EXPECT_TRUE(std::isnan(value));
          } else {
            EXPECT_LE(std::fabs(value), 1) << "head " << i[1] << ", column " << i[3];
          }
        });
        ASSERT_TRUE(Run(c, true) == got);
      }
    }
  }
}

}  // namespace
}  // namespace jaxgraph::testing
