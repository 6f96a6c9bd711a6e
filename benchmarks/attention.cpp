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
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/check.h"
#include "benchmarks/filled_memory.h"
#include "benchmarks/graph_timer.h"
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

TensorRef Tensor(DType t, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& strides = {}) {
  TensorRef r;
  r.dtype = t;
  r = Viewed(r, shape);
  std::copy(strides.begin(), strides.end(), r.strides.begin());
  return r;
}

class Bench {
 public:
  explicit Bench(const Case& c)
      : case_(c),
        cache_bytes_(c.batch * c.kv_heads * c.context * c.width * kItem),
        copies_(std::clamp<int64_t>((int64_t{320} << 20) / (2 * cache_bytes_), 2, kLaunches)),
        row_bytes_(c.batch * c.kv_heads * c.width * kItem),
        caches_(memory_.Take(2 * copies_ * cache_bytes_)),
        activations_(memory_.Take(kActivationBytes)),
        weights_(memory_.Take(kWeights * kModelWidth * kLarge * kItem)) {
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
    return caches_ + (2 * (i % copies_) + values) * cache_bytes_;
  }
  ResolvedNode Attention(int i) const {
    ResolvedNode n;
    n.node = &attention_;
    n.outs = {activations_ + kOutputAt};
    if (attention_.outs.size() > 1) n.outs.push_back(activations_ + kWorkspaceAt);
    n.srcs = {activations_ + kProductAt, Cache(i, false), Cache(i, true), position_};
    return n;
  }
  ResolvedNode SetRows(int i, bool values) const {
    ResolvedNode n;
    n.node = &set_rows_;
    n.outs = {Cache(i, values)};
    n.srcs = {n.outs[0], activations_ + kProductAt, position_ + sizeof(int32_t)};
    return n;
  }
  // Its weights are the `i`-th small ones, or (0) the first large ones.
  ResolvedNode Product(const Node& product, int64_t i) const {
    ResolvedNode n;
    n.node = &product;
    n.outs = {activations_ + kProductAt};
    n.srcs = {activations_ + kInputAt, weights_ + i * kModelWidth * kSmall * kItem};
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
  FilledMemory memory_;
  char *const caches_, *const activations_, *const weights_;
  char* position_ = nullptr;
  Node attention_, set_rows_, large_, small_;
};

// Median time of a replay, in µs.
double TimeGraph(GraphDevice& device, const std::vector<Launch>& launches) {
  return GraphTimer(device, launches).Median(15, 1, 3);
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
