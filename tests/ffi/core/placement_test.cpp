#include "ffi/core/placement.h"

#include <gtest/gtest.h>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

// Bases of the step: 1 x (hinted), 2 w, 3 big, 4 acc (donated), 5 its result, 6 y.
constexpr int kManyReaders = 8;

// Makes `calls` calls, in each of which the base moves.
void Move(Placement* placement, size_t base, int calls, bool recorded = false) {
  for (int i = 0; i < calls; ++i) {
    placement->BeginCall();
    placement->NoteMoved(base, recorded);
  }
}

TEST(Placement, BeforeAnythingMoves) {
  const Placement placement(StepProgram(1, kManyReaders));
  EXPECT_EQ(placement.place(0), Place::kArena);
  EXPECT_EQ(placement.place(1), Place::kPatched);  // free while it stays
  EXPECT_EQ(placement.place(2), Place::kInPlace);
  EXPECT_EQ(placement.place(3), Place::kInPlace);
  EXPECT_EQ(placement.place(4), Place::kInPlace);
  EXPECT_EQ(placement.place(5), Place::kInPlace);
  EXPECT_EQ(placement.place(6), Place::kPatched);
}

TEST(Placement, TheDecision) {
  BaseFacts token;
  token.nbytes = 4;
  token.nodes = 1;
  token.expected = true;
  EXPECT_EQ(ChoosePlace(token), Place::kPatched);
  token.moves = token.calls = 1;
  EXPECT_EQ(ChoosePlace(token), Place::kSlot);  // one node to patch, but the launch is dearer

  BaseFacts position = token;
  position.nodes = 60;
  EXPECT_EQ(ChoosePlace(position), Place::kSlot);
  position.recorded = true;  // an executable is not changed for a single move
  EXPECT_EQ(ChoosePlace(position), Place::kPatched);
  position.moves = position.calls = 4;
  EXPECT_EQ(ChoosePlace(position), Place::kSlot);
  position.calls = 1000;  // it hardly ever moves
  EXPECT_EQ(ChoosePlace(position), Place::kPatched);
  position.moves = position.calls = 0;
  EXPECT_EQ(ChoosePlace(position), Place::kPatched);
  position.expected = false;
  EXPECT_EQ(ChoosePlace(position), Place::kInPlace);

  BaseFacts logits = token;
  logits.kind = BaseKind::kResult;
  logits.nbytes = 512 << 10;
  EXPECT_EQ(ChoosePlace(logits), Place::kSlot);
  logits.nbytes = 4 << 20;
  EXPECT_EQ(ChoosePlace(logits), Place::kPatched);
  logits.nodes = 60;  // too large to copy, too many to patch
  EXPECT_EQ(ChoosePlace(logits), Place::kInPlace);

  BaseFacts cache = position;
  cache.aliased = true;
  cache.moves = cache.calls = 10;
  cache.nbytes = 1 << 16;
  EXPECT_EQ(ChoosePlace(cache), Place::kInPlace);
  cache.nbytes = 4;  // a donated counter
  EXPECT_EQ(ChoosePlace(cache), Place::kPatched);
  cache.aliased = false;
  cache.written = true;
  EXPECT_EQ(ChoosePlace(cache), Place::kPatched);

  BaseFacts weight;
  weight.nbytes = 1 << 16;
  weight.nodes = 1;
  EXPECT_EQ(ChoosePlace(weight), Place::kInPlace);
  weight.moves = weight.calls = 10;
  EXPECT_EQ(ChoosePlace(weight), Place::kPatched);
  EXPECT_FALSE(MayUseSlot(weight));

  BaseFacts none = position;
  none.nbytes = 0;
  EXPECT_EQ(ChoosePlace(none), Place::kNowhere);
  none.kind = BaseKind::kArena;
  EXPECT_EQ(ChoosePlace(none), Place::kArena);
}

TEST(Placement, WhatItTakesToGetASlot) {
  const Program program = StepProgram(1, kManyReaders);
  Placement warming(program);
  Move(&warming, 1, 1);
  EXPECT_EQ(warming.place(1), Place::kSlot);
  EXPECT_TRUE(warming.has_slots());

  Placement captured(program);
  Move(&captured, 1, 3, /*recorded=*/true);
  EXPECT_EQ(captured.place(1), Place::kPatched);
  Move(&captured, 1, 1, /*recorded=*/true);
  EXPECT_EQ(captured.place(1), Place::kSlot);

  Placement rare(program);
  for (int i = 0; i < 10; ++i) {
    for (int still = 0; still < 40; ++still) rare.BeginCall();
    Move(&rare, 1, 1, /*recorded=*/true);
  }
  EXPECT_EQ(rare.place(1), Place::kPatched);
  Move(&rare, 3, 20);
  EXPECT_EQ(rare.place(3), Place::kInPlace);  // too large
  EXPECT_FALSE(rare.has_slots());
}

TEST(Placement, ABaseThatComesToRestLeavesItsSlot) {
  Placement placement(StepProgram(1, kManyReaders));
  Move(&placement, 1, 10);
  EXPECT_EQ(placement.place(1), Place::kSlot);
  int calls = 0;
  for (; calls < 5000 && placement.place(1) == Place::kSlot; ++calls) {
    placement.BeginCall();
    if (placement.DueToSettle()) placement.Settle();
  }
  EXPECT_GE(calls, 128);
  EXPECT_LE(calls, 256);
  EXPECT_EQ(placement.place(1), Place::kPatched);
  EXPECT_FALSE(placement.DueToSettle());
  Move(&placement, 1, 1);
  EXPECT_EQ(placement.place(1), Place::kPatched);  // one move in so many calls
  Move(&placement, 1, 20);
  EXPECT_EQ(placement.place(1), Place::kSlot);
}

TEST(Placement, SlotsAreAlignedDisjointAndThereFromTheStart) {
  Program program = StepProgram(1, kManyReaders);
  for (Node& node : program.nodes) node.srcs.push_back(Dense(DType::kF32, 6, 0, {kWidth}));
  Placement placement(program);
  const uint64_t before = placement.arena_bytes();
  for (size_t b : {1, 2, 6}) Move(&placement, b, 2);
  EXPECT_EQ(placement.arena_bytes(), before);
  EXPECT_EQ(ArenaBytesOf(program), before);

  char* arena = reinterpret_cast<char*>(uintptr_t{1} << 20);
  std::vector<char*> resolved;
  placement.Resolve(std::vector<char*>(program.bases.size()), arena, &resolved);
  std::vector<char*> slots;
  for (size_t b : {1, 2, 6}) {
    EXPECT_EQ(placement.place(b), Place::kSlot) << b;
    EXPECT_EQ((resolved[b] - arena) % kArenaAlignment, 0u);
    EXPECT_GE(resolved[b], arena + program.arena_bytes);
    EXPECT_LE(resolved[b] + program.bases[b].nbytes, arena + before);
    slots.push_back(resolved[b]);
  }
  std::sort(slots.begin(), slots.end());
  for (size_t i = 1; i < slots.size(); ++i) EXPECT_GE(slots[i] - slots[i - 1], kSlice);
}

TEST(Placement, ScratchMemoryLiesBetweenTheProgramAndTheSlots) {
  Program program = StepProgram(1, kManyReaders);
  EXPECT_LT(Placement(program).scratch(), 0);  // nobody asks for it
  program.nodes.back().op = Op::kAttention;
  Placement placement(program);
  const int64_t scratch = placement.scratch();
  ASSERT_GE(scratch, static_cast<int64_t>(program.arena_bytes));
  EXPECT_EQ(static_cast<uint64_t>(scratch) % kArenaAlignment, 0u);
  Move(&placement, 1, 10);
  ASSERT_EQ(placement.place(1), Place::kSlot);
  char* const arena = reinterpret_cast<char*>(uintptr_t{1} << 20);
  EXPECT_GE(placement.ResolveOne(1, std::vector<char*>(program.bases.size()), arena),
            arena + scratch + kScratchBytes);
  EXPECT_LT(Placement(program, /*slots=*/false).scratch(), 0);  // an arena of the program's size
}

TEST(Placement, WithoutSlotsEverythingIsInPlace) {
  const Placement placement(StepProgram(), /*slots=*/false);
  for (size_t b = 1; b < 7; ++b) EXPECT_EQ(placement.place(b), Place::kInPlace) << b;
}

TEST(Placement, ExplainsItself) {
  const Program program = StepProgram(1, kManyReaders);
  Placement placement(program);
  EXPECT_EQ(placement.Explain(program.bases[1], 1),
            "x: patched, 32 bytes (10 nodes, has not moved)");
  EXPECT_EQ(placement.Explain(program.bases[3], 3),
            "big: in place, 1048580 bytes (1 node, has not moved; too large to follow)");
  EXPECT_EQ(placement.Explain(program.bases[2], 2),
            "w: in place, 32 bytes (9 nodes, has not moved)");
  Move(&placement, 1, 3);
  EXPECT_EQ(placement.Explain(program.bases[1], 1),
            "x: slot, 32 bytes (10 nodes, moved in 3 of 3 calls; copied beside the graph)");
  for (int i = 0; i < 4; ++i) placement.BeginCall();
  EXPECT_EQ(placement.Explain(program.bases[1], 1),
            "x: slot, 32 bytes (10 nodes, moved in 3 of 6 calls; copied beside the graph)");
  for (int i = 0; i < 96; ++i) placement.BeginCall();
  EXPECT_EQ(placement.Explain(program.bases[1], 1),
            "x: slot, 32 bytes (10 nodes, has not moved for 100 calls; copied beside the graph)");
  Move(&placement, 3, 4);  // always in place, but that it moves is told
  EXPECT_EQ(placement.Explain(program.bases[3], 3),
            "big: in place, 1048580 bytes (1 node, moved in 4 of 67 calls; too large to follow)");
}

}  // namespace
}  // namespace jaxgraph
