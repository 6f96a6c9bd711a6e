// ATTENTION: a few queries against a cache of keys and values.
//
// A unit of work is one (b0, b1) and up to 16 of its queries, which share every read of the cache:
// raw scores of all positions, the score program over them, the softmax, then the weighted sum of
// the values. What lies beyond the bound is left out in whole tiles; a tile's borders are fixed, so
// that leaving some out changes no order of summation and therefore no bit.
#include "ffi/core/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "ffi/kernels/host/expr_elements.h"
#include "ffi/kernels/host/float_convert.h"
#include "ffi/kernels/host/loops.h"
#include "ffi/kernels/host/operand.h"
#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/parallel.h"

namespace jaxgraph {
namespace {

struct Header {
  Operand out, q, k, v;
  Operand bound, sink;  // address null: there is none
  int64_t b0, b1, g, d, s, e;
  uint32_t score_cost;  // of the score program, per score, in the steps of ParallelRanges
  DType raw, masked;
  uint8_t raw_source;
  uint8_t in_double;
};
static_assert(std::has_unique_object_representations_v<Header>, "equal nodes, equal bytes");

// The score program follows as the params of an EXPR launch, which come in a few sizes.
template <size_t kExprBytes>
struct AttentionLaunch {
  Header header;
  alignas(8) char expr[kExprBytes];
};

constexpr int64_t kTile = 64;               // positions; a multiple of every loop's step
constexpr int64_t kGroup = kMaxMatmulRows;  // queries that share the reads

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t ReadInteger(DType t, const char* src) {
  const auto get = [src](auto v) {
    std::memcpy(&v, src, sizeof v);
    return static_cast<int64_t>(v);
  };
  switch (t) {
    case DType::kS8:
      return get(int8_t{});
    case DType::kS16:
      return get(int16_t{});
    case DType::kS32:
      return get(int32_t{});
    case DType::kU8:
      return get(uint8_t{});
    case DType::kU16:
      return get(uint16_t{});
    case DType::kU32:
      return get(uint32_t{});
    default:
      return get(int64_t{});  // a u64 beyond int64 comes out negative: no bound
  }
}

// ---- raw scores and weighted sums in float: the loops of MATMUL ----

// scores[i][j] = q[i] . k[:, j], j in [0, limit); q and scores have rows of d and of `stride`.
void RawScores(const Header& p, int64_t b0, int64_t b1, int rows, const float* q, int64_t limit,
               float* scores, int64_t stride) {
  const MatmulLoops& loops = Loops().matmul;
  const char* keys = p.k.At(b0, b1, 0, 0);
  if (p.k.strides[2] == 1 || p.d == 1) {
    return loops.dots(p.k.dtype, keys, p.k.strides[3], q, p.d, rows, p.d, limit, scores, stride);
  }
  if ((p.k.strides[3] == 1 || p.s == 1) && p.d > 0) {
    return loops.rows(p.k.dtype, keys, p.k.strides[2], q, p.d, rows, p.d, limit, scores, stride);
  }
  std::unique_ptr<float[]> key(new float[p.d]);
  for (int64_t j = 0; j < limit; ++j) {
    loops.widen(p.k.dtype, p.k.At(b0, b1, 0, j), p.k.strides[2], p.d, key.get());
    loops.dots(DType::kF32, reinterpret_cast<const char*>(key.get()), p.d, q, p.d, rows, p.d, 1,
               scores + j, stride);
  }
}

// sums[i][c] = sum over j in [0, limit) of weights[i][j] * v[j, c]
void WeightedSums(const Header& p, int64_t b0, int64_t b1, int rows, const float* weights,
                  int64_t stride, int64_t limit, float* sums) {
  const MatmulLoops& loops = Loops().matmul;
  const char* values = p.v.At(b0, b1, 0, 0);
  if (p.v.strides[3] == 1 || p.e == 1) {
    return loops.rows(p.v.dtype, values, p.v.strides[2], weights, stride, rows, limit, p.e, sums,
                      p.e);
  }
  if (p.v.strides[2] == 1) {
    return loops.dots(p.v.dtype, values, p.v.strides[3], weights, stride, rows, limit, p.e, sums,
                      p.e);
  }
  std::unique_ptr<float[]> column(new float[limit]);
  for (int64_t c = 0; c < p.e; ++c) {
    loops.widen(p.v.dtype, p.v.At(b0, b1, 0, c), p.v.strides[2], limit, column.get());
    loops.dots(DType::kF32, reinterpret_cast<const char*>(column.get()), limit, weights, stride,
               rows, limit, 1, sums + c, p.e);
  }
}

// ---- the same in double: plain loops ----

void RawScores(const Header& p, int64_t b0, int64_t b1, int rows, const double* q, int64_t limit,
               double* scores, int64_t stride) {
  for (int64_t j = 0; j < limit; ++j) {
    for (int i = 0; i < rows; ++i) scores[i * stride + j] = 0;
    for (int64_t c = 0; c < p.d; ++c) {
      const double key = ReadFloat<double>(p.k.dtype, p.k.At(b0, b1, c, j));
      for (int i = 0; i < rows; ++i) scores[i * stride + j] += q[i * p.d + c] * key;
    }
  }
}

void WeightedSums(const Header& p, int64_t b0, int64_t b1, int rows, const double* weights,
                  int64_t stride, int64_t limit, double* sums) {
  std::fill_n(sums, rows * p.e, 0.0);
  for (int64_t j = 0; j < limit; ++j) {
    for (int64_t c = 0; c < p.e; ++c) {
      const double value = ReadFloat<double>(p.v.dtype, p.v.At(b0, b1, j, c));
      for (int i = 0; i < rows; ++i) sums[i * p.e + c] += weights[i * stride + j] * value;
    }
  }
}

// ---- one unit ----

// Scratch memory of one thread, kept from call to call.
char* ScratchBytes(int64_t n) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t capacity = 0;
  if (capacity < n) {
    memory.reset(new char[n]);
    capacity = n;
  }
  return memory.get();
}

template <typename Real>
class Unit {
 public:
  static constexpr DType kReal = std::is_same_v<Real, float> ? DType::kF32 : DType::kF64;

  // Queries [first, first + rows) of (b0, b1).
  Unit(const Header& p, int64_t b0, int64_t b1, int64_t first, int rows)
      : p_(p), b0_(b0), b1_(b1), first_(first), rows_(rows), limit_(Limit()) {
    // Strips begin at multiples of their length, and loops may run to the end of the last one.
    stride_ = RoundUp(std::max<int64_t>(p.s, 1), kStripElements);
    const int64_t scores = rows * stride_, line = stride_;
    const int64_t reals = scores + rows * (p.d + p.e);
    Real* memory = reinterpret_cast<Real*>(ScratchBytes(reals * sizeof(Real) + 16 * line));
    scores_ = memory;
    queries_ = scores_ + scores;
    sums_ = queries_ + rows * p.d;
    raw_ = reinterpret_cast<char*>(sums_ + rows * p.e);
    masked_ = raw_ + 8 * line;
  }

  void Run(char* expr) {
    for (int i = 0; i < rows_; ++i)
      for (int64_t c = 0; c < p_.d; ++c)
        queries_[i * p_.d + c] = ReadFloat<Real>(p_.q.dtype, p_.q.At(b0_, b1_, first_ + i, c));
    RawScores(p_, b0_, b1_, rows_, queries_, limit_, scores_, stride_);
    Real totals[kGroup];
    for (int i = 0; i < rows_; ++i) {
      Mask(i, expr);
      totals[i] = Exponentiate(i, scores_ + i * stride_);
    }
    WeightedSums(p_, b0_, b1_, rows_, scores_, stride_, limit_, sums_);
    for (int i = 0; i < rows_; ++i)
      for (int64_t c = 0; c < p_.e; ++c)
        WriteFloat(p_.out.dtype, sums_[i * p_.e + c] / totals[i],
                   p_.out.At(b0_, b1_, first_ + i, c));
  }

 private:
  // How many positions any of the queries may see, up to a tile's border.
  int64_t Limit() const {
    if (p_.bound.address == nullptr) return p_.s;
    int64_t last = 0;
    for (int i = 0; i < rows_; ++i) {
      const int64_t bound = ReadInteger(p_.bound.dtype, p_.bound.At(b0_, b1_, first_ + i, 0));
      if (bound < 0 || bound >= p_.s) return p_.s;
      last = std::max(last, bound);
    }
    return std::min(p_.s, RoundUp(last + 1, kTile));
  }

  // The score program over row i of the scores, in place unless it has other dtypes.
  void Mask(int i, char* expr) {
    Real* scores = scores_ + i * stride_;
    char* raw = reinterpret_cast<char*>(scores);
    char* masked = raw;
    if (p_.raw != kReal) {
      raw = raw_;
      const int64_t size = static_cast<int64_t>(SizeOf(p_.raw));
      for (int64_t j = 0; j < limit_; ++j) WriteFloat(p_.raw, scores[j], raw + j * size);
    }
    if (p_.masked != kReal) masked = masked_;
    SetExprSource(expr, p_.raw_source, raw);
    SetExprOutput(expr, 0, masked);
    const int64_t row = ((b0_ * p_.b1 + b1_) * p_.g + first_ + i) * p_.s;
    RunExprElements(expr, row, row + limit_);
    if (p_.masked == kReal) return;
    const int64_t size = static_cast<int64_t>(SizeOf(p_.masked));
    for (int64_t j = 0; j < limit_; ++j) scores[j] = ReadFloat<Real>(p_.masked, masked + j * size);
  }

  // The sink of row i; -inf, which weighs nothing, if there is none.
  Real Sink(int i) const {
    if (p_.sink.address == nullptr) return -std::numeric_limits<Real>::infinity();
    return ReadFloat<Real>(p_.sink.dtype, p_.sink.At(b0_, b1_, first_ + i, 0));
  }

  // scores of row i <- exp(scores - their maximum); returns their sum, the sink's part included.
  Real Exponentiate(int i, Real* scores) {
    const ExprLoops& loops = Loops().expr;
    ExprInstr instr{};
    instr.dtype = kReal;
    // The rest of the last strip changes neither the maximum nor the sum; whole strips keep the
    // order of summation the same wherever the bound lies.
    const int64_t end = std::min(stride_, RoundUp(limit_, kStripElements));
    std::fill(scores + limit_, scores + end, -std::numeric_limits<Real>::infinity());
    ReduceState peak, total;
    instr.op = ExprOp::kReduceMax;
    for (int64_t at = 0; at < end; at += kStripElements)
      loops.reduce(instr, scores + at, kStripElements, at, &peak);
    alignas(64) Real top[kStripElements], shifted[kStripElements];
    const Real sink = Sink(i);
    const Real max = std::max(static_cast<Real>(peak.f), sink);
    std::fill_n(top, kStripElements, max);
    for (int64_t at = 0; at < end; at += kStripElements) {
      instr.op = ExprOp::kSub;
      loops.compute(instr, scores + at, top, nullptr, kStripElements, shifted);
      instr.op = ExprOp::kExp;
      loops.compute(instr, shifted, nullptr, nullptr, kStripElements, scores + at);
      instr.op = ExprOp::kReduceSum;
      loops.reduce(instr, scores + at, kStripElements, at, &total);
    }
    const Real sum = static_cast<Real>(total.f);
    return p_.sink.address == nullptr ? sum : sum + std::exp(sink - max);
  }

  const Header& p_;
  const int64_t b0_, b1_, first_;
  const int rows_;
  const int64_t limit_;
  int64_t stride_;
  Real *scores_, *queries_, *sums_;
  char *raw_, *masked_;  // a row of scores in the program's dtypes
};

// Softmax over nothing: sums of nothing.
void ClearOutput(const Header& p) {
  for (int64_t b0 = 0; b0 < p.b0; ++b0)
    for (int64_t b1 = 0; b1 < p.b1; ++b1)
      for (int64_t i = 0; i < p.g; ++i)
        for (int64_t c = 0; c < p.e; ++c) WriteFloat(p.out.dtype, 0.0f, p.out.At(b0, b1, i, c));
}

template <size_t kExprBytes>
void Run(const void* params, ParallelFor& pool) {
  const auto& launch = *static_cast<const AttentionLaunch<kExprBytes>*>(params);
  const Header& p = launch.header;
  if (p.s == 0) return ClearOutput(p);
  const int64_t groups = (p.g + kGroup - 1) / kGroup;
  const int64_t cost = p.b0 * p.b1 * p.g * p.s * ((p.d + p.e) / 8 + p.score_cost);
  ParallelRanges(pool, p.b0 * p.b1 * groups, 1, cost, [&](int64_t begin, int64_t end) {
    alignas(8) char expr[kExprBytes];  // a copy, for this thread's rows
    std::memcpy(expr, launch.expr, kExprBytes);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / groups, first = unit % groups * kGroup;
      const int rows = static_cast<int>(std::min(kGroup, p.g - first));
      if (p.in_double) {
        Unit<double>(p, batch / p.b1, batch % p.b1, first, rows).Run(expr);
      } else {
        Unit<float>(p, batch / p.b1, batch % p.b1, first, rows).Run(expr);
      }
    }
  });
}

template <size_t kExprBytes>
Status MakeLaunch(const Header& header, const std::string& expr, Launch* launch) {
  static const KernelInfo kernel = {"host_attention", sizeof(AttentionLaunch<kExprBytes>),
                                    Run<kExprBytes>};
  AttentionLaunch<kExprBytes> params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  params.header = header;
  std::memcpy(params.expr, expr.data(), expr.size());
  launch->kernel = &kernel;
  launch->set_params(params);
  return Status::Ok();
}

}  // namespace

Status EmitAttention(const ResolvedNode& resolved, Launch* launch) {
  const Node& node = *resolved.node;
  Attention attention;
  JAXGRAPH_RETURN_IF_ERROR(DecodeAttention(node, &attention));

  ResolvedNode scores{&attention.scores, {nullptr}, {}};
  scores.srcs.assign(resolved.srcs.begin() + 3, resolved.srcs.end() - attention.has_sink());
  scores.srcs.insert(scores.srcs.begin() + attention.params.raw_source, nullptr);
  Launch expr;
  JAXGRAPH_RETURN_IF_ERROR(EmitExpr(scores, &expr));

  Header header{};
  header.out = OperandOf(node.outs[0], resolved.outs[0]);
  header.q = OperandOf(node.srcs[0], resolved.srcs[0]);
  header.k = OperandOf(node.srcs[1], resolved.srcs[1]);
  header.v = OperandOf(node.srcs[2], resolved.srcs[2]);
  const uint8_t bound = attention.params.bound_source;
  if (bound != 0xff) header.bound = OperandOf(node.srcs[bound], resolved.srcs[bound]);
  if (attention.has_sink()) header.sink = OperandOf(node.srcs.back(), resolved.srcs.back());
  header.b0 = node.outs[0].shape[0];
  header.b1 = node.outs[0].shape[1];
  header.g = node.outs[0].shape[2];
  header.e = node.outs[0].shape[3];
  header.d = node.srcs[0].shape[3];
  header.s = node.srcs[2].shape[2];
  header.score_cost = 16 + attention.program.num_instrs;
  header.raw = attention.raw();
  header.masked = attention.masked();
  header.raw_source = attention.params.raw_source;
  header.in_double = attention.in_double(node);

  const std::string& bytes = expr.params;
  if (bytes.size() <= 512) return MakeLaunch<512>(header, bytes, launch);
  if (bytes.size() <= 1536) return MakeLaunch<1536>(header, bytes, launch);
  if (bytes.size() <= 4096) return MakeLaunch<4096>(header, bytes, launch);
  return Status(Code::kInternal, "a score program is larger than its limits allow");
}

}  // namespace jaxgraph
