// The executor's state machine: what is eager, captured, updated and replayed, and that the values
// are right all the while.
#include "ffi/core/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

size_t Launches(const VariantDescription& variant) {
  size_t launches = 0;
  for (const ChunkDescription& chunk : variant.chunks) launches += chunk.launches;
  return launches;
}

long BasesIn(Place place, const VariantDescription& variant) {
  return std::count_if(variant.bases.begin(), variant.bases.end(),
                       [&](const BaseDescription& base) { return base.place == place; });
}

TEST(Executor, SteadyProgramIsOneEagerOneCaptureAndReplays) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  constexpr int kCalls = 20;
  for (int i = 0; i < kCalls; ++i) b.Check(m.executor.get(), program, i);
  const Counters c = m.Stats();
  EXPECT_EQ(c.executions, kCalls);
  EXPECT_EQ(c.eager, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, kCalls - 2u);
  EXPECT_EQ(c.patches, 0u);
  EXPECT_EQ(c.exec_updates, 0u);
  EXPECT_EQ(c.instantiations, 3u);  // six nodes in chunks of two
  EXPECT_EQ(c.live_execs, 3u);
  EXPECT_EQ(c.chunk_launches, 3u * (kCalls - 1));
  EXPECT_EQ(c.uid_hits, kCalls - 1u);
  EXPECT_EQ(c.nodes_compared, 0u);
  EXPECT_GT(c.arena_bytes, 0u);
}

// They are copied into slots beside the executables and out of them by the last, so that these
// never change.
TEST(Executor, WanderingBuffersCostNoPatches) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  constexpr int kCalls = 20;
  for (int i = 0; i < kCalls; ++i) {
    b.MoveX();
    b.MoveY();
    b.Check(m.executor.get(), program, i);
  }
  const Counters c = m.Stats();
  EXPECT_EQ(c.eager, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, kCalls - 2u);
  EXPECT_EQ(c.exec_updates, 0u);
  EXPECT_EQ(c.instantiations, 3u);
  EXPECT_EQ(c.patches, 0u);
  // The five nodes of the eager call, and in each call one launch that fills slots; but the first
  // call does not know yet that they wander.
  EXPECT_EQ(m.device.calls(DeviceCall::kLaunchKernel), 5u + kCalls - 1);
  EXPECT_EQ(c.live_exec_nodes, 5u + 1);
  EXPECT_EQ(c.nodes_compared, 0u);
}

TEST(Executor, WarmupCallsAreCounted) {
  for (uint32_t warmup : {0u, 1u, 2u, 5u}) {
    Machine m;
    StepBuffers b;
    Program program = StepProgram();
    program.options.warmup_calls = warmup;
    const auto sealed = Seal(program);
    for (int i = 0; i < 8; ++i) b.Check(m.executor.get(), sealed, i);
    EXPECT_EQ(m.Stats().eager, std::max(warmup, 1u) - 1) << warmup;
    EXPECT_EQ(m.Stats().captures, 1u);
  }
}

TEST(Executor, AnotherCopyOfTheProgramIsTheSameProgram) {
  Machine m;
  StepBuffers b;
  for (int i = 0; i < 5; ++i) b.Check(m.executor.get(), Seal(StepProgram()), i);
  EXPECT_EQ(m.Stats().replays, 3u);
}

TEST(Executor, DonatedBufferThatMovesOnceIsUpdatedOnce) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 5; ++i) b.Check(m.executor.get(), program, i);
  b.MoveAcc();
  for (int i = 0; i < 5; ++i) b.Check(m.executor.get(), program, i);
  const Counters c = m.Stats();
  EXPECT_EQ(c.eager, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, 8u);
  EXPECT_EQ(c.patches, 2u);  // the writer of acc and its reader
  EXPECT_EQ(c.property_compares, 1u);
  EXPECT_EQ(c.nodes_compared, 6u);
  EXPECT_EQ(c.resets, 0u);
  EXPECT_TRUE(Logged(*m.executor, "update", "address"));
}

TEST(Executor, AddressChangesWarmUpAgainIfAskedTo) {
  Machine m;
  StepBuffers b;
  Program program = StepProgram();
  program.options.rewarm_on_address_change = true;
  const auto sealed = Seal(program);
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), sealed, i);
  b.MoveAcc();
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), sealed, i);
  const Counters c = m.Stats();
  EXPECT_EQ(c.eager, 2u);
  EXPECT_EQ(c.captures, 2u);
  EXPECT_EQ(c.replays, 4u);
  EXPECT_EQ(c.resets, 1u);
  EXPECT_TRUE(Logged(*m.executor, "reset", "acc") || Logged(*m.executor, "reset", "address"));
}

TEST(Executor, SmallOperandThatMovesIsFollowedFromThenOn) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), program, i);
  EXPECT_FALSE(Logged(*m.executor, "placement"));
  b.MoveW();
  b.Check(m.executor.get(), program, 4);
  EXPECT_TRUE(Logged(*m.executor, "placement", "w: patched"));
  const Counters before = m.Stats();
  EXPECT_EQ(before.property_compares, 1u);
  for (int i = 0; i < 6; ++i) {
    b.MoveW();
    b.Check(m.executor.get(), program, i);
  }
  const Counters after = m.Stats();
  EXPECT_EQ(after.property_compares, before.property_compares);
  EXPECT_TRUE(Logged(*m.executor, "placement", "w: slot"));
  EXPECT_EQ(after.patches - before.patches, 3u);  // the last time when it gets the slot
  EXPECT_EQ(after.eager, 1u);
}

constexpr int kManyReaders = 12;

TEST(Executor, PositionThatWandersGoesThroughASlot) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram(0.5f, kManyReaders));
  for (int i = 0; i < 20; ++i) {
    b.MoveX();
    b.Check(m.executor.get(), program, i);
  }
  const Counters c = m.Stats();
  EXPECT_TRUE(Logged(*m.executor, "placement", "x: slot"));
  EXPECT_EQ(c.eager, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, 18u);
  EXPECT_EQ(c.patches, 0u);
  EXPECT_EQ(c.nodes_compared, 0u);
  EXPECT_EQ(m.device.calls(DeviceCall::kLaunchKernel), 17u + 19);  // the eager call, and copies
}

// The same for a result that many nodes touch.
TEST(Executor, ResultThatWandersGoesThroughASlot) {
  Machine m;
  StepBuffers b;
  Program program = StepProgram();
  AddReaders(&program, 6, kManyReaders);  // of y
  program.options.warmup_calls = 3;
  const auto sealed = Seal(program);
  for (int i = 0; i < 20; ++i) {
    b.MoveY();
    b.Check(m.executor.get(), sealed, i);
  }
  const Counters c = m.Stats();
  EXPECT_TRUE(Logged(*m.executor, "placement", "result[1]: slot"));
  EXPECT_EQ(c.eager, 2u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, 17u);
  EXPECT_EQ(c.patches, 0u);
  // The second eager call drains by a launch of its own, each fills by one.
  EXPECT_EQ(m.device.calls(DeviceCall::kLaunchKernel), 2u * (5 + kManyReaders) + 1 + 19);
}

// As inside a scan: nothing is copied, nothing patched.
TEST(Executor, PositionThatStaysPutCostsNothing) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram(0.5f, kManyReaders));
  for (int i = 0; i < 20; ++i) b.Check(m.executor.get(), program, i);
  EXPECT_EQ(m.Stats().patches, 0u);
  EXPECT_FALSE(Logged(*m.executor, "placement"));
  const std::vector<VariantDescription> variants = m.executor->Variants(7);
  ASSERT_EQ(variants.size(), 1u);
  EXPECT_EQ(Launches(variants[0]), 17u);
  EXPECT_EQ(BasesIn(Place::kSlot, variants[0]), 0);
}

// If the allocator gave the same buffer twice at first, so that the position looked steady until
// the capture, nothing is captured or instantiated anew for its sake.
TEST(Executor, PositionThatWandersOnlyAfterTheCaptureGetsItsSlotLater) {
  for (uint32_t chunk_size : {0u, 1u, 2u, 5u}) {
    Machine m;
    StepBuffers b;
    Program program = StepProgram(0.5f, kManyReaders);
    program.options.chunk_size = chunk_size;
    const auto sealed = Seal(program);
    for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), sealed, i);
    const Counters captured = m.Stats();
    for (int i = 0; i < 20; ++i) {
      b.MoveX();
      if (i > 10) b.MoveAcc();
      b.Check(m.executor.get(), sealed, i);
    }
    const Counters c = m.Stats();
    EXPECT_TRUE(Logged(*m.executor, "placement", "beside the graph"));
    EXPECT_EQ(c.eager, 1u);
    EXPECT_EQ(c.captures, 1u);
    EXPECT_EQ(c.instantiations, captured.instantiations);
    EXPECT_EQ(c.exec_updates, 0u);
    EXPECT_EQ(c.replays, 22u);
    // Three moves, then the slot, then acc's two nodes alone.
    EXPECT_EQ(c.patches, 4u * (2 + kManyReaders) + 9 * 2);
  }
}

// The launch that drains slots is missing from what was captured before there was one: the chunk
// that gets it is captured and instantiated anew, once. Then it stays, also where it has nothing to
// do: results that come to rest and wander again cost patches alone.
TEST(Executor, ResultThatWandersOnlyAfterTheCaptureChangesTheLastChunkOnce) {
  for (uint32_t chunk_size : {0u, 1u, 2u, 5u}) {
    Machine m;
    StepBuffers b;
    Program program = StepProgram();
    AddReaders(&program, 6, kManyReaders);  // of y
    program.options.chunk_size = chunk_size;
    const auto sealed = Seal(program);
    for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), sealed, i);
    const Counters captured = m.Stats();
    const auto is_in_slot = [&] { return BasesIn(Place::kSlot, m.executor->Variants(7).at(0)); };
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 20; ++i) {
        b.MoveY();
        b.Check(m.executor.get(), sealed, i);
      }
      EXPECT_EQ(is_in_slot(), 1);
      for (int i = 0; i < 300; ++i) b.Check(m.executor.get(), sealed, i % 50);
      EXPECT_EQ(is_in_slot(), 0);
      if (HasFatalFailure()) return;
      const Counters c = m.Stats();
      EXPECT_EQ(c.instantiations, captured.instantiations + 1);
      EXPECT_EQ(c.captures, captured.captures + 1);
      EXPECT_EQ(c.eager, 1u);
      EXPECT_EQ(c.live_exec_nodes, captured.live_exec_nodes + 1);
    }
  }
}

// More bases than one launch takes, all in slots: y_i = x_i * i + x_i.
TEST(Executor, AnyNumberOfBasesGoesThroughSlots) {
  for (uint32_t count : {1u, 15u, 16u, 17u, 40u}) {
    Program program;
    program.function_id = 7;
    program.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena")};
    for (BaseKind kind : {BaseKind::kOperand, BaseKind::kResult}) {
      for (uint32_t i = 0; i < count; ++i) {
        program.bases.push_back(MakeBase(kind, i, kSlice, "base"));
        program.bases.back().hint = BaseHint::kWanders;
      }
    }
    for (uint32_t i = 0; i < count; ++i) {
      const TensorRef x = Dense(DType::kF32, 1 + i, 0, {kWidth});
      const TensorRef y = Dense(DType::kF32, 1 + count + i, 0, {kWidth});
      program.nodes.push_back(Axpy(y, x, static_cast<float>(i), x));
    }
    program.options.fusion = false;
    const auto sealed = Seal(program);
    Machine m;
    constexpr int kCalls = 12;
    std::vector<Values> xs[kCalls], ys[kCalls];  // kept, so that all of them lie elsewhere
    for (int call = 0; call < kCalls; ++call) {
      std::vector<Values>&x = xs[call], &y = ys[call];
      x.resize(count);
      y.resize(count);
      std::vector<char*> operands, results;
      for (uint32_t i = 0; i < count; ++i) {
        x[i].fill(static_cast<float>(100 * call + i));
        operands.push_back(reinterpret_cast<char*>(&x[i]));
        results.push_back(reinterpret_cast<char*>(&y[count - 1 - i]));
      }
      ASSERT_TRUE(m.executor->Execute(sealed, operands, results, nullptr).ok());
      for (uint32_t i = 0; i < count; ++i) {
        ASSERT_EQ(y[count - 1 - i][kWidth - 1], x[i][0] * (static_cast<float>(i) + 1)) << i;
      }
    }
    const VariantDescription variant = m.executor->Variants(7).at(0);
    EXPECT_EQ(BasesIn(Place::kSlot, variant), static_cast<int>(2 * count));
    EXPECT_EQ(Launches(variant), count);
    EXPECT_EQ(m.Stats().live_exec_nodes, count + (count + kMaxSlots - 1) / kMaxSlots);
    EXPECT_EQ(m.Stats().patches, 0u);
  }
}

// Into slots and out of them: in replays, where a chunk fails, and where all runs eagerly since.
TEST(Executor, WhatIsCopiedBesideTheGraphIsCopiedInEveryKindOfRun) {
  Program program = StepProgram(0.5f, kManyReaders);
  AddReaders(&program, 6, kManyReaders);  // of y
  program.options.max_failures = 1;
  program.options.chunk_size = 4;
  const auto sealed = Seal(program);
  for (uint64_t failing = 0; failing < 8; ++failing) {
    Machine m;
    StepBuffers b;
    const auto move_and_check = [&](int times) {
      for (int i = 0; i < times; ++i) {
        b.MoveX();
        b.MoveY();
        b.Check(m.executor.get(), sealed, i);
      }
    };
    for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), sealed, i);
    move_and_check(8);
    EXPECT_TRUE(Logged(*m.executor, "placement", "x: slot"));
    EXPECT_TRUE(Logged(*m.executor, "placement", "copied out at the graph's end"));
    ASSERT_EQ(m.Stats().eager, 1u);
    m.device.Fail(DeviceCall::kLaunchGraph, failing);
    move_and_check(1);
    ASSERT_EQ(m.Stats().failures, failing < m.Stats().instantiations ? 1u : 0u);
    move_and_check(4);
    if (HasFatalFailure()) return;
  }
}

TEST(Executor, PositionThatComesToRestLeavesItsSlot) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram(0.5f, kManyReaders));
  for (int i = 0; i < 20; ++i) {
    b.MoveX();
    b.Check(m.executor.get(), program, i);
  }
  const auto copies = [&] { return m.device.calls(DeviceCall::kLaunchKernel); };
  const uint64_t before = copies();
  for (int i = 0; i < 100; ++i) b.Check(m.executor.get(), program, i % 50);
  EXPECT_EQ(copies(), before + 100);
  EXPECT_EQ(m.Stats().patches, 0u);
  for (int i = 0; i < 200; ++i) b.Check(m.executor.get(), program, i % 50);
  EXPECT_TRUE(Logged(*m.executor, "placement", "came to rest"));
  EXPECT_LT(copies(), before + 257);
  EXPECT_EQ(m.Stats().eager, 1u);
  EXPECT_EQ(m.Stats().captures, 1u);
  EXPECT_EQ(m.Stats().patches, 2u + kManyReaders);  // its readers, once
  EXPECT_EQ(BasesIn(Place::kSlot, m.executor->Variants(7).at(0)), 0);
}

// A donated counter gets another buffer at nearly every call, which no hint says.
TEST(Executor, DonatedCounterThatWandersIsPatched) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 20; ++i) {
    b.MoveAcc();
    b.Check(m.executor.get(), program, i);
  }
  const Counters c = m.Stats();
  EXPECT_EQ(c.eager, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, 18u);
  EXPECT_EQ(c.patches, 36u);
  EXPECT_EQ(c.property_compares, 1u);
}

// More address sets than variants, in random order: none is worth a capture of its own.
TEST(Executor, ManyAddressSetsNeverPushEachOtherOut) {
  Machine m;
  Program program = StepProgram();
  program.options.max_variants = 3;
  const auto sealed = Seal(program);
  StepBuffers b[7];
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) b[random() % 7].Check(m.executor.get(), sealed, i);
  const Counters c = m.Stats();
  EXPECT_EQ(c.evictions, 0u);
  EXPECT_LE(c.captures, 3u);
  EXPECT_LE(c.eager, 3u);
}

TEST(Executor, LargeOperandThatAlwaysMovesIsUpdatedEveryTime) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 12; ++i) {
    b.MoveBig();
    b.Check(m.executor.get(), program, i);
  }
  const Counters c = m.Stats();
  EXPECT_EQ(c.eager, 1u);
  EXPECT_EQ(c.captures, 1u);
  EXPECT_EQ(c.replays, 10u);
  EXPECT_EQ(c.patches, 10u);
  EXPECT_EQ(c.evictions, 0u);
}

TEST(Executor, AlternatingAddressSetsConvergeToReplay) {
  Machine m;
  StepBuffers b[3];
  const auto program = Seal(StepProgram());
  for (int round = 0; round < 6; ++round) {
    for (StepBuffers& one : b) one.Check(m.executor.get(), program, round);
  }
  const Counters before = m.Stats();
  for (int round = 0; round < 6; ++round) {
    for (StepBuffers& one : b) one.Check(m.executor.get(), program, round);
  }
  const Counters after = m.Stats();
  EXPECT_EQ(after.replays - before.replays, 18u);
  EXPECT_EQ(after.exec_updates, before.exec_updates);
  EXPECT_EQ(after.property_compares, before.property_compares);
  EXPECT_EQ(after.eager, before.eager);
}

TEST(Executor, AlternatingProgramsOfOneKeyConvergeToReplay) {
  Machine m;
  StepBuffers b;
  const std::vector<std::shared_ptr<const Program>> programs = {
      Seal(StepProgram(1)), Seal(StepProgram(2)), Seal(StepProgram(3)), Seal(StepProgram(4)),
      Seal(StepProgram(5))};
  for (int i = 0; i < 50; ++i) {
    const int which = i * 7 % 5;
    b.Check(m.executor.get(), programs[which], i, static_cast<float>(which + 1));
  }
  const Counters c = m.Stats();
  EXPECT_EQ(c.eager, 5u);
  EXPECT_EQ(c.captures, 5u);
  EXPECT_EQ(c.replays, 40u);
  EXPECT_EQ(c.resets, 0u);
  EXPECT_TRUE(Logged(*m.executor, "eager", "structure: node 5"));
}

TEST(Executor, LeastRecentlyUsedVariantIsEvicted) {
  Machine m;
  StepBuffers b;
  std::vector<std::shared_ptr<const Program>> programs;
  for (int i = 0; i < 3; ++i) {
    Program program = StepProgram(static_cast<float>(i));
    program.options.max_variants = 2;
    programs.push_back(Seal(program));
  }
  for (int which : {0, 0, 1, 1, 0, 2}) b.Check(m.executor.get(), programs[which], 1, which);
  EXPECT_EQ(m.Stats().evictions, 1u);  // of 1, not of 0
  EXPECT_EQ(m.Stats().live_execs, 3u);
  const uint64_t replays = m.Stats().replays;
  b.Check(m.executor.get(), programs[0], 1, 0);
  EXPECT_EQ(m.Stats().replays, replays + 1);
}

TEST(Executor, ArenaThatGrowsInvalidatesWhatWasRecorded) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), program, i);
  Program large = StepProgram(9);
  large.arena_bytes = 1 << 20;
  const auto sealed = Seal(large);
  for (int i = 0; i < 3; ++i) {
    b.Check(m.executor.get(), sealed, i, 9);
    b.Check(m.executor.get(), program, i);
  }
  // The old memory is gone (a sanitizer would see a stale launch), and every node of the first
  // program was patched or re-captured once.
  EXPECT_EQ(m.Stats().property_compares, 2u);  // of the new variant, and of the moved arena
  EXPECT_EQ(m.Stats().patches, 5u);
}

TEST(Executor, ReservedArenaNeverMoves) {
  Machine m;
  ASSERT_TRUE(m.executor->Reserve(4 << 20).ok());
  StepBuffers b;
  const auto program = Seal(StepProgram());
  Program large = StepProgram(9);
  large.arena_bytes = 1 << 20;
  const auto sealed = Seal(large);
  for (int i = 0; i < 4; ++i) {
    b.Check(m.executor.get(), program, i);
    b.Check(m.executor.get(), sealed, i, 9);
  }
  EXPECT_EQ(m.device.calls(DeviceCall::kArenaReserve), 1u);
  EXPECT_EQ(m.Stats().replays, 4u);
  EXPECT_EQ(m.Stats().patches, 0u);
}

// Moves a large result by one float at the fourth call, so that the alignment of one node's output
// changes, and at the fifth to another aligned place.
void MisalignOneResult(Machine* m, Program program, const std::function<void(int call)>& after) {
  StepBuffers b;
  program.bases[6].nbytes = kBigBytes;  // too large for a slot
  const auto sealed = Seal(program);
  std::vector<char> memory(kBigBytes + 256);
  char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  for (int call = 1; call <= 5; ++call) {
    char* y = call <= 3 ? aligned : call == 4 ? aligned + sizeof(float) : aligned + 64;
    std::fill(memory.begin(), memory.end(), 0);
    ASSERT_TRUE(m->executor->Execute(sealed, b.Operands(), {b.Results()[0], y}, nullptr).ok());
    float first = 0;
    std::memcpy(&first, y, sizeof first);
    EXPECT_NE(first, 0);
    after(call);
  }
}

TEST(Executor, UpdateThatIsTaken) {
  Machine m(ByAlignment::kGrid);
  MisalignOneResult(&m, StepProgram(), [&](int call) {
    const Counters c = m.Stats();
    EXPECT_EQ(c.exec_updates, static_cast<uint64_t>(std::max(call - 3, 0)));
  });
  const Counters c = m.Stats();
  EXPECT_EQ(c.instantiations, 3u);
  EXPECT_EQ(c.captures, 3u);
  EXPECT_EQ(c.replays, 1u);
  EXPECT_TRUE(Logged(*m.executor, "update", "re-captured"));
}

// The executable answers to the nodes that it was made from, whatever it was updated with since.
TEST(Executor, APatchAfterAnUpdateReachesTheExecutable) {
  Machine m(ByAlignment::kGrid);
  StepBuffers b;
  Program program = StepProgram();
  program.bases[6].nbytes = kBigBytes;
  const auto sealed = Seal(program);
  std::vector<float> memory(kBigBytes / sizeof(float) + 64);
  float* aligned = memory.data();
  while (reinterpret_cast<uintptr_t>(aligned) % 64 != 0) ++aligned;
  for (int at : {0, 0, 0, 1, 2, 3, 4, 4}) {
    std::fill(memory.begin(), memory.end(), 0);
    char* y = reinterpret_cast<char*>(aligned + at);
    ASSERT_TRUE(m.executor->Execute(sealed, b.Operands(), {b.Results()[0], y}, nullptr).ok());
    EXPECT_NE(aligned[at], 0);
    for (int before = 0; before < at; ++before) EXPECT_EQ(aligned[before], 0) << at;
  }
  EXPECT_EQ(m.Stats().exec_updates, 1u);
  EXPECT_EQ(m.Stats().patches, 3u);
  EXPECT_EQ(m.Stats().failures, 0u);
}

TEST(Executor, UpdateThatIsRefusedInstantiatesAnew) {
  Machine m(ByAlignment::kKernel);
  MisalignOneResult(&m, StepProgram(), [](int) {});
  const Counters c = m.Stats();
  EXPECT_EQ(c.exec_updates, 0u);
  EXPECT_EQ(c.instantiations, 5u);
  EXPECT_EQ(c.captures, 3u);
  EXPECT_EQ(c.live_execs, 3u);
  EXPECT_TRUE(Logged(*m.executor, "instantiate", "refused"));
}

TEST(Executor, ExecutablesLeftOverFromALongerListAreDestroyed) {
  Machine m(ByAlignment::kFusion);
  Program program = StepProgram();
  program.options.fusion = true;
  program.options.chunk_size = 1;
  std::vector<uint64_t> live;
  MisalignOneResult(&m, program, [&](int) { live.push_back(m.Stats().live_execs); });
  // Node 5 is fused with node 4, then not, then again.
  ASSERT_EQ(live.size(), 5u);
  EXPECT_EQ(live[3], live[2] + 1);
  EXPECT_EQ(live[4], live[2]);
}

TEST(Executor, BufferThatComesBackIsNotTakenForOneThatNeverLeft) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 12; ++i) {
    if (i >= 3) b.FlipX();
    b.Check(m.executor.get(), program, i);
  }
  EXPECT_EQ(m.Stats().patches, 2u * 4);  // until it has a slot
}

TEST(Executor, WhatIsKnownOfABaseHoldsForNewVariants) {
  Machine m;
  StepBuffers b[2];
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 8; ++i) {
    if (i >= 3) b[0].MoveW();
    b[0].Check(m.executor.get(), program, i);
  }
  for (int i = 0; i < 8; ++i) b[i % 2].Check(m.executor.get(), program, i);
  const Counters before = m.Stats();
  for (int i = 0; i < 8; ++i) {
    b[i % 2].MoveW();
    b[i % 2].Check(m.executor.get(), program, i);
  }
  EXPECT_EQ(m.Stats().property_compares, before.property_compares);
  size_t placements = 0;
  for (const Event& event : m.executor->Events(0)) {
    placements += event.what == "placement" && event.why.find("w:") == 0;
  }
  EXPECT_EQ(placements, 2u);  // patched, then a slot
}

// Each depth can be chosen, and each gives the same values.
TEST(Executor, DepthsOfUpdate) {
  for (UpdateDepth depth :
       {UpdateDepth::kPatch, UpdateDepth::kRecapture, UpdateDepth::kInstantiate}) {
    Machine m;
    StepBuffers b;
    Program program = StepProgram();
    program.options.update_depth = depth;
    const auto sealed = Seal(program);
    for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), sealed, i);
    b.MoveBig();  // one node of the second chunk reads it
    b.Check(m.executor.get(), sealed, 3);
    b.Check(m.executor.get(), sealed, 4);
    const Counters c = m.Stats();
    EXPECT_EQ(c.patches, depth == UpdateDepth::kPatch ? 1u : 0u);
    EXPECT_EQ(c.exec_updates, depth == UpdateDepth::kRecapture ? 1u : 0u);
    EXPECT_EQ(c.instantiations, depth == UpdateDepth::kInstantiate ? 4u : 3u);
    EXPECT_EQ(c.captures, depth == UpdateDepth::kPatch ? 1u : 2u);
    EXPECT_EQ(c.live_execs, 3u);
  }
}

// Only the launches of nodes that the diff names are emitted anew.
TEST(Executor, AnUpdateEmitsOnlyWhatChanged) {
  for (bool fusion : {false, true}) {
    Machine m;
    StepBuffers b;
    Program program = StepProgram(0.5f, kManyReaders);
    program.options.fusion = fusion;
    const auto sealed = Seal(program);
    for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), sealed, i);
    const uint64_t before = m.emitter.emissions;
    b.MoveAcc();  // nodes 3 and 4
    b.Check(m.executor.get(), sealed, 3);
    EXPECT_LE(m.emitter.emissions - before, fusion ? 4u : 2u);
    EXPECT_EQ(m.Stats().replays, 2u);
  }
}

TEST(Executor, EveryChunkSizeGivesTheSame) {
  for (bool fusion : {false, true}) {
    for (uint32_t size = 0; size <= 8; ++size) {
      Machine m;
      StepBuffers b;
      Program program = StepProgram();
      program.options.chunk_size = size;
      program.options.fusion = fusion;
      const auto sealed = Seal(program);
      for (int i = 0; i < 6; ++i) {
        if (i == 4) b.MoveAcc();
        b.MoveX();
        b.Check(m.executor.get(), sealed, i);
      }
      EXPECT_EQ(m.Stats().replays, 4u) << size;
    }
  }
}

TEST(Executor, ViewsAloneAndNoNodesAtAll) {
  for (int nodes : {0, 1, 3}) {
    Machine m;
    Program program;
    program.function_id = 7;
    program.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"),
                     MakeBase(BaseKind::kOperand, 0, kBigBytes, "x")};
    program.options.chunk_size = 1;
    const TensorRef x = Dense(DType::kF32, 1, 0, {kWidth});
    for (int n = 0; n < nodes; ++n) program.nodes.push_back(MakeNode(Op::kView, {x}, {x}));
    const auto sealed = Seal(program);
    char byte = 0;
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(m.executor->Execute(sealed, {&byte}, {}, nullptr).ok());
    EXPECT_EQ(m.Stats().eager, 1u);
    EXPECT_EQ(m.Stats().captures, 1u);
    EXPECT_EQ(m.Stats().replays, 2u);
    EXPECT_EQ(m.Stats().instantiations, 0u);
  }
}

TEST(Executor, BaseThatNoNodeReadsMayMove) {
  Machine m;
  StepBuffers b;
  Program program = StepProgram();
  program.bases.insert(program.bases.begin() + 5,
                       MakeBase(BaseKind::kOperand, 4, kBigBytes, "idle"));
  for (Node& node : program.nodes) {
    for (auto* tensors : {&node.outs, &node.srcs}) {
      for (TensorRef& t : *tensors) t.base += t.base >= 5;
    }
  }
  const auto sealed = Seal(program);
  std::vector<char> idle(16);
  for (int i = 0; i < 8; ++i) {
    std::vector<char*> operands = b.Operands();
    operands.push_back(idle.data() + i);
    ASSERT_TRUE(m.executor->Execute(sealed, operands, b.Results(), nullptr).ok());
  }
  EXPECT_EQ(m.Stats().eager, 1u);
  EXPECT_EQ(m.Stats().replays, 6u);
  EXPECT_EQ(m.Stats().patches, 0u);
}

// The thread that calls gets its own current device back, whatever became of the call.
TEST(Executor, EveryDeviceThatIsEnteredIsLeft) {
  class Counting final : public HostDevice {
   public:
    Status EnterDevice(int* previous) override {
      *previous = 40 + entered++;
      return Status::Ok();
    }
    void LeaveDevice(int previous) override {
      EXPECT_EQ(previous, 40 + --entered);  // nested as they should be
      ++left;
    }
    int entered = 0;
    int left = 0;
  };
  Counting host;
  FaultInjecting device(&host);
  TestEmitter emitter;
  const auto program = Seal(StepProgram());
  Program disabled = StepProgram();
  disabled.options.disabled = true;
  {
    Executor executor(&device, &emitter);
    StepBuffers b;
    ASSERT_TRUE(executor.Reserve(1 << 12).ok());
    for (int i = 0; i < 4; ++i) b.Check(&executor, program, i);
    b.Check(&executor, Seal(disabled), 1);
    for (DeviceCall call : {DeviceCall::kLaunchGraph, DeviceCall::kLaunchKernel}) {
      device.Fail(call, 0, 1, Code::kContextPoisoned);
      EXPECT_FALSE(executor.Execute(program, b.Operands(), b.Results(), nullptr).ok());
      EXPECT_EQ(host.entered, 0);
      executor.Clear(7);
    }
    VariantDescription description;
    EXPECT_TRUE(executor.Preview(*program, &description).ok());
    executor.FlushTrace();
    EXPECT_EQ(host.entered, 0);
  }
  EXPECT_EQ(host.entered, 0);
  EXPECT_GE(host.left, 10);
}

TEST(Executor, DisabledMeansEager) {
  Machine m;
  StepBuffers b;
  Program program = StepProgram();
  program.options.disabled = true;
  const auto sealed = Seal(program);
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), sealed, i);
  EXPECT_EQ(m.Stats().eager, 4u);
  EXPECT_EQ(m.Stats().executions, 4u);
}

TEST(Executor, NodeThatCannotBeCapturedKeepsItsSplitEager) {
  Machine m;
  StepBuffers b;
  Program program = StepProgram();
  program.nodes[2].flags = kFlagNotCapturable;
  const auto eager = Seal(program);
  const auto neighbour = Seal(StepProgram());
  for (int i = 0; i < 4; ++i) {
    b.Check(m.executor.get(), eager, i);
    b.Check(m.executor.get(), neighbour, i);
  }
  EXPECT_EQ(m.Stats().eager, 5u);
  EXPECT_EQ(m.Stats().captures, 1u);
  EXPECT_EQ(m.Stats().replays, 2u);
  EXPECT_TRUE(Logged(*m.executor, "eager", "node 2"));
}

TEST(Executor, InsideSomebodyElsesCaptureNothingOfOursIsCaptured) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 4; ++i) b.Check(m.executor.get(), program, i);
  const Counters before = m.Stats();

  Stream stream = nullptr;
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  ASSERT_TRUE(m.host.CreateStream(&stream).ok());
  ASSERT_TRUE(m.host.BeginCapture(stream).ok());
  ASSERT_TRUE(m.executor->Execute(program, b.Operands(), b.Results(), stream).ok());
  ASSERT_TRUE(m.host.EndCapture(stream, &graph).ok());
  const Counters after = m.Stats();
  EXPECT_EQ(after.eager, before.eager + 1);
  EXPECT_EQ(after.replays, before.replays);
  EXPECT_EQ(after.captures, before.captures);

  // What went into the foreign graph is the whole step.
  float acc = 0;
  std::memcpy(&acc, b.Results()[0], sizeof acc);
  ASSERT_TRUE(m.host.Instantiate(graph, &exec).ok());
  ASSERT_TRUE(m.host.LaunchGraph(exec, nullptr).ok());
  float now = 0;
  std::memcpy(&now, b.Results()[0], sizeof now);
  EXPECT_EQ(now, acc + (3 * 2 + 10) * 3 + 20);
  m.host.DestroyExec(exec);
  m.host.DestroyGraph(graph);
  m.host.DestroyStream(stream);

  b.Check(m.executor.get(), program, 1);
  EXPECT_EQ(m.Stats().replays, before.replays + 1);
}

TEST(Executor, ResultMustShareItsOperandsAddress) {
  Machine m;
  StepBuffers b;
  std::vector<char*> results = b.Results();
  results[0] = results[1];
  EXPECT_EQ(m.executor->Execute(Seal(StepProgram()), b.Operands(), results, nullptr).code(),
            Code::kInternal);
}

TEST(Executor, WrongCallsAreRefused) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  std::vector<char*> operands = b.Operands();
  operands.pop_back();
  EXPECT_EQ(m.executor->Execute(program, operands, b.Results(), nullptr).code(),
            Code::kInvalidArgument);
  operands = b.Operands();
  operands[0] = nullptr;
  EXPECT_EQ(m.executor->Execute(program, operands, b.Results(), nullptr).code(),
            Code::kInvalidArgument);
  for (int i = 0; i < 3; ++i) b.Check(m.executor.get(), program, i);
  EXPECT_EQ(m.executor->Execute(program, operands, b.Results(), nullptr).code(),
            Code::kInvalidArgument);
  b.Check(m.executor.get(), program, 3);
  Program unsupported = StepProgram();
  unsupported.nodes[1].op = Op::kMatmul;
  EXPECT_EQ(m.executor->Execute(Seal(unsupported), b.Operands(), b.Results(), nullptr).code(),
            Code::kUnsupported);
}

TEST(Executor, ClearForgetsOneFunction) {
  Machine m;
  StepBuffers b;
  const auto program = Seal(StepProgram());
  Program other = StepProgram(3);
  other.function_id = 8;
  const auto neighbour = Seal(other);
  for (int i = 0; i < 4; ++i) {
    b.Check(m.executor.get(), program, i);
    b.Check(m.executor.get(), neighbour, i, 3);
  }
  EXPECT_EQ(m.executor->Stats(0).executions, 8u);
  EXPECT_FALSE(m.executor->Variants(7).empty());
  m.executor->Clear(7);
  EXPECT_EQ(m.Stats().executions, 0u);
  EXPECT_EQ(m.Stats().live_execs, 0u);
  EXPECT_TRUE(m.executor->Variants(7).empty());
  EXPECT_TRUE(m.executor->Events(7).empty());
  EXPECT_EQ(m.executor->Stats(8).live_execs, 3u);
  b.Check(m.executor.get(), program, 1);
  b.Check(m.executor.get(), neighbour, 1, 3);
  EXPECT_EQ(m.Stats().eager, 1u);
  EXPECT_EQ(m.executor->Stats(8).replays, 3u);
}

TEST(Executor, ClearForgetsTheAddressSetsThatOthersMayRepeat) {
  Machine m;
  StepBuffers b[2];
  Program other = StepProgram(3);
  other.function_id = 8;  // under the same key
  const auto program = Seal(StepProgram());
  const auto neighbour = Seal(other);
  b[0].Check(m.executor.get(), neighbour, 1, 3);
  for (int i = 0; i < 3; ++i) b[0].Check(m.executor.get(), program, i);
  b[1].Check(m.executor.get(), program, 1);  // another address set, seen once
  m.executor->Clear(7);
  for (int i = 0; i < 3; ++i) b[0].Check(m.executor.get(), program, i);
  b[1].Check(m.executor.get(), program, 1);
  // As after any start: the second set updates the variant. Remembered, it would be taken for one
  // that comes back and be warmed up.
  EXPECT_EQ(m.Stats().eager, 1u);
  EXPECT_EQ(m.Stats().captures, 1u);
  EXPECT_EQ(m.Stats().replays, 2u);
}

TEST(Executor, EventsCarryTheClock) {
  HostDevice host;
  TestEmitter emitter;
  Executor executor(&host, &emitter, [] { return 42.0; });
  StepBuffers b;
  b.Check(&executor, Seal(StepProgram()), 1);
  ASSERT_EQ(executor.Events(7).size(), 1u);
  EXPECT_EQ(executor.Events(7)[0].time_s, 42.0);
  EXPECT_EQ(executor.Events(7)[0].why, "the first call");
}

}  // namespace
}  // namespace jaxgraph
