// What bounds the executables: idle time, their number, their memory; and what a variant's end
// leaves behind.
#include <gtest/gtest.h>

#include <map>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

// A machine whose time passes when it is told to.
struct TimedMachine {
  TimedMachine() {
    executor = std::make_unique<Executor>(&device, &emitter, [this] { return now; });
  }
  ~TimedMachine() {
    executor.reset();
    EXPECT_EQ(host.live_handles().execs, 0);
    EXPECT_EQ(host.live_handles().graphs, 0);
    EXPECT_EQ(host.misuses(), 0);
  }
  Counters Stats() const { return executor->Stats(7); }

  double now = 1000;
  HostDevice host;
  FaultInjecting device{&host};
  TestEmitter emitter;
  std::unique_ptr<Executor> executor;
};

Program WithKey(float scale, uint8_t key) {
  Program program = StepProgram(scale);
  program.key.fill(key);
  return program;
}

// So many programs of three chunks; the number of each is its key and its scale.
std::vector<std::shared_ptr<const Program>> Limited(int count, uint32_t max_executables) {
  std::vector<std::shared_ptr<const Program>> programs;
  for (int i = 0; i < count; ++i) {
    Program program = WithKey(static_cast<float>(i), static_cast<uint8_t>(i));
    program.options.max_executables = max_executables;
    programs.push_back(Seal(program));
  }
  return programs;
}

TEST(Limits, IdleVariantsAreDestroyed) {
  TimedMachine m;
  StepBuffers b;
  const auto idle = Seal(WithKey(2, 1));
  const auto busy = Seal(WithKey(3, 2));
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), idle, i, 2);
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), busy, i, 3);
  EXPECT_EQ(m.Stats().live_execs, 6u);

  m.now += 9;
  b.Check(m.executor.get(), busy, 1, 3);
  EXPECT_EQ(m.Stats().live_execs, 6u);
  m.now += 2;  // 11 s, but the last sweep was 2 s ago
  b.Check(m.executor.get(), busy, 1, 3);
  EXPECT_EQ(m.Stats().live_execs, 6u);
  m.now += 4;
  b.Check(m.executor.get(), busy, 1, 3);
  EXPECT_EQ(m.Stats().live_execs, 3u);
  EXPECT_EQ(m.Stats().evictions, 1u);
  EXPECT_TRUE(Logged(*m.executor, "evict", "idle for 15 s"));

  const Counters before = m.Stats();
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), idle, i, 2);
  EXPECT_TRUE(Logged(*m.executor, "eager", "the first call since an eviction (idle for 15 s)"));
  EXPECT_EQ(m.Stats().eager, before.eager + 1);
  EXPECT_EQ(m.Stats().captures, before.captures + 1);
  EXPECT_EQ(m.Stats().replays, before.replays + 1);
}

TEST(Limits, ACallAfterALongWaitStillReplays) {
  TimedMachine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 5; ++i) {
    m.now += 1000;
    b.Check(m.executor.get(), program, i);
  }
  EXPECT_EQ(m.Stats().replays, 3u);
  EXPECT_EQ(m.Stats().evictions, 0u);
}

TEST(Limits, IdleTimeAndSweepAreOptions) {
  for (uint32_t idle_ms : {0u, 100u}) {
    TimedMachine m;
    StepBuffers b;
    Program a = WithKey(2, 1);
    Program other = WithKey(3, 2);
    a.options.idle_ms = other.options.idle_ms = idle_ms;
    a.options.sweep_ms = other.options.sweep_ms = 10;
    for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), Seal(a), i, 2);
    m.now += 0.2;
    b.Check(m.executor.get(), Seal(other), 1, 3);
    EXPECT_EQ(m.Stats().evictions, idle_ms == 0 ? 0u : 1u);
  }
}

// How often one function looks for idle executables is not for another to say.
TEST(Limits, EachProgramSweepsAsOftenAsItsOptionsSay) {
  TimedMachine m;
  StepBuffers b;
  const auto idle = Seal(WithKey(2, 1));
  Program never = WithKey(3, 2);
  never.options.sweep_ms = 1'000'000'000;
  const auto busy = Seal(WithKey(4, 3));
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), idle, i, 2);
  m.now += 6;
  b.Check(m.executor.get(), Seal(never), 1, 3);
  for (int i = 0; i < 3; ++i) {
    m.now += 6;
    b.Check(m.executor.get(), Seal(never), 1, 3);
    b.Check(m.executor.get(), busy, 1, 4);
  }
  EXPECT_EQ(m.Stats().evictions_idle, 1u);
}

TEST(Limits, NumberOfExecutables) {
  Machine m;
  StepBuffers b;
  const auto programs = Limited(4, 7);  // there is room for two
  const auto run = [&](int which, int calls) {
    for (int i = 0; i < calls; ++i) b.Check(m.executor.get(), programs[which], i, which);
  };
  run(0, 3);
  run(1, 3);
  run(0, 1);
  run(2, 3);  // pushes 1 out
  EXPECT_EQ(m.Stats().live_execs, 6u);
  EXPECT_TRUE(Logged(*m.executor, "evict", "more than 7 executables"));
  const uint64_t replays = m.Stats().replays;
  run(0, 1);
  run(2, 1);
  EXPECT_EQ(m.Stats().replays, replays + 2);
  for (int round = 0; round < 5; ++round) {
    for (int which = 0; which < 4; ++which) run(which, 3);
    EXPECT_LE(m.Stats().live_execs, 7u);
  }
}

// Two programs that have no room beside each other would push each other out at every call, and
// capture anew, for ever.
TEST(Limits, ProgramsWithoutRoomBesideEachOtherStopPushingEachOtherOut) {
  TimedMachine m;
  StepBuffers b;
  const auto programs = Limited(2, 4);  // there is room for one
  const auto run = [&](int which, int calls) {
    for (int i = 0; i < calls; ++i) b.Check(m.executor.get(), programs[which], i, which);
    EXPECT_LE(m.Stats().live_execs, 4u);
  };
  const auto rounds = [&](int times) {
    for (int i = 0; i < times; ++i) {
      run(0, 3);
      run(1, 3);
    }
  };
  rounds(10);
  const Counters before = m.Stats();
  rounds(20);
  const Counters after = m.Stats();
  EXPECT_EQ(after.captures, before.captures);
  EXPECT_EQ(after.evictions, before.evictions);
  EXPECT_EQ(after.replays - before.replays, 60u);  // of the one
  EXPECT_EQ(after.eager_crowded - before.eager_crowded, 60u);
  EXPECT_TRUE(Logged(*m.executor, "eager", "no room: its 3 executables were pushed out 3 times"));

  // Each gets its turn all the same, but ever more seldom.
  rounds(2000);
  EXPECT_LT(m.Stats().captures, after.captures + 20);
  EXPECT_GT(m.Stats().captures, after.captures + 2);

  // Where the other one has gone, there is room at once.
  for (int which : {0, 1}) {
    m.now += 20;
    run(which, 1);
    m.now += 20;
    run(which, 1);
    const uint64_t replays = m.Stats().replays;
    run(which, 2);
    EXPECT_EQ(m.Stats().replays, replays + 2) << which;
  }
}

// A recording that is pushed out after it has paid for itself is no sign of crowding.
TEST(Limits, ProgramsThatTakeLongTurnsMayPushEachOtherOut) {
  Machine m;
  StepBuffers b;
  const auto programs = Limited(2, 4);
  for (int round = 0; round < 10; ++round) {
    for (int which : {0, 1}) {
      for (int i = 0; i < 12; ++i) b.Check(m.executor.get(), programs[which], i, which);
    }
  }
  EXPECT_EQ(m.Stats().eager_crowded, 0u);
  EXPECT_EQ(m.Stats().replays, 20u * 10u);
}

TEST(Limits, AProgramOfMoreExecutablesThanAllowedRunsEagerly) {
  Machine m;
  StepBuffers b;
  Program program = StepProgram();
  program.options.max_executables = 2;  // it has three chunks
  const auto sealed = Seal(program);
  for (int i = 0; i < 1000; ++i) {
    b.Check(m.executor.get(), sealed, i % 50);
    ASSERT_LE(m.Stats().live_execs, 2u);
  }
  EXPECT_EQ(m.Stats().captures, 1u);
  EXPECT_EQ(m.Stats().eager_crowded, 998u);
  EXPECT_TRUE(Logged(*m.executor, "evict", "alone it is more than allowed: more than 2"));
  EXPECT_TRUE(Logged(*m.executor, "eager", "its 3 executables alone have no room"));
  m.executor->Clear(7);
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), sealed, i);
  EXPECT_EQ(m.Stats().captures, 1u);  // tried again
}

// Says that every node of an executable takes 500 bytes.
class Accountant final : public GraphDevice {
 public:
  // `neighbour`: bytes that another process takes between any two questions.
  explicit Accountant(HostDevice* host, uint64_t neighbour = 0)
      : host_(host), neighbour_(neighbour) {}
  Status FreeMemory(uint64_t* bytes) override {
    *bytes = (uint64_t{1} << 40) - used_;
    used_ += neighbour_;
    return Status::Ok();
  }
  Status Instantiate(GraphHandle graph, ExecHandle* exec) override {
    used_ += 500 * nodes_of_[graph];
    return host_->Instantiate(graph, exec);
  }
  Status CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) override {
    ++nodes_;
    return host_->CaptureKernel(launch, stream, node);
  }
  Status BeginCapture(Stream stream) override {
    nodes_ = 0;
    return host_->BeginCapture(stream);
  }
  std::string_view name() const override { return host_->name(); }
  int ordinal() const override { return 0; }
  bool streams_are_transient() const override { return true; }
  Status EnterDevice(int* previous) override { return host_->EnterDevice(previous); }
  void LeaveDevice(int previous) override { host_->LeaveDevice(previous); }
  Status LaunchKernel(const Launch& l, Stream s) override { return host_->LaunchKernel(l, s); }
  Status IsCapturing(Stream s, bool* c) override { return host_->IsCapturing(s, c); }
  Status CreateStream(Stream* s) override { return host_->CreateStream(s); }
  void DestroyStream(Stream s) override { host_->DestroyStream(s); }
  Status Fork(Stream from, Stream to) override { return host_->Fork(from, to); }
  Status Join(Stream from, Stream to) override { return host_->Join(from, to); }
  Status EndCapture(Stream s, GraphHandle* g) override {
    const Status status = host_->EndCapture(s, g);
    nodes_of_[*g] = nodes_;
    return status;
  }
  Status Update(ExecHandle e, GraphHandle g) override { return host_->Update(e, g); }
  Status Patch(ExecHandle e, NodeHandle n, const Launch& l) override {
    return host_->Patch(e, n, l);
  }
  Status LaunchGraph(ExecHandle e, Stream s) override { return host_->LaunchGraph(e, s); }
  void DestroyGraph(GraphHandle g) override { host_->DestroyGraph(g); }
  void DestroyExec(ExecHandle e) override { host_->DestroyExec(e); }
  Status ArenaReserve(Stream s, uint64_t bytes, void** base, uint64_t* capacity,
                      bool* moved) override {
    return host_->ArenaReserve(s, bytes, base, capacity, moved);
  }
  void ArenaRelease(Stream s, void* base) override { host_->ArenaRelease(s, base); }
  HandleCounts live_handles() const override { return host_->live_handles(); }

 private:
  HostDevice* host_;
  const uint64_t neighbour_;
  uint64_t used_ = 0;
  uint64_t nodes_ = 0;  // captured of late
  std::map<GraphHandle, uint64_t> nodes_of_;
};

TEST(Limits, MemoryBudgetByWhatANodeCosts) {
  HostDevice host;
  Accountant device(&host);
  TestEmitter emitter;
  {
    Executor executor(&device, &emitter);
    StepBuffers b;
    for (int which = 0; which < 4; ++which) {
      Program program = WithKey(static_cast<float>(which), static_cast<uint8_t>(which));
      // Five launches and a view a program: room for two programs at 500 bytes a node, not three.
      program.options.memory_budget = 14 * 500;
      program.options.chunk_size = 0;
      const auto sealed = Seal(program);
      for (int i = 0; i < 3; ++i) {
        b.Check(&executor, sealed, i, static_cast<float>(which));
        EXPECT_LE(executor.Stats(7).live_execs, 2u);
      }
    }
    EXPECT_EQ(executor.Stats(7).live_execs, 2u);
    EXPECT_EQ(executor.Stats(7).evictions, 2u);
    EXPECT_TRUE(Logged(executor, "evict", "the memory budget of 7000 bytes"));

    Program large = WithKey(9, 9);
    large.options.memory_budget = 5 * 500;
    for (int i = 0; i < 3; ++i) b.Check(&executor, Seal(large), i, 9);
    EXPECT_TRUE(Logged(executor, "eager", "alone exceed the memory budget"));
  }
  EXPECT_EQ(host.live_handles().execs, 0);
  EXPECT_EQ(host.misuses(), 0);
}

// What cannot be asked, or tried, costs no call, and is asked again.
TEST(Limits, ANodesCostIsLearntLaterIfTheDeviceDoesNotAnswer) {
  for (DeviceCall call : {DeviceCall::kFreeMemory, DeviceCall::kInstantiate}) {
    HostDevice host;
    Accountant accountant(&host);
    FaultInjecting device(&accountant);
    TestEmitter emitter;
    {
      Executor executor(&device, &emitter);
      StepBuffers b;
      // Of the first program's capture: its three executables pass, the trial fails.
      device.Fail(call, call == DeviceCall::kInstantiate ? 3 : 0);
      for (int which = 0; which < 2; ++which) {
        Program program = WithKey(static_cast<float>(which), static_cast<uint8_t>(which));
        program.options.memory_budget = 1 << 20;
        for (int i = 0; i < 4; ++i) b.Check(&executor, Seal(program), i, static_cast<float>(which));
        const uint64_t learnt = which == 0 ? 1024u : 500u;
        EXPECT_EQ(executor.Stats(7).exec_bytes, executor.Stats(7).live_exec_nodes * learnt);
      }
      EXPECT_EQ(device.failures(), 1u);
      EXPECT_EQ(executor.Stats(7).replays, 4u);
      EXPECT_EQ(executor.Stats(7).failures, 0u);
    }
    EXPECT_EQ(host.live_handles().execs, 0);
    EXPECT_EQ(host.misuses(), 0);
  }
}

// The first recording may turn out to be too large only when a node's cost is known: then it goes.
TEST(Limits, WhatIsNotReplayedForWantOfMemoryHoldsNone) {
  HostDevice host;
  Accountant device(&host, /*neighbour=*/uint64_t{1} << 39);  // makes nodes look as dear as can be
  TestEmitter emitter;
  Executor executor(&device, &emitter);
  StepBuffers b;
  Program program = StepProgram();
  program.options.memory_budget = 64 * 1024;  // 16 KiB a node: less than four
  for (int i = 0; i < 5; ++i) {
    b.Check(&executor, Seal(program), i);
    EXPECT_EQ(executor.Stats(7).live_execs, 0u);
  }
  EXPECT_EQ(executor.Stats(7).evictions_memory, 1u);
  EXPECT_EQ(executor.Stats(7).eager_memory, 3u);
}

// A chunk of views alone has no executable to learn from.
TEST(Limits, ANodesCostIsLearntThoughTheFirstChunkIsEmpty) {
  HostDevice host;
  Accountant device(&host);
  TestEmitter emitter;
  Executor executor(&device, &emitter);
  StepBuffers b;
  Program program = StepProgram();
  const TensorRef x = Dense(DType::kF32, 1, 0, {kWidth});
  program.nodes.insert(program.nodes.begin(), 2, MakeNode(Op::kView, {x}, {x}));
  program.options.memory_budget = 1 << 20;
  for (int i = 0; i < 3; ++i) b.Check(&executor, Seal(program), i);
  EXPECT_EQ(executor.Stats(7).live_exec_nodes, 5u);
  EXPECT_EQ(executor.Stats(7).exec_bytes, 5u * 500u);
}

// What another process took while a node's cost was measured is not the node's.
TEST(Limits, ANeighbourOnTheDeviceDoesNotEndReplays) {
  HostDevice host;
  Accountant device(&host, uint64_t{64} << 30);
  TestEmitter emitter;
  Executor executor(&device, &emitter);
  StepBuffers b;
  for (int which = 0; which < 2; ++which) {
    Program program = WithKey(static_cast<float>(which), static_cast<uint8_t>(which));
    program.options.memory_budget = uint64_t{64} << 20;
    for (int i = 0; i < 4; ++i) b.Check(&executor, Seal(program), i, static_cast<float>(which));
  }
  EXPECT_EQ(executor.Stats(7).replays, 4u);
  EXPECT_EQ(executor.Stats(7).evictions, 0u);
}

// One context a stream, as on a GPU.
class StreamDevice final : public HostDevice {
 public:
  bool streams_are_transient() const override { return false; }
};

TEST(Limits, WhatWasReservedAheadNeedNotBeHadForACallThatNeedsLess) {
  StreamDevice host;
  FaultInjecting device(&host);
  TestEmitter emitter;
  Stream first = nullptr;
  Stream second = nullptr;
  ASSERT_TRUE(host.CreateStream(&first).ok());
  ASSERT_TRUE(host.CreateStream(&second).ok());
  {
    Executor executor(&device, &emitter);
    StepBuffers b;
    const auto program = Seal(StepProgram());
    ASSERT_TRUE(executor.Reserve(1 << 20).ok());
    b.Check(&executor, program, 0, 0.5f, first);
    device.Fail(DeviceCall::kArenaReserve, 0, 1, Code::kOutOfMemory);
    for (int i = 0; i < 4; ++i) b.Check(&executor, program, i, 0.5f, second);
    EXPECT_EQ(device.failures(), 1u);
    EXPECT_EQ(executor.Stats(7).replays, 2u);
  }
  EXPECT_EQ(host.live_handles().arenas, 0);
  host.DestroyStream(first);
  host.DestroyStream(second);
}

// Before any call came, on a device where each stream has its own arena: the memory is taken, or
// its absence told, there and then.
TEST(Limits, WhatIsReservedBeforeAnyCallIsThere) {
  StreamDevice host;
  FaultInjecting device(&host);
  TestEmitter emitter;
  Stream streams[2] = {};
  for (Stream& stream : streams) ASSERT_TRUE(host.CreateStream(&stream).ok());
  {
    Executor executor(&device, &emitter);
    StepBuffers b;
    const auto program = Seal(StepProgram());
    device.Fail(DeviceCall::kArenaReserve, 0, 1, Code::kOutOfMemory);
    const Status status = executor.Reserve(1 << 20);
    EXPECT_EQ(status.code(), Code::kOutOfMemory);
    EXPECT_NE(status.message().find("from 0 to 1048576 bytes"), std::string::npos);
    ASSERT_TRUE(executor.Reserve(1 << 20).ok());
    EXPECT_EQ(host.live_handles().arenas, 1);
    for (int i = 0; i < 4; ++i) b.Check(&executor, program, i, 0.5f, streams[0]);
    EXPECT_EQ(host.live_handles().arenas, 1);  // the first stream has taken it over
    EXPECT_EQ(device.calls(DeviceCall::kArenaReserve), 2u);
    for (int i = 0; i < 4; ++i) b.Check(&executor, program, i, 0.5f, streams[1]);
    EXPECT_EQ(host.live_handles().arenas, 2);  // and the second has its own
    for (int i = 0; i < 4; ++i) b.Check(&executor, program, i, 0.5f, nullptr);
    EXPECT_EQ(host.live_handles().arenas, 3);
    for (const ArenaExtent& arena : executor.Arenas()) EXPECT_EQ(arena.capacity, 1u << 20);
    EXPECT_EQ(executor.Stats(7).replays, 6u);
  }
  EXPECT_EQ(host.live_handles().arenas, 0);
  for (Stream stream : streams) host.DestroyStream(stream);
}

// A variant that is pushed out and made again has not earned new attempts.
TEST(Limits, FailuresOutliveTheVariant) {
  TimedMachine m;
  StepBuffers b;
  Program failing = StepProgram(2);
  Program other = StepProgram(3);
  failing.options.max_variants = other.options.max_variants = 1;
  m.device.Fail(DeviceCall::kInstantiate, 0, 1000);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), Seal(failing), i, 2);
    b.Check(m.executor.get(), Seal(other), round, 3);
    m.now += 20;
  }
  EXPECT_GE(m.Stats().evictions, 9u);
  EXPECT_EQ(m.device.failures(), 2u);
  m.device.Heal();
  b.Check(m.executor.get(), Seal(failing), 1, 2);
  EXPECT_TRUE(Logged(*m.executor, "eager", "too many failures"));
  m.executor->Clear(7);
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), Seal(failing), i, 2);
  EXPECT_EQ(m.Stats().replays, 1u);
}

// Also where nothing else is under its key, so that the key's entry could go.
TEST(Limits, FailuresOutliveTheKeysLastVariant) {
  TimedMachine m;
  StepBuffers b;
  const auto failing = Seal(WithKey(2, 1));
  const auto other = Seal(WithKey(3, 2));
  m.device.Fail(DeviceCall::kInstantiate, 0, 2);
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), failing, i, 2);
  m.now += 20;
  b.Check(m.executor.get(), other, 1, 3);
  EXPECT_EQ(m.Stats().evictions_idle, 1u);
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), failing, i, 2);
  EXPECT_EQ(m.Stats().captures, 0u);
  EXPECT_EQ(m.Stats().eager_failures, 5u);
}

}  // namespace
}  // namespace jaxgraph
