#include "ffi/device/host/host_device.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <new>

#include "ffi/device/host/serial_for.h"
#include "tests/ffi/core/allocations.h"

namespace jaxgraph {
namespace {

struct SetParams {
  int* at;
  int value;
};
const KernelInfo kSet = {"set", sizeof(SetParams), [](const void* params, ParallelFor&) {
                           const auto* p = static_cast<const SetParams*>(params);
                           *p->at = *p->at * 10 + p->value;
                         }};
const KernelInfo kOther = {"other", sizeof(SetParams), kSet.host_function};

struct CountParams {
  int* threads;
};
const KernelInfo kCount = {"count", sizeof(CountParams), [](const void* params, ParallelFor& pool) {
                             *static_cast<const CountParams*>(params)->threads = pool.num_threads();
                           }};

Launch Set(int* at, int value, const KernelInfo* kernel = &kSet) {
  Launch launch;
  launch.kernel = kernel;
  launch.set_params(SetParams{at, value});
  return launch;
}

class HostDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(device_.CreateStream(&stream_).ok());
    ASSERT_TRUE(device_.CreateStream(&side_).ok());
  }
  void TearDown() override {
    device_.DestroyStream(stream_);
    device_.DestroyStream(side_);
    const HandleCounts live = device_.live_handles();
    EXPECT_EQ(live.graphs + live.execs + live.arenas + live.streams + live.events, 0);
  }

  GraphHandle Capture(const std::vector<Launch>& launches, std::vector<NodeHandle>* nodes) {
    GraphHandle graph = nullptr;
    EXPECT_TRUE(device_.BeginCapture(stream_).ok());
    for (const Launch& launch : launches) {
      NodeHandle node = nullptr;
      EXPECT_TRUE(device_.CaptureKernel(launch, stream_, &node).ok());
      nodes->push_back(node);
    }
    EXPECT_TRUE(device_.EndCapture(stream_, &graph).ok());
    return graph;
  }
  GraphHandle Capture(const std::vector<Launch>& launches) {
    std::vector<NodeHandle> nodes;
    return Capture(launches, &nodes);
  }
  void Fork() { EXPECT_TRUE(device_.Fork(stream_, side_).ok()); }
  // One launch, then one on a side stream, joined or put behind each other.
  GraphHandle CaptureFork(bool parallel) {
    NodeHandle node = nullptr;
    GraphHandle graph = nullptr;
    EXPECT_TRUE(device_.BeginCapture(stream_).ok());
    if (parallel) Fork();
    EXPECT_TRUE(device_.CaptureKernel(Set(&value_, 1), stream_, &node).ok());
    if (!parallel) Fork();
    EXPECT_TRUE(device_.CaptureKernel(Set(&value_, 2), side_, &node).ok());
    EXPECT_TRUE(device_.Join(side_, stream_).ok());
    EXPECT_TRUE(device_.CaptureKernel(Set(&value_, 3), stream_, &node).ok());
    EXPECT_TRUE(device_.EndCapture(stream_, &graph).ok());
    return graph;
  }

  HostDevice device_;
  Stream stream_ = nullptr;
  Stream side_ = nullptr;
  int value_ = 0;
};

TEST_F(HostDeviceTest, ReplaysInOrderWithParametersByValue) {
  std::vector<Launch> launches = {Set(&value_, 1), Set(&value_, 2), Set(&value_, 3)};
  const GraphHandle graph = Capture(launches);
  EXPECT_EQ(value_, 0);  // a capture runs nothing
  launches.clear();
  ExecHandle exec = nullptr;
  ASSERT_TRUE(device_.Instantiate(graph, &exec).ok());
  device_.DestroyGraph(graph);
  EXPECT_TRUE(device_.LaunchGraph(exec, nullptr).ok());
  EXPECT_EQ(value_, 123);
  device_.DestroyExec(exec);
}

TEST_F(HostDeviceTest, TheCallersPoolIsUsed) {
  struct Pool final : ParallelFor {
    int num_threads() const override { return 7; }
    void Run(int n, void (*fn)(void*, int), void* ctx) override {
      for (int i = 0; i < n; ++i) fn(ctx, i);
    }
  } pool;
  int threads = 0;
  Launch launch;
  launch.kernel = &kCount;
  launch.set_params(CountParams{&threads});
  ParallelFor* stream = &pool;
  EXPECT_TRUE(device_.LaunchKernel(launch, stream).ok());
  EXPECT_EQ(threads, 7);
  EXPECT_TRUE(device_.LaunchKernel(launch, nullptr).ok());
  EXPECT_EQ(threads, 1);
}

TEST_F(HostDeviceTest, UpdateTakesOtherParametersAndKeepsTheNodes) {
  std::vector<NodeHandle> nodes;
  const GraphHandle graph = Capture({Set(&value_, 1), Set(&value_, 2)}, &nodes);
  ExecHandle exec = nullptr;
  ASSERT_TRUE(device_.Instantiate(graph, &exec).ok());
  Launch wider = Set(&value_, 5);
  wider.grid[0] = 9;
  std::vector<NodeHandle> other_nodes;
  const GraphHandle other = Capture({wider, Set(&value_, 6)}, &other_nodes);
  EXPECT_TRUE(device_.Update(exec, other).ok());
  EXPECT_TRUE(device_.LaunchGraph(exec, nullptr).ok());
  EXPECT_EQ(value_, 56);
  // Patches still address the graph that the executable was instantiated from.
  EXPECT_EQ(device_.Patch(exec, other_nodes[1], Set(&value_, 8)).code(), Code::kInternal);
  EXPECT_TRUE(device_.Patch(exec, nodes[1], Set(&value_, 8)).ok());
  value_ = 0;
  EXPECT_TRUE(device_.LaunchGraph(exec, nullptr).ok());
  EXPECT_EQ(value_, 58);
  device_.DestroyExec(exec);
  device_.DestroyGraph(graph);
  device_.DestroyGraph(other);
}

TEST_F(HostDeviceTest, UpdateRefusesAnotherTopology) {
  const GraphHandle graph = Capture({Set(&value_, 1), Set(&value_, 2)});
  ExecHandle exec = nullptr;
  ASSERT_TRUE(device_.Instantiate(graph, &exec).ok());
  Launch dependent = Set(&value_, 2);
  dependent.dependent = true;
  for (const auto& launches :
       std::vector<std::vector<Launch>>{{Set(&value_, 1)},
                                        {Set(&value_, 1), Set(&value_, 2), Set(&value_, 3)},
                                        {Set(&value_, 1), Set(&value_, 2, &kOther)},
                                        {Set(&value_, 1), dependent}}) {
    const GraphHandle other = Capture(launches);
    EXPECT_EQ(device_.Update(exec, other).code(), Code::kUpdateRefused);
    device_.DestroyGraph(other);
  }
  EXPECT_TRUE(device_.LaunchGraph(exec, nullptr).ok());
  EXPECT_EQ(value_, 12);
  device_.DestroyExec(exec);
  device_.DestroyGraph(graph);
}

TEST_F(HostDeviceTest, EdgesAreTopology) {
  const GraphHandle parallel = CaptureFork(true);
  const GraphHandle serial = CaptureFork(false);
  ExecHandle exec = nullptr;
  ASSERT_TRUE(device_.Instantiate(parallel, &exec).ok());
  EXPECT_EQ(device_.Update(exec, serial).code(), Code::kUpdateRefused);
  EXPECT_TRUE(device_.Update(exec, parallel).ok());
  device_.DestroyExec(exec);
  device_.DestroyGraph(parallel);
  device_.DestroyGraph(serial);
}

TEST_F(HostDeviceTest, ForkThatNobodyJoinedEndsTheCaptureWithAnError) {
  NodeHandle node = nullptr;
  GraphHandle graph = nullptr;
  ASSERT_TRUE(device_.BeginCapture(stream_).ok());
  ASSERT_TRUE(device_.Fork(stream_, side_).ok());
  ASSERT_TRUE(device_.CaptureKernel(Set(&value_, 1), side_, &node).ok());
  EXPECT_EQ(device_.EndCapture(stream_, &graph).code(), Code::kDeviceError);
  EXPECT_EQ(graph, nullptr);
  bool capturing = true;
  EXPECT_TRUE(device_.IsCapturing(side_, &capturing).ok());
  EXPECT_FALSE(capturing);
  graph = Capture({Set(&value_, 1)});  // and the stream is as new
  EXPECT_NE(graph, nullptr);
  device_.DestroyGraph(graph);
}

TEST_F(HostDeviceTest, LaunchOnACapturingStreamIsRecorded) {
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  ASSERT_TRUE(device_.BeginCapture(stream_).ok());
  bool capturing = false;
  EXPECT_TRUE(device_.IsCapturing(stream_, &capturing).ok());
  EXPECT_TRUE(capturing);
  EXPECT_TRUE(device_.LaunchKernel(Set(&value_, 4), stream_).ok());
  EXPECT_EQ(value_, 0);
  ASSERT_TRUE(device_.EndCapture(stream_, &graph).ok());
  ASSERT_TRUE(device_.Instantiate(graph, &exec).ok());
  EXPECT_TRUE(device_.LaunchGraph(exec, nullptr).ok());
  EXPECT_EQ(value_, 4);
  EXPECT_TRUE(device_.LaunchKernel(Set(&value_, 5), stream_).ok());  // no more
  EXPECT_EQ(value_, 45);
  device_.DestroyExec(exec);
  device_.DestroyGraph(graph);
}

TEST_F(HostDeviceTest, DeadHandlesAreFound) {
  std::vector<NodeHandle> nodes;
  const GraphHandle graph = Capture({Set(&value_, 1)}, &nodes);
  ExecHandle exec = nullptr;
  ASSERT_TRUE(device_.Instantiate(graph, &exec).ok());
  Launch other_config = Set(&value_, 2);
  other_config.grid[0] = 2;
  EXPECT_EQ(device_.Patch(exec, nodes[0], other_config).code(), Code::kInternal);
  EXPECT_EQ(device_.Patch(exec, nullptr, Set(&value_, 2)).code(), Code::kInternal);
  device_.DestroyExec(exec);
  EXPECT_EQ(device_.LaunchGraph(exec, nullptr).code(), Code::kInternal);
  EXPECT_EQ(device_.Patch(exec, nodes[0], Set(&value_, 2)).code(), Code::kInternal);
  EXPECT_EQ(device_.Update(exec, graph).code(), Code::kInternal);
  EXPECT_EQ(device_.misuses(), 0);
  device_.DestroyExec(exec);
  EXPECT_EQ(device_.misuses(), 1);
  device_.DestroyGraph(graph);
  EXPECT_EQ(device_.Instantiate(graph, &exec).code(), Code::kInternal);
  EXPECT_EQ(exec, nullptr);
  device_.DestroyGraph(graph);
  EXPECT_EQ(device_.misuses(), 2);
  int nobody = 0;
  device_.ArenaRelease(nullptr, &nobody);
  EXPECT_EQ(device_.misuses(), 3);
  NodeHandle node = nullptr;
  EXPECT_EQ(device_.CaptureKernel(Set(&value_, 1), stream_, &node).code(), Code::kInternal);
}

TEST_F(HostDeviceTest, BadLaunchesAreRefused) {
  Launch launch = Set(&value_, 1);
  launch.params.pop_back();
  EXPECT_EQ(device_.LaunchKernel(launch, nullptr).code(), Code::kInternal);
  static const KernelInfo cuda_only = {"cuda_only", 0};
  launch.kernel = &cuda_only;
  EXPECT_EQ(device_.LaunchKernel(launch, nullptr).code(), Code::kUnsupported);
}

TEST_F(HostDeviceTest, ArenaGrowsByMoving) {
  void* base = nullptr;
  uint64_t capacity = 0;
  bool moved = false;
  ASSERT_TRUE(device_.ArenaReserve(nullptr, 100, &base, &capacity, &moved).ok());
  EXPECT_TRUE(moved);
  EXPECT_GE(capacity, 100u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(base) % 256, 0u);
  void* const first = base;
  ASSERT_TRUE(device_.ArenaReserve(nullptr, capacity, &base, &capacity, &moved).ok());
  EXPECT_FALSE(moved);
  EXPECT_EQ(base, first);
  ASSERT_TRUE(device_.ArenaReserve(nullptr, 100000, &base, &capacity, &moved).ok());
  EXPECT_TRUE(moved);
  static_cast<char*>(base)[99999] = 1;
  EXPECT_EQ(device_.live_handles().arenas, 1);
  void* const second = base;
  EXPECT_EQ(device_.ArenaReserve(nullptr, UINT64_MAX - 1, &base, &capacity, &moved).code(),
            Code::kOutOfMemory);
  EXPECT_FALSE(moved);
  EXPECT_EQ(base, second);
  static_cast<char*>(base)[0] = 1;
  device_.ArenaRelease(nullptr, base);
}

// An exception on the way leaves the caller the arena that it had.
TEST_F(HostDeviceTest, ArenaThatCannotBeNotedIsNotTakenForTheOldOne) {
  for (uint64_t allocation = 1, thrown = 1; thrown > 0; ++allocation) {
    void* base = nullptr;
    uint64_t capacity = 0;
    bool moved = false;
    ASSERT_TRUE(device_.ArenaReserve(nullptr, 1000, &base, &capacity, &moved).ok());
    std::memset(base, 7, capacity);
    void* const first = base;
    thrown = 0;
    failing_allocation = allocation;
    try {
      ASSERT_TRUE(device_.ArenaReserve(nullptr, 100000, &base, &capacity, &moved).ok());
    } catch (const std::bad_alloc&) {
      thrown = 1;
    }
    failing_allocation = 0;
    if (thrown > 0) {
      EXPECT_EQ(base, first);
      EXPECT_EQ(static_cast<char*>(base)[capacity - 1], 7);
    }
    EXPECT_EQ(device_.live_handles().arenas, 1);
    device_.ArenaRelease(nullptr, base);
    EXPECT_GT(allocation + thrown, 1u);  // one at least can fail
  }
  EXPECT_EQ(device_.misuses(), 0);
}

}  // namespace
}  // namespace jaxgraph
