// The expressions of a decode step, as the planner makes them, for tests and timings.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ffi/core/expr.h"
#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {

// Writes a program instruction by instruction; element registers and scalar ones are taken in turn.
class NodeBuilder {
 public:
  NodeBuilder(Rng& rng, Op op, const std::vector<int64_t>& shape) : rng_(rng) {
    case_.node.op = op;
    program_.rank = static_cast<uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), program_.shape);
    program_.num_stages = 1;
  }

  // A tensor at the start of a buffer of its own, broadcast along dimensions of stride 0.
  TensorRef Tensor(DType t, const std::vector<int64_t>& strides) {
    std::vector<int64_t> shape(program_.shape, program_.shape + program_.rank);
    TensorRef ref = MakeTensor(rng_, &case_, t, shape, Layout::kDense);
    ref.offset = 0;
    if (!strides.empty()) std::copy(strides.begin(), strides.end(), ref.strides.begin());
    FillRandom(rng_, &case_, ref, -2, 2);
    return ref;
  }
  uint16_t Source(const TensorRef& t) {
    case_.node.srcs.push_back(t);
    return program_.num_srcs++;
  }
  uint16_t Out(const TensorRef& t) {
    case_.node.outs.push_back(t);
    case_.tolerance.push_back(0);
    return program_.num_outs++;
  }
  uint16_t Source(DType t, const std::vector<int64_t>& strides = {}) {
    return Source(Tensor(t, strides));
  }
  uint16_t Out(DType t) { return Out(Tensor(t, {})); }

  uint8_t Load(uint16_t src) { return Do(ExprOp::kLoad, case_.node.srcs[src].dtype, 0, 0, 0, src); }
  uint8_t Const(float v) {
    std::memcpy(&program_.imms[program_.num_imms], &v, sizeof v);
    return Do(ExprOp::kConst, DType::kF32, 0, 0, 0, program_.num_imms++);
  }
  uint8_t Convert(uint8_t a, DType from, DType to) {
    return Do(ExprOp::kConvert, to, a, 0, 0, static_cast<uint16_t>(from));
  }
  uint8_t Do(ExprOp op, DType t, uint8_t a, uint8_t b = 0, uint8_t c = 0, uint16_t aux = 0) {
    const bool scalar = in_scalar_ || op >= ExprOp::kReduceSum;
    const uint8_t dst = scalar ? scalars_++ : elements_++;
    Append({op, t, dst, a, b, c, aux});
    return dst;
  }
  void Store(uint16_t out, uint8_t a) {
    Append({ExprOp::kStore, case_.node.outs[out].dtype, 0, a, 0, 0, out});
  }

  // Sections in turn: EXPR has one element section; ROW a scalar and an element section a stage.
  void Elements() {
    in_scalar_ = false;
    elements_ = 0;
    Stage().elem_begin = program_.num_instrs;
  }
  void NextStage() {
    ++program_.num_stages;
    in_scalar_ = true;
    Stage() = {program_.num_instrs, program_.num_instrs, program_.num_instrs, program_.num_instrs};
  }

  NodeCase Make() {
    case_.node.params = EncodeExpr(program_);
    return std::move(case_);
  }

 private:
  ExprStage& Stage() { return program_.stages[program_.num_stages - 1]; }
  void Append(const ExprInstr& instr) {
    program_.instrs[program_.num_instrs++] = instr;
    if (in_scalar_) {
      Stage().scalar_end = Stage().elem_begin = Stage().elem_end = program_.num_instrs;
    } else {
      Stage().elem_end = program_.num_instrs;
    }
  }

  Rng& rng_;
  NodeCase case_;
  ExprProgram program_;
  bool in_scalar_ = true;
  uint8_t elements_ = 0, scalars_ = kExprNumElementRegs;
};

constexpr DType kHalf = DType::kBF16, kSingle = DType::kF32;

// Both halves of each head turned by the position's angles: two stores.
inline NodeCase Rotary(Rng& rng, int64_t heads, int64_t width) {
  const int64_t half = width / 2;
  NodeBuilder b(rng, Op::kExpr, {heads, half});
  const uint16_t x1 = b.Source(kHalf), x2 = b.Source(kHalf);
  const uint16_t cosine = b.Source(kSingle, {0, 1}), sine = b.Source(kSingle, {0, 1});
  const uint16_t y1 = b.Out(kHalf), y2 = b.Out(kHalf);
  b.Elements();
  const uint8_t a1 = b.Convert(b.Load(x1), kHalf, kSingle);
  const uint8_t a2 = b.Convert(b.Load(x2), kHalf, kSingle);
  const uint8_t c = b.Load(cosine), s = b.Load(sine);
  const auto mul = [&](uint8_t x, uint8_t y) { return b.Do(ExprOp::kMul, kSingle, x, y); };
  const uint8_t p = b.Do(ExprOp::kSub, kSingle, mul(a1, c), mul(a2, s));
  const uint8_t q = b.Do(ExprOp::kAdd, kSingle, mul(a2, c), mul(a1, s));
  b.Store(y1, b.Convert(p, kSingle, kHalf));
  b.Store(y2, b.Convert(q, kSingle, kHalf));
  return b.Make();
}

// gate * sigmoid(gate) * up
inline NodeCase SiluProduct(Rng& rng, int64_t width) {
  NodeBuilder b(rng, Op::kExpr, {1, width});
  const uint16_t gate = b.Source(kHalf), up = b.Source(kHalf), out = b.Out(kHalf);
  b.Elements();
  const uint8_t g = b.Load(gate);
  const uint8_t s = b.Do(ExprOp::kLogistic, kHalf, g);
  const uint8_t a = b.Do(ExprOp::kMul, kHalf, g, s);
  b.Store(out, b.Do(ExprOp::kMul, kHalf, a, b.Load(up)));
  return b.Make();
}

// With `residual`: the sum of two rows is stored, too, over the first of them if `in_place`.
inline NodeCase RmsNorm(Rng& rng, int64_t rows, int64_t width, bool residual = false,
                        bool in_place = false) {
  NodeBuilder b(rng, Op::kRow, {rows, width});
  const TensorRef x = b.Tensor(kHalf, {});
  const uint16_t first = b.Source(x);
  const uint16_t weight = b.Source(kHalf, {0, 1}), out = b.Out(kHalf);
  const uint16_t added = residual ? b.Source(kHalf) : 0;
  const uint16_t sum = residual ? b.Out(in_place ? x : b.Tensor(kHalf, {})) : 0;
  const auto value = [&](bool stores) {
    uint8_t v = b.Load(first);
    // What stage 0 stored over the first row is what stage 1 reads there.
    if (residual && (stores || !in_place)) {
      v = b.Do(ExprOp::kAdd, kHalf, v, b.Load(added));
      if (stores) b.Store(sum, v);
    }
    return b.Convert(v, kHalf, kSingle);
  };
  b.Elements();
  const uint8_t v = value(true);
  const uint8_t total = b.Do(ExprOp::kReduceSum, kSingle, b.Do(ExprOp::kMul, kSingle, v, v));
  b.NextStage();
  const uint8_t mean = b.Do(ExprOp::kDiv, kSingle, total, b.Const(static_cast<float>(width)));
  const uint8_t scale =
      b.Do(ExprOp::kRsqrt, kSingle, b.Do(ExprOp::kAdd, kSingle, mean, b.Const(1e-5f)));
  b.Elements();
  const uint8_t h = b.Convert(b.Do(ExprOp::kMul, kSingle, value(false), scale), kSingle, kHalf);
  b.Store(out, b.Do(ExprOp::kMul, kHalf, h, b.Load(weight)));
  NodeCase c = b.Make();
  c.tolerance.assign(c.tolerance.size(), 0.05);
  return c;
}

inline NodeCase Softmax(Rng& rng, int64_t rows, int64_t width) {
  NodeBuilder b(rng, Op::kRow, {rows, width});
  const uint16_t x = b.Source(kSingle), out = b.Out(kHalf);
  b.Elements();
  const uint8_t most = b.Do(ExprOp::kReduceMax, kSingle, b.Load(x));
  b.NextStage();
  b.Elements();
  const auto power = [&] {
    return b.Do(ExprOp::kExp, kSingle, b.Do(ExprOp::kSub, kSingle, b.Load(x), most));
  };
  const uint8_t total = b.Do(ExprOp::kReduceSum, kSingle, power());
  b.NextStage();
  b.Elements();
  b.Store(out, b.Convert(b.Do(ExprOp::kDiv, kSingle, power(), total), kSingle, kHalf));
  NodeCase c = b.Make();
  c.tolerance.assign(c.tolerance.size(), 1e-3);
  return c;
}

inline NodeCase Argmax(Rng& rng, int64_t width, DType t) {
  NodeBuilder b(rng, Op::kRow, {1, width});
  const uint16_t x = b.Source(t);
  TensorRef result = b.Tensor(DType::kS32, {});
  result.shape[1] = 1;
  const uint16_t out = b.Out(result);
  b.Elements();
  const uint8_t best =
      b.Do(ExprOp::kReduceArgmax, t, b.Load(x), 0, 0, static_cast<uint16_t>(DType::kS32));
  b.NextStage();
  b.Store(out, best);
  return b.Make();
}

}  // namespace jaxgraph::testing
