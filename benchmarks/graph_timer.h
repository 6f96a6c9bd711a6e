// Launches recorded in a graph, and how long its replays take.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "benchmarks/check.h"
#include "ffi/device/graph_device.h"

namespace jaxgraph {

class GraphTimer {
 public:
  GraphTimer(GraphDevice& device, const std::vector<Launch>& launches) : device_(device) {
    Check(device.CreateStream(&stream_));
    Check(device.BeginCapture(stream_));
    for (const Launch& launch : launches) {
      NodeHandle node = nullptr;
      Check(device.CaptureKernel(launch, stream_, &node));
    }
    Check(device.EndCapture(stream_, &graph_));
    Check(device.Instantiate(graph_, &exec_));
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  GraphTimer(const GraphTimer&) = delete;
  GraphTimer& operator=(const GraphTimer&) = delete;
  ~GraphTimer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    device_.DestroyExec(exec_);
    device_.DestroyGraph(graph_);
    device_.DestroyStream(stream_);
  }

  // Microseconds of a replay, of so many in a row.
  double Time(int replays = 1) {
    const auto stream = static_cast<cudaStream_t>(stream_);
    CHECK_CUDA(cudaEventRecord(begin_, stream));
    for (int i = 0; i < replays; ++i) Check(device_.LaunchGraph(exec_, stream_));
    CHECK_CUDA(cudaEventRecord(end_, stream));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return 1000.0 * ms / replays;
  }
  // The median of `rounds` of those, behind others that warm up.
  double Median(int rounds, int replays = 1, int warmups = 1) {
    for (int i = 0; i < warmups; ++i) Time(replays);
    std::vector<double> times;
    for (int i = 0; i < rounds; ++i) times.push_back(Time(replays));
    std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
    return times[rounds / 2];
  }

 private:
  GraphDevice& device_;
  Stream stream_ = nullptr;
  GraphHandle graph_ = nullptr;
  ExecHandle exec_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace jaxgraph
