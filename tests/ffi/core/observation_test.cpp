// What a replay does to be observed. How long that takes is measured by benchmarks/identity.py: a
// test's figure would say more of the machine than of the code.
#include "ffi/core/observation.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ffi/core/trace.h"
#include "tests/ffi/core/allocations.h"
#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

// An executor whose calls replay, all with the same addresses.
class Replays : public testing::Test {
 protected:
  void SetUp() override {
    Call();
    ASSERT_GT(allocated_, 0u) << "are they counted?";
    for (int i = 1; i < 5; ++i) Call();
    ASSERT_GE(executor_.Stats(7).replays, 2u);
    ASSERT_GE(executor_.Stats(7).live_execs, 3u) << "several chunks";
  }

  void Call() {
    looks_ = 0;
    const uint64_t before = allocations;
    const Status status = executor_.Execute(program_, operands_, results_, nullptr);
    allocated_ = allocations - before;
    ASSERT_TRUE(status.ok()) << status.message();
  }
  std::map<std::string, uint64_t> Counted() const {
    std::map<std::string, uint64_t> values;
    executor_.Stats(7).ForEach([&](const char* name, uint64_t value) { values[name] = value; });
    return values;
  }

  HostDevice device_;
  TestEmitter emitter_{ByAlignment::kNothing};
  Executor executor_{&device_, &emitter_, [this] {
                       ++looks_;
                       return Trace::Now();
                     }};
  const std::shared_ptr<const Program> program_ = Seal(StepProgram());
  const StepBuffers buffers_;
  const std::vector<char*> operands_ = buffers_.Operands(), results_ = buffers_.Results();
  // Of the last call.
  int looks_ = 0;  // at the clock
  uint64_t allocated_ = 0;
};

TEST_F(Replays, LookAtTheClockTwiceAndAllocateNothing) {
  for (size_t i = 0; i < ExecutionLog::kCapacity + 10; ++i) {
    Call();
    ASSERT_EQ(looks_, 2) << "however many chunks";
    ASSERT_EQ(allocated_, 0u) << "once the rings are there";
  }
}

TEST_F(Replays, LeaveOneRecordAndFourCounters) {
  const std::map<std::string, uint64_t> before = Counted();
  const size_t executions = executor_.Executions(7).size(), events = executor_.Events(7).size();
  Call();
  EXPECT_EQ(executor_.Executions(7).size(), executions + 1);
  EXPECT_EQ(executor_.Events(7).size(), events);
  std::set<std::string> changed;
  for (const auto& [name, value] : Counted()) {
    if (value != before.at(name)) changed.insert(name);
  }
  changed.erase("executions");  // the sum
  EXPECT_EQ(changed, (std::set<std::string>{"chunk_launches", "replay_ns", "replays", "uid_hits"}));
}

}  // namespace
}  // namespace jaxgraph
