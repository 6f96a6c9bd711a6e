// Times whole layers of a decode step of small models (docs/kernels.md, "Layers of small models"):
// one chain of layers in one CUDA graph with dependent launches, µs a replay and a layer. The
// digest is of all that the layers leave: equal digests, equal bits.
//
//   cmake --build build -t layers && build/layers [part of a case's name, or =name]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "benchmarks/check.h"
#include "benchmarks/graph_timer.h"
#include "ffi/device/cuda/cuda_device.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "tests/ffi/cuda/layer_case.h"

namespace jaxgraph::testing {
namespace {

struct Case {
  const char* name;
  int64_t layers, size, kv_heads, heads, width, hidden, rows, position;
};
constexpr Case kCases[] = {
    {"135m", 30, 576, 3, 3, 64, 1536, 1024, 512},
    {"135m, last position", 30, 576, 3, 3, 64, 1536, 1024, 1023},
    {"135m, one layer", 1, 576, 3, 3, 64, 1536, 1024, 512},
    {"15m", 6, 288, 6, 1, 48, 768, 256, 100},
};
constexpr int kReplays = 200;

struct Timing {
  double median, least, in_a_row;  // µs; the last is a replay's part of all without a pause
};

class Bench {
 public:
  Bench(GraphDevice& device, const Case& c) : device_(device) {
    Check(device.CreateStream(&stream_));
    StepShape s;
    s.layers = c.layers, s.size = c.size, s.kv_heads = c.kv_heads, s.heads = c.heads;
    s.width = c.width, s.hidden = c.hidden, s.rows = c.rows;
    s.position = s.written = c.position;
    Rng rng(1);
    case_ = MakeLayers(rng, s);
    for (const auto& buffer : case_.buffers) {
      char* data = nullptr;
      CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data), buffer.size()));
      memory_.push_back(data);
    }
    Upload();
    const std::vector<ResolvedNode> nodes = ResolveLayers(case_, memory_);
    // Without the norm behind the layers.
    for (size_t n = 0; n + 1 < nodes.size();) {
      size_t covered = 0;
      Check(CudaEmitter().Emit(nodes, n, true, &launches_, &covered));
      n += covered;
    }
    launches_.front().dependent = false;
  }
  ~Bench() {
    device_.DestroyStream(stream_);
    for (char* data : memory_) cudaFree(data);
  }

  size_t num_launches() const { return launches_.size(); }

  // FNV-1a over what the layers leave.
  uint64_t Digest() {
    Upload();
    for (const Launch& launch : launches_) Check(device_.LaunchKernel(launch, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream()));
    uint64_t digest = 0xcbf29ce484222325u;
    const auto add = [&](const TensorRef& t) {
      std::vector<char> bytes(2 * t.num_elements());
      CHECK_CUDA(cudaMemcpy(bytes.data(), memory_[t.base] + t.offset, bytes.size(),
                            cudaMemcpyDeviceToHost));
      for (const char b : bytes) digest = (digest ^ static_cast<uint8_t>(b)) * 0x100000001b3u;
    };
    add(case_.out);
    add(case_.last_row);
    for (const LayerNodes& l : case_.layers) {
      add(l.keys);
      add(l.values);
    }
    return digest;
  }

  Timing Time() {
    GraphTimer timer(device_, launches_);
    std::vector<double> times;
    for (int i = 0; i < kReplays; ++i) times.push_back(timer.Time());
    Timing t;
    t.in_a_row = timer.Time(kReplays);
    std::sort(times.begin(), times.end());
    t.median = times[kReplays / 2];
    t.least = times[0];
    return t;
  }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }
  void Upload() {
    for (size_t b = 0; b < memory_.size(); ++b) {
      CHECK_CUDA(cudaMemcpy(memory_[b], case_.buffers[b].data(), case_.buffers[b].size(),
                            cudaMemcpyHostToDevice));
    }
  }

  GraphDevice& device_;
  Stream stream_ = nullptr;
  LayerCase case_;
  std::vector<char*> memory_;
  std::vector<Launch> launches_;
};

int Main(const char* only) {
  const auto device = MakeCudaDevice(0);
  int previous = 0;
  Check(device->EnterDevice(&previous));
  std::printf("%-20s %8s %8s %8s %8s %8s  %s\n", "case", "launches", "median", "least", "in a row",
              "a layer", "digest");
  for (const Case& c : kCases) {
    if (only[0] == '=' ? std::strcmp(c.name, only + 1) != 0
                       : std::strstr(c.name, only) == nullptr) {
      continue;
    }
    Bench bench(*device, c);
    const uint64_t digest = bench.Digest();
    const Timing t = bench.Time();
    std::printf("%-20s %8zu %8.1f %8.1f %8.1f %8.2f  %016llx\n", c.name, bench.num_launches(),
                t.median, t.least, t.in_a_row, t.median / static_cast<double>(c.layers),
                static_cast<unsigned long long>(digest));
  }
  return 0;
}

}  // namespace
}  // namespace jaxgraph::testing

int main(int argc, char** argv) { return jaxgraph::testing::Main(argc > 1 ? argv[1] : ""); }
