#include "ffi/core/attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jaxgraph {
namespace {

constexpr uint8_t kNoBound = 0xff;

Status Invalid(const char* what) { return Status(Code::kInvalidArgument, what); }

Status CheckShapes(const Node& node) {
  if (node.outs.empty() || node.outs.size() > 2) return Invalid("has not one or two outputs");
  if (node.srcs.size() < 3) return Invalid("lacks queries, keys or values");
  const TensorRef& out = node.outs[0];
  const TensorRef &q = node.srcs[0], &k = node.srcs[1], &v = node.srcs[2];
  for (const TensorRef* t : {&out, &q, &k, &v}) {
    if (t->rank != 4) return Invalid("is not of rank 4");
    if (!IsFloat(t->dtype)) return Invalid("is not of floats");
    if (t->shape[0] != out.shape[0] || t->shape[1] != out.shape[1]) {
      return Invalid("has unequal batch dimensions");
    }
  }
  if (q.shape[2] != out.shape[2] || q.shape[3] != k.shape[2] || k.shape[3] != v.shape[2] ||
      v.shape[3] != out.shape[3]) {
    return Invalid("has shapes that do not multiply");
  }
  if (node.outs.size() == 2) {
    const TensorRef& workspace = node.outs[1];
    if (workspace.rank != 1 || workspace.dtype != DType::kF32 || workspace.strides[0] != 1) {
      return Invalid("has a workspace that is not of contiguous f32");
    }
  }
  return Status::Ok();
}

// A row of scores in a kernel's own memory.
TensorRef ScoreRow(const Node& node, DType dtype) {
  TensorRef row;
  row.dtype = dtype;
  row.rank = 4;
  row.shape = {node.outs[0].shape[0], node.outs[0].shape[1], node.outs[0].shape[2],
               node.srcs[2].shape[2]};
  row.strides = {0, 0, 0, 1};
  return row;
}

Status CheckBound(const Node& node, const AttentionParams& params) {
  if (params.bound_source == kNoBound) return Status::Ok();
  if (params.bound_source < 3 || params.bound_source >= node.srcs.size()) {
    return Invalid("has a bound that is none of its program's sources");
  }
  const TensorRef& bound = node.srcs[params.bound_source];
  if (IsFloat(bound.dtype) || bound.dtype == DType::kPred) {
    return Invalid("has a bound that is not of integers");
  }
  const TensorRef row = ScoreRow(node, bound.dtype);
  if (bound.rank != 4 || !std::equal(row.shape.begin(), row.shape.begin() + 4, bound.shape.begin()))
    return Invalid("has a bound of another shape");
  if (bound.strides[3] != 0 && bound.shape[3] > 1) return Invalid("has a bound that moves along s");
  return Status::Ok();
}

Status CheckSink(const Node& node, const AttentionParams& params) {
  if (params.sink_source == 0) return Status::Ok();
  if (params.sink_source < 3 || params.sink_source + size_t{1} != node.srcs.size()) {
    return Invalid("has a sink that is not its last source");
  }
  const TensorRef& sink = node.srcs[params.sink_source];
  if (!IsFloat(sink.dtype)) return Invalid("has a sink that is not of floats");
  if (sink.rank != 4 || sink.shape[3] != 1 ||
      !std::equal(sink.shape.begin(), sink.shape.begin() + 3, node.outs[0].shape.begin())) {
    return Invalid("has a sink of another shape");
  }
  return Status::Ok();
}

// The instructions of `op` on tensor number `aux` (any, if negative).
int CountInstrs(const ExprProgram& p, ExprOp op, int aux, DType* dtype) {
  int count = 0;
  for (int i = 0; i < p.num_instrs; ++i) {
    if (p.instrs[i].op != op || (aux >= 0 && p.instrs[i].aux != aux)) continue;
    ++count;
    *dtype = p.instrs[i].dtype;
  }
  return count;
}

}  // namespace

bool Attention::in_double(const Node& node) const {
  if (raw() == DType::kF64 || masked() == DType::kF64) return true;
  if (node.outs[0].dtype == DType::kF64) return true;
  if (has_sink() && node.srcs.back().dtype == DType::kF64) return true;
  for (int i = 0; i < 3; ++i)
    if (node.srcs[i].dtype == DType::kF64) return true;
  return false;
}

Status DecodeAttention(const Node& node, Attention* attention) {
  JAXGRAPH_RETURN_IF_ERROR(CheckShapes(node));
  Attention a;
  if (node.params.size() < sizeof a.params) return Invalid("has params that are truncated");
  std::memcpy(static_cast<void*>(&a.params), node.params.data(), sizeof a.params);
  JAXGRAPH_RETURN_IF_ERROR(CheckSink(node, a.params));
  const auto end = node.srcs.end() - a.has_sink();  // of the program's own sources
  JAXGRAPH_RETURN_IF_ERROR(CheckBound(node, a.params));

  const size_t num_srcs = static_cast<size_t>(end - node.srcs.begin()) - 3 + 1;
  if (a.params.raw_source >= num_srcs) return Invalid("has no source for its raw scores");
  a.scores.op = Op::kExpr;
  a.scores.params = node.params.substr(sizeof a.params);
  a.scores.srcs.assign(node.srcs.begin() + 3, end);
  // The dtypes of raw and masked scores are those that the instructions name, so they must be read
  // before the program can be checked against them.
  JAXGRAPH_RETURN_IF_ERROR(ParseExpr(a.scores.params, &a.program));
  DType raw = DType::kF32, masked = DType::kF32;
  CountInstrs(a.program, ExprOp::kLoad, a.params.raw_source, &raw);
  if (CountInstrs(a.program, ExprOp::kStore, -1, &masked) != 1) {
    return Invalid("does not store one masked score");
  }
  if (!IsFloat(raw) || !IsFloat(masked)) return Invalid("has scores that are not floats");
  a.scores.srcs.insert(a.scores.srcs.begin() + a.params.raw_source, ScoreRow(node, raw));
  a.scores.outs = {ScoreRow(node, masked)};
  JAXGRAPH_RETURN_IF_ERROR(DecodeExpr(a.scores, &a.program));
  if (a.program.rank != 4) return Invalid("has a program that is not of rank 4");
  const TensorRef row = ScoreRow(node, raw);
  if (!std::equal(row.shape.begin(), row.shape.begin() + 4, a.program.shape)) {
    return Invalid("has a program of another shape");
  }
  *attention = std::move(a);
  return Status::Ok();
}

}  // namespace jaxgraph
