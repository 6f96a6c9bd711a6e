// GroupCase: a run of nodes as a decode layer has it (norm, products of its row, activation), with
// buffers. Every tensor has a buffer of its own that starts aligned, unless a test moves it.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/expr.h"
#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {

// Assembles an expression program, an instruction a call.
class Assembler {
 public:
  Assembler(const std::vector<int64_t>& shape, int num_srcs, int num_outs) {
    program_.rank = static_cast<uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), program_.shape);
    program_.num_srcs = static_cast<uint8_t>(num_srcs);
    program_.num_outs = static_cast<uint8_t>(num_outs);
  }

  // What follows belongs to the scalar or the element section; each stage has both, in this order.
  void Scalar() {
    ExprStage& stage = program_.stages[program_.num_stages++];
    stage.scalar_begin = stage.scalar_end = stage.elem_begin = stage.elem_end = program_.num_instrs;
    in_elements_ = false;
  }
  void Elements() {
    ExprStage& stage = program_.stages[program_.num_stages - 1];
    stage.elem_begin = stage.elem_end = program_.num_instrs;
    in_elements_ = true;
    element_ = 0;
  }

  // Each gives the register that holds the result.
  uint8_t Load(DType t, int src) { return Add({ExprOp::kLoad, t, 0, 0, 0, 0, Aux(src)}); }
  uint8_t Const(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    program_.imms[program_.num_imms] = bits;
    return Add({ExprOp::kConst, DType::kF32, 0, 0, 0, 0, program_.num_imms++});
  }
  uint8_t Convert(DType from, DType to, uint8_t a) {
    return from == to ? a : Add({ExprOp::kConvert, to, 0, a, 0, 0, Aux(static_cast<int>(from))});
  }
  uint8_t Op1(ExprOp op, DType t, uint8_t a, int aux = 0) {
    return Add({op, t, 0, a, 0, 0, Aux(aux)});
  }
  uint8_t Op2(ExprOp op, DType t, uint8_t a, uint8_t b) { return Add({op, t, 0, a, b, 0, 0}); }
  uint8_t ReduceSum(uint8_t a) { return Reduce(ExprOp::kReduceSum, DType::kF32, a); }
  uint8_t Reduce(ExprOp op, DType t, uint8_t a, int aux = 0) {
    in_elements_ = false;  // only the register is a scalar one
    const uint8_t r = Add({op, t, 0, a, 0, 0, Aux(aux)});
    in_elements_ = true;
    ++program_.stages[program_.num_stages - 1].elem_end;
    --program_.stages[program_.num_stages - 1].scalar_end;
    return r;
  }
  void Store(DType t, int out, uint8_t a) {
    Add({ExprOp::kStore, t, 0, a, 0, 0, Aux(out)});
    --(in_elements_ ? element_ : scalar_);
  }

  std::string Encode() const { return EncodeExpr(program_); }

 private:
  static uint16_t Aux(int value) { return static_cast<uint16_t>(value); }

  uint8_t Add(ExprInstr in) {
    in.dst = in.op == ExprOp::kStore ? uint8_t{0}
             : in_elements_          ? element_
                                     : static_cast<uint8_t>(kExprNumElementRegs + scalar_++);
    if (in_elements_) ++element_;
    program_.instrs[program_.num_instrs++] = in;
    ExprStage& stage = program_.stages[program_.num_stages - 1];
    ++(in_elements_ ? stage.elem_end : stage.scalar_end);
    return in.dst;
  }

  ExprProgram program_;
  bool in_elements_ = false;
  uint8_t element_ = 0, scalar_ = 0;
};

struct GroupShape {
  int64_t m = 1, k = 64;
  std::vector<int64_t> columns = {64};
  bool along_k = true;  // the weights' layout
  DType dtype = DType::kBF16;
  DType out = DType::kBF16;  // of the products
  bool norm = false, residual = false, norm_weight = true, rounds_first = true;
  bool divides = true;  // the mean: a division by the length, or a product with its inverse
  bool squares = true;  // v * v, or integer_pow(v, 2)
  bool turned = false;  // commutative operands the other way round, loads in another order
  bool activation = false;
  bool silu_rounds = true;
  bool argmax = false;  // of the last product's rows
  int64_t before = 0;   // k of a product, in front of the norm, that makes the residual; 0: none
  bool product_first = false;  // of the sum's two
  bool stores_sum = true;
};

struct GroupCase {
  std::vector<Node> nodes;
  Buffers buffers;
  int scratch = -1;  // the buffer that is scratch memory, if there is any
  std::vector<TensorRef> outs() const {
    std::vector<TensorRef> all;
    for (const Node& node : nodes) all.insert(all.end(), node.outs.begin(), node.outs.end());
    return all;
  }
};

inline TensorRef AddDense(GroupCase* c, DType t, const std::vector<int64_t>& shape) {
  TensorRef ref;
  ref.dtype = t;
  ref.base = static_cast<uint32_t>(c->buffers.size());
  ref = Viewed(ref, shape);
  c->buffers.emplace_back(ref.num_elements() * static_cast<int64_t>(SizeOf(t)), kPoison);
  return ref;
}

// Normal-ish numbers of a 16-bit type, quickly: sums of four uniform ones, times `scale`.
inline void FillQuickly(Rng& rng, GroupCase* c, const TensorRef& t, float scale, float offset = 0) {
  uint64_t state = rng() | 1;
  std::vector<char>& bytes = c->buffers[t.base];
  for (size_t at = 0; at < bytes.size(); at += 2) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t bits = state >> 16;
    const int sum = static_cast<int>((bits & 0xfff) + (bits >> 12 & 0xfff) + (bits >> 24 & 0xfff) +
                                     (bits >> 36 & 0xfff)) -
                    2 * 0xfff;
    const float value = offset + scale * static_cast<float>(sum) / 4096.0f;
    WriteElement(t.dtype, {value, 0}, bytes.data() + at);
  }
}

inline std::string NormProgram(const GroupShape& s) {
  constexpr DType f32 = DType::kF32;
  const DType t = s.dtype;
  Assembler a(s.m == 1 ? std::vector<int64_t>{s.k} : std::vector<int64_t>{s.m, s.k},
              1 + s.residual + s.norm_weight, s.residual && s.stores_sum ? 2 : 1);
  const auto binary = [&](ExprOp op, DType type, uint8_t x, uint8_t y) {
    return s.turned ? a.Op2(op, type, y, x) : a.Op2(op, type, x, y);
  };
  const auto sum = [&] {
    if (!s.residual) return a.Load(t, 0);
    if (s.turned) {
      const uint8_t y = a.Load(t, 1);
      return a.Op2(ExprOp::kAdd, t, y, a.Load(t, 0));
    }
    const uint8_t x = a.Load(t, 0);
    return a.Op2(ExprOp::kAdd, t, x, a.Load(t, 1));
  };
  a.Scalar();
  const float length = static_cast<float>(s.k);
  const uint8_t factor = a.Const(s.divides ? length : 1.0f / length);
  const uint8_t eps = a.Const(1e-5f);
  a.Elements();
  const uint8_t x = sum();
  const uint8_t wide = a.Convert(t, f32, x);
  const uint8_t square =
      s.squares ? a.Op2(ExprOp::kMul, f32, wide, wide) : a.Op1(ExprOp::kIntegerPow, f32, wide, 2);
  const uint8_t total = a.ReduceSum(square);
  const bool stores = s.residual && s.stores_sum;
  if (stores) a.Store(t, 0, x);
  a.Scalar();
  const uint8_t mean = s.divides ? a.Op2(ExprOp::kDiv, f32, total, factor)
                                 : binary(ExprOp::kMul, f32, total, factor);
  const uint8_t scale = a.Op1(ExprOp::kRsqrt, f32, binary(ExprOp::kAdd, f32, mean, eps));
  a.Elements();
  uint8_t weight = 0;
  if (s.norm_weight && s.turned) weight = a.Load(t, 1 + s.residual);
  const uint8_t scaled = binary(ExprOp::kMul, f32, a.Convert(t, f32, sum()), scale);
  if (s.norm_weight && !s.turned) weight = a.Load(t, 1 + s.residual);
  uint8_t h = scaled;
  if (s.norm_weight && s.rounds_first) {
    h = binary(ExprOp::kMul, t, a.Convert(f32, t, scaled), weight);
  } else {
    if (s.norm_weight) h = binary(ExprOp::kMul, f32, scaled, a.Convert(t, f32, weight));
    h = a.Convert(f32, t, h);
  }
  a.Store(t, stores, h);
  return a.Encode();
}

inline std::string SiluProgram(const GroupShape& s, int64_t size) {
  const DType t = s.dtype, steps = s.silu_rounds ? t : DType::kF32;
  Assembler a({size}, 2, 1);
  const auto multiply = [&](uint8_t x, uint8_t y) {
    return s.turned ? a.Op2(ExprOp::kMul, steps, y, x) : a.Op2(ExprOp::kMul, steps, x, y);
  };
  a.Scalar();
  a.Elements();
  const uint8_t gate = a.Convert(t, steps, a.Load(t, 0));
  const uint8_t silu = multiply(gate, a.Op1(ExprOp::kLogistic, steps, gate));
  const uint8_t up = a.Convert(t, steps, a.Load(t, 1));
  a.Store(t, 0, a.Convert(steps, t, multiply(silu, up)));
  return a.Encode();
}

inline std::string ArgmaxProgram(const std::vector<int64_t>& shape, DType t,
                                 ExprOp op = ExprOp::kReduceArgmax, DType index = DType::kS32) {
  Assembler a(shape, 1, 1);
  a.Scalar();
  a.Elements();
  const uint8_t best = a.Reduce(op, t, a.Load(t, 0), static_cast<int>(index));
  a.Scalar();
  a.Store(index, 0, best);
  return a.Encode();
}

inline GroupCase MakeGroup(Rng& rng, const GroupShape& s) {
  GroupCase c;
  c.scratch = static_cast<int>(c.buffers.size());
  c.buffers.emplace_back(kScratchBytes, kPoison);
  const auto vectors = [&](int64_t n) {
    return s.m == 1 ? std::vector<int64_t>{n} : std::vector<int64_t>{s.m, n};
  };
  // The same memory as a product's operand: [1, 1, m, n].
  const auto as_matrix = [&](TensorRef t, int64_t n) {
    t.rank = 4;
    t.shape = {1, 1, s.m, n};
    t.strides = {s.m * n, s.m * n, n, 1};
    return t;
  };
  const auto filled = [&](TensorRef t, float scale, float offset = 0) {
    FillQuickly(rng, &c, t, scale, offset);
    return t;
  };
  TensorRef row;
  if (s.norm) {
    Node norm;
    norm.op = Op::kRow;
    norm.params = NormProgram(s);
    norm.srcs.push_back(filled(AddDense(&c, s.dtype, vectors(s.k)), 1.5f));
    if (s.before > 0) {
      Node product;
      product.op = Op::kMatmul;
      const TensorRef in = filled(AddDense(&c, s.dtype, vectors(s.before)), 1);
      TensorRef weights = filled(AddDense(&c, s.dtype, {1, 1, s.before, s.k}),
                                 1.0f / std::sqrt(static_cast<float>(s.before)));
      if (s.along_k) weights.strides = {s.before * s.k, s.before * s.k, 1, s.before};
      product.srcs = {as_matrix(in, s.before), weights};
      norm.srcs.push_back(AddDense(&c, s.dtype, vectors(s.k)));
      product.outs = {as_matrix(norm.srcs.back(), s.k)};
      c.nodes.push_back(product);
      if (s.product_first) std::swap(norm.srcs[0], norm.srcs[1]);
    } else if (s.residual) {
      norm.srcs.push_back(filled(AddDense(&c, s.dtype, vectors(s.k)), 0.5f));
    }
    if (s.norm_weight) {
      TensorRef weight = filled(AddDense(&c, s.dtype, {s.k}), 0.2f, 1.0f);
      if (s.m > 1) {
        weight.rank = 2;
        weight.shape = {s.m, s.k};
        weight.strides = {0, 1};
      }
      norm.srcs.push_back(weight);
    }
    if (s.residual && s.stores_sum) norm.outs.push_back(AddDense(&c, s.dtype, vectors(s.k)));
    row = AddDense(&c, s.dtype, vectors(s.k));
    norm.outs.push_back(row);
    c.nodes.push_back(norm);
  } else {
    row = filled(AddDense(&c, s.dtype, vectors(s.k)), 1);
  }
  const float scale = 2.0f / std::sqrt(static_cast<float>(s.k));
  for (const int64_t n : s.columns) {
    Node product;
    product.op = Op::kMatmul;
    TensorRef weights = filled(AddDense(&c, s.dtype, {1, 1, s.k, n}), scale);
    if (s.along_k) weights.strides = {s.k * n, s.k * n, 1, s.k};
    product.srcs = {as_matrix(row, s.k), weights};
    product.outs = {as_matrix(AddDense(&c, s.out, vectors(n)), n)};
    c.nodes.push_back(product);
  }
  if (s.activation) {
    Node activation;
    activation.op = Op::kExpr;
    const int64_t size = s.m * s.columns[0];
    activation.params = SiluProgram(s, size);
    for (size_t i = 2; i > 0; --i) {
      TensorRef t = c.nodes[c.nodes.size() - i].outs[0];
      t.rank = 1;
      t.shape = {size};
      t.strides = {1};
      activation.srcs.push_back(t);
    }
    activation.outs = {AddDense(&c, s.dtype, {size})};
    c.nodes.push_back(activation);
  }
  if (s.argmax) {
    Node argmax;
    argmax.op = Op::kRow;
    const std::vector<int64_t> shape = vectors(s.columns.back());
    argmax.params = ArgmaxProgram(shape, s.out);
    TensorRef logits = c.nodes.back().outs[0], out = AddDense(&c, DType::kS32, {s.m, 1});
    logits.rank = out.rank = static_cast<uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), logits.shape.begin());
    out.shape = logits.shape;
    out.strides = s.m == 1 ? std::array<int64_t, kMaxRank>{0} : std::array<int64_t, kMaxRank>{1, 0};
    logits.strides = s.m == 1 ? std::array<int64_t, kMaxRank>{1}
                              : std::array<int64_t, kMaxRank>{s.columns.back(), 1};
    argmax.srcs = {logits};
    argmax.outs = {out};
    c.nodes.push_back(argmax);
  }
  return c;
}

inline std::vector<ResolvedNode> ResolveAll(const GroupCase& c, const std::vector<char*>& bases) {
  std::vector<ResolvedNode> nodes;
  for (const Node& node : c.nodes) {
    nodes.push_back(Resolve(node, bases));
    if (c.scratch >= 0) nodes.back().scratch = bases[c.scratch];
    if (node.op == Op::kMatmul) nodes.back().constant_srcs = 2;
  }
  return nodes;
}

inline std::vector<double> ValuesOf(const TensorRef& t, const Buffers& buffers) {
  std::vector<double> x;
  ForEachIndex(t, [&](const int64_t* index) { x.push_back(Read(buffers, t, index).f); });
  return x;
}

// ||got - want|| / ||want||; not a number where either holds one.
inline double Distance(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

}  // namespace jaxgraph::testing
