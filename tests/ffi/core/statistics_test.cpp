// Counters and events: what each call adds to them, and what the rings keep.
#include "ffi/core/statistics.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/core/context.h"
#include "ffi/core/events.h"
#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

TEST(Statistics, EveryCounterIsSummedUnderItsName) {
  Statistics statistics;
  for (size_t i = 0; i < kNumCounters; ++i) {
    statistics.Of(1)->Add(static_cast<Counter>(i), 1 + i);
    statistics.Of(2)->Add(static_cast<Counter>(i), 1000);
  }
  std::set<std::string> names;
  size_t at = 0;
  statistics.Sum(1).ForEach([&](const char* name, uint64_t) { names.insert(name), ++at; });
  EXPECT_EQ(names.size(), at) << "a name occurs twice";
  EXPECT_EQ(at, kNumCounters + 10);

  // In one order: the enumerators', which is the fields'.
  std::vector<uint64_t> own;
  const Counters one = statistics.Sum(1);
#define JAXGRAPH_TAKE(enumerator, name) own.push_back(one.name);
  JAXGRAPH_COUNTERS(JAXGRAPH_TAKE)
#undef JAXGRAPH_TAKE
  for (size_t i = 0; i < kNumCounters; ++i) EXPECT_EQ(own[i], 1 + i);
  EXPECT_EQ(one.executions, one.eager + one.captures + one.replays);
  EXPECT_EQ(one.evictions, one.evictions_variants + one.evictions_idle + one.evictions_count +
                               one.evictions_memory);
  EXPECT_EQ(statistics.Sum(0).captures, one.captures + 1000);

  statistics.Zero(1);
  EXPECT_EQ(statistics.Sum(1).executions, 0u);
  EXPECT_EQ(statistics.Sum(2).captures, 1000u);
}

TEST(Statistics, AReaderSeesThemGrowWithoutTheWritersLock) {
  constexpr uint64_t kReplays = 40000;
  Statistics statistics;
  std::thread writer([&] {
    for (uint64_t i = 0; i < kReplays; ++i) {
      statistics.Of(1)->Add(Counter::kReplays);
      statistics.Of(1)->AddLive(1, 2);
      statistics.Of(1 + i % 3)->RaiseArena(i);
    }
  });
  for (Counters last, now; last.replays < kReplays; last = now) {
    now = statistics.Sum(1);
    EXPECT_GE(now.replays, last.replays);
    EXPECT_GE(now.live_execs, last.live_execs);
    EXPECT_GE(now.arena_bytes, last.arena_bytes);
  }
  writer.join();
  EXPECT_EQ(statistics.Sum(1).live_exec_nodes, 2 * kReplays);
}

// A device that puts the arena elsewhere without need.
class Mover final : public HostDevice {
 public:
  Status ArenaReserve(Stream, uint64_t, void** base, uint64_t* capacity, bool* moved) override {
    *base = memory_ + 256 * (calls_++ % 2);
    *capacity = sizes.at(calls_ - 1);
    *moved = moves;
    return Status::Ok();
  }
  void ArenaRelease(Stream, void*) override {}
  std::vector<uint64_t> sizes = {64, 64, 128, 256};
  bool moves = true;

 private:
  char memory_[1024];
  size_t calls_ = 0;
};

TEST(Statistics, ArenaThatMovesWithoutGrowingIsTold) {
  Mover device;
  Statistics statistics;
  FunctionStats* stats = statistics.Of(1);
  Context context(&device);
  ASSERT_TRUE(context.Reserve(65, stats).ok());  // the first is no move
  EXPECT_EQ(statistics.Sum(1).arena_moves_same_size + statistics.Sum(1).arena_moves_resized, 0u);
  ASSERT_TRUE(context.Reserve(66, stats).ok());
  EXPECT_EQ(statistics.Sum(1).arena_moves_same_size, 1u);
  ASSERT_TRUE(context.Reserve(128 + 256, stats).ok());
  EXPECT_EQ(statistics.Sum(1).arena_moves_resized, 1u);
  device.moves = false;
  ASSERT_TRUE(context.Reserve(1000, stats).ok());
  EXPECT_EQ(statistics.Sum(1).arena_growths, 1u);
  EXPECT_EQ(statistics.Sum(1).arena_moves_same_size, 1u);
}

TEST(Statistics, ReasonsAreCounted) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 4; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  Counters c = m.Stats();
  EXPECT_EQ(c.eager_warmup, 1u);
  EXPECT_EQ(c.warmups_first, 1u);
  EXPECT_EQ(c.warmups, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, 2u);
  EXPECT_GT(c.live_exec_nodes, 0u);
  EXPECT_GT(c.exec_bytes, 0u);
  EXPECT_GT(c.decide_ns, 0u);
  EXPECT_GT(c.eager_ns, 0u);
  EXPECT_GT(c.record_ns, c.capture_ns + c.instantiate_ns);
  EXPECT_GT(c.replay_ns, 0u);

  m.device.Fail(DeviceCall::kLaunchGraph, 0);
  step.Check(m.executor.get(), program, 5);
  c = m.Stats();
  EXPECT_EQ(c.failures_launch, 1u);
  EXPECT_EQ(c.failures, 1u);
  EXPECT_EQ(c.eager_recovered, 1u);
  EXPECT_EQ(c.resets_failure, 1u);

  m.executor->ResetStats(7);
  c = m.Stats();
  EXPECT_EQ(c.executions, 0u);
  EXPECT_TRUE(m.executor->Executions(7).empty());
  EXPECT_TRUE(m.executor->Events(7).empty());
}

TEST(Statistics, LiveNodesReturnToZero) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 3; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  ASSERT_GT(m.Stats().live_exec_nodes, 0u);
  m.executor->Clear(7);
  EXPECT_EQ(m.Stats().live_exec_nodes, 0u);
  EXPECT_EQ(m.Stats().exec_bytes, 0u);
}

TEST(Events, MovedAddressIsToldWithNodeAndValues) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 3; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  const uint64_t last = LastSequence();
  step.MoveBig();
  step.Check(m.executor.get(), program, 9);
  const std::vector<Event> events = m.executor->Events(7, last);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].what, "update");
  EXPECT_GT(events[0].variant, 0u);
  ASSERT_FALSE(events[0].changes.empty());
  const NodeChange& change = events[0].changes[0];
  EXPECT_EQ(change.field, "address");
  EXPECT_TRUE(change.source);
  EXPECT_NE(change.before, change.after);
  EXPECT_EQ(change.label, program->nodes[change.node].label);
}

TEST(Events, RingKeepsTheNewest) {
  EventRing ring(3, [] { return 42.0; });
  Program program;
  program.function_id = 5;
  for (size_t i = 0; i < EventRing::kCapacity + 10; ++i) {
    Event event;
    event.why = std::to_string(i);
    ring.Push(std::move(event), program);
  }
  std::vector<Event> events = ring.Since(5, 0);
  ASSERT_EQ(events.size(), EventRing::kCapacity);
  EXPECT_EQ(events.front().why, "10");
  EXPECT_EQ(events.front().device, 3);
  EXPECT_EQ(events.front().time_s, 42.0);
  for (size_t i = 1; i < events.size(); ++i) {
    EXPECT_EQ(events[i].sequence, events[i - 1].sequence + 1);
  }
  EXPECT_EQ(ring.Since(5, events.back().sequence - 2).size(), 2u);
  EXPECT_TRUE(ring.Since(6, 0).empty());
  ring.Clear(6);
  EXPECT_EQ(ring.Since(0, 0).size(), EventRing::kCapacity);
  ring.Clear(5);
  EXPECT_TRUE(ring.Since(0, 0).empty());
}

TEST(Executions, LogKeepsTheNewestInOrder) {
  ExecutionLog log;
  for (size_t i = 0; i < ExecutionLog::kCapacity + 3; ++i) {
    Execution e;
    e.function_id = 1 + i % 2;
    e.start_s = static_cast<double>(i);
    log.Push(e);
  }
  std::vector<Execution> all;
  log.AppendTo(0, &all);
  ASSERT_EQ(all.size(), ExecutionLog::kCapacity);
  EXPECT_EQ(all.front().start_s, 3.0);
  EXPECT_EQ(all.back().start_s, static_cast<double>(ExecutionLog::kCapacity + 2));
  log.Clear(1);
  std::vector<Execution> rest;
  log.AppendTo(0, &rest);
  EXPECT_EQ(rest.size(), ExecutionLog::kCapacity / 2);
  for (const Execution& e : rest) EXPECT_EQ(e.function_id, 2u);
}

TEST(Executions, OneIsToldForEachCall) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 4; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  const std::vector<Execution> executions = m.executor->Executions(7);
  ASSERT_EQ(executions.size(), 4u);
  EXPECT_EQ(executions[0].outcome, Outcome::kEager);
  EXPECT_EQ(executions[1].outcome, Outcome::kCapture);
  EXPECT_EQ(executions[2].outcome, Outcome::kReplay);
  EXPECT_EQ(executions[3].outcome, Outcome::kReplay);
  uint64_t sum = 0;
  for (const Execution& e : executions) sum += e.decide_ns + e.run_ns;
  const Counters c = m.Stats();
  EXPECT_EQ(sum, c.decide_ns + c.eager_ns + c.record_ns + c.replay_ns);
}

// Also those that ran outside of the ledger, and each with its own reason and variant.
TEST(Executions, EachTellsWhyItRanEagerly) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  const auto other = Seal(StepProgram(2));
  m.device.Fail(DeviceCall::kLaunchGraph, 0, 2);
  for (int i = 0; i < 4; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  step.Check(m.executor.get(), other, 1, 2);
  m.device.Fail(DeviceCall::kIsCapturing, 0);
  step.Check(m.executor.get(), other, 1, 2);
  const std::vector<Execution> executions = m.executor->Executions(7);
  const std::vector<std::pair<Counter, uint64_t>> wanted = {
      {Counter::kEagerWarmup, 1},   {Counter::kEagerRecovered, 1}, {Counter::kEagerRecovered, 1},
      {Counter::kEagerFailures, 1}, {Counter::kEagerWarmup, 2},    {Counter::kEagerOutside, 0},
  };
  ASSERT_EQ(executions.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(executions[i].outcome, Outcome::kEager);
    EXPECT_EQ(NameOf(executions[i].counted), std::string(NameOf(wanted[i].first))) << i;
    EXPECT_EQ(executions[i].variant, wanted[i].second) << i;
  }
}

}  // namespace
}  // namespace jaxgraph
