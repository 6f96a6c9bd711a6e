// Several threads, several functions and two devices at once, with Clear, Stats and the rest
// meanwhile.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "ffi/device/host/serial_for.h"
#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

constexpr int kThreads = 8;
constexpr int kFunctions = 3;
constexpr int kDevices = 2;
constexpr int kCalls = 1000;

std::vector<std::shared_ptr<const Program>> Functions() {
  std::vector<std::shared_ptr<const Program>> programs;
  for (int f = 0; f < kFunctions; ++f) {
    Program program = StepProgram(static_cast<float>(f + 1));
    program.function_id = 100 + static_cast<uint64_t>(f);
    program.key.fill(static_cast<uint8_t>(f / 2));  // two of them share a key
    program.arena_bytes *= static_cast<uint64_t>(f + 1);
    if (f == 1) program.options.max_executables = 10;  // now and then a variant is pushed out
    if (f == 2) program.options.sweep_ms = program.options.idle_ms = 1;
    programs.push_back(Seal(program));
  }
  return programs;
}

void RunThreads(Machine* devices, const std::function<void()>& meanwhile) {
  const auto programs = Functions();
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      StepBuffers b[kFunctions];
      SerialFor pool;
      for (int i = 0; i < kCalls; ++i) {
        const int f = (i + t) % kFunctions;
        if (i % 5 == 0) b[f].MoveX();
        if (i % 2 == 0) b[f].MoveY();
        if (i % 50 == 49) b[f].MoveAcc();
        Machine& m = devices[(i / 7 + t) % kDevices];
        b[f].Check(m.executor.get(), programs[f], (t + i) % 50, static_cast<float>(f + 1),
                   static_cast<ParallelFor*>(&pool));
      }
      --running;
    });
  }
  while (running > 0) meanwhile();
  for (std::thread& thread : threads) thread.join();
}

TEST(ExecutorThreads, CallsNeverMixState) {
  Machine m[kDevices];
  RunThreads(m, [&] {
    for (Machine& one : m) {
      one.executor->Events(0);
      one.executor->Variants(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  uint64_t executions = 0;
  for (Machine& one : m) {
    for (uint64_t f = 0; f < kFunctions; ++f) {
      const Counters c = one.executor->Stats(100 + f);
      EXPECT_EQ(c.executions, c.eager + c.captures + c.replays);
      EXPECT_GT(c.replays, 0u);
      executions += c.executions;
    }
    EXPECT_LE(one.host.live_handles().arenas, kThreads);
  }
  EXPECT_EQ(executions, static_cast<uint64_t>(kThreads * kCalls));
}

TEST(ExecutorThreads, ClearMeanwhile) {
  Machine m[kDevices];
  int round = 0;
  RunThreads(m, [&] {
    Machine& one = m[round % kDevices];
    one.executor->Clear(100 + static_cast<uint64_t>(round++ % (kFunctions + 1)));
    (void)one.executor->Reserve(static_cast<uint64_t>(round) << 10);
    one.executor->Stats(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  for (Machine& one : m) {
    one.executor->Clear(0);
    EXPECT_EQ(one.executor->Stats(0).live_execs, 0u);
    EXPECT_EQ(one.host.live_handles().execs, 0);
    EXPECT_EQ(one.host.live_handles().graphs, 0);
  }
}

}  // namespace
}  // namespace jaxgraph
