// Fork-join regions: branches run on streams of their own, eagerly and in graphs, and nothing of
// the values depends on it.
#include "ffi/core/branches.h"

#include <gtest/gtest.h>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

// t = x * 2 + w; then `branches` branches b of two nodes each, u_b = t * (b+1) + x and
// v_b = u_b * 3 + w; then y = v_0 * 1 + v_1, and so on over all. `interleaved`: the branches' nodes
// take turns.
Program ForkJoinProgram(int branches, bool interleaved) {
  Program p;
  p.function = "fork_join";
  p.function_id = 7;
  p.key.fill(2);
  const int slices = 2 + 2 * branches;
  p.arena_bytes = static_cast<uint64_t>(slices * kSlice);
  p.options.fusion = false;
  p.bases = {
      MakeBase(BaseKind::kArena, 0, 0, "arena"), MakeBase(BaseKind::kOperand, 0, kSlice, "x"),
      MakeBase(BaseKind::kOperand, 1, kSlice, "w"), MakeBase(BaseKind::kResult, 0, kSlice, "y")};
  const auto at = [](uint32_t base, int slice = 0) {
    return Dense(DType::kF32, base, slice * kSlice, {kWidth});
  };
  const auto add = [&](Node node, int branch) {
    node.region = branch < 0 ? 0 : 1;
    node.branch = branch < 0 ? 0 : static_cast<uint32_t>(branch);
    p.nodes.push_back(std::move(node));
  };
  const auto u = [&](int b) { return Axpy(at(0, 2 + 2 * b), at(0, 0), b + 1, at(1)); };
  const auto v = [&](int b) { return Axpy(at(0, 3 + 2 * b), at(0, 2 + 2 * b), 3, at(2)); };
  add(Axpy(at(0, 0), at(1), 2, at(2)), -1);
  if (interleaved) {
    for (int b = 0; b < branches; ++b) add(u(b), b);
    for (int b = 0; b < branches; ++b) add(v(b), b);
  } else {
    for (int b = 0; b < branches; ++b) {
      add(u(b), b);
      add(v(b), b);
    }
  }
  TensorRef sum = at(0, 3);
  for (int b = 1; b < branches; ++b) {
    const TensorRef out = b + 1 < branches ? at(0, 1) : at(3);
    add(Axpy(out, sum, 1, at(0, 3 + 2 * b)), -1);
    sum = out;
  }
  return p;
}

struct Buffers {
  Values x{}, w{}, y{};
  std::vector<char*> Operands() {
    return {reinterpret_cast<char*>(x.data()), reinterpret_cast<char*>(w.data())};
  }
  std::vector<char*> Results() { return {reinterpret_cast<char*>(y.data())}; }

  Status Run(Machine* m, const std::shared_ptr<const Program>& program, float seed) {
    for (int i = 0; i < kWidth; ++i) {
      x[i] = seed + static_cast<float>(i);
      w[i] = 7 - static_cast<float>(i);
      y[i] = std::numeric_limits<float>::quiet_NaN();
    }
    return m->executor->Execute(program, Operands(), Results(), nullptr);
  }
  void Check(int branches) {
    for (int i = 0; i < kWidth; ++i) {
      const float t = x[i] * 2 + w[i];
      float sum = 0;
      for (int b = 0; b < branches; ++b) {
        const float v = (t * static_cast<float>(b + 1) + x[i]) * 3 + w[i];
        sum = b == 0 ? v : sum + v;
      }
      ASSERT_EQ(y[i], sum) << i;
    }
  }
};

TEST(Branches, ValuesAndCountersAreTheSameWithAndWithout) {
  for (bool concurrency : {false, true}) {
    for (int branches : {2, 3, 8, 12}) {
      for (bool interleaved : {false, true}) {
        for (uint32_t chunk_size : {0u, 1u, 3u}) {
          Machine m;
          Program program = ForkJoinProgram(branches, interleaved);
          program.options.concurrency = concurrency;
          program.options.chunk_size = chunk_size;
          const auto sealed = Seal(program);
          Buffers b;
          for (uint64_t call = 0; call < 12; ++call) {
            m.host.Shuffle(call);  // an edge that is missing shows
            ASSERT_TRUE(b.Run(&m, sealed, static_cast<float>(call)).ok());
            b.Check(branches);
          }
          const Counters c = m.Stats();
          EXPECT_EQ(c.eager, 1u);
          EXPECT_EQ(c.captures, 1u);
          EXPECT_EQ(c.replays, 10u);
          // Once in the eager run, once in the capture; replays need none.
          const uint64_t forks = concurrency ? 2u * std::min(branches - 1, 7) : 0u;
          EXPECT_EQ(m.device.calls(DeviceCall::kFork), forks);
          EXPECT_EQ(m.device.calls(DeviceCall::kJoin), forks);
        }
      }
    }
  }
}

TEST(Branches, APatchReachesNodesOfEveryBranch) {
  Machine m;
  const auto program = Seal(ForkJoinProgram(3, true));
  Buffers b[2];
  for (int call = 0; call < 12; ++call) {
    Buffers& present = b[call < 3 ? 0 : call % 2];
    ASSERT_TRUE(present.Run(&m, program, static_cast<float>(call)).ok());
    present.Check(3);
  }
  EXPECT_EQ(m.Stats().captures, 2u);  // again for the sake of results that get slots after patches
  EXPECT_GT(m.Stats().patches, 0u);
}

TEST(Branches, NothingIsForkedFromAStreamThatSomebodyElseCaptures) {
  Machine m;
  const auto program = Seal(ForkJoinProgram(3, false));
  Stream stream = nullptr;
  GraphHandle graph = nullptr;
  Buffers b;
  ASSERT_TRUE(m.host.CreateStream(&stream).ok());
  ASSERT_TRUE(m.host.BeginCapture(stream).ok());
  ASSERT_TRUE(m.executor->Execute(program, b.Operands(), b.Results(), stream).ok());
  ASSERT_TRUE(m.host.EndCapture(stream, &graph).ok());
  EXPECT_EQ(m.device.calls(DeviceCall::kFork), 0u);
  m.host.DestroyGraph(graph);
  m.host.DestroyStream(stream);
}

// A fork that fails costs the concurrency. A join that fails in a capture costs the capture; where
// branches really run, nothing else can order what follows, and the call fails.
TEST(Branches, EveryForkAndJoinFailsInTurn) {
  for (DeviceCall call : {DeviceCall::kCreateStream, DeviceCall::kFork, DeviceCall::kJoin}) {
    for (uint64_t skip = 0;; ++skip) {
      SCOPED_TRACE(std::string(NameOf(call)) + " after " + std::to_string(skip));
      Machine m;
      const auto program = Seal(ForkJoinProgram(4, true));
      m.device.Fail(call, skip);
      Buffers b;
      for (int i = 0; i < 8; ++i) {
        const Status status = b.Run(&m, program, static_cast<float>(i));
        if (!status.ok()) {
          EXPECT_EQ(call, DeviceCall::kJoin);
          EXPECT_EQ(i, 0);
          continue;
        }
        b.Check(4);
      }
      if (m.device.failures() == 0) break;
      EXPECT_GT(m.Stats().replays, 3u);
      if (skip >= 3 || call == DeviceCall::kFork) {
        EXPECT_TRUE(Logged(*m.executor, "failure"));
      }
    }
  }
}

}  // namespace
}  // namespace jaxgraph
