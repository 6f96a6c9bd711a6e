#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/ffi/cuda/cuda_test.h"

namespace jaxgraph::testing {
namespace {

// Copies bytes: a kernel whose effect is easy to see.
Launch CopyLaunch(char* dst, const char* src, uint64_t bytes) {
  SlotFill fill;
  fill.num_copies = 1;
  fill.copies[0] = {dst, src, bytes};
  Launch launch;
  EXPECT_TRUE(CudaEmitter().EmitSlotFill(fill, &launch).ok());
  return launch;
}

std::vector<char> Pattern(size_t size, int seed) {
  std::vector<char> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(seed + 31 * i);
  return bytes;
}

class CudaDeviceTest : public CudaTest {
 protected:
  static constexpr size_t kBytes = 1000;
  DeviceBytes Buffer(int seed) {
    DeviceBytes buffer(kBytes, stream());
    buffer.Upload(Pattern(kBytes, seed));
    EXPECT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
    return buffer;
  }
};

TEST(CudaQueryTest, NeverThrowsAndNeedsNoDevice) {
  const int count = CudaDeviceCount();
  EXPECT_GE(count, 0);
  int capability = 0;
  EXPECT_EQ(CudaComputeCapability(0, &capability).ok(), count > 0);
  EXPECT_FALSE(CudaComputeCapability(count, &capability).ok());
  // Without a driver every call gives an error, this one too.
  if (count > 0) {
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error was left behind";
  }
}

TEST(CudaQueryTest, ADeviceThatDoesNotExistIsAnError) {
  auto device = MakeCudaDevice(CudaDeviceCount());
  int previous = 0;
  EXPECT_FALSE(device->EnterDevice(&previous).ok());
}

TEST_F(CudaDeviceTest, StreamKnowsItsDevice) {
  int ordinal = -1;
  ASSERT_OK(CudaStreamDevice(stream_, &ordinal));
  EXPECT_EQ(ordinal, 0);
}

TEST_F(CudaDeviceTest, LaunchesRunInStreamOrder) {
  DeviceBytes a = Buffer(1), b = Buffer(2), c = Buffer(3);
  ASSERT_OK(device_->LaunchKernel(CopyLaunch(b.data(), a.data(), kBytes), stream_));
  ASSERT_OK(device_->LaunchKernel(CopyLaunch(c.data(), b.data(), kBytes), stream_));
  EXPECT_EQ(c.Download(), Pattern(kBytes, 1));
}

TEST_F(CudaDeviceTest, CapturedGraphReplays) {
  DeviceBytes a = Buffer(1), b = Buffer(2), c = Buffer(3);
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  std::vector<NodeHandle> nodes;
  ASSERT_OK(
      Capture({CopyLaunch(b.data(), a.data(), kBytes), CopyLaunch(c.data(), b.data(), kBytes)},
              &graph, &nodes));
  EXPECT_NE(nodes[0], nodes[1]);
  EXPECT_EQ(c.Download(), Pattern(kBytes, 3)) << "a capture ran something";
  ASSERT_OK(device_->Instantiate(graph, &exec));
  for (int seed : {1, 7}) {
    a.Upload(Pattern(kBytes, seed));
    ASSERT_OK(device_->LaunchGraph(exec, stream_));
    EXPECT_EQ(c.Download(), Pattern(kBytes, seed));
  }
  device_->DestroyExec(exec);
  device_->DestroyGraph(graph);
}

TEST_F(CudaDeviceTest, MarksTimeWhatLiesBetweenThem) {
  DeviceBytes a = Buffer(1), b = Buffer(2);
  Mark begin = nullptr, middle = nullptr, end = nullptr;
  ASSERT_OK(device_->MakeMark(stream_, &begin));
  for (int i = 0; i < 100; ++i) {
    ASSERT_OK(device_->LaunchKernel(CopyLaunch(b.data(), a.data(), kBytes), stream_));
  }
  ASSERT_OK(device_->MakeMark(stream_, &middle));
  ASSERT_OK(device_->MakeMark(stream_, &end));
  EXPECT_EQ(device_->live_handles().events, 3);
  float work = 0, nothing = 0, all = 0;
  ASSERT_OK(device_->MillisecondsBetween(begin, middle, &work));
  ASSERT_OK(device_->MillisecondsBetween(middle, end, &nothing));
  ASSERT_OK(device_->MillisecondsBetween(begin, end, &all));
  EXPECT_GT(work, nothing);
  EXPECT_NEAR(all, work + nothing, 0.01);
  for (Mark mark : {begin, middle, end}) device_->DestroyMark(mark);
}

TEST_F(CudaDeviceTest, CapturedGraphIsWrittenAsDot) {
  DeviceBytes a = Buffer(1), b = Buffer(2);
  GraphHandle graph = nullptr;
  std::vector<NodeHandle> nodes;
  ASSERT_OK(Capture({CopyLaunch(b.data(), a.data(), kBytes)}, &graph, &nodes));
  const std::string path = ::testing::TempDir() + "/captured.dot";
  ASSERT_OK(device_->WriteDot(graph, path));
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_NE(text.str().find("digraph"), std::string::npos);
  EXPECT_NE(text.str().find("KERNEL"), std::string::npos) << text.str();
  device_->DestroyGraph(graph);
}

TEST_F(CudaDeviceTest, RangesNeedNoProfiler) {
  device_->BeginRange("outer");
  device_->BeginRange("inner");
  device_->EndRange();
  device_->EndRange();
  EXPECT_FALSE(device_->profiled()) << "run this test without a profiler";
}

TEST_F(CudaDeviceTest, IsCapturingSeesForeignCaptures) {
  bool capturing = true;
  ASSERT_OK(device_->IsCapturing(stream_, &capturing));
  EXPECT_FALSE(capturing);
  ASSERT_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(device_->IsCapturing(stream_, &capturing).ok());
  EXPECT_TRUE(capturing);
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(stream(), &graph));
  ASSERT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(CudaDeviceTest, PatchSetsOneNodeOfTheExecutable) {
  DeviceBytes a = Buffer(1), b = Buffer(2), c = Buffer(3), d = Buffer(4);
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  std::vector<NodeHandle> nodes;
  ASSERT_OK(
      Capture({CopyLaunch(b.data(), a.data(), kBytes), CopyLaunch(c.data(), b.data(), kBytes)},
              &graph, &nodes));
  ASSERT_OK(device_->Instantiate(graph, &exec));
  ASSERT_OK(device_->LaunchGraph(exec, stream_));
  // While the launch before may still run: it keeps its own parameters.
  ASSERT_OK(device_->Patch(exec, nodes[0], CopyLaunch(b.data(), d.data(), kBytes)));
  ASSERT_OK(device_->LaunchGraph(exec, stream_));
  EXPECT_EQ(c.Download(), Pattern(kBytes, 4));
  device_->DestroyExec(exec);
  device_->DestroyGraph(graph);
}

TEST_F(CudaDeviceTest, UpdateTakesOverParameters) {
  DeviceBytes a = Buffer(1), b = Buffer(2), c = Buffer(3);
  GraphHandle first = nullptr, second = nullptr;
  ExecHandle exec = nullptr;
  std::vector<NodeHandle> nodes;
  ASSERT_OK(Capture({CopyLaunch(b.data(), a.data(), kBytes)}, &first, &nodes));
  ASSERT_OK(Capture({CopyLaunch(c.data(), a.data(), kBytes)}, &second, &nodes));
  ASSERT_OK(device_->Instantiate(first, &exec));
  ASSERT_OK(device_->Update(exec, second));
  ASSERT_OK(device_->LaunchGraph(exec, stream_));
  EXPECT_EQ(b.Download(), Pattern(kBytes, 2));
  EXPECT_EQ(c.Download(), Pattern(kBytes, 1));
  device_->DestroyExec(exec);
  device_->DestroyGraph(first);
  device_->DestroyGraph(second);
}

TEST_F(CudaDeviceTest, UpdateWithAnotherTopologyIsRefused) {
  DeviceBytes a = Buffer(1), b = Buffer(2), c = Buffer(3);
  GraphHandle one = nullptr, two = nullptr;
  ExecHandle exec = nullptr;
  std::vector<NodeHandle> nodes;
  ASSERT_OK(Capture({CopyLaunch(b.data(), a.data(), kBytes)}, &one, &nodes));
  ASSERT_OK(
      Capture({CopyLaunch(b.data(), a.data(), kBytes), CopyLaunch(c.data(), b.data(), kBytes)},
              &two, &nodes));
  ASSERT_OK(device_->Instantiate(one, &exec));
  EXPECT_EQ(device_->Update(exec, two).code(), Code::kUpdateRefused);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  device_->DestroyExec(exec);
  ASSERT_OK(device_->Instantiate(two, &exec));
  ASSERT_OK(device_->LaunchGraph(exec, stream_));
  EXPECT_EQ(c.Download(), Pattern(kBytes, 1));
  device_->DestroyExec(exec);
  device_->DestroyGraph(one);
  device_->DestroyGraph(two);
}

TEST_F(CudaDeviceTest, ForkAndJoinAreEdges) {
  DeviceBytes a = Buffer(1), b = Buffer(2), c = Buffer(3), d = Buffer(4);
  Stream side = nullptr;
  NodeHandle node = nullptr;
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  ASSERT_OK(device_->CreateStream(&side));
  ASSERT_OK(device_->BeginCapture(capture_));
  ASSERT_OK(device_->CaptureKernel(CopyLaunch(b.data(), a.data(), kBytes), capture_, &node));
  ASSERT_OK(device_->Fork(capture_, side));
  ASSERT_OK(device_->CaptureKernel(CopyLaunch(c.data(), b.data(), kBytes), side, &node));
  ASSERT_OK(device_->Join(side, capture_));
  ASSERT_OK(device_->CaptureKernel(CopyLaunch(d.data(), c.data(), kBytes), capture_, &node));
  ASSERT_OK(device_->EndCapture(capture_, &graph));
  ASSERT_OK(device_->Instantiate(graph, &exec));
  ASSERT_OK(device_->LaunchGraph(exec, stream_));
  EXPECT_EQ(d.Download(), Pattern(kBytes, 1));
  device_->DestroyExec(exec);
  device_->DestroyGraph(graph);
  device_->DestroyStream(side);
}

TEST_F(CudaDeviceTest, AForkWithoutJoinFailsAndTheStreamLivesOn) {
  DeviceBytes a = Buffer(1), b = Buffer(2);
  Stream side = nullptr;
  NodeHandle node = nullptr;
  GraphHandle graph = nullptr;
  ASSERT_OK(device_->CreateStream(&side));
  ASSERT_OK(device_->BeginCapture(capture_));
  ASSERT_OK(device_->Fork(capture_, side));
  ASSERT_OK(device_->CaptureKernel(CopyLaunch(b.data(), a.data(), kBytes), side, &node));
  EXPECT_FALSE(device_->EndCapture(capture_, &graph).ok());
  EXPECT_EQ(graph, nullptr);
  std::vector<NodeHandle> nodes;
  ASSERT_OK(Capture({CopyLaunch(b.data(), a.data(), kBytes)}, &graph, &nodes));
  device_->DestroyGraph(graph);
  device_->DestroyStream(side);
}

TEST_F(CudaDeviceTest, AFailedLaunchLeavesNoErrorBehind) {
  DeviceBytes a = Buffer(1), b = Buffer(2);
  Launch bad = CopyLaunch(b.data(), a.data(), kBytes);
  bad.block[0] = 4096;
  EXPECT_EQ(device_->LaunchKernel(bad, stream_).code(), Code::kDeviceError);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  ASSERT_OK(device_->LaunchKernel(CopyLaunch(b.data(), a.data(), kBytes), stream_));
  EXPECT_EQ(b.Download(), Pattern(kBytes, 1));
}

TEST_F(CudaDeviceTest, AFailureInsideACaptureStillEndsIt) {
  DeviceBytes a = Buffer(1), b = Buffer(2);
  Launch bad = CopyLaunch(b.data(), a.data(), kBytes);
  bad.block[0] = 4096;
  NodeHandle node = nullptr;
  GraphHandle graph = nullptr;
  ASSERT_OK(device_->BeginCapture(capture_));
  EXPECT_FALSE(device_->CaptureKernel(bad, capture_, &node).ok());
  // The runtime may or may not have ended the capture by itself.
  if (device_->EndCapture(capture_, &graph).ok()) device_->DestroyGraph(graph);
  bool capturing = true;
  ASSERT_OK(device_->IsCapturing(capture_, &capturing));
  EXPECT_FALSE(capturing);
}

TEST_F(CudaDeviceTest, MappedArenaGrowsInPlaceAndOldGraphsStayValid) {
  void* base = nullptr;
  uint64_t capacity = 0;
  bool moved = false;
  ASSERT_OK(device_->ArenaReserve(stream_, 1000, &base, &capacity, &moved));
  EXPECT_TRUE(moved);
  EXPECT_GE(capacity, 1000u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(base) % 256, 0u);
  char* arena = static_cast<char*>(base);

  DeviceBytes a = Buffer(1), b = Buffer(2);
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  std::vector<NodeHandle> nodes;
  ASSERT_OK(Capture({CopyLaunch(arena, a.data(), kBytes), CopyLaunch(b.data(), arena, kBytes)},
                    &graph, &nodes));
  ASSERT_OK(device_->Instantiate(graph, &exec));
  for (uint64_t bytes = 4 << 20; bytes <= 64 << 20; bytes *= 2) {
    void* before = base;
    ASSERT_OK(device_->ArenaReserve(stream_, bytes, &base, &capacity, &moved));
    EXPECT_FALSE(moved);
    EXPECT_EQ(base, before);
    EXPECT_GE(capacity, bytes);
    a.Upload(Pattern(kBytes, static_cast<int>(bytes >> 20)));
    ASSERT_OK(device_->LaunchGraph(exec, stream_));
    ASSERT_OK(
        device_->LaunchKernel(CopyLaunch(arena + capacity - kBytes, a.data(), kBytes), stream_));
    EXPECT_EQ(b.Download(), Pattern(kBytes, static_cast<int>(bytes >> 20)));
  }
  device_->DestroyExec(exec);
  device_->DestroyGraph(graph);
  device_->ArenaRelease(stream_, base);
}

TEST_F(CudaDeviceTest, AnArenaThatCannotGrowStaysAsItIs) {
  for (CudaArenaKind kind : {CudaArenaKind::kMappedIfPossible, CudaArenaKind::kMoving}) {
    auto device = MakeCudaDevice(0, kind);
    void* base = nullptr;
    uint64_t capacity = 0;
    bool moved = false;
    ASSERT_OK(device->ArenaReserve(stream_, 1 << 20, &base, &capacity, &moved));
    void* const before = base;
    const uint64_t capacity_before = capacity;
    EXPECT_EQ(device->ArenaReserve(stream_, uint64_t{1} << 45, &base, &capacity, &moved).code(),
              Code::kOutOfMemory);
    EXPECT_EQ(base, before);
    EXPECT_EQ(capacity, capacity_before);
    DeviceBytes a = Buffer(1), b = Buffer(2);
    char* arena = static_cast<char*>(base);
    ASSERT_OK(device->LaunchKernel(CopyLaunch(arena, a.data(), kBytes), stream_));
    ASSERT_OK(device->LaunchKernel(CopyLaunch(b.data(), arena, kBytes), stream_));
    EXPECT_EQ(b.Download(), Pattern(kBytes, 1));
    device->ArenaRelease(stream_, base);
    EXPECT_EQ(device->live_handles().arenas, 0);
  }
}

TEST_F(CudaDeviceTest, MovingArenaReportsItsNewBase) {
  auto device = MakeCudaDevice(0, CudaArenaKind::kMoving);
  void* base = nullptr;
  uint64_t capacity = 0;
  bool moved = false;
  ASSERT_OK(device->ArenaReserve(stream_, 1 << 20, &base, &capacity, &moved));
  ASSERT_OK(device->ArenaReserve(stream_, 1000, &base, &capacity, &moved));
  EXPECT_FALSE(moved);
  void* const before = base;
  ASSERT_OK(device->ArenaReserve(stream_, 64 << 20, &base, &capacity, &moved));
  EXPECT_TRUE(moved);
  EXPECT_NE(base, before);
  EXPECT_GE(capacity, uint64_t{64} << 20);
  device->ArenaRelease(stream_, base);
  EXPECT_EQ(device->live_handles().arenas, 0);
}

TEST_F(CudaDeviceTest, ArenaGrowsWhileSomebodyCapturesOnThisThread) {
  ASSERT_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  void* base = nullptr;
  uint64_t capacity = 0;
  bool moved = false;
  EXPECT_TRUE(device_->ArenaReserve(stream_, 4 << 20, &base, &capacity, &moved).ok());
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(stream(), &graph));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  device_->ArenaRelease(stream_, base);
}

// Needs a process of its own: nothing works after it.
TEST(CudaPoisonedDeathTest, AnIllegalAddressPoisonsTheContext) {
  if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto poison = [] {
    auto device = MakeCudaDevice(0);
    int previous = 0;
    Stream stream = nullptr;
    if (!device->EnterDevice(&previous).ok() || !device->CreateStream(&stream).ok()) std::exit(1);
    void* base = nullptr;
    uint64_t capacity = 0;
    bool moved = false;
    if (!device->ArenaReserve(stream, 1 << 20, &base, &capacity, &moved).ok()) std::exit(1);
    char* const nowhere = reinterpret_cast<char*>(uintptr_t{64});
    if (!device->LaunchKernel(CopyLaunch(nowhere, nowhere + 64, 64), stream).ok()) std::exit(2);
    cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    const Code code = device->LaunchKernel(CopyLaunch(nowhere, nowhere + 64, 64), stream).code();
    if (code != Code::kContextPoisoned) std::exit(3);
    // What the driver says itself is told apart from a mere failure, too.
    const Code grown = device->ArenaReserve(stream, 1 << 26, &base, &capacity, &moved).code();
    std::exit(grown == Code::kOk || grown == Code::kContextPoisoned ? 0 : 4);
  };
  EXPECT_EXIT(poison(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace jaxgraph::testing
