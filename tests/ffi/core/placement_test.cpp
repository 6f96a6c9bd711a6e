#include "ffi/core/placement.h"

#include <gtest/gtest.h>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

// Bases of the step: 1 x (wanders), 2 w, 3 big, 4 acc (donated), 5 its result, 6 y.
TEST(Placement, TheRule) {
  const Placement placement(StepProgram());
  EXPECT_EQ(placement.place(0), Place::kArena);
  EXPECT_EQ(placement.place(1), Place::kSlot);
  EXPECT_EQ(placement.place(2), Place::kInPlace);
  EXPECT_EQ(placement.place(3), Place::kInPlace);
  EXPECT_EQ(placement.place(4), Place::kInPlace);
  EXPECT_EQ(placement.place(5), Place::kInPlace);
  EXPECT_EQ(placement.place(6), Place::kSlot);
}

TEST(Placement, MovingGivesASlotOnlyWhereOneIsAllowed) {
  Placement placement(StepProgram());
  EXPECT_FALSE(placement.NoteMoved(1));  // has one
  EXPECT_TRUE(placement.NoteMoved(2));
  EXPECT_FALSE(placement.NoteMoved(2));  // once is enough
  EXPECT_FALSE(placement.NoteMoved(3));  // too large
  EXPECT_FALSE(placement.NoteMoved(4));  // written in place
  EXPECT_FALSE(placement.NoteMoved(5));
  EXPECT_EQ(placement.place(2), Place::kSlot);
}

TEST(Placement, WrittenOperandNeverWanders) {
  Program program = StepProgram();
  program.bases[1].written = true;
  EXPECT_EQ(Placement(program).place(1), Place::kInPlace);
}

TEST(Placement, AliasedOperandNeverWanders) {
  Program program = StepProgram();
  program.bases[4].written = false;  // handed through
  program.bases[4].hint = BaseHint::kWanders;
  EXPECT_EQ(Placement(program).place(4), Place::kInPlace);
}

TEST(Placement, EmptyBasesHaveNoPlace) {
  Program program = StepProgram();
  program.bases[1].nbytes = 0;
  EXPECT_EQ(Placement(program).place(1), Place::kNowhere);
}

TEST(Placement, SlotsAreAlignedDisjointAndThereFromTheStart) {
  const Program program = StepProgram();
  Placement placement(program);
  const uint64_t before = placement.arena_bytes();
  placement.NoteMoved(2);
  EXPECT_EQ(placement.arena_bytes(), before);
  EXPECT_EQ(ArenaBytesOf(program), before);

  char* arena = reinterpret_cast<char*>(uintptr_t{1} << 20);
  std::vector<char*> resolved;
  placement.Resolve(std::vector<char*>(program.bases.size()), arena, &resolved);
  std::vector<char*> slots;
  for (size_t b : {1, 2, 6}) {
    EXPECT_EQ((resolved[b] - arena) % kArenaAlignment, 0u);
    EXPECT_GE(resolved[b], arena + program.arena_bytes);
    EXPECT_LE(resolved[b] + program.bases[b].nbytes, arena + before);
    slots.push_back(resolved[b]);
  }
  std::sort(slots.begin(), slots.end());
  for (size_t i = 1; i < slots.size(); ++i) EXPECT_GE(slots[i] - slots[i - 1], kSlice);
}

TEST(Placement, WithoutSlotsEverythingIsInPlace) {
  const Placement placement(StepProgram(), /*slots=*/false);
  for (size_t b = 1; b < 7; ++b) EXPECT_EQ(placement.place(b), Place::kInPlace) << b;
}

TEST(Placement, ExplainsItself) {
  const Program program = StepProgram();
  const Placement placement(program);
  EXPECT_EQ(placement.Explain(program.bases[1], 1), "x: slot, 32 bytes (it is expected to wander)");
  EXPECT_EQ(placement.Explain(program.bases[3], 3),
            "big: in place, 1048580 bytes (larger than a slot)");
  EXPECT_EQ(placement.Explain(program.bases[4], 4), "acc: in place, 32 bytes (written in place)");
}

}  // namespace
}  // namespace jaxgraph
