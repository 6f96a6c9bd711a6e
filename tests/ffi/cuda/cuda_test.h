// What the tests of the CUDA device and its kernels share.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/device/cuda/cuda_device.h"
#include "ffi/device/cuda/cuda_query.h"
#include "ffi/kernels/cuda/cuda_emitter.h"

#define ASSERT_OK(expr)                                              \
  do {                                                               \
    const ::jaxgraph::Status status_ = (expr);                       \
    ASSERT_TRUE(status_.ok()) << #expr << ": " << status_.message(); \
  } while (0)
#define ASSERT_CUDA(expr) ASSERT_EQ((expr), cudaSuccess)

namespace jaxgraph::testing {

// An executable and its graph, which are destroyed with it.
struct Recording {
  Recording() = default;
  Recording(const Recording&) = delete;
  ~Recording() {
    if (exec != nullptr) device->DestroyExec(exec);
    if (graph != nullptr) device->DestroyGraph(graph);
  }

  GraphDevice* device = nullptr;
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  std::vector<NodeHandle> nodes;
};

// A CUDA device with a stream as XLA would own it, and another for captures.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
    device_ = MakeCudaDevice(0);
    ASSERT_OK(device_->EnterDevice(&previous_));
    ASSERT_OK(device_->CreateStream(&stream_));
    ASSERT_OK(device_->CreateStream(&capture_));
  }

  void TearDown() override {
    if (device_ == nullptr) return;
    EXPECT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
    if (stream_ != nullptr) device_->DestroyStream(stream_);
    if (capture_ != nullptr) device_->DestroyStream(capture_);
    device_->LeaveDevice(previous_);
    const HandleCounts live = device_->live_handles();
    EXPECT_EQ(live.graphs, 0);
    EXPECT_EQ(live.execs, 0);
    EXPECT_EQ(live.arenas, 0);
    EXPECT_EQ(live.streams, 0);
    EXPECT_EQ(live.events, 0);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error was left behind";
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

  // Captures launches into a graph on the capture stream.
  Status Capture(const std::vector<Launch>& launches, GraphHandle* graph,
                 std::vector<NodeHandle>* nodes) {
    JAXGRAPH_RETURN_IF_ERROR(device_->BeginCapture(capture_));
    Status status;
    for (const Launch& launch : launches) {
      NodeHandle node = nullptr;
      if (status.ok()) status = device_->CaptureKernel(launch, capture_, &node);
      nodes->push_back(node);
    }
    const Status end = device_->EndCapture(capture_, graph);
    return status.ok() ? end : status;
  }

  // Launches as an executable, with the graph that it was made from.
  Status Record(const std::vector<Launch>& launches, Recording* recorded) {
    recorded->device = device_.get();
    JAXGRAPH_RETURN_IF_ERROR(Capture(launches, &recorded->graph, &recorded->nodes));
    return device_->Instantiate(recorded->graph, &recorded->exec);
  }

  std::unique_ptr<GraphDevice> device_;
  int previous_ = 0;
  Stream stream_ = nullptr;
  Stream capture_ = nullptr;
};

// For kernels of thread block clusters, which not all devices have.
class ClusterTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    int capability = 0;
    ASSERT_OK(CudaComputeCapability(0, &capability));
    if (capability / 10 != 9 && capability / 10 != 10) GTEST_SKIP() << "no kernels of clusters";
  }
};

// Device memory that frees itself, in the order of a stream.
class DeviceBytes {
 public:
  DeviceBytes(size_t size, cudaStream_t stream) : size_(size), stream_(stream) {
    EXPECT_EQ(cudaMallocAsync(&data_, size > 0 ? size : 1, stream), cudaSuccess);
  }
  ~DeviceBytes() {
    if (data_ == nullptr) return;
    EXPECT_EQ(cudaFreeAsync(data_, stream_), cudaSuccess);
  }
  DeviceBytes(DeviceBytes&& o) noexcept : data_(o.data_), size_(o.size_), stream_(o.stream_) {
    o.data_ = nullptr;
  }
  DeviceBytes(const DeviceBytes&) = delete;

  char* data() const { return static_cast<char*>(data_); }

  void Upload(const std::vector<char>& from) {
    EXPECT_EQ(cudaMemcpyAsync(data_, from.data(), size_, cudaMemcpyHostToDevice, stream_),
              cudaSuccess);
  }
  std::vector<char> Download() const {
    std::vector<char> to(size_);
    EXPECT_EQ(cudaMemcpyAsync(to.data(), data_, size_, cudaMemcpyDeviceToHost, stream_),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return to;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
  cudaStream_t stream_;
};

}  // namespace jaxgraph::testing
