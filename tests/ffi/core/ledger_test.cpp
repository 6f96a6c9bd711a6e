// What the ledger remembers beside variants is bounded.
#include "ffi/core/ledger.h"

#include <gtest/gtest.h>

#include "ffi/core/crowding.h"
#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

// A large operand that lies elsewhere at every call is a new address set each time.
TEST(AddressHistory, RemembersTheNewestSets) {
  const auto program = Seal(StepProgram());
  const Placement placement(*program);
  AddressHistory history;
  constexpr size_t kLimit = 3;
  const auto seen = [&](uintptr_t big) {
    std::vector<char*> addresses(program->bases.size());
    addresses[3] = reinterpret_cast<char*>(big);
    return history.SeenBefore(*program, placement, addresses, kLimit);
  };
  for (uintptr_t set = 1; set <= 5; ++set) EXPECT_FALSE(seen(set)) << set;
  for (uintptr_t set = 3; set <= 5; ++set) EXPECT_TRUE(seen(set)) << set;
  EXPECT_FALSE(seen(1));  // takes the place of 3, which was asked for longest ago
  EXPECT_TRUE(seen(4));
  EXPECT_FALSE(seen(3));
}

// Bases that may wander are no part of a set.
TEST(AddressHistory, KnowsASetByWhatIsAlwaysInPlace) {
  const auto program = Seal(StepProgram());
  const Placement placement(*program);
  AddressHistory history;
  std::vector<char*> addresses(program->bases.size());
  EXPECT_FALSE(history.SeenBefore(*program, placement, addresses, 8));
  for (size_t base : {1, 2, 6}) {
    addresses[base] = reinterpret_cast<char*>(uintptr_t{64});
    EXPECT_TRUE(history.SeenBefore(*program, placement, addresses, 8)) << base;
  }
  const auto other = Seal(StepProgram(2));
  EXPECT_FALSE(history.SeenBefore(*other, Placement(*other), addresses, 8));
}

TEST(Crowding, ForgetsTheProgramThatWasPushedOutLongestAgo) {
  Crowding crowding;
  Program program = StepProgram();
  const auto numbered = [&](size_t n) -> const Program& {
    std::memcpy(program.id.data(), &n, sizeof n);
    return program;
  };
  const auto waits = [&](size_t n) {
    std::string why;
    return crowding.Waits(numbered(n), [](const Room&) { return false; }, &why);
  };
  for (size_t n = 0; n <= Crowding::kMostPrograms; ++n) {
    for (uint32_t i = 0; i < Crowding::kMostTimes; ++i) {
      EXPECT_FALSE(waits(n));
      crowding.NotePushedOut(numbered(n), {1, 1}, Crowding::kPaidReplays - 1);
    }
  }
  EXPECT_FALSE(waits(0));
  for (size_t n = 1; n <= Crowding::kMostPrograms; ++n) EXPECT_TRUE(waits(n)) << n;
  crowding.NotePushedOut(numbered(5), {1, 1}, Crowding::kPaidReplays);  // it had paid this time
  EXPECT_FALSE(waits(5));
}

}  // namespace
}  // namespace jaxgraph
