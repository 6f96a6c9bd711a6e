// Traces: what is gathered and when, marks that are read late, and graphs that are drawn.
#include "ffi/core/trace.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

std::map<std::string, int> CountByCategory(const std::vector<TraceSpan>& spans) {
  std::map<std::string, int> count;
  for (const TraceSpan& span : spans) ++count[span.category];
  return count;
}

std::vector<TraceSpan> EndTrace() {
  uint64_t dropped = 0;
  std::vector<TraceSpan> spans = Trace::End(&dropped);
  EXPECT_EQ(dropped, 0u);
  return spans;
}

// A device whose marks are numbered: one millisecond lies between each and the next.
class Marked final : public HostDevice {
 public:
  Status MakeMark(Stream, Mark* mark) override {
    if (++calls == fail_call) return Status(Code::kDeviceError, "no mark");
    ++live;
    *mark = reinterpret_cast<Mark>(calls);
    return Status::Ok();
  }
  Status MillisecondsBetween(Mark from, Mark to, float* ms) override {
    *ms = static_cast<float>(reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from));
    return Status::Ok();
  }
  void DestroyMark(Mark) override { --live; }

  intptr_t calls = 0;
  intptr_t fail_call = 0;
  int live = 0;
};

Status Nothing() { return Status::Ok(); }

TEST(Trace, OneAtATime) {
  ASSERT_TRUE(Trace::Begin());
  EXPECT_FALSE(Trace::Begin());
  Trace::AddOnHost("a", "phase", 1, 2);
  std::vector<TraceSpan> spans = EndTrace();
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].name, "a");
  Trace::AddOnHost("late", "phase", 1, 2);
  ASSERT_TRUE(Trace::Begin());
  EXPECT_TRUE(EndTrace().empty());
}

TEST(Trace, HostHasNoMarksAndIsAskedOnce) {
  Marked device;
  device.fail_call = 1;
  DeviceTimeline timeline(&device);
  ASSERT_TRUE(Trace::Begin());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(timeline.Run("chunk", nullptr, Nothing).ok());
  timeline.Flush();
  EXPECT_EQ(CountByCategory(EndTrace()), (std::map<std::string, int>{{"launch", 3}}));
  EXPECT_EQ(device.calls, 1);
}

TEST(Trace, DeviceSpansLieBetweenTheirMarks) {
  Marked device;
  DeviceTimeline timeline(&device);
  ASSERT_TRUE(timeline.Run("before", nullptr, Nothing).ok());
  EXPECT_EQ(device.calls, 0) << "nobody traces";
  const double begin = Trace::Now();
  ASSERT_TRUE(Trace::Begin());
  ASSERT_TRUE(timeline.Run("first", nullptr, Nothing).ok());
  ASSERT_TRUE(timeline.Run("second", nullptr, Nothing).ok());
  timeline.Flush();
  std::vector<TraceSpan> device_spans;
  for (const TraceSpan& span : EndTrace()) {
    if (span.category == "device") device_spans.push_back(span);
  }
  ASSERT_EQ(device_spans.size(), 2u);
  EXPECT_EQ(device_spans[0].name, "first");  // marks 2 and 3; mark 1 is the origin
  EXPECT_NEAR(device_spans[0].end_s - device_spans[0].begin_s, 1e-3, 1e-9);
  EXPECT_NEAR(device_spans[1].begin_s - device_spans[0].begin_s, 2e-3, 1e-9);
  EXPECT_GE(device_spans[0].begin_s, begin);
  EXPECT_EQ(device.live, 0);
}

TEST(Trace, AMarkThatFailsCostsItsSpanAlone) {
  for (intptr_t fail = 2; fail <= 3; ++fail) {
    Marked device;
    device.fail_call = fail;
    {
      DeviceTimeline timeline(&device);
      ASSERT_TRUE(Trace::Begin());
      ASSERT_TRUE(timeline.Run("first", nullptr, Nothing).ok());
      ASSERT_TRUE(timeline.Run("second", nullptr, Nothing).ok());
      timeline.Flush();
    }
    const std::map<std::string, int> expected = {{"launch", 2}, {"device", 1}};
    EXPECT_EQ(CountByCategory(EndTrace()), expected) << fail;
    EXPECT_EQ(device.live, 0);
  }
}

TEST(Trace, FailureOfTheWorkIsReturned) {
  Marked device;
  DeviceTimeline timeline(&device);
  ASSERT_TRUE(Trace::Begin());
  const Status status =
      timeline.Run("chunk", nullptr, [] { return Status(Code::kDeviceError, "lost"); });
  EXPECT_EQ(status.message(), "lost");
  timeline.Flush();
  EndTrace();
  EXPECT_EQ(device.live, 0);
}

TEST(Trace, ExecutorTellsExecutionsPhasesAndLaunches) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  ASSERT_TRUE(Trace::Begin());
  for (int i = 0; i < 3; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  m.executor->FlushTrace();
  const std::vector<TraceSpan> spans = EndTrace();
  std::map<std::string, int> count = CountByCategory(spans);
  EXPECT_EQ(count["execution"], 3);
  EXPECT_EQ(count["launch"], static_cast<int>(m.Stats().chunk_launches));
  EXPECT_GT(count["phase"], 3);
  bool named = false;
  for (const TraceSpan& span : spans) named |= span.name == "step split 0: capture";
  EXPECT_TRUE(named);
}

// A device that a profiler looks at.
class Profiled final : public HostDevice {
 public:
  bool profiled() const override { return true; }
  void BeginRange(const std::string& name) override {
    names.push_back(name);
    ++depth;
  }
  void EndRange() override { --depth; }

  std::vector<std::string> names;
  int depth = 0;
};

TEST(Trace, SplitsAndChunksAreRangesOfAProfilerAndAlwaysEnd) {
  Profiled device;
  FaultInjecting faults(&device);
  TestEmitter emitter{ByAlignment::kNothing};
  Executor executor(&faults, &emitter);
  StepBuffers step;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 3; ++i) step.Check(&executor, program, static_cast<float>(i));
  EXPECT_EQ(device.depth, 0);
  device.names.clear();
  step.Check(&executor, program, 4);
  const std::vector<std::string> expected = {"step split 0", "step split 0 chunk 0",
                                             "step split 0 chunk 1", "step split 0 chunk 2"};
  EXPECT_EQ(device.names, expected);
  faults.Fail(DeviceCall::kLaunchGraph, 1);
  step.Check(&executor, program, 5);
  EXPECT_EQ(device.depth, 0) << "a failure ends its range, too";
}

TEST(Trace, GraphsAreWrittenOnePerChunk) {
  Machine m;
  StepBuffers step;
  const auto program = Seal(StepProgram());
  for (int i = 0; i < 2; ++i) step.Check(m.executor.get(), program, static_cast<float>(i));
  std::vector<std::string> files;
  const std::string folder = ::testing::TempDir();
  ASSERT_TRUE(m.executor->WriteGraphs(7, folder, &files).ok());
  ASSERT_EQ(files.size(), m.Stats().live_execs);
  uint64_t nodes = 0;
  for (const std::string& name : files) {
    std::stringstream text;
    text << std::ifstream(folder + "/" + name).rdbuf();
    for (size_t at = 0; (at = text.str().find("[label", at)) != std::string::npos; ++at) ++nodes;
    EXPECT_NE(text.str().find("digraph"), std::string::npos);
  }
  EXPECT_EQ(nodes, m.Stats().live_exec_nodes);
  EXPECT_FALSE(m.executor->WriteGraphs(7, folder + "/no/such/folder", &files).ok());
  files.clear();
  ASSERT_TRUE(m.executor->WriteGraphs(8, folder, &files).ok());
  EXPECT_TRUE(files.empty());
}

}  // namespace
}  // namespace jaxgraph
