// ATTENTION nodes: the layouts of caches, the score programs of models.
#pragma once

#include "ffi/core/attention.h"
#include "tests/ffi/kernels/node_case.h"
#include "tests/ffi/kernels/random_expr.h"

namespace jaxgraph::testing {

enum class CacheLayout {
  kHeadsFirst,  // [b0, b1, s, d]
  kHeadsLast,   // [b0, s, b1, d]
  kTransposed,  // [b0, b1, d, s]
  kAny,         // whatever a view can make
};

struct AttentionSpec {
  int64_t b0 = 1, b1 = 1, g = 1, d = 16, s = 64, e = 16;
  DType q = DType::kF32, k = DType::kF32, v = DType::kF32, out = DType::kF32;
  DType raw = DType::kF32, masked = DType::kF32;
  CacheLayout keys = CacheLayout::kHeadsFirst, values = CacheLayout::kHeadsFirst;
  bool aligned = true;  // the cache and the queries begin where their buffers do

  bool soft_cap = false;
  bool bias = false;                              // a source of [b0, b1, g, s] that is added
  int64_t window = 0;                             // not 0: only this many positions back are seen
  bool causal = true;                             // masked by index <= position
  bool declares_bound = true;                     // says so in the params
  bool per_query = false;                         // every query has a position of its own
  DType position = DType::kS32;                   // of integers
  int64_t first_position = 0, last_position = 0;  // positions are drawn from these
  double masked_value = -HUGE_VAL;
  int64_t first_index = 0;  // with which the mask begins to count the cache's positions
  bool sink = false;        // every query has one
  DType sink_dtype = DType::kF32;
  int64_t workspace = 0;  // floats; 0: there is none
};

// Keys (along, across: d, s) or values (s, d) in a layout; the shape is [b0, b1, rows, cols].
inline TensorRef MakeCache(Rng& rng, NodeCase* c, DType dtype, const AttentionSpec& spec,
                           CacheLayout layout, bool keys, int64_t width) {
  const int64_t rows = keys ? width : spec.s, cols = keys ? spec.s : width;
  TensorRef t;
  if (layout == CacheLayout::kAny) {
    t = MakeTensor(rng, c, dtype, {spec.b0, spec.b1, rows, cols}, Layout::kBroadcast);
  } else {
    t = MakeTensor(rng, c, dtype, {spec.b0, spec.b1, spec.s, width}, Layout::kDense);
    int64_t head = spec.s * width, position = width, element = 1;
    if (layout == CacheLayout::kHeadsLast) head = width, position = spec.b1 * width;
    if (layout == CacheLayout::kTransposed) position = 1, element = spec.s;
    const int64_t batch = spec.b1 * spec.s * width;
    t.shape = {spec.b0, spec.b1, rows, cols};
    t.strides = {batch, head, keys ? element : position, keys ? position : element};
    if (spec.aligned) t.offset = 0;
  }
  FillRandom(rng, c, t, -1, 1);
  return t;
}

// The program scale, soft cap, bias, mask; loads and stores convert where dtypes differ.
class ScoreProgram {
 public:
  explicit ScoreProgram(const AttentionSpec& spec) : spec_(spec) {
    p_.rank = 4;
    const int64_t shape[] = {spec.b0, spec.b1, spec.g, spec.s};
    std::copy_n(shape, 4, p_.shape);
    p_.num_outs = 1;
    const DType work = spec.masked == DType::kF64 ? DType::kF64 : DType::kF32;
    Load(0, spec.raw, raw_source());
    Convert(0, spec.raw, work);
    Const(1, work, 1 / std::sqrt(std::max(1.0, static_cast<double>(spec.d))));
    Add(ExprOp::kMul, work, 0, 0, 1);
    if (spec.soft_cap) {
      Const(1, work, 2);
      Add(ExprOp::kDiv, work, 0, 0, 1);
      Add(ExprOp::kTanh, work, 0, 0);
      Add(ExprOp::kMul, work, 0, 0, 1);
    }
    if (spec.bias) {
      Load(1, DType::kF32, bias_source());
      Convert(1, DType::kF32, work);
      Add(ExprOp::kAdd, work, 0, 0, 1);
    }
    if (spec.causal) {
      p_.indices[0].strides[3] = 1;
      p_.indices[0].offset = spec.first_index;
      p_.num_indices = 1;
      Add(ExprOp::kIndex, DType::kS64, 2);
      Load(3, spec.position, position_source());
      Convert(3, spec.position, DType::kS64);
      Add(ExprOp::kLe, DType::kS64, 4, 2, 3);
      Const(1, work, spec.masked_value);
      Add(ExprOp::kSelect, work, 0, 4, 1, 0);
      if (spec.window > 0) {
        Add(ExprOp::kSub, DType::kS64, 3, 3, 2);
        Const(2, DType::kS64, static_cast<double>(spec.window));
        Add(ExprOp::kLt, DType::kS64, 4, 3, 2);
        Add(ExprOp::kSelect, work, 0, 4, 1, 0);
      }
    }
    Convert(0, work, spec.masked);
    Add(ExprOp::kStore, spec.masked, 0, 0);
    p_.num_srcs = static_cast<uint8_t>(1 + spec.bias + spec.causal);
    p_.num_stages = 1;
    p_.stages[0] = {0, 0, 0, p_.num_instrs};
  }

  // The bias comes before the raw score, so that the latter is not always the first.
  uint8_t bias_source() const { return 0; }
  uint8_t raw_source() const { return spec_.bias ? 1 : 0; }
  uint8_t position_source() const { return static_cast<uint8_t>(raw_source() + 1); }

  const ExprProgram& program() const { return p_; }

 private:
  void Add(ExprOp op, DType t, uint8_t dst, uint8_t a = 0, uint8_t b = 0, uint8_t c = 0,
           uint16_t aux = 0) {
    p_.instrs[p_.num_instrs++] = {op, t, dst, a, b, c, aux};
  }
  void Load(uint8_t dst, DType t, uint8_t source) { Add(ExprOp::kLoad, t, dst, 0, 0, 0, source); }
  void Convert(uint8_t reg, DType from, DType to) {
    if (from != to) Add(ExprOp::kConvert, to, reg, reg, 0, 0, static_cast<uint16_t>(from));
  }
  void Const(uint8_t dst, DType t, double value) {
    const float narrow = static_cast<float>(value);
    const int64_t integer = IsFloat(t) ? 0 : static_cast<int64_t>(value);
    uint64_t& bits = p_.imms[p_.num_imms];
    if (t == DType::kF64) {
      std::memcpy(&bits, &value, sizeof value);
    } else if (IsFloat(t)) {
      std::memcpy(&bits, &narrow, sizeof narrow);
    } else {
      std::memcpy(&bits, &integer, sizeof integer);
    }
    Add(ExprOp::kConst, t, dst, 0, 0, 0, p_.num_imms++);
  }

  const AttentionSpec& spec_;
  ExprProgram p_;
};

// Gives every query of an attention a sink.
inline TensorRef AddSink(Rng& rng, NodeCase* c, DType dtype, Layout layout) {
  const auto& shape = c->node.outs[0].shape;
  TensorRef sink = MakeTensor(rng, c, dtype, {shape[0], shape[1], shape[2], 1}, layout);
  c->node.params[offsetof(AttentionParams, sink_source)] = static_cast<char>(c->node.srcs.size());
  c->node.srcs.push_back(sink);
  return sink;
}

inline NodeCase MakeAttention(Rng& rng, const AttentionSpec& spec) {
  NodeCase c;
  c.node.op = Op::kAttention;
  const Layout queries = spec.aligned ? Layout::kDense : Layout::kStrided;
  TensorRef q = MakeTensor(rng, &c, spec.q, {spec.b0, spec.b1, spec.g, spec.d}, queries);
  if (spec.aligned) q.offset = 0;
  FillRandom(rng, &c, q, -2, 2);
  c.node.srcs = {q, MakeCache(rng, &c, spec.k, spec, spec.keys, true, spec.d),
                 MakeCache(rng, &c, spec.v, spec, spec.values, false, spec.e)};
  if (spec.bias) {
    c.node.srcs.push_back(
        MakeTensor(rng, &c, DType::kF32, {spec.b0, spec.b1, spec.g, spec.s}, Layout::kBroadcast));
    FillRandom(rng, &c, c.node.srcs.back(), -1, 1);
  }
  AttentionParams params;
  const ScoreProgram scores(spec);
  params.raw_source = scores.raw_source();
  if (spec.causal) {
    if (spec.declares_bound) params.bound_source = static_cast<uint8_t>(c.node.srcs.size());
    const int64_t n = spec.per_query ? spec.g : 1;
    TensorRef t = MakeTensor(rng, &c, spec.position, {spec.b0, 1, n, 1}, Layout::kDense);
    FillRandom(rng, &c, t, static_cast<double>(spec.first_position),
               static_cast<double>(spec.last_position));
    t.shape = {spec.b0, spec.b1, spec.g, spec.s};
    t.strides = {n, 0, spec.per_query ? 1 : 0, 0};
    c.node.srcs.push_back(t);
  }
  c.node.params.assign(reinterpret_cast<const char*>(&params), sizeof params);
  c.node.params += EncodeExpr(scores.program());
  c.node.outs = {MakeTensor(rng, &c, spec.out, {spec.b0, spec.b1, spec.g, spec.e}, queries)};
  if (spec.sink) FillRandom(rng, &c, AddSink(rng, &c, spec.sink_dtype, Layout::kBroadcast), -2, 6);

  // A score's error moves its weight by as much, relatively; an output is a mean of values in
  // [-1, 1]. Narrow scores may round either way, each on its own, so their errors average out.
  const bool wide = spec.masked == DType::kF64 || spec.raw == DType::kF64 ||
                    spec.out == DType::kF64 || spec.q == DType::kF64 || spec.k == DType::kF64 ||
                    spec.v == DType::kF64 || (spec.sink && spec.sink_dtype == DType::kF64);
  const double exact =
      (wide && spec.masked == DType::kF64 && spec.raw == DType::kF64) ? 1e-9 : 2e-5;
  const double narrow = std::max(spec.raw == DType::kF64 ? 0 : UnitOf(spec.raw),
                                 spec.masked == DType::kF64 ? 0 : UnitOf(spec.masked));
  c.tolerance = {exact + UnitOf(spec.out) + (narrow > 1e-4 ? narrow : 0)};
  if (spec.workspace > 0) {
    c.node.outs.push_back(MakeTensor(rng, &c, DType::kF32, {spec.workspace}, Layout::kDense));
    c.node.outs.back().offset = 0;
    c.tolerance.push_back(HUGE_VAL);
  }
  c.node.label = "s=" + std::to_string(spec.s);
  return c;
}

inline AttentionSpec RandomAttentionSpec(Rng& rng) {
  using Sizes = std::vector<int64_t>;
  AttentionSpec spec;
  do {
    spec.b0 = Pick(rng, Sizes{1, 1, 2, 3});
    spec.b1 = Pick(rng, Sizes{1, 2, 3, 8});
    spec.g = Pick(rng, Sizes{1, 1, 2, 3, 4, 4, 5, 7, 8, 16, 17, 33});
    spec.d = Pick(rng, Sizes{1, 3, 8, 16, 40, 64, 64, 80, 100, 128, 256});
    spec.e = Chance(rng, 0.7) ? spec.d : Pick(rng, Sizes{1, 5, 8, 64, 72, 200, 256});
    spec.s = Pick(rng, Sizes{1, 2, 5, 31, 64, 65, 128, 257, 512, 513, 700, 1030, 2050});
  } while (spec.b0 * spec.b1 * spec.g * spec.s * (spec.d + spec.e) > 3000000);

  const DType t = Pick(rng, FloatTypes());
  const auto mostly = [&](DType usual) {
    return Chance(rng, 0.85) ? usual : Pick(rng, FloatTypes());
  };
  spec.q = mostly(t);
  spec.k = mostly(t);
  spec.v = mostly(spec.k);
  spec.out = mostly(t);
  spec.raw = Chance(rng, 0.5) ? spec.q : mostly(DType::kF32);
  spec.masked = Chance(rng, 0.3) ? spec.raw : mostly(DType::kF32);
  const std::vector<CacheLayout> layouts = {CacheLayout::kHeadsFirst, CacheLayout::kHeadsFirst,
                                            CacheLayout::kHeadsLast,  CacheLayout::kHeadsLast,
                                            CacheLayout::kTransposed, CacheLayout::kAny};
  spec.keys = Pick(rng, layouts);
  spec.values = Chance(rng, 0.7) ? spec.keys : Pick(rng, layouts);
  spec.aligned = Chance(rng, 0.7);

  spec.soft_cap = Chance(rng, 0.2);
  spec.bias = Chance(rng, 0.3);
  spec.causal = Chance(rng, 0.8);
  spec.window = Chance(rng, 0.2) ? UniformInt(rng, 1, spec.s + 2) : 0;
  spec.declares_bound = Chance(rng, 0.7);
  spec.per_query = Chance(rng, 0.3);
  spec.position = Pick(rng, IntTypes());
  spec.last_position = UniformInt(rng, 0, spec.s + 2);
  spec.first_position = spec.last_position;
  if (Chance(rng, 0.3)) spec.first_position = UniformInt(rng, 0, spec.last_position);
  if (IsSigned(spec.position) && Chance(rng, 0.1)) spec.first_position = spec.last_position = -1;
  const int64_t most = IntMax(spec.position);
  spec.first_position = std::min(spec.first_position, most);
  spec.last_position = std::min(spec.last_position, most);
  if (Chance(rng, 0.3)) spec.masked_value = -3e4;  // finite in every dtype
  spec.sink = Chance(rng, 0.3);
  spec.sink_dtype = mostly(DType::kF32);
  return spec;
}

inline NodeCase RandomAttention(Rng& rng) { return MakeAttention(rng, RandomAttentionSpec(rng)); }

}  // namespace jaxgraph::testing
