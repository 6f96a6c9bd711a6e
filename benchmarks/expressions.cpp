// Time of an expression node in a graph, in us: compiled and interpreted kernels, without and with
// dependent launch. cmake --build build -t expressions && build/expressions
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/check.h"
#include "benchmarks/graph_timer.h"
#include "ffi/device/cuda/cuda_device.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "ffi/kernels/cuda/jit/jit.h"
#include "tests/ffi/cuda/decode_nodes.h"

namespace jaxgraph::testing {
namespace {

constexpr int kNodes = 200, kRepetitions = 15;

// Median time of a node in a graph of kNodes like it.
double Measure(GraphDevice& device, const std::vector<Launch>& node, bool dependent) {
  std::vector<Launch> launches;
  for (int i = 0; i < kNodes; ++i) {
    for (Launch launch : node) {
      launch.dependent = dependent && i > 0;
      launches.push_back(std::move(launch));
    }
  }
  return GraphTimer(device, launches).Median(kRepetitions, 1, 0) / kNodes;
}

void Run() {
  auto device = MakeCudaDevice(0);
  int previous = 0;
  Check(device->EnterDevice(&previous));
  Rng rng(1);
  const std::vector<std::pair<const char*, NodeCase>> cases = {
      {"rotary 9x64", Rotary(rng, 9, 64)},
      {"rotary 32x64", Rotary(rng, 32, 64)},
      {"silu product 1536", SiluProduct(rng, 1536)},
      {"silu product 8192", SiluProduct(rng, 8192)},
      {"silu product 524288", SiluProduct(rng, 524288)},
      {"rms norm 576", RmsNorm(rng, 1, 576)},
      {"rms norm 2048", RmsNorm(rng, 1, 2048)},
      {"rms norm 4096", RmsNorm(rng, 1, 4096)},
      {"add, rms norm 2048", RmsNorm(rng, 1, 2048, true)},
      {"rms norm 8x2048", RmsNorm(rng, 8, 2048)},
      {"softmax 32x1024", Softmax(rng, 32, 1024)},
      {"argmax 49152 bf16", Argmax(rng, 49152, kHalf)},
      {"argmax 49152 f32", Argmax(rng, 49152, kSingle)},
      {"argmax 128256 bf16", Argmax(rng, 128256, kHalf)},
      {"argmax 128256 f32", Argmax(rng, 128256, kSingle)},
  };
  std::printf("%-22s %10s %10s %12s %12s\n", "us a node", "compiled", "dependent", "interpreted",
              "dependent");
  for (const auto& [name, c] : cases) {
    std::vector<void*> memory;
    std::vector<char*> addresses;
    for (const auto& buffer : c.buffers) {
      void* p = nullptr;
      CHECK_CUDA(cudaMalloc(&p, buffer.size()));
      CHECK_CUDA(cudaMemcpy(p, buffer.data(), buffer.size(), cudaMemcpyHostToDevice));
      memory.push_back(p);
      addresses.push_back(static_cast<char*>(p));
    }
    std::printf("%-22s", name);
    for (const Emitter* emitter : {&CudaEmitter(), &InterpretingCudaEmitter()}) {
      std::vector<Launch> launches;
      size_t covered = 0;
      Check(emitter->Emit({Resolve(c.node, addresses)}, 0, true, &launches, &covered));
      const double plain = Measure(*device, launches, false);
      const double dependent = Measure(*device, launches, true);
      std::printf(" %10.2f %10.2f", plain, dependent);
    }
    std::printf("\n");
    for (void* p : memory) CHECK_CUDA(cudaFree(p));
  }
  std::printf("%s\n", Jit::Describe().c_str());
  device->LeaveDevice(previous);
}

}  // namespace
}  // namespace jaxgraph::testing

int main() { jaxgraph::testing::Run(); }
