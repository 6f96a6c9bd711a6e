// ATTENTION on CUDA: what the random nodes of kernels_test.cpp meet too seldom.
#include <cstdlib>
#include <string>
#include <vector>

#include "ffi/device/host/serial_for.h"
#include "ffi/kernels/host/host_emitter.h"
#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/kernels/random_attention.h"

namespace jaxgraph::testing {
namespace {

class CudaAttentionTest : public CudaTest {
 protected:
  // Eager, or captured and replayed.
  Buffers Run(const NodeCase& c, bool captured, const Emitter& emitter = CudaEmitter()) {
    std::vector<DeviceBytes> memory;
    std::vector<char*> addresses;
    for (const auto& buffer : c.buffers) {
      memory.emplace_back(buffer.size(), stream());
      memory.back().Upload(buffer);
      addresses.push_back(memory.back().data());
    }
    std::vector<Launch> launches;
    size_t covered = 0;
    EXPECT_TRUE(emitter.Emit({Resolve(c.node, addresses)}, 0, true, &launches, &covered).ok());
    if (captured) {
      GraphHandle graph = nullptr;
      ExecHandle exec = nullptr;
      std::vector<NodeHandle> handles;
      EXPECT_TRUE(Capture(launches, &graph, &handles).ok());
      EXPECT_TRUE(device_->Instantiate(graph, &exec).ok());
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(device_->LaunchGraph(exec, stream_).ok());
      EXPECT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
      device_->DestroyExec(exec);
      device_->DestroyGraph(graph);
    } else {
      for (const Launch& launch : launches) {
        EXPECT_TRUE(device_->LaunchKernel(launch, stream_).ok());
      }
    }
    Buffers result;
    for (const DeviceBytes& m : memory) result.push_back(m.Download());
    return result;
  }

  static Buffers OnHost(const NodeCase& c) {
    Buffers buffers = c.buffers;
    std::vector<Launch> launches;
    size_t covered = 0;
    EXPECT_TRUE(HostEmitter()
                    .Emit({Resolve(c.node, Addresses(buffers))}, 0, true, &launches, &covered)
                    .ok());
    SerialFor serial;
    for (const Launch& launch : launches) {
      launch.kernel->host_function(launch.params.data(), serial);
    }
    return buffers;
  }

  void Check(const NodeCase& c) {
    const Buffers got = Run(c, false);
    ASSERT_TRUE(SameResult(c, got, OnHost(c)));
    ASSERT_TRUE(Run(c, true) == got) << "replay differs from the eager run: " << Describe(c);
  }
};

TEST_F(CudaAttentionTest, RandomNodes) {
  const char* cases = std::getenv("JAXGRAPH_TEST_CASES");
  for (int seed = 0; seed < (cases != nullptr ? std::atoi(cases) : 600); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    ASSERT_NO_FATAL_FAILURE(Check(RandomAttention(rng)));
  }
}

AttentionSpec Decode(DType t, int64_t heads, int64_t group, int64_t width, int64_t s,
                     int64_t position) {
  AttentionSpec spec;
  spec.b1 = heads;
  spec.g = group;
  spec.d = spec.e = width;
  spec.s = s;
  spec.q = spec.k = spec.v = spec.out = t;
  spec.keys = spec.values = CacheLayout::kHeadsLast;
  spec.first_position = spec.last_position = position;
  return spec;
}

TEST_F(CudaAttentionTest, ModelsDecodeSteps) {
  Rng rng(1);
  for (DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int64_t group : {1, 2, 3, 4, 8, 9, 16}) {
      for (int64_t width : {64, 80, 128, 256}) {
        AttentionSpec spec = Decode(t, 3, group, width, 1000, UniformInt(rng, 0, 1001));
        spec.raw = Chance(rng, 0.5) ? t : DType::kF32;
        ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
        spec.bias = true;  // through the interpreter
        ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
      }
    }
  }
}

TEST_F(CudaAttentionTest, BoundsChangeNoBit) {
  Rng rng(2);
  for (int64_t batch : {1, 5, 64}) {
    for (int64_t position : {-1, 0, 31, 32, 33, 511, 512, 1023, 1024}) {
      AttentionSpec spec = Decode(DType::kBF16, 2, 4, 64, 1024, position);
      spec.b0 = batch;
      spec.per_query = true;
      if (position > 3) spec.first_position = position - 3;
      NodeCase c = MakeAttention(rng, spec);
      const Buffers with = Run(c, false);
      reinterpret_cast<AttentionParams*>(c.node.params.data())->bound_source = 0xff;
      ASSERT_TRUE(with == Run(c, false)) << "position " << position;
    }
  }
}

TEST_F(CudaAttentionTest, OlderDevicesGiveTheSameNumbers) {
  Rng rng(3);
  for (int64_t position : {5, 700}) {
    const NodeCase c = MakeAttention(rng, Decode(DType::kBF16, 2, 4, 64, 1024, position));
    ASSERT_TRUE(SameResult(c, Run(c, false, CudaEmitter(kMinComputeCapability)), OnHost(c)));
  }
}

TEST_F(CudaAttentionTest, ARowThatSeesNothingIsNan) {
  Rng rng(4);
  for (DType t : FloatTypes()) {
    const NodeCase c = MakeAttention(rng, Decode(t, 2, 4, 64, 200, -1));
    const Buffers got = Run(c, false);
    ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
      EXPECT_TRUE(std::isnan(Read(got, c.node.outs[0], i).f));
    });
  }
}

TEST_F(CudaAttentionTest, OfNothingIsZero) {
  Rng rng(5);
  AttentionSpec spec = Decode(DType::kBF16, 2, 4, 64, 0, 0);
  spec.causal = false;
  ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, spec)));
}

TEST_F(CudaAttentionTest, WideRows) {  // wider than the streaming kernel takes
  Rng rng(6);
  for (DType t : {DType::kBF16, DType::kF64}) {
    ASSERT_NO_FATAL_FAILURE(Check(MakeAttention(rng, Decode(t, 2, 2, 320, 300, 123))));
  }
}

}  // namespace
}  // namespace jaxgraph::testing
