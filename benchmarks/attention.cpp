// Times decode attention in CUDA graphs with dependent launches, two ways:
//   chain   50 launches, one after the other, each over a cache of its own (together larger than
//           the second-level cache): µs a launch, and the rate at which keys and values are read
//   step    layers of [large product, small one, keys and values written, attention, small
//   product],
//           as in a model: µs that the attention adds to a layer
//   floor   the same for a launch in the attention's place that does next to nothing
//
//   cmake --build build -t attention && build/attention [part of a case's name]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/check.h"
#include "ffi/device/cuda/cuda_device.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "tests/ffi/kernels/random_attention.h"

namespace jaxgraph::testing {
namespace {

struct Case {
  const char* name;
  int64_t batch, kv_heads, group, width, context, position;
};
constexpr Case kCases[] = {{"135m", 1, 3, 3, 64, 1024, 512},
                           {"1b", 1, 8, 4, 64, 1024, 512},
                           {"1b, first position", 1, 8, 4, 64, 1024, 0},
                           {"1b, last position", 1, 8, 4, 64, 1024, 1023},
                           {"8b", 1, 8, 4, 128, 1024, 512},
                           {"32 heads", 1, 32, 1, 128, 1024, 512},
                           {"1b, batch 8", 8, 8, 4, 64, 1024, 512},
                           {"1b, batch 64", 64, 8, 4, 64, 1024, 512},
                           {"1b, 8192", 1, 8, 4, 64, 8192, 8000},
                           {"135m, long", 1, 3, 3, 64, 32768, 32000},
                           {"1b, long", 1, 8, 4, 64, 32768, 32000},
                           {"8b, long", 1, 8, 4, 128, 32768, 32000}};

constexpr DType kType = DType::kBF16;
constexpr int64_t kItem = 2;
constexpr int kLaunches = 50;
constexpr int64_t kModelWidth = 2048, kLarge = 16384, kSmall = 2048;  // products of 64 and 8 MB

TensorRef Tensor(DType t, const std::vector<int64_t>& shape, std::vector<int64_t> strides = {}) {
  TensorRef r;
  r.dtype = t;
  r.rank = static_cast<uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), r.shape.begin());
  if (strides.empty()) {
    strides.resize(shape.size());
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = stride;
  }
  std::copy(strides.begin(), strides.end(), r.strides.begin());
  return r;
}

// Device memory, filled with bf16 numbers of both signs between 2^-7 and 2^-3.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
    std::vector<uint16_t> noise(1 << 20);
    uint32_t state = 1;
    for (uint16_t& n : noise) {
      state = state * 1664525u + 1013904223u;
      n = static_cast<uint16_t>(((state >> 16) & 0x81ff) + 0x3c00);
    }
    const int64_t pattern = static_cast<int64_t>(noise.size()) * kItem;
    for (int64_t at = 0; at < bytes; at += pattern) {
      CHECK_CUDA(cudaMemcpy(data_ + at, noise.data(), std::min(pattern, bytes - at),
                            cudaMemcpyHostToDevice));
    }
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  char* at(int64_t offset) const { return data_ + offset; }

 private:
  char* data_ = nullptr;
};

class Bench {
 public:
  explicit Bench(const Case& c)
      : case_(c),
        cache_bytes_(c.batch * c.kv_heads * c.context * c.width * kItem),
        copies_(std::clamp<int64_t>((int64_t{320} << 20) / (2 * cache_bytes_), 2, kLaunches)),
        row_bytes_(c.batch * c.kv_heads * c.width * kItem),
        caches_(2 * copies_ * cache_bytes_),
        activations_(kActivationBytes),
        weights_(kWeights * kModelWidth * kLarge * kItem) {
    const int32_t position = static_cast<int32_t>(c.position);
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&position_), 2 * sizeof position));
    for (int i = 0; i < 2; ++i) {
      CHECK_CUDA(cudaMemcpy(position_ + i * sizeof position, &position, sizeof position,
                            cudaMemcpyHostToDevice));
    }
    MakeNodes();
  }
  ~Bench() { cudaFree(position_); }

  double bytes_read() const {
    return 2.0 * static_cast<double>(row_bytes_) * static_cast<double>(case_.position + 1);
  }

  std::vector<Launch> Chain() const {
    std::vector<ResolvedNode> nodes;
    for (int i = 0; i < kLaunches; ++i) {
      nodes.push_back(Attention(i));
      nodes.back().constant_srcs = 1u << 1 | 1u << 2 | 1u << 3;
    }
    return Emit(nodes);
  }
  enum class Last { kNothing, kSetRows, kAttention };
  std::vector<Launch> Step(Last last) const {
    std::vector<ResolvedNode> nodes;
    for (int i = 0; i < kLaunches; ++i) {
      nodes.push_back(Product(large_, 0));
      nodes.push_back(Product(small_, 1 + 2 * (i % kWeights)));
      nodes.push_back(SetRows(i, false));
      nodes.push_back(SetRows(i, true));
      if (last == Last::kSetRows) nodes.push_back(SetRows(i, true));
      if (last == Last::kAttention) {
        nodes.push_back(Attention(i));
        nodes.back().constant_srcs = 1u << 3;
      }
      nodes.push_back(Product(small_, 2 + 2 * (i % kWeights)));
    }
    return Emit(nodes);
  }

 private:
  static constexpr int64_t kActivationBytes = 1 << 24, kWeights = 3;
  // What products make, what attention makes, what products take: nothing grows from layer to
  // layer.
  static constexpr int64_t kProductAt = 0, kOutputAt = 1 << 21, kInputAt = 1 << 22,
                           kWorkspaceAt = 1 << 23;
  // When the planner brings one along, and more than it needs.
  static constexpr int64_t kLongCache = 4096, kLargeCacheBytes = 1 << 24, kWorkspaceFloats = 300000;

  void MakeNodes() {
    const auto [name, b, h, g, w, s, position] = case_;
    AttentionSpec spec;
    spec.b0 = b, spec.b1 = h, spec.g = g, spec.d = spec.e = w, spec.s = s;
    spec.q = spec.k = spec.v = spec.out = kType;
    const ScoreProgram scores(spec);
    AttentionParams params;
    params.raw_source = scores.raw_source();
    params.bound_source = 3;
    attention_.op = Op::kAttention;
    attention_.params.assign(reinterpret_cast<const char*>(&params), sizeof params);
    attention_.params += EncodeExpr(scores.program());
    attention_.outs = {Tensor(kType, {b, h, g, w})};
    if (s >= kLongCache && 2 * cache_bytes_ >= kLargeCacheBytes) {
      attention_.outs.push_back(Tensor(DType::kF32, {kWorkspaceFloats}));
    }
    attention_.srcs = {
        Tensor(kType, {b, h, g, w}), Tensor(kType, {b, h, w, s}, {h * s * w, s * w, 1, w}),
        Tensor(kType, {b, h, s, w}), Tensor(DType::kS32, {b, h, g, s}, {0, 0, 0, 0})};
    IndexParams index;
    index.num_components = 1;
    index.dim[0] = 2;
    set_rows_.op = Op::kSetRows;
    set_rows_.params.assign(reinterpret_cast<const char*>(&index), sizeof index);
    set_rows_.outs = {Tensor(kType, {b, h, s, w})};
    set_rows_.srcs = {set_rows_.outs[0], Tensor(kType, {1, b, h, 1, w}), Tensor(DType::kS32, {1})};
    for (auto [product, columns] : {std::pair{&large_, kLarge}, std::pair{&small_, kSmall}}) {
      product->op = Op::kMatmul;
      product->outs = {Tensor(kType, {1, 1, 1, columns})};
      product->srcs = {Tensor(kType, {1, 1, 1, kModelWidth}),
                       Tensor(kType, {1, 1, kModelWidth, columns})};
    }
  }

  char* Cache(int i, bool values) const {
    return caches_.at((2 * (i % copies_) + values) * cache_bytes_);
  }
  ResolvedNode Attention(int i) const {
    ResolvedNode n;
    n.node = &attention_;
    n.outs = {activations_.at(kOutputAt)};
    if (attention_.outs.size() > 1) n.outs.push_back(activations_.at(kWorkspaceAt));
    n.srcs = {activations_.at(kProductAt), Cache(i, false), Cache(i, true), position_};
    return n;
  }
  ResolvedNode SetRows(int i, bool values) const {
    ResolvedNode n;
    n.node = &set_rows_;
    n.outs = {Cache(i, values)};
    n.srcs = {n.outs[0], activations_.at(kProductAt), position_ + sizeof(int32_t)};
    return n;
  }
  // Its weights are the `i`-th small ones, or (0) the first large ones.
  ResolvedNode Product(const Node& product, int64_t i) const {
    ResolvedNode n;
    n.node = &product;
    n.outs = {activations_.at(kProductAt)};
    n.srcs = {activations_.at(kInputAt), weights_.at(i * kModelWidth * kSmall * kItem)};
    n.constant_srcs = 2;
    return n;
  }

  static std::vector<Launch> Emit(const std::vector<ResolvedNode>& nodes) {
    std::vector<Launch> launches;
    for (size_t n = 0; n < nodes.size();) {
      size_t covered = 0;
      Check(CudaEmitter().Emit(nodes, n, true, &launches, &covered));
      n += covered;
    }
    launches.front().dependent = false;
    return launches;
  }

  const Case& case_;
  const int64_t cache_bytes_, copies_, row_bytes_;
  Memory caches_, activations_, weights_;
  char* position_ = nullptr;
  Node attention_, set_rows_, large_, small_;
};

// Median time of a replay, in µs.
double TimeGraph(GraphDevice& device, const std::vector<Launch>& launches) {
  Stream stream = nullptr, capture = nullptr;
  Check(device.CreateStream(&stream));
  Check(device.CreateStream(&capture));
  Check(device.BeginCapture(capture));
  for (const Launch& launch : launches) {
    NodeHandle node;
    Check(device.CaptureKernel(launch, capture, &node));
  }
  GraphHandle graph = nullptr;
  ExecHandle exec = nullptr;
  Check(device.EndCapture(capture, &graph));
  Check(device.Instantiate(graph, &exec));
  const auto at = static_cast<cudaStream_t>(stream);
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, at));
    Check(device.LaunchGraph(exec, stream));
    CHECK_CUDA(cudaEventRecord(end, at));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(1000 * ms);
  }
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  device.DestroyExec(exec);
  device.DestroyGraph(graph);
  device.DestroyStream(stream);
  device.DestroyStream(capture);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

int Main(const char* only) {
  const auto device = MakeCudaDevice(0);
  int previous = 0;
  Check(device->EnterDevice(&previous));
  std::printf("%-20s %-18s %6s %6s %8s %8s %8s %8s %8s\n", "case", "kernel", "blocks", "warps",
              "cluster", "chain", "TB/s", "step", "floor");
  for (const Case& c : kCases) {
    if (std::strstr(c.name, only) == nullptr) continue;
    const Bench bench(c);
    const std::vector<Launch> launches = bench.Chain();
    const double chain = TimeGraph(*device, launches) / kLaunches;
    const double none = TimeGraph(*device, bench.Step(Bench::Last::kNothing));
    const double least = TimeGraph(*device, bench.Step(Bench::Last::kSetRows)) - none;
    const double step = TimeGraph(*device, bench.Step(Bench::Last::kAttention)) - none;
    const Launch& first = launches[0];
    std::printf("%-20s %-18s %6u %6u %8u %8.2f %8.2f %8.2f %8.2f\n", c.name, first.kernel->name,
                first.grid[0], first.block[0] / 32, first.cluster, chain,
                bench.bytes_read() / chain / 1e6, step / kLaunches, least / kLaunches);
  }
  return 0;
}

}  // namespace
}  // namespace jaxgraph::testing

int main(int argc, char** argv) { return jaxgraph::testing::Main(argc > 1 ? argv[1] : ""); }
