// Layers of a decode step for one row, as the planner makes them of a Llama, and their results in
// f64.
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/ffi/cuda/group_case.h"
#include "tests/ffi/cuda/small_nodes.h"
#include "tests/ffi/kernels/random_attention.h"

namespace jaxgraph::testing {

struct StepShape {
  int64_t layers = 1, size = 64, kv_heads = 2, heads = 3, width = 16, hidden = 128, rows = 80;
  DType dtype = DType::kBF16;
  int64_t position = 40;
  int64_t first_index = 0;       // at which the mask begins to count: at + first_index <= position
  double masked = -HUGE_VAL;     // what hidden scores become
  int64_t written = 40;          // the row of the cache
  bool positions_first = false;  // the cache is [positions, heads, width]
  bool residual = false;         // the first norm adds two rows, too
  bool drops = false;            // SET_ROWS beyond the cache writes nothing
  GroupShape spelling;           // of norms and activations
};

// One layer's tensors, for changes and for the reference.
struct LayerNodes {
  TensorRef norm_weight, query, key, value, output, mlp_weight, gate, up, down;  // weights
  TensorRef keys, values;                                                        // the cache
  size_t first = 0;                                                              // of its nodes
};

struct LayerCase : GroupCase {
  std::vector<LayerNodes> layers;
  TensorRef row, added;               // what comes in; `added` with `residual` alone
  TensorRef cos, sin, last_row, out;  // the row so far and the down product
};

// kNodesOfLayer, in this order.
enum LayerNode : size_t {
  kNorm,
  kQuery,
  kKey,
  kValue,
  kRotatedQuery,
  kRotatedKey,
  kSetKeys,
  kSetValues,
  kAttend,
  kOutput,
  kMlpNorm,
  kGate,
  kUp,
  kActivation,
  kDown,
  kNodesOfLayer
};

// Buffer 0 is the arena, buffer 1 scratch memory. Behind the layers stands a norm of what they
// leave.
inline LayerCase MakeLayers(Rng& rng, const StepShape& s) {
  LayerCase c;
  c.buffers.resize(2);
  c.buffers[1].assign(kScratchBytes, kPoison);
  const DType t = s.dtype;
  const int64_t outputs = s.kv_heads * s.heads * s.width;
  const auto arena = [&](DType type, const std::vector<int64_t>& shape) {
    GroupCase unused;
    TensorRef ref = AddDense(&unused, type, shape);
    ref.base = 0;
    ref.offset = static_cast<int64_t>(c.buffers[0].size());
    const size_t bytes = unused.buffers[0].size();
    c.buffers[0].resize(c.buffers[0].size() + (bytes + 255) / 256 * 256, kPoison);
    return ref;
  };
  const auto filled = [&](const std::vector<int64_t>& shape, float scale, float offset = 0) {
    const TensorRef ref = AddDense(&c, t, shape);
    FillQuickly(rng, &c, ref, scale, offset);
    return ref;
  };
  const auto weights = [&](int64_t n, int64_t k) {
    TensorRef ref = filled({1, 1, n, k}, 2.0f / std::sqrt(static_cast<float>(k)));
    std::swap(ref.shape[2], ref.shape[3]);
    std::swap(ref.strides[2], ref.strides[3]);
    return ref;
  };
  const auto product = [&](const TensorRef& row, const TensorRef& matrix) {
    Node node;
    node.op = Op::kMatmul;
    const int64_t k = matrix.shape[2], n = matrix.shape[3];
    const TensorRef out = arena(t, {n});
    node.srcs = {Viewed(row, {1, 1, 1, k}), matrix};
    node.outs = {Viewed(out, {1, 1, 1, n})};
    c.nodes.push_back(node);
    return out;
  };
  GroupShape spelling = s.spelling;
  spelling.dtype = t;
  spelling.k = s.size;
  const auto norm = [&](const TensorRef& row, const TensorRef* added, const TensorRef& weight,
                        TensorRef* sum) {
    spelling.residual = added != nullptr;
    Node node;
    node.op = Op::kRow;
    node.params = NormProgram(spelling);
    node.srcs = {row};
    if (added != nullptr) node.srcs.push_back(*added);
    if (spelling.norm_weight) node.srcs.push_back(weight);
    *sum = row;
    if (added != nullptr) node.outs.push_back(*sum = arena(t, {s.size}));
    node.outs.push_back(arena(t, {s.size}));
    c.nodes.push_back(node);
    return node.outs.back();
  };

  c.row = filled({s.size}, 1.5f);
  if (s.residual) c.added = filled({s.size}, 0.5f);
  for (TensorRef* angle : {&c.cos, &c.sin}) {
    *angle = arena(DType::kF32, {s.width / 2});
    FillRandom(rng, &c, *angle, -1, 1);
  }
  const TensorRef index = arena(DType::kS32, {1});
  const TensorRef position = AddDense(&c, DType::kS32, {1});
  const int64_t at[] = {0};
  Write(c.buffers, index, at, {0, s.written});
  Write(c.buffers, position, at, {0, s.position});

  TensorRef row = c.row, added = c.added;
  bool adds = s.residual;
  for (int64_t i = 0; i < s.layers; ++i) {
    LayerNodes& l = c.layers.emplace_back();
    l.first = c.nodes.size();
    l.norm_weight = filled({s.size}, 0.2f, 1.0f);
    l.query = weights(outputs, s.size);
    l.key = weights(s.kv_heads * s.width, s.size);
    l.value = weights(s.kv_heads * s.width, s.size);
    l.output = weights(s.size, outputs);
    l.mlp_weight = filled({s.size}, 0.2f, 1.0f);
    l.gate = weights(s.hidden, s.size);
    l.up = weights(s.hidden, s.size);
    l.down = weights(s.size, s.hidden);
    for (TensorRef* cache : {&l.keys, &l.values}) {
      *cache = s.positions_first ? filled({1, s.rows, s.kv_heads, s.width}, 1)
                                 : filled({1, s.kv_heads, s.rows, s.width}, 1);
    }

    TensorRef sum;
    const TensorRef normed = norm(row, adds ? &added : nullptr, l.norm_weight, &sum);
    const TensorRef q = Viewed(product(normed, l.query), {s.kv_heads * s.heads, s.width});
    const TensorRef k = Viewed(product(normed, l.key), {s.kv_heads, s.width});
    const TensorRef v = Viewed(product(normed, l.value), {s.kv_heads, s.width});
    const TensorRef q_turned = arena(t, {s.kv_heads * s.heads, s.width});
    const TensorRef k_turned = arena(t, {s.kv_heads, s.width});
    c.nodes.push_back(RotaryNode(q, q_turned, c.cos, c.sin));
    c.nodes.push_back(RotaryNode(k, k_turned, c.cos, c.sin));
    const auto slices = [&](const TensorRef& rows) {
      return s.positions_first ? Viewed(rows, {1, 1, 1, s.kv_heads, s.width})
                               : Viewed(rows, {1, 1, s.kv_heads, 1, s.width});
    };
    const uint8_t dim = s.positions_first ? 1 : 2;
    const IndexMode mode = s.drops ? IndexMode::kFillOrDrop : IndexMode::kClip;
    c.nodes.push_back(SetRowsNode(l.keys, slices(k_turned), {{dim, index}}, mode));
    c.nodes.push_back(SetRowsNode(l.values, slices(v), {{dim, index}}, mode));

    AttentionSpec spec;
    spec.b1 = s.kv_heads;
    spec.g = s.heads;
    spec.d = spec.e = s.width;
    spec.s = s.rows;
    spec.q = spec.k = spec.v = spec.out = t;
    spec.masked_value = s.masked;
    spec.first_index = s.first_index;
    spec.declares_bound = s.first_index >= 0;
    Node attention = MakeAttention(rng, spec).node;
    const int64_t head = s.positions_first ? s.width : s.rows * s.width;
    const int64_t step = s.positions_first ? s.kv_heads * s.width : s.width;
    TensorRef keys = l.keys, values = l.values, seen = position;
    keys.shape = {1, s.kv_heads, s.width, s.rows};
    keys.strides = {0, head, 1, step};
    values.shape = {1, s.kv_heads, s.rows, s.width};
    values.strides = {0, head, step, 1};
    seen.rank = 4;
    seen.shape = {1, s.kv_heads, s.heads, s.rows};
    seen.strides = {};
    const TensorRef attended = arena(t, {1, s.kv_heads, s.heads, s.width});
    attention.srcs = {Viewed(q_turned, {1, s.kv_heads, s.heads, s.width}), keys, values, seen};
    attention.outs = {attended};
    c.nodes.push_back(attention);

    const TensorRef o = product(attended, l.output);
    const TensorRef mlp = norm(sum, &o, l.mlp_weight, &row);
    const TensorRef gate = product(mlp, l.gate), up = product(mlp, l.up);
    Node activation;
    activation.op = Op::kExpr;
    activation.params = SiluProgram(spelling, s.hidden);
    activation.srcs = {gate, up};
    activation.outs = {arena(t, {s.hidden})};
    c.nodes.push_back(activation);
    added = product(activation.outs[0], l.down);
    adds = true;
  }
  c.last_row = row;
  c.out = added;
  TensorRef unused;
  norm(row, &added, filled({s.size}, 0.2f, 1.0f), &unused);
  return c;
}

inline std::vector<ResolvedNode> ResolveLayers(const LayerCase& c,
                                               const std::vector<char*>& bases) {
  std::vector<ResolvedNode> nodes;
  for (const Node& node : c.nodes) {
    ResolvedNode& at = nodes.emplace_back(Resolve(node, bases));
    at.scratch = bases[1];
    if (node.op == Op::kMatmul) at.constant_srcs = 2;
    if (node.op == Op::kAttention) at.constant_srcs = 8;
    if (node.op == Op::kRow) at.constant_srcs = 1u << (node.srcs.size() - 1);
  }
  return nodes;
}

// What the layers leave, in f64 throughout: the row so far and the down product.
struct LayerResults {
  std::vector<double> row, out;
};
inline LayerResults LayersInDouble(const LayerCase& c, const StepShape& s) {
  const auto vector = [&](const TensorRef& t) { return ValuesOf(t, c.buffers); };
  const auto times = [&](const std::vector<double>& x, const TensorRef& w) {
    TensorRef turned = w;  // [out, in]
    std::swap(turned.shape[2], turned.shape[3]);
    std::swap(turned.strides[2], turned.strides[3]);
    const std::vector<double> weights = vector(turned);
    std::vector<double> y(weights.size() / x.size());
    for (size_t n = 0; n < y.size(); ++n)
      for (size_t k = 0; k < x.size(); ++k) y[n] += weights[n * x.size() + k] * x[k];
    return y;
  };
  const auto add = [](std::vector<double> x, const std::vector<double>& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    return x;
  };
  const auto norm = [&](std::vector<double> x, const TensorRef& weight) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
    const std::vector<double> w = vector(weight);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * (s.spelling.norm_weight ? w[i] : 1);
    return x;
  };
  const std::vector<double> cos = vector(c.cos), sin = vector(c.sin);
  const size_t width = s.width, half = width / 2;
  const auto rotate = [&](std::vector<double> x) {
    for (size_t h = 0; h < x.size(); h += width) {
      for (size_t i = 0; i < half; ++i) {
        const double a = x[h + i], b = x[h + half + i];
        x[h + i] = a * cos[i] - b * sin[i];
        x[h + half + i] = b * cos[i] + a * sin[i];
      }
    }
    return x;
  };
  std::vector<double> row = vector(c.row), out(s.size);
  if (s.residual) out = vector(c.added);
  for (const LayerNodes& l : c.layers) {
    row = add(row, out);
    const std::vector<double> x = norm(row, l.norm_weight);
    const std::vector<double> q = rotate(times(x, l.query)), k = rotate(times(x, l.key)),
                              v = times(x, l.value);
    const bool writes = !s.drops || (s.written >= 0 && s.written < s.rows);
    const int64_t written = std::min(std::max<int64_t>(s.written, 0), s.rows - 1);
    const auto cached = [&](const TensorRef& cache, const std::vector<double>& fresh, int64_t head,
                            int64_t at, int64_t d) {
      if (writes && at == written) return fresh[head * width + d];
      const int64_t by_head[] = {0, head, at, d}, by_position[] = {0, at, head, d};
      return Read(c.buffers, cache, s.positions_first ? by_position : by_head).f;
    };
    std::vector<double> attended(q.size());
    for (int64_t h = 0; h < s.kv_heads * s.heads; ++h) {
      const int64_t head = h / s.heads;
      std::vector<double> scores;
      double peak = -HUGE_VAL, total = 0;
      for (int64_t at = 0; at < s.rows; ++at) {
        double score = 0;
        for (size_t d = 0; d < width; ++d)
          score += q[h * width + d] * cached(l.keys, k, head, at, d);
        score /= std::sqrt(static_cast<double>(width));
        scores.push_back(at + s.first_index <= s.position ? score : s.masked);
        peak = std::max(peak, scores.back());
      }
      for (double& score : scores) total += score = std::exp(score - peak);
      for (size_t d = 0; d < width; ++d) {
        for (size_t at = 0; at < scores.size(); ++at)
          attended[h * width + d] += scores[at] / total * cached(l.values, v, head, at, d);
      }
    }
    row = add(row, times(attended, l.output));
    const std::vector<double> y = norm(row, l.mlp_weight);
    std::vector<double> hidden = times(y, l.gate);
    const std::vector<double> up = times(y, l.up);
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] *= up[i] / (1 + std::exp(-hidden[i]));
    out = times(hidden, l.down);
  }
  return {row, out};
}

}  // namespace jaxgraph::testing
