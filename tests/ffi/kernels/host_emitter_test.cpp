// What the random nodes of host_conformance_test do not reach: what the emitter promises, work
// large enough for several threads, special values in rows, and indices of extreme value.
#include "ffi/kernels/host/host_emitter.h"

#include "tests/ffi/kernels/random_nodes.h"
#include "tests/ffi/kernels/reference.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

std::vector<Launch> EmitOne(const NodeCase& c, Buffers* buffers) {
  std::vector<Launch> launches;
  size_t covered = 0;
  const Status status =
      HostEmitter().Emit({Resolve(c.node, Addresses(*buffers))}, 0, true, &launches, &covered);
  EXPECT_TRUE(status.ok()) << status.message();
  return launches;
}

TEST(HostEmitter, ViewsLaunchNothing) {
  Rng rng(1);
  NodeCase c = RandomCopy(rng);
  c.node.op = Op::kView;
  EXPECT_TRUE(EmitOne(c, &c.buffers).empty());
}

TEST(HostEmitter, LaunchesNameTheirNode) {
  Rng rng(2);
  NodeCase c = RandomCopy(rng);
  c.node.region = 3;
  c.node.branch = 2;
  const std::vector<ResolvedNode> nodes(4, Resolve(c.node, Addresses(c.buffers)));
  std::vector<Launch> launches;
  size_t covered = 0;
  ASSERT_TRUE(HostEmitter().Emit(nodes, 2, true, &launches, &covered).ok());
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_EQ(covered, 1u);
  EXPECT_EQ(launches[0].first_node, 2u);
  EXPECT_EQ(launches[0].node_count, 1u);
  EXPECT_EQ(launches[0].region, 3u);
  EXPECT_EQ(launches[0].branch, 2u);
}

TEST(HostEmitter, EqualNodesGiveEqualBytes) {
  for (int seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    NodeCase c = RandomNode(rng, static_cast<Op>(1 + seed % 6));
    const auto first = EmitOne(c, &c.buffers), second = EmitOne(c, &c.buffers);
    ASSERT_EQ(first.size(), second.size());
    for (size_t i = 0; i < first.size(); ++i) {
      ASSERT_TRUE(first[i].SameConfig(second[i]));
      ASSERT_EQ(first[i].params, second[i].params);
      ASSERT_EQ(first[i].params.size(), first[i].kernel->param_bytes);
    }
  }
}

TEST(HostEmitter, MalformedNodesAreRefused) {
  Rng rng(3);
  NodeCase c = RandomExpr(rng);
  c.node.params.resize(c.node.params.size() / 2);
  std::vector<Launch> launches;
  size_t covered = 0;
  const Status status =
      HostEmitter().Emit({Resolve(c.node, Addresses(c.buffers))}, 0, true, &launches, &covered);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_TRUE(launches.empty());
}

TEST(HostEmitter, OnlyFlaggedNodesCannotBeCaptured) {
  Node node;
  EXPECT_TRUE(HostEmitter().Capturable(node));
  node.flags = kFlagNotCapturable;
  EXPECT_FALSE(HostEmitter().Capturable(node));
}

TEST(HostEmitter, SlotsAreFilledAndDrained) {
  std::string from(1600, 0), to(1600, '-');
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7);
  std::string slots = to, want = to;
  char* table[kMaxSlots + 1] = {};
  SlotFill fill;
  SlotDrain drain;
  fill.table = reinterpret_cast<char*>(table);
  drain.table = fill.table;
  fill.num_copies = fill.num_addresses = drain.num_sources = kMaxSlots;
  for (size_t i = 0; i < kMaxSlots; ++i) {
    const uint64_t bytes = 6 * i;
    fill.copies[i] = {&slots[i * 100], &from[(15 - i) * 100], bytes};
    fill.addresses[i] = &to[(i + 3) % kMaxSlots * 100];
    drain.sources[i] = {&slots[i * 100], bytes};
    want.replace((i + 3) % kMaxSlots * 100, bytes, from, (15 - i) * 100, bytes);
  }
  Threads pool(1);
  const auto run = [&](const Launch& launch) {
    EXPECT_EQ(launch.node_count, 0u);
    RunLaunch(launch, pool);
  };
  Launch filling, draining;
  ASSERT_TRUE(HostEmitter().EmitSlotFill(fill, &filling).ok());
  ASSERT_TRUE(HostEmitter().EmitSlotDrain(drain, &draining).ok());
  run(filling);
  EXPECT_EQ(table[kMaxSlots], nullptr);
  run(draining);
  EXPECT_EQ(to, want);

  Launch nothing;  // a drain that stays although results have come to rest
  ASSERT_TRUE(HostEmitter().EmitSlotDrain({0, drain.table, {}}, &nothing).ok());
  to.assign(to.size(), '-');
  run(nothing);
  EXPECT_EQ(to, std::string(to.size(), '-'));
}

// Products as decode steps and prompts have them: large enough to be cut over threads.
TEST(HostMatmul, LargeProductsOnSeveralThreads) {
  for (DType t : FloatTypes()) {
    for (int64_t m : {1, 3, 8, 20, 70}) {
      for (bool transposed : {false, true}) {
        Rng rng(m);
        NodeCase c = MakeMatmul(rng, t, t, t, 1, 1, m, 331, 576, Layout::kDense);
        if (transposed) TransposeWeights(&c);
        const Buffers one = RunHost(c, 1);
        ASSERT_TRUE(SameResult(c, one, RunReference(c)));
        ASSERT_EQ(one, RunHost(c, 2));
        ASSERT_EQ(one, RunHost(c, 5));
      }
    }
  }
}

TEST(HostMatmul, WideWeightsOnSeveralThreads) {
  for (bool transposed : {false, true}) {
    Rng rng(5);
    NodeCase c =
        MakeMatmul(rng, DType::kF32, DType::kBF16, DType::kF32, 1, 1, 2, 5003, 96, Layout::kDense);
    if (transposed) TransposeWeights(&c);
    const Buffers one = RunHost(c, 1);
    ASSERT_TRUE(SameResult(c, one, RunReference(c)));
    ASSERT_EQ(one, RunHost(c, 4));
  }
}

TEST(HostMatmul, MoreRowsThanOneBlock) {
  Rng rng(6);
  const NodeCase c =
      MakeMatmul(rng, DType::kBF16, DType::kF32, DType::kF32, 1, 1, 530, 40, 300, Layout::kStrided);
  ASSERT_TRUE(SameResult(c, RunHost(c, 2), RunReference(c)));
}

TEST(HostMatmul, NothingToSumGivesZeros) {
  for (DType t : FloatTypes()) {
    Rng rng(7);
    const NodeCase c = MakeMatmul(rng, t, t, t, 1, 2, 3, 5, 0, Layout::kStrided);
    ASSERT_TRUE(SameResult(c, RunHost(c), RunReference(c)));
  }
}

TEST(HostMatmul, IntegersAreRefused) {
  Rng rng(8);
  NodeCase c =
      MakeMatmul(rng, DType::kF32, DType::kF32, DType::kF32, 1, 1, 1, 4, 4, Layout::kDense);
  c.node.srcs[1].dtype = DType::kS32;
  std::vector<Launch> launches;
  size_t covered = 0;
  EXPECT_EQ(HostEmitter()
                .Emit({Resolve(c.node, Addresses(c.buffers))}, 0, true, &launches, &covered)
                .code(),
            Code::kUnsupported);
}

// A row program that stores one reduction of its only source.
NodeCase Reduction(ExprOp op, DType t, DType result, int64_t rows, int64_t length) {
  Rng rng(9);
  NodeCase c;
  c.node.op = Op::kRow;
  c.node.srcs = {MakeTensor(rng, &c, t, {rows, length}, Layout::kDense)};
  c.node.outs = {MakeTensor(rng, &c, result, {rows, 1}, Layout::kDense)};
  ExprProgram p;
  p.rank = 2;
  p.shape[0] = rows;
  p.shape[1] = length;
  p.num_stages = 2;
  p.num_srcs = p.num_outs = 1;
  p.instrs[0] = {ExprOp::kLoad, t, 0, 0, 0, 0, 0};
  p.instrs[1] = {op, t, 40, 0, 0, 0, static_cast<uint16_t>(result)};
  p.instrs[2] = {ExprOp::kStore, result, 0, 40, 0, 0, 0};
  p.num_instrs = 3;
  p.stages[0] = {0, 0, 0, 2};
  p.stages[1] = {2, 3, 3, 3};
  c.node.params = EncodeExpr(p);
  c.tolerance = {0};
  return c;
}

TEST(HostRow, EmptyRowsReduceToTheIdentity) {
  const std::vector<ExprOp> ops = {ExprOp::kReduceSum, ExprOp::kReduceProd, ExprOp::kReduceMax,
                                   ExprOp::kReduceMin};
  for (ExprOp op : ops) {
    for (int t = 1; t < kNumDTypes; ++t) {
      const NodeCase c = Reduction(op, static_cast<DType>(t), static_cast<DType>(t), 3, 0);
      ASSERT_TRUE(SameResult(c, RunHost(c), RunReference(c)))
          << static_cast<int>(op) << " " << NameOf(static_cast<DType>(t));
    }
  }
}

TEST(HostRow, ArgmaxTakesTheFirst) {
  // Over several strips: equal maxima, zeros of both signs, then NaN.
  NodeCase c = Reduction(ExprOp::kReduceArgmax, DType::kF32, DType::kS32, 1, 2000);
  auto argmax = [&](std::vector<std::pair<int64_t, double>> values, double others) {
    FillRandom(*std::make_unique<Rng>(1), &c, c.node.srcs[0], others, others);
    for (const auto& [at, v] : values) {
      const int64_t index[] = {0, at};
      Write(c.buffers, c.node.srcs[0], index, {v, 0});
    }
    const Buffers got = RunHost(c);
    EXPECT_TRUE(SameResult(c, got, RunReference(c)));
    const int64_t zero[] = {0, 0};
    return Read(got, c.node.outs[0], zero).i;
  };
  EXPECT_EQ(argmax({{700, 3}, {701, 3}, {1900, 3}}, 1), 700);
  EXPECT_EQ(argmax({{3, 0.0}}, -0.0), 0);
  EXPECT_EQ(argmax({{600, NAN}, {1200, NAN}, {5, 9}}, 1), 600);
  EXPECT_EQ(argmax({}, -HUGE_VAL), 0);
}

TEST(HostRow, LongSumsStayAccurate) {
  const NodeCase c = [] {
    NodeCase made = Reduction(ExprOp::kReduceSum, DType::kF32, DType::kF32, 1, 1000000);
    Rng rng(10);
    FillRandom(rng, &made, made.node.srcs[0], 0.1, 0.1);
    return made;
  }();
  const int64_t zero[] = {0, 0};
  const double want = 1000000 * static_cast<double>(0.1f);
  EXPECT_FLOAT_EQ(Read(RunHost(c), c.node.outs[0], zero).f, want);
}

// Indices as extreme as their types allow reach no memory but the operand's.
TEST(HostGather, ExtremeIndices) {
  for (IndexMode mode : {IndexMode::kClip, IndexMode::kFillOrDrop, IndexMode::kPromiseInBounds}) {
    for (DType t : {DType::kS8, DType::kS32, DType::kS64, DType::kU32, DType::kU64}) {
      Rng rng(11);
      NodeCase c;
      c.node.op = Op::kGather;
      c.node.srcs = {MakeTensor(rng, &c, DType::kF32, {5, 3}, Layout::kDense),
                     MakeTensor(rng, &c, t, {4}, Layout::kDense)};
      c.node.outs = {MakeTensor(rng, &c, DType::kF32, {4, 2, 3}, Layout::kDense)};
      FillRandom(rng, &c, c.node.srcs[0], 1, 2);
      const int64_t values[] = {IntMin(t), IntMax(t), -1, 4};  // -1: the greatest u64
      for (int64_t i = 0; i < 4; ++i) Write(c.buffers, c.node.srcs[1], &i, {0, values[i]});
      IndexParams p;
      p.mode = mode;
      p.num_components = 1;
      const float fill = -5;
      std::memcpy(&p.fill, &fill, sizeof fill);
      c.node.params.assign(reinterpret_cast<const char*>(&p), sizeof p);
      c.tolerance = {0};
      const Buffers got = RunHost(c);
      for (int64_t i = 0; i < 4; ++i) {
        const bool low = t == DType::kU64 ? false : Read(c.buffers, c.node.srcs[1], &i).i < 0;
        const bool inside = i == 0 && values[0] == 0;
        const int64_t at[] = {i, 0, 0}, from[] = {low || inside ? 0 : 3, 0};
        const double want = mode == IndexMode::kFillOrDrop && !inside
                                ? fill
                                : Read(c.buffers, c.node.srcs[0], from).f;
        EXPECT_EQ(Read(got, c.node.outs[0], at).f, want) << NameOf(t) << " " << i;
      }
    }
  }
}

TEST(HostSetRows, TheLastOfOverlappingSlicesWins) {
  Rng rng(12);
  NodeCase c;
  c.node.op = Op::kSetRows;
  const TensorRef dest = MakeTensor(rng, &c, DType::kF32, {8}, Layout::kDense);
  c.node.srcs = {dest, MakeTensor(rng, &c, DType::kF32, {3, 4}, Layout::kDense),
                 MakeTensor(rng, &c, DType::kS32, {3}, Layout::kDense)};
  c.node.outs = {dest};
  FillRandom(rng, &c, dest, 0, 0);
  ForEachIndex(c.node.srcs[1], [&](const int64_t* at) {
    Write(c.buffers, c.node.srcs[1], at, {static_cast<double>(10 * (at[0] + 1) + at[1]), 0});
  });
  const int64_t starts[] = {2, 4, 1};
  for (int64_t i = 0; i < 3; ++i) Write(c.buffers, c.node.srcs[2], &i, {0, starts[i]});
  IndexParams p;
  p.num_components = 1;
  c.node.params.assign(reinterpret_cast<const char*>(&p), sizeof p);
  const Buffers got = RunHost(c, 3);
  const double want[] = {0, 30, 31, 32, 33, 21, 22, 23};
  for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(Read(got, dest, &i).f, want[i]) << i;
}

}  // namespace
}  // namespace jaxgraph::testing
