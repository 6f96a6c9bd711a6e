// Random nodes of every kind, with buffers: the conformance suite that every device's kernels pass.
//
//   NodeCase c = RandomNode(rng, Op::kGather);
//   ... run c.node through the kernels under test on a copy of c.buffers ...
//   EXPECT_TRUE(SameResult(c, got, want));   // want: the reference's or the host kernels' buffers
#pragma once

#include "ffi/core/sort_key.h"
#include "tests/ffi/kernels/node_case.h"
#include "tests/ffi/kernels/random_attention.h"
#include "tests/ffi/kernels/random_expr.h"

namespace jaxgraph::testing {

inline Layout RandomLayout(Rng& rng) {
  return Pick(rng, std::vector<Layout>{Layout::kDense, Layout::kStrided, Layout::kBroadcast});
}
inline Layout ForOutput(Layout layout) {
  return layout == Layout::kBroadcast ? Layout::kStrided : layout;
}

// A shape of at most about `most` elements, with odd sizes, ones, and now and then a zero.
inline std::vector<int64_t> RandomShape(Rng& rng, int rank, int64_t most) {
  static const std::vector<int64_t> sizes = {1, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 129};
  std::vector<int64_t> shape(rank);
  for (int64_t& n : shape) {
    n = std::min(Pick(rng, sizes), std::max<int64_t>(most, 1));
    most /= n;
  }
  std::shuffle(shape.begin(), shape.end(), rng);
  if (rank > 0 && Chance(rng, 0.03)) shape[UniformInt(rng, 0, rank - 1)] = 0;
  return shape;
}

inline NodeCase RandomExpr(Rng& rng) {
  const int rank = static_cast<int>(UniformInt(rng, 0, kExprMaxRank));
  return ExprGenerator(rng, Op::kExpr, RandomShape(rng, rank, 6000), RandomLayout(rng)).Make();
}

inline NodeCase RandomRow(Rng& rng) {
  auto shape = RandomShape(rng, static_cast<int>(UniformInt(rng, 0, 3)), 40);
  static const std::vector<int64_t> lengths = {1,   2,   3,   16,  64,   129,
                                               511, 512, 513, 576, 1536, 3000};
  shape.push_back(Pick(rng, lengths));
  return ExprGenerator(rng, Op::kRow, shape, RandomLayout(rng)).Make();
}

// Weights of products: f32, bf16, f16 or f64, the left operand mostly of the same type.
inline NodeCase MakeMatmul(Rng& rng, DType lhs, DType rhs, DType out, int64_t b0, int64_t b1,
                           int64_t m, int64_t n, int64_t k, Layout layout) {
  NodeCase c;
  c.node.op = Op::kMatmul;
  c.node.srcs = {MakeTensor(rng, &c, lhs, {b0, b1, m, k}, layout),
                 MakeTensor(rng, &c, rhs, {b0, b1, k, n}, layout)};
  c.node.outs = {MakeTensor(rng, &c, out, {b0, b1, m, n}, ForOutput(layout))};
  for (const TensorRef& t : c.node.srcs) FillRandom(rng, &c, t, -1, 1);
  const bool wide = lhs == DType::kF64 || rhs == DType::kF64;
  const double sum = (wide ? 1e-15 : 2e-7) * 4 * static_cast<double>(k);
  c.tolerance = {sum + UnitOf(out) * std::sqrt(static_cast<double>(k)) * 4};
  return c;
}

// The two layouts of weights that decode steps have: [K, N] with N contiguous, [N, K] with K.
inline void TransposeWeights(NodeCase* c) {
  TensorRef& w = c->node.srcs[1];
  const int64_t k = w.shape[2], n = w.shape[3];
  w.strides = {k * n * w.shape[1], k * n, 1, k};
}

// Makes the right operand a table of matrices, and adds the index that chooses among them.
inline void ChooseMatrices(Rng& rng, NodeCase* c, int64_t matrices, Layout layout) {
  const TensorRef lhs = c->node.srcs[0], rhs = c->node.srcs[1];
  c->node.srcs[1] =
      MakeTensor(rng, c, rhs.dtype, {matrices, 1, rhs.shape[2], rhs.shape[3]}, layout);
  FillRandom(rng, c, c->node.srcs[1], -1, 1);
  const DType t = Pick(rng, IntTypes());
  c->node.srcs.push_back(MakeTensor(rng, c, t, {lhs.shape[0], lhs.shape[1]}, layout));
  FillRandom(rng, c, c->node.srcs[2], IsSigned(t) ? -2 : 0, static_cast<double>(matrices + 2));
}

inline NodeCase RandomMatmul(Rng& rng) {
  static const std::vector<int64_t> rows = {1, 1, 1, 2, 3, 4, 5, 8, 9, 17, 40};
  static const std::vector<int64_t> sizes = {0, 1, 3, 8, 16, 31, 64, 129, 200, 300};
  const DType t = Pick(rng, FloatTypes());
  const DType lhs = Chance(rng, 0.8) ? t : Pick(rng, FloatTypes());
  const DType out = Chance(rng, 0.7) ? t : Pick(rng, FloatTypes());
  const Layout layout = Chance(rng, 0.5) ? Layout::kDense : RandomLayout(rng);
  NodeCase c = MakeMatmul(rng, lhs, t, out, UniformInt(rng, 1, 2), UniformInt(rng, 1, 3),
                          Pick(rng, rows), Pick(rng, sizes), Pick(rng, sizes), layout);
  if (Chance(rng, 0.3)) ChooseMatrices(rng, &c, UniformInt(rng, 1, 4), layout);
  if (layout == Layout::kDense && Chance(rng, 0.5)) TransposeWeights(&c);
  return c;
}

inline DType RandomDType(Rng& rng) {
  return static_cast<DType>(UniformInt(rng, 0, kNumDTypes - 1));
}

// GATHER and SET_ROWS share everything but which tensor is written.
inline NodeCase RandomIndexed(Rng& rng, Op op) {
  NodeCase c;
  c.node.op = op;
  const int rank = static_cast<int>(UniformInt(rng, 1, 4));
  std::vector<int64_t> full = RandomShape(rng, rank, 4000);
  for (int64_t& n : full) n = std::max<int64_t>(n, 1);
  const int64_t n = Pick(rng, std::vector<int64_t>{0, 1, 1, 1, 2, 5, 33});

  IndexParams p;
  p.mode = static_cast<IndexMode>(UniformInt(rng, 0, 2));
  std::vector<int> dims(rank);
  for (int d = 0; d < rank; ++d) dims[d] = d;
  std::shuffle(dims.begin(), dims.end(), rng);
  p.num_components = static_cast<uint8_t>(UniformInt(rng, 0, rank));
  std::vector<int64_t> slices = full;
  slices.insert(slices.begin(), n);
  for (int i = 0; i < p.num_components; ++i) {
    p.dim[i] = static_cast<uint8_t>(dims[i]);
    slices[dims[i] + 1] = Chance(rng, 0.5) ? 1 : UniformInt(rng, 1, full[dims[i]]);
  }

  const DType t = RandomDType(rng);
  const Layout layout = RandomLayout(rng);
  const bool gather = op == Op::kGather;
  TensorRef whole = MakeTensor(rng, &c, t, full, gather ? layout : ForOutput(layout));
  TensorRef part = MakeTensor(rng, &c, t, slices, gather ? ForOutput(layout) : layout);
  const double lo = IsFloat(t) || IsSigned(t) ? -100 : 0, hi = t == DType::kPred ? 1 : 100;
  FillRandom(rng, &c, whole, lo, hi);
  if (!gather) FillRandom(rng, &c, part, lo, hi);
  char fill[8] = {};
  WriteElement(t, {7, 1}, fill);
  std::memcpy(&p.fill, fill, 8);

  c.node.srcs = {whole};
  if (!gather) c.node.srcs.push_back(part);
  for (int i = 0; i < p.num_components; ++i) {
    const DType it = Pick(rng, IntTypes());
    const int64_t past = p.mode == IndexMode::kPromiseInBounds ? 0 : 3;
    const int64_t last = full[p.dim[i]] - slices[p.dim[i] + 1];
    TensorRef index = MakeTensor(rng, &c, it, {n}, layout);
    FillRandom(rng, &c, index, IsSigned(it) ? static_cast<double>(-past) : 0,
               static_cast<double>(last + past));
    c.node.srcs.push_back(index);
  }
  c.node.outs = {gather ? part : whole};
  c.node.params.assign(reinterpret_cast<const char*>(&p), sizeof p);
  c.tolerance = {0};
  return c;
}

inline NodeCase RandomCopy(Rng& rng) {
  NodeCase c;
  c.node.op = Op::kCopy;
  const int rank = static_cast<int>(UniformInt(rng, 0, 6));
  const auto shape = RandomShape(rng, rank, 20000);
  const DType t = RandomDType(rng);
  const Layout layout = RandomLayout(rng);
  c.node.srcs = {MakeTensor(rng, &c, t, shape, layout)};
  c.node.outs = {MakeTensor(rng, &c, t, shape, ForOutput(layout))};
  FillRandom(rng, &c, c.node.srcs[0], IsFloat(t) || IsSigned(t) ? -100 : 0,
             t == DType::kPred ? 1 : 100);
  c.tolerance = {0};
  return c;
}

// Keys with many equals and, among floats, what orders badly.
inline void FillKeys(Rng& rng, NodeCase* c, const TensorRef& t) {
  static const std::vector<double> special = {0.0,          -0.0,          HUGE_VAL, -HUGE_VAL,
                                              std::nan(""), -std::nan(""), 1.0,      -1.0};
  const bool many = Chance(rng, 0.5);
  ForEachIndex(t, [&](const int64_t* index) {
    Value v;
    v.f = Chance(rng, 0.3) ? Pick(rng, special) : UniformReal(rng, -1, 1);
    v.i = many ? UniformInt(rng, 0, t.dtype == DType::kPred ? 1 : 5) : static_cast<int64_t>(rng());
    if (t.dtype == DType::kPred) v.i &= 1;
    Write(c->buffers, t, index, v);
  });
}

// Puts each of so many pieces of the keys in order.
inline void PresortKeys(NodeCase* c, SortOrder order, int64_t pieces) {
  const TensorRef& t = c->node.srcs[0];
  const uint32_t size = static_cast<uint32_t>(SizeOf(t.dtype));
  for (int64_t row = 0; row < t.shape[0]; ++row) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = piece * t.shape[1] / pieces, end = (piece + 1) * t.shape[1] / pieces;
      std::vector<std::pair<uint64_t, uint64_t>> keys;  // with the bits
      const auto place = [&](int64_t i) {
        const int64_t at[] = {row, i};
        return c->buffers[t.base].data() + OffsetOf(t, at);
      };
      for (int64_t i = begin; i < end; ++i) {
        uint64_t bits = 0;
        std::memcpy(&bits, place(i), size);
        keys.emplace_back(SortKey(order, t.dtype, size, bits), bits);
      }
      std::sort(keys.begin(), keys.end());
      for (int64_t i = begin; i < end; ++i) std::memcpy(place(i), &keys[i - begin].second, size);
    }
  }
}

// Of `kept` elements a piece, or all (0); `merged`: as in SortParams.
inline NodeCase MakeSort(Rng& rng, DType keys, int64_t rows, int64_t n, int64_t chunks,
                         int64_t kept, Layout layout, int64_t merged = 0) {
  NodeCase c;
  c.node.op = Op::kSort;
  SortParams p;
  p.chunks = static_cast<uint32_t>(chunks);
  p.order = static_cast<SortOrder>(UniformInt(rng, 0, 1));
  p.merged = static_cast<uint8_t>(merged);
  const int others = static_cast<int>(UniformInt(rng, 0, 3));
  c.node.srcs = {MakeTensor(rng, &c, keys, {rows, n}, merged == 0 ? layout : ForOutput(layout))};
  FillKeys(rng, &c, c.node.srcs[0]);
  if (merged != 0) PresortKeys(&c, p.order, chunks * merged);
  for (int i = 0; i < others; ++i) {
    c.node.srcs.push_back(MakeTensor(rng, &c, RandomDType(rng), {rows, n}, layout));
    FillKeys(rng, &c, c.node.srcs.back());
  }
  const int outs = static_cast<int>(UniformInt(rng, 1, 4));
  for (int i = 0; i < outs; ++i) {
    const int source = static_cast<int>(UniformInt(rng, 0, others + 1));
    p.source[i] = source > others ? kSortPositions : static_cast<uint8_t>(source);
    const DType t = source > others ? DType::kS32 : c.node.srcs[source].dtype;
    const int64_t length = kept == 0 ? n : chunks * kept;
    c.node.outs.push_back(MakeTensor(rng, &c, t, {rows, length}, ForOutput(layout)));
  }
  c.node.params.assign(reinterpret_cast<const char*>(&p), sizeof p);
  c.tolerance.assign(outs, 0);
  return c;
}

inline NodeCase RandomSort(Rng& rng) {
  static const std::vector<int64_t> lengths = {1, 2, 3, 8, 31, 64, 65, 129, 500, 1000};
  const int64_t n = Pick(rng, lengths);
  const int64_t most = std::min<int64_t>(kSortMaxMerged, n);
  const int64_t merged = most < 2 || Chance(rng, 0.5) ? 0 : UniformInt(rng, 2, most);
  const int64_t room = n / std::max<int64_t>(merged, 1);
  const int64_t chunks = Chance(rng, 0.5) ? 1 : UniformInt(rng, 1, std::min<int64_t>(room, 5));
  const int64_t kept = Chance(rng, 0.4) ? 0 : UniformInt(rng, 1, n / chunks);
  return MakeSort(rng, RandomDType(rng), UniformInt(rng, 0, 4), n, chunks, kept, RandomLayout(rng),
                  merged);
}

inline NodeCase RandomNode(Rng& rng, Op op) {
  switch (op) {
    case Op::kExpr:
      return RandomExpr(rng);
    case Op::kRow:
      return RandomRow(rng);
    case Op::kMatmul:
      return RandomMatmul(rng);
    case Op::kGather:
    case Op::kSetRows:
      return RandomIndexed(rng, op);
    case Op::kCopy:
      return RandomCopy(rng);
    case Op::kAttention:
      return RandomAttention(rng);
    case Op::kSort:
      return RandomSort(rng);
    case Op::kView:
      break;
  }
  return {};
}

}  // namespace jaxgraph::testing
