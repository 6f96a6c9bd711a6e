// Times decode steps of Llama-shaped models in one CUDA graph with dependent launches: whole layers
// as the planner makes them, each with weights and a cache of its own, then the head and its
// argmax. Of each launch of a layer it says by how much a step is shorter without it: what it adds,
// with all that it hides, and what of others it hides. And how many of its clusters find room at
// once.
//
//   cmake --build build -t steps && build/steps [models] [rows] [in,out or out,in]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/check.h"
#include "benchmarks/filled_memory.h"
#include "benchmarks/graph_timer.h"
#include "ffi/device/cuda/cuda_device.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "tests/ffi/cuda/clusters_at_once.h"
#include "tests/ffi/cuda/group_case.h"
#include "tests/ffi/cuda/small_nodes.h"
#include "tests/ffi/kernels/random_attention.h"

namespace jaxgraph::testing {
namespace {

struct Model {
  const char* name;
  int64_t layers, width, heads, kv_heads, head, hidden, vocab;  // as many layers as are timed
};
constexpr Model kModels[] = {{"135m", 30, 576, 9, 3, 64, 1536, 49152},
                             {"1b", 16, 2048, 32, 8, 64, 8192, 128256},
                             {"8b", 6, 4096, 32, 8, 128, 14336, 128256}};
constexpr int64_t kContext = 1024;
constexpr int32_t kPosition = 512;
constexpr DType kType = DType::kBF16;

class Step {
 public:
  Step(const Model& model, int64_t rows, bool along_k) : m_(model), rows_(rows), along_k_(along_k) {
    MakeNodes();
  }

  std::vector<Launch> Emit() const {
    std::vector<ResolvedNode> nodes;
    for (const Node& node : nodes_) {
      ResolvedNode& at = nodes.emplace_back(Resolve(node, bases_));
      at.scratch = scratch_;
      if (node.op == Op::kMatmul) at.constant_srcs = 2;
      if (node.op == Op::kAttention) at.constant_srcs = 8;
      if (node.op == Op::kRow && node.srcs.size() > 1) {  // a norm: its weight
        at.constant_srcs = 1u << (node.srcs.size() - 1);
      }
    }
    std::vector<Launch> launches;
    for (size_t n = 0; n < nodes.size();) {
      size_t covered = 0;
      Check(CudaEmitter().Emit(nodes, n, true, &launches, &covered));
      n += covered;
    }
    launches.front().dependent = false;
    return launches;
  }

  int64_t bytes() const { return bytes_; }

 private:
  TensorRef Take(const std::vector<int64_t>& shape, DType t = kType) {
    TensorRef ref;
    ref.dtype = t;
    ref.base = static_cast<uint32_t>(bases_.size());
    ref = Viewed(ref, shape);
    bases_.push_back(memory_.Take(ref.num_elements() * static_cast<int64_t>(SizeOf(t))));
    return ref;
  }
  TensorRef Product(const TensorRef& row, int64_t k, int64_t n) {
    TensorRef weights = Take({1, 1, k, n});
    if (along_k_) weights.strides = {k * n, k * n, 1, k};
    bytes_ += 2 * k * n;
    Node node;
    node.op = Op::kMatmul;
    const TensorRef out = Row(n);
    node.srcs = {Viewed(row, {1, 1, rows_, k}), weights};
    node.outs = {Viewed(out, {1, 1, rows_, n})};
    nodes_.push_back(node);
    return out;
  }
  TensorRef Norm(const TensorRef& row, const TensorRef* added, TensorRef* sum) {
    GroupShape s;
    s.m = rows_;
    s.k = m_.width;
    s.residual = added != nullptr;
    Node node;
    node.op = Op::kRow;
    node.params = NormProgram(s);
    node.srcs = {row};
    if (added != nullptr) node.srcs.push_back(*added);
    TensorRef weight = Take({m_.width});
    if (rows_ > 1) {
      weight.rank = 2;
      weight.shape = {rows_, m_.width};
      weight.strides = {0, 1};
    }
    node.srcs.push_back(weight);
    *sum = row;
    if (added != nullptr) node.outs.push_back(*sum = Row(m_.width));
    node.outs.push_back(Row(m_.width));
    nodes_.push_back(node);
    return node.outs.back();
  }
  TensorRef Row(int64_t n) { return rows_ == 1 ? Take({n}) : Take({rows_, n}); }

  void MakeNodes() {
    scratch_ = memory_.Take(kScratchBytes);
    const TensorRef cos = Take({m_.head / 2}, DType::kF32), sin = Take({m_.head / 2}, DType::kF32);
    const TensorRef index = Take({1}, DType::kS32), position = Take({1}, DType::kS32);
    for (const TensorRef* t : {&index, &position}) {
      CHECK_CUDA(cudaMemcpy(bases_[t->base], &kPosition, sizeof kPosition, cudaMemcpyHostToDevice));
    }
    TensorRef row = Row(m_.width), added = row;
    bool adds = false;
    for (int64_t l = 0; l < m_.layers; ++l) {
      AddLayer(cos, sin, index, position, adds, &row, &added);
      adds = true;
    }
    TensorRef sum;
    const TensorRef normed = Norm(row, &added, &sum);
    TensorRef logits = Product(normed, m_.width, m_.vocab);
    Node argmax;
    argmax.op = Op::kRow;
    const std::vector<int64_t> shape =
        rows_ == 1 ? std::vector<int64_t>{m_.vocab} : std::vector<int64_t>{rows_, m_.vocab};
    argmax.params = ArgmaxProgram(shape, kType);
    TensorRef out = Take({rows_, 1}, DType::kS32);
    if (rows_ == 1) logits = Viewed(logits, shape);
    out.rank = logits.rank;
    out.shape = logits.shape;
    out.strides = {};
    if (rows_ > 1) out.strides[0] = 1;
    argmax.srcs = {logits};
    argmax.outs = {out};
    nodes_.push_back(argmax);
  }

  void AddLayer(const TensorRef& cos, const TensorRef& sin, const TensorRef& index,
                const TensorRef& position, bool adds, TensorRef* row, TensorRef* added) {
    const int64_t g = m_.heads / m_.kv_heads;
    TensorRef sum;
    const TensorRef normed = Norm(*row, adds ? added : nullptr, &sum);
    const TensorRef q = Product(normed, m_.width, m_.heads * m_.head);
    const TensorRef k = Product(normed, m_.width, m_.kv_heads * m_.head);
    const TensorRef v = Product(normed, m_.width, m_.kv_heads * m_.head);
    const TensorRef q_turned = Take({rows_ * m_.heads, m_.head});
    const TensorRef k_turned = Take({rows_ * m_.kv_heads, m_.head});
    nodes_.push_back(RotaryNode(Viewed(q, {rows_ * m_.heads, m_.head}), q_turned, cos, sin));
    nodes_.push_back(RotaryNode(Viewed(k, {rows_ * m_.kv_heads, m_.head}), k_turned, cos, sin));
    const TensorRef keys = Take({rows_, m_.kv_heads, kContext, m_.head});
    const TensorRef values = Take({rows_, m_.kv_heads, kContext, m_.head});
    const std::vector<int64_t> slice = {1, rows_, m_.kv_heads, 1, m_.head};
    nodes_.push_back(SetRowsNode(keys, Viewed(k_turned, slice), {{2, index}}, IndexMode::kClip));
    nodes_.push_back(SetRowsNode(values, Viewed(v, slice), {{2, index}}, IndexMode::kClip));

    AttentionSpec spec;
    spec.b0 = rows_, spec.b1 = m_.kv_heads, spec.g = g;
    spec.d = spec.e = m_.head, spec.s = kContext;
    spec.q = spec.k = spec.v = spec.out = kType;
    const ScoreProgram scores(spec);
    AttentionParams params;
    params.raw_source = scores.raw_source();
    params.bound_source = 3;
    Node attention;
    attention.op = Op::kAttention;
    attention.params.assign(reinterpret_cast<const char*>(&params), sizeof params);
    attention.params += EncodeExpr(scores.program());
    TensorRef turned_keys = keys, seen = position;
    std::swap(turned_keys.shape[2], turned_keys.shape[3]);
    std::swap(turned_keys.strides[2], turned_keys.strides[3]);
    seen.rank = 4;
    seen.shape = {rows_, m_.kv_heads, g, kContext};
    seen.strides = {};
    const TensorRef attended = Take({rows_, m_.kv_heads, g, m_.head});
    attention.srcs = {Viewed(q_turned, {rows_, m_.kv_heads, g, m_.head}), turned_keys, values,
                      seen};
    attention.outs = {attended};
    nodes_.push_back(attention);
    bytes_ += 4 * rows_ * m_.kv_heads * (kPosition + 1) * m_.head;

    const TensorRef o = Product(attended, m_.heads * m_.head, m_.width);
    const TensorRef mlp = Norm(sum, &o, row);
    const TensorRef gate = Product(mlp, m_.width, m_.hidden);
    const TensorRef up = Product(mlp, m_.width, m_.hidden);
    GroupShape spelling;
    Node activation;
    activation.op = Op::kExpr;
    activation.params = SiluProgram(spelling, rows_ * m_.hidden);
    activation.srcs = {Viewed(gate, {rows_ * m_.hidden}), Viewed(up, {rows_ * m_.hidden})};
    activation.outs = {Take({rows_ * m_.hidden})};
    nodes_.push_back(activation);
    *added = Product(activation.outs[0], m_.hidden, m_.width);
    if (rows_ == 1) *added = Viewed(*added, {m_.width});
  }

  const Model m_;
  const int64_t rows_;
  const bool along_k_;
  FilledMemory memory_;
  std::vector<char*> bases_;
  std::vector<Node> nodes_;
  char* scratch_ = nullptr;
  int64_t bytes_ = 0;
};

// Median microseconds of a replay.
double TimeGraph(GraphDevice& device, std::vector<Launch> launches) {
  launches.front().dependent = false;
  return GraphTimer(device, launches).Median(9, 4);
}

// What each launch of a layer adds, from the attention on.
void PrintParts(GraphDevice& device, const std::vector<Launch>& all, double whole) {
  std::vector<size_t> attentions;
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::string(all[i].kernel->name).rfind("attention", 0) == 0) attentions.push_back(i);
  }
  const size_t period = attentions[1] - attentions[0];
  attentions.pop_back();  // behind the last one stands the head
  for (size_t j = 0; j < period; ++j) {
    std::vector<Launch> rest;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool left_out =
          std::any_of(attentions.begin(), attentions.end(), [&](size_t at) { return i == at + j; });
      if (!left_out) rest.push_back(all[i]);
    }
    const Launch& launch = all[attentions[0] + j];
    const double less = whole - TimeGraph(device, rest);
    std::printf("  %6.2f us  %s, %u blocks of %u KB", less / static_cast<double>(attentions.size()),
                launch.kernel->name, launch.grid[0], launch.shared_bytes / 1024);
    if (launch.cluster > 1) {
      int at_once = 0;
      CHECK_CUDA(ClustersAtOnce(launch, &at_once));
      std::printf(", %u clusters, %d at once", launch.grid[0] / launch.cluster, at_once);
    }
    std::printf("\n");
  }
}

int Main(const std::string& models, int64_t rows, const std::string& layout) {
  const auto device = MakeCudaDevice(0);
  int previous = 0;
  Check(device->EnterDevice(&previous));
  for (const Model& model : kModels) {
    if (models.find(model.name) == std::string::npos) continue;
    const Step step(model, rows, layout == "out,in");
    const std::vector<Launch> launches = step.Emit();
    const double whole = TimeGraph(*device, launches);
    std::printf("%s, %lld rows, [%s], %lld layers and the head: %.1f us, %.2f TB/s\n", model.name,
                static_cast<long long>(rows), layout.c_str(), static_cast<long long>(model.layers),
                whole, static_cast<double>(step.bytes()) / whole / 1e6);
    PrintParts(*device, launches, whole);
  }
  return 0;
}

}  // namespace
}  // namespace jaxgraph::testing

int main(int argc, char** argv) {
  return jaxgraph::testing::Main(argc > 1 ? argv[1] : "1b,8b", argc > 2 ? std::atoi(argv[2]) : 1,
                                 argc > 3 ? argv[3] : "in,out");
}
