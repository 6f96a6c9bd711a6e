// Runs of small nodes as a decode layer has them between its products: rotary embeddings, rows for
// the cache; and random ones.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/ffi/cuda/group_case.h"
#include "tests/ffi/kernels/random_nodes.h"

namespace jaxgraph::testing {

// Elements [first, first + size) of the last dimension.
inline TensorRef Part(TensorRef t, int64_t first, int64_t size) {
  t.offset += first * t.strides[t.rank - 1] * static_cast<int64_t>(SizeOf(t.dtype));
  t.shape[t.rank - 1] = size;
  return t;
}

// y = x with the two halves of each row of [heads, width] turned by angles [width / 2].
inline Node RotaryNode(const TensorRef& x, const TensorRef& y, TensorRef cosine, TensorRef sine) {
  const int64_t heads = x.shape[0], half = x.shape[1] / 2;
  const DType t = x.dtype, f32 = DType::kF32;
  for (TensorRef* angle : {&cosine, &sine}) {
    angle->rank = 2;
    angle->shape = {heads, half};
    angle->strides = {0, 1};
  }
  Node node;
  node.op = Op::kExpr;
  node.srcs = {Part(x, 0, half), cosine, Part(x, half, half), sine};
  node.outs = {Part(y, 0, half), Part(y, half, half)};
  Assembler a({heads, half}, 4, 2);
  a.Scalar();
  a.Elements();
  const uint8_t x1 = a.Convert(t, f32, a.Load(t, 0)), c = a.Load(f32, 1);
  const uint8_t x2 = a.Convert(t, f32, a.Load(t, 2)), s = a.Load(f32, 3);
  const auto op = [&](ExprOp o, uint8_t l, uint8_t r) { return a.Op2(o, f32, l, r); };
  const uint8_t y1 = op(ExprOp::kSub, op(ExprOp::kMul, x1, c), op(ExprOp::kMul, x2, s));
  const uint8_t y2 = op(ExprOp::kAdd, op(ExprOp::kMul, x2, c), op(ExprOp::kMul, x1, s));
  a.Store(t, 0, a.Convert(f32, t, y1));
  a.Store(t, 1, a.Convert(f32, t, y2));
  node.params = a.Encode();
  return node;
}

inline Node SetRowsNode(const TensorRef& cache, const TensorRef& rows,
                        const std::vector<std::pair<uint8_t, TensorRef>>& indices, IndexMode mode) {
  Node node;
  node.op = Op::kSetRows;
  IndexParams params;
  params.mode = mode;
  node.srcs = {cache, rows};
  for (const auto& [dim, index] : indices) {
    params.dim[params.num_components++] = dim;
    node.srcs.push_back(index);
  }
  node.outs = {cache};
  node.params.assign(reinterpret_cast<const char*>(&params), sizeof params);
  return node;
}

struct LayerShape {
  int64_t batch = 1, heads = 4, kv_heads = 2, width = 64, context = 32;
  bool position_a_row = false;   // else one for all rows
  bool positions_first = false;  // the cache is [batch, context, kv_heads, width]
  DType dtype = DType::kBF16;
  IndexMode mode = IndexMode::kClip;
  int64_t position = 5;
};

// Appends rotary of q, rotary of k, k's row into the cache, v's row into the cache: four nodes. q,
// k and v are [batch * heads, width].
inline void AppendCacheUpdate(Rng& rng, GroupCase* to, const LayerShape& s, const TensorRef& q,
                              const TensorRef& k, const TensorRef& v) {
  GroupCase& c = *to;
  const auto filled = [&](TensorRef t) {
    FillRandom(rng, &c, t, -2, 2);
    return t;
  };
  const auto heads_of = [&](int64_t heads) {
    return AddDense(&c, s.dtype, {s.batch * heads, s.width});
  };
  const TensorRef cosine = filled(AddDense(&c, DType::kF32, {s.width / 2}));
  const TensorRef sine = filled(AddDense(&c, DType::kF32, {s.width / 2}));
  const TensorRef turned_q = heads_of(s.heads), turned_k = heads_of(s.kv_heads);
  const std::vector<int64_t> cache =
      s.positions_first ? std::vector<int64_t>{s.batch, s.context, s.kv_heads, s.width}
                        : std::vector<int64_t>{s.batch, s.kv_heads, s.context, s.width};
  const TensorRef keys = filled(AddDense(&c, s.dtype, cache));
  const TensorRef values = filled(AddDense(&c, s.dtype, cache));
  std::vector<std::pair<uint8_t, TensorRef>> indices;
  const int64_t slices = s.position_a_row ? s.batch : 1;
  if (s.position_a_row) {  // the row's number is an index, too
    const TensorRef row = AddDense(&c, DType::kS32, {s.batch});
    for (int64_t b = 0; b < s.batch; ++b) Write(c.buffers, row, &b, {0, b});
    indices.emplace_back(0, row);
  }
  const TensorRef position = AddDense(&c, DType::kS32, {slices});
  for (int64_t b = 0; b < slices; ++b) Write(c.buffers, position, &b, {0, s.position + 3 * b});
  indices.emplace_back(s.positions_first ? 1 : 2, position);
  if (s.position_a_row) {  // heads and width: whole dimensions, as JAX writes it
    const TensorRef zero = AddDense(&c, DType::kS32, {s.batch});
    for (int64_t b = 0; b < s.batch; ++b) Write(c.buffers, zero, &b, {0, 0});
    indices.emplace_back(s.positions_first ? 2 : 1, zero);
    indices.emplace_back(3, zero);
  }
  // The same memory as [slices, batch or 1, kv heads, 1, width].
  const auto as_rows = [&](TensorRef t) {
    t.rank = 5;
    t.shape = {slices, s.position_a_row ? 1 : s.batch, s.kv_heads, 1, s.width};
    const int64_t row = s.kv_heads * s.width;
    t.strides = {slices > 1 ? row : 0, s.position_a_row ? 0 : row, s.width, 0, 1};
    if (s.positions_first) {
      std::swap(t.shape[2], t.shape[3]);
      std::swap(t.strides[2], t.strides[3]);
    }
    return t;
  };
  c.nodes.push_back(RotaryNode(q, turned_q, cosine, sine));
  c.nodes.push_back(RotaryNode(k, turned_k, cosine, sine));
  c.nodes.push_back(SetRowsNode(keys, as_rows(turned_k), indices, s.mode));
  c.nodes.push_back(SetRowsNode(values, as_rows(v), indices, s.mode));
}
inline GroupCase MakeCacheUpdate(Rng& rng, const LayerShape& s) {
  GroupCase c;
  const auto filled = [&](int64_t heads) {
    const TensorRef t = AddDense(&c, s.dtype, {s.batch * heads, s.width});
    FillRandom(rng, &c, t, -2, 2);
    return t;
  };
  const TensorRef q = filled(s.heads), k = filled(s.kv_heads), v = filled(s.kv_heads);
  AppendCacheUpdate(rng, &c, s, q, k, v);
  return c;
}

// Query, key and value products and what MakeCacheUpdate makes of them.
inline GroupCase MakeHeads(Rng& rng, const GroupShape& s, const LayerShape& layer) {
  GroupCase c = MakeGroup(rng, s);
  std::vector<TensorRef> heads;
  for (const Node& node : c.nodes) {
    if (node.op != Op::kMatmul) continue;
    TensorRef t = node.outs[0];
    const int64_t count = t.num_elements() / layer.width;
    t.rank = 2;
    t.shape = {count, layer.width};
    t.strides = {layer.width, 1};
    heads.push_back(t);
  }
  AppendCacheUpdate(rng, &c, layer, heads[0], heads[1], heads[2]);
  return c;
}

// Appends a node with its buffers.
inline void Append(const NodeCase& from, GroupCase* c) {
  const uint32_t base = static_cast<uint32_t>(c->buffers.size());
  c->buffers.insert(c->buffers.end(), from.buffers.begin(), from.buffers.end());
  Node node = from.node;
  for (TensorRef& t : node.outs) t.base += base;
  for (TensorRef& t : node.srcs) t.base += base;
  c->nodes.push_back(std::move(node));
}

// A random SET_ROWS whose rows are an EXPR's output, or its two outputs one behind the other along
// some dimension; both appended.
inline void AppendFedSetRows(Rng& rng, GroupCase* c) {
  NodeCase set = RandomIndexed(rng, Op::kSetRows);
  const TensorRef old = set.node.srcs[1];
  const std::vector<int64_t> shape(old.shape.begin(), old.shape.begin() + old.rank);
  const TensorRef rows = MakeTensor(rng, &set, old.dtype, shape, Layout::kDense);
  set.node.srcs[1] = rows;
  std::vector<int> even;
  for (int d = 0; d < rows.rank; ++d) {
    if (rows.shape[d] % 2 == 0) even.push_back(d);
  }
  const int cut = even.empty() ? -1 : Pick(rng, even);
  TensorRef part = rows;
  if (cut >= 0) part.shape[cut] /= 2;
  std::vector<int64_t> space(part.shape.begin(), part.shape.begin() + part.rank);
  Node expr;
  expr.op = Op::kExpr;
  Assembler a(space, cut >= 0 ? 2 : 1, cut >= 0 ? 2 : 1);
  a.Scalar();
  a.Elements();
  std::vector<uint8_t> loaded;
  for (int i = 0; i < (cut >= 0 ? 2 : 1); ++i) {
    const TensorRef src = MakeTensor(rng, &set, rows.dtype, space, RandomLayout(rng));
    FillRandom(rng, &set, src, rows.dtype == DType::kPred || IsUnsigned(rows.dtype) ? 0 : -1, 1);
    expr.srcs.push_back(src);
    expr.outs.push_back(part);
    part.offset += part.shape[std::max(cut, 0)] * part.strides[std::max(cut, 0)] *
                   static_cast<int64_t>(SizeOf(part.dtype));
    loaded.push_back(a.Load(rows.dtype, i));
  }
  for (size_t i = 0; i < loaded.size(); ++i) {
    a.Store(rows.dtype, static_cast<int>(i), loaded[loaded.size() - 1 - i]);
  }
  expr.params = a.Encode();
  const uint32_t base = static_cast<uint32_t>(c->buffers.size());
  Append(set, c);
  for (TensorRef& t : expr.outs) t.base += base;
  for (TensorRef& t : expr.srcs) t.base += base;
  c->nodes.insert(c->nodes.end() - 1, std::move(expr));
}

// Inserts an EXPR in front of the last node, a GATHER or SET_ROWS, whose index `src` becomes one of
// its two outputs, which lie element by element side by side.
inline void ComputeIndex(Rng& rng, GroupCase* c, size_t src) {
  Node& user = c->nodes.back();
  const TensorRef values = user.srcs[src];
  const int64_t n = values.shape[0];
  TensorRef pairs = AddDense(c, values.dtype, {n, 2});  // of both outputs
  pairs.rank = 1;
  TensorRef second = pairs;
  second.offset = static_cast<int64_t>(SizeOf(values.dtype));
  Assembler a({n}, 1, 2);
  a.Scalar();
  a.Elements();
  const uint8_t value = a.Load(values.dtype, 0);
  a.Store(values.dtype, 0, value);
  a.Store(values.dtype, 1, a.Op2(ExprOp::kMax, values.dtype, value, value));
  Node expr;
  expr.op = Op::kExpr;
  expr.params = a.Encode();
  expr.srcs = {values};
  expr.outs = {pairs, second};
  user.srcs[src] = Chance(rng, 0.5) ? pairs : second;
  c->nodes.insert(c->nodes.end() - 1, std::move(expr));
}

// Random small nodes, each with memory of its own but for the rows and indices that an EXPR makes.
inline GroupCase RandomSmallNodes(Rng& rng) {
  GroupCase c;
  for (int64_t n = UniformInt(rng, 2, 10); n > 0; --n) {
    if (Chance(rng, 0.4)) {
      AppendFedSetRows(rng, &c);
    } else {
      Append(RandomNode(
                 rng, Pick(rng, std::vector<Op>{Op::kExpr, Op::kSetRows, Op::kGather, Op::kCopy})),
             &c);
    }
    const Node& last = c.nodes.back();
    const size_t first_index = last.op == Op::kGather ? 1 : 2;
    if ((last.op == Op::kGather || last.op == Op::kSetRows) && last.srcs.size() > first_index &&
        Chance(rng, 0.4)) {
      ComputeIndex(rng, &c,
                   static_cast<size_t>(UniformInt(rng, static_cast<int64_t>(first_index),
                                                  static_cast<int64_t>(last.srcs.size()) - 1)));
    }
  }
  return c;
}

}  // namespace jaxgraph::testing
