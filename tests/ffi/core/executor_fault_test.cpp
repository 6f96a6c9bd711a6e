// Every device call fails in turn, at every place where it occurs: the values stay right, or the
// call reports an error; nothing leaks, and no failure is repeated for ever.
#include <gtest/gtest.h>

#include "tests/ffi/core/allocations.h"
#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

constexpr int kCalls = 12;

// Calls that touch every path: warmup, capture, wandering, a moved cache, a new slot.
void Scenario(Machine* m, const std::shared_ptr<const Program>& program) {
  StepBuffers b;
  for (int i = 0; i < kCalls; ++i) {
    b.MoveX();
    if (i % 3 == 0) b.MoveY();
    if (i == 5 || i == 9) b.MoveAcc();
    if (i == 7) b.MoveW();
    b.Check(m->executor.get(), program, i);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// These are what keeps a call going when the others fail.
bool CanBeSurvived(DeviceCall call) {
  return call != DeviceCall::kEnterDevice && call != DeviceCall::kLaunchKernel &&
         call != DeviceCall::kArenaReserve;
}

class Faults : public testing::TestWithParam<ByAlignment> {};

TEST_P(Faults, EveryCallInTurn) {
  const auto program = Seal(StepProgram());
  for (size_t kind = 0; kind < kNumDeviceCalls; ++kind) {
    const DeviceCall call = static_cast<DeviceCall>(kind);
    if (!CanBeSurvived(call)) continue;
    for (uint64_t times : {1, 2, 1000}) {
      for (uint64_t skip = 0;; ++skip) {
        SCOPED_TRACE(std::string(NameOf(call)) + " fails " + std::to_string(times) +
                     " times after " + std::to_string(skip));
        Machine m(GetParam());
        m.device.Fail(call, skip, times);
        Scenario(&m, program);
        if (HasFatalFailure()) return;
        const Counters c = m.Stats();
        EXPECT_EQ(c.executions, static_cast<uint64_t>(kCalls));
        EXPECT_EQ(c.executions, c.eager + c.captures + c.replays);
        EXPECT_EQ(c.failures, m.device.failures());
        if (call != DeviceCall::kIsCapturing) {
          EXPECT_LE(c.failures, 2u);  // then it stays eager
        }
        if (m.device.failures() == 0) break;  // there are no more such calls
        EXPECT_TRUE(Logged(*m.executor, call == DeviceCall::kIsCapturing ? "eager" : "failure"));
      }
    }
  }
}

std::string DepthOf(const testing::TestParamInfo<ByAlignment>& info) {
  constexpr const char* names[] = {"Patch", "Update", "Instantiate"};
  return names[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Executor, Faults,
                         testing::Values(ByAlignment::kNothing, ByAlignment::kGrid,
                                         ByAlignment::kKernel),
                         DepthOf);

TEST(ExecutorFaults, FailureMidwayGoesOnFromTheFailedChunk) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), program, i);
  // The second chunk changes acc; when the third fails, acc must not be changed again.
  m.device.Fail(DeviceCall::kLaunchGraph, 2);
  const uint64_t kernels = m.device.calls(DeviceCall::kLaunchKernel);
  b.Check(m.executor.get(), program, 3);
  EXPECT_EQ(m.device.calls(DeviceCall::kLaunchKernel) - kernels, 2u);  // nodes 4 and 5
  EXPECT_TRUE(Logged(*m.executor, "failure", "eager from node 4 on"));
  EXPECT_EQ(m.Stats().live_execs, 0u);
  b.Check(m.executor.get(), program, 4);
  EXPECT_EQ(m.Stats().captures, 2u);  // the retry
  b.Check(m.executor.get(), program, 5);
  EXPECT_EQ(m.Stats().replays, 2u);
}

TEST(ExecutorFaults, StaysEagerUntilClear) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  m.device.Fail(DeviceCall::kInstantiate, 0, 1000);
  for (int i = 0; i < 10; ++i) b.Check(m.executor.get(), program, i);
  EXPECT_EQ(m.Stats().failures, 2u);
  EXPECT_EQ(m.Stats().eager, 10u);
  EXPECT_EQ(m.device.calls(DeviceCall::kInstantiate), 2u);
  EXPECT_TRUE(Logged(*m.executor, "eager", "too many failures"));
  m.device.Heal();
  b.Check(m.executor.get(), program, 1);
  EXPECT_EQ(m.Stats().eager, 11u);
  m.executor->Clear(7);
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), program, i);
  EXPECT_EQ(m.Stats().replays, 1u);
}

TEST(ExecutorFaults, WhatCannotBeSurvivedIsReportedAndLeavesNothingStale) {
  const auto program = Seal(StepProgram());
  for (DeviceCall call :
       {DeviceCall::kEnterDevice, DeviceCall::kLaunchKernel, DeviceCall::kArenaReserve}) {
    SCOPED_TRACE(NameOf(call));
    Machine m;
    StepBuffers b;
    m.device.Fail(call, 0, 1, Code::kOutOfMemory);
    const Status status = m.executor->Execute(program, b.Operands(), b.Results(), nullptr);
    EXPECT_EQ(status.code(), Code::kOutOfMemory);
    for (int i = 0; i < 5; ++i) b.Check(m.executor.get(), program, i);
  }
}

TEST(ExecutorFaults, ArenaThatCannotGrowNamesTheSizesAndStillWorks) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), program, i);
  Program large = StepProgram(2);
  large.arena_bytes = 1 << 20;
  m.device.Fail(DeviceCall::kArenaReserve, 0, 1, Code::kOutOfMemory);
  const Status status = m.executor->Execute(Seal(large), b.Operands(), b.Results(), nullptr);
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_NE(status.message().find("from 1280 to 1049600 bytes"), std::string::npos)
      << status.message();
  b.Check(m.executor.get(), program, 3);
  EXPECT_EQ(m.Stats().replays, 2u);
  m.device.Fail(DeviceCall::kArenaReserve, 0, 1, Code::kOutOfMemory);
  EXPECT_EQ(m.executor->Reserve(1 << 24).code(), Code::kOutOfMemory);
  b.Check(m.executor.get(), program, 4);
}

TEST(ExecutorFaults, PoisonedContextIsAnError) {
  for (DeviceCall call : {DeviceCall::kIsCapturing, DeviceCall::kBeginCapture,
                          DeviceCall::kInstantiate, DeviceCall::kLaunchGraph, DeviceCall::kPatch}) {
    SCOPED_TRACE(NameOf(call));
    Machine m;
    StepBuffers b;
    const auto program = Seal(StepProgram());
    m.device.Fail(call, 0, 1000, Code::kContextPoisoned);
    Status status;
    for (int i = 0; i < 4 && status.ok(); ++i) {
      b.MoveAcc();  // it is patched at its nodes
      status = m.executor->Execute(program, b.Operands(), b.Results(), nullptr);
    }
    EXPECT_EQ(status.code(), Code::kContextPoisoned);
  }
}

// A call that fails before anything is launched has changed the variant's addresses all the same;
// the next call, with these addresses, must not take the old recording for its own.
TEST(ExecutorFaults, FailedEmissionLeavesNoStaleRecording) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  const auto fail_once = [&] {
    m.emitter.fail = true;
    EXPECT_FALSE(m.executor->Execute(program, b.Operands(), b.Results(), nullptr).ok());
    m.emitter.fail = false;
  };
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), program, i);
  b.MoveAcc();
  fail_once();
  b.Check(m.executor.get(), program, 3);
  b.MoveX();
  b.MoveY();
  fail_once();
  b.Check(m.executor.get(), program, 4);
  b.MoveW();
  fail_once();
  b.Check(m.executor.get(), program, 5);
}

// Host memory that runs out in the middle of a change is an exception, past all statuses. What was
// half changed must not be taken for what its list of launches says.
TEST(ExecutorFaults, AnExceptionMidwayLeavesNoStaleRecording) {
  class Throwing final : public HostDevice {
   public:
    Status CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) override {
      if (armed) throw std::bad_alloc();
      return HostDevice::CaptureKernel(launch, stream, node);
    }
    bool armed = false;
  };
  Throwing device;
  TestEmitter emitter;
  Executor executor(&device, &emitter);
  StepBuffers b;
  Program program = StepProgram();
  program.options.update_depth = UpdateDepth::kRecapture;
  const auto sealed = Seal(program);
  for (int i = 0; i < 3; ++i) b.Check(&executor, sealed, i);
  b.MoveBig();
  device.armed = true;
  EXPECT_THROW((void)executor.Execute(sealed, b.Operands(), b.Results(), nullptr), std::bad_alloc);
  device.armed = false;
  for (int i = 0; i < 3; ++i) b.Check(&executor, sealed, i);
  EXPECT_EQ(executor.Stats(7).failures, 0u);  // the capture was ended
}

// Where fewer chunks were to come of it, nobody says that nodes are in those that are gone.
TEST(ExecutorFaults, AnExceptionMidwayLeavesNoNodesInChunksThatAreGone) {
  class Throwing final : public HostDevice {
   public:
    Status Instantiate(GraphHandle graph, ExecHandle* exec) override {
      if (armed) throw std::bad_alloc();
      return HostDevice::Instantiate(graph, exec);
    }
    bool armed = false;
  };
  Throwing device;
  TestEmitter emitter(ByAlignment::kFusion);
  Executor executor(&device, &emitter);
  StepBuffers b;
  Program program = StepProgram();
  program.bases[6].nbytes = kBigBytes;  // too large for a slot
  program.options.fusion = true;
  program.options.chunk_size = 1;
  const auto sealed = Seal(program);
  std::vector<char> memory(kBigBytes + 256);
  char* const aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  const auto call = [&](char* y) {
    return executor.Execute(sealed, b.Operands(), {b.Results()[0], y}, nullptr).ok();
  };
  const auto described = [&] {  // chunks, and nodes in them
    std::pair<size_t, size_t> sum;
    const VariantDescription variant = executor.Variants(7).at(0);
    for (const ChunkDescription& chunk : variant.chunks) {
      ++sum.first;
      sum.second += chunk.node_count;
    }
    return sum;
  };
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(call(aligned + sizeof(float)));
  const auto [chunks, nodes] = described();
  EXPECT_EQ(nodes, program.nodes.size());
  device.armed = true;
  EXPECT_THROW((void)call(aligned), std::bad_alloc);  // the last two nodes are fused now
  device.armed = false;
  EXPECT_EQ(described(), std::make_pair(chunks - 1, size_t{0}));
  EXPECT_TRUE(call(aligned));
  EXPECT_EQ(described(), std::make_pair(chunks - 1, nodes));
}

// The same while a variant takes new addresses over: some bases are of the new call by then, some
// of the last one. A call with the last one's addresses must not find the variant as it left it.
TEST(ExecutorFaults, AnExceptionWhileAddressesAreTakenOverLeavesNothingStale) {
  Program reading = StepProgram();
  AddReaders(&reading, 2, 8);  // for w to get a slot
  const auto program = Seal(reading);
  constexpr int kFlips = 12;
  int thrown = 0;
  for (int flip = 0; flip < kFlips; ++flip) {
    for (int look = 1; look <= 8; ++look) {  // at the clock: each event is an occasion
      SCOPED_TRACE("flip " + std::to_string(flip) + ", look " + std::to_string(look));
      HostDevice device;
      TestEmitter emitter;
      int left = 0;
      Executor executor(&device, &emitter, [&] {
        if (left > 0 && --left == 0) throw std::bad_alloc();
        return 1.0;
      });
      StepBuffers b;
      // `acc` is patched at each of its nodes, and before it gets there, `y` has its event.
      const auto flip_all = [&] {
        b.FlipX();
        b.FlipW();
        b.FlipAcc();
        b.FlipY();
      };
      for (int i = 0; i < 3; ++i) b.Check(&executor, program, i);
      for (int i = 0; i < kFlips; ++i) {
        flip_all();
        if (i == flip) {
          left = look;
          try {
            b.Check(&executor, program, i);
          } catch (const std::bad_alloc&) {
            ++thrown;
          }
          left = 0;
          flip_all();
        }
        b.Check(&executor, program, i);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(thrown, 2 * kFlips);
}

// And while bases that came to rest leave their slots, which nobody would fill any more: at every
// allocation of that call.
TEST(ExecutorFaults, NoAllocationThatFailsWhileBasesLeaveTheirSlotsLeavesThemStale) {
  const auto program = Seal(StepProgram());
  constexpr int kFlips = 6, kMost = 600;
  int settles = 0;  // number of the call in which they do
  bool threw = true;
  for (uint64_t allocation = 0; threw; ++allocation) {  // 0: none fails, to find that call
    SCOPED_TRACE("allocation " + std::to_string(allocation));
    Machine m;
    StepBuffers b;
    threw = allocation == 0;
    const auto rested = [&] { return Logged(*m.executor, "placement", "came to rest"); };
    for (int i = 0; allocation == 0 ? !rested() : i < settles + 3; ++i) {
      ASSERT_LT(i, kMost);
      if (i < kFlips) {
        b.FlipX();
        b.FlipY();
      }
      if (allocation > 0 && i == settles) {
        failing_allocation = allocation;
        try {
          b.Check(m.executor.get(), program, i);
        } catch (const std::bad_alloc&) {
          threw = true;
        }
        failing_allocation = 0;
      } else {
        b.Check(m.executor.get(), program, i);
      }
      if (HasFatalFailure()) return;
      if (allocation == 0) settles = i;
    }
    if (!threw) {
      EXPECT_TRUE(rested());
    }
  }
}

}  // namespace
}  // namespace jaxgraph
