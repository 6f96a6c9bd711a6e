// A program with every op, every kind of base and every option away from its default.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "ffi/core/expr.h"
#include "ffi/core/program.h"

namespace jaxgraph {

// A dense tensor in row-major order.
inline TensorRef Dense(DType dtype, uint32_t base, int64_t offset,
                       std::initializer_list<int64_t> shape) {
  TensorRef t;
  t.dtype = dtype;
  t.rank = static_cast<uint8_t>(shape.size());
  t.base = base;
  t.offset = offset;
  std::copy(shape.begin(), shape.end(), t.shape.begin());
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.shape[d];
  }
  return t;
}

inline Base MakeBase(BaseKind kind, uint32_t index, uint64_t nbytes, std::string label) {
  Base base;
  base.kind = kind;
  base.index = index;
  base.nbytes = nbytes;
  base.label = std::move(label);
  return base;
}

// out[2, 4] = src[2, 4] + src[2, 4]
inline ExprProgram AddExpr() {
  ExprProgram p;
  p.rank = 2;
  p.num_stages = 1;
  p.num_srcs = 2;
  p.num_outs = 1;
  p.shape[0] = 2;
  p.shape[1] = 4;
  p.instrs[p.num_instrs++] = {ExprOp::kLoad, DType::kF32, 0, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kLoad, DType::kF32, 1, 0, 0, 0, 1};
  p.instrs[p.num_instrs++] = {ExprOp::kAdd, DType::kF32, 2, 0, 1, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kStore, DType::kF32, 0, 2, 0, 0, 0};
  p.stages[0] = {0, 0, 0, p.num_instrs};
  return p;
}

// out[2, 4] = src / sum(src over the last axis), out[2, 1] = argmax of the row, with an index and
// an immediate mixed in so that every table of the format is used.
inline ExprProgram NormalizeExpr() {
  ExprProgram p;
  p.rank = 2;
  p.num_stages = 2;
  p.num_srcs = 1;
  p.num_outs = 2;
  p.num_indices = 1;
  p.num_imms = 1;
  p.shape[0] = 2;
  p.shape[1] = 4;
  p.indices[0].strides[1] = 1;
  p.imms[0] = 0x3f800000;
  p.instrs[p.num_instrs++] = {ExprOp::kLoad, DType::kF32, 0, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kReduceSum, DType::kF32, 32, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {
      ExprOp::kReduceArgmax, DType::kF32, 33, 0, 0, 0, static_cast<uint16_t>(DType::kS32)};
  p.instrs[p.num_instrs++] = {ExprOp::kConst, DType::kF32, 34, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kDiv, DType::kF32, 35, 34, 32, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kStore, DType::kS32, 0, 33, 0, 0, 1};
  p.instrs[p.num_instrs++] = {ExprOp::kLoad, DType::kF32, 0, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kMul, DType::kF32, 1, 0, 35, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kIndex, DType::kS32, 2, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kStore, DType::kF32, 0, 1, 0, 0, 0};
  p.stages[0] = {0, 0, 0, 3};
  p.stages[1] = {3, 6, 6, p.num_instrs};
  return p;
}

// masked[1, 1, 2, 4] = index along s <= position ? raw : -inf
inline ExprProgram CausalExpr() {
  ExprProgram p;
  p.rank = 4;
  p.num_stages = 1;
  p.num_srcs = 2;
  p.num_outs = 1;
  p.num_indices = 1;
  p.num_imms = 1;
  p.shape[0] = p.shape[1] = 1;
  p.shape[2] = 2;
  p.shape[3] = 4;
  p.indices[0].strides[3] = 1;
  p.imms[0] = 0xff800000;
  p.instrs[p.num_instrs++] = {ExprOp::kLoad, DType::kF32, 0, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kLoad, DType::kS32, 1, 0, 0, 0, 1};
  p.instrs[p.num_instrs++] = {ExprOp::kIndex, DType::kS32, 2, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kLe, DType::kS32, 3, 2, 1, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kConst, DType::kF32, 4, 0, 0, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kSelect, DType::kF32, 5, 3, 4, 0, 0};
  p.instrs[p.num_instrs++] = {ExprOp::kStore, DType::kF32, 0, 5, 0, 0, 0};
  p.stages[0] = {0, 0, 0, p.num_instrs};
  return p;
}

inline std::string EncodeAttentionParams(const ExprProgram& program) {
  AttentionParams params;
  params.bound_source = 3;
  return std::string(reinterpret_cast<const char*>(&params), sizeof params) + EncodeExpr(program);
}

inline std::string EncodeSortParams(const SortParams& p) {
  return std::string(reinterpret_cast<const char*>(&p), sizeof p);
}

inline std::string EncodeIndexParams(uint8_t components, uint8_t dim) {
  IndexParams params;
  params.mode = IndexMode::kFillOrDrop;
  params.num_components = components;
  params.dim[0] = dim;
  params.fill = 7;
  return std::string(reinterpret_cast<const char*>(&params), sizeof params);
}

inline Node MakeNode(Op op, std::vector<TensorRef> outs, std::vector<TensorRef> srcs,
                     std::string params = {}) {
  Node node;
  node.op = op;
  node.params = std::move(params);
  node.outs = std::move(outs);
  node.srcs = std::move(srcs);
  node.label = std::string(NameOf(op)) + "@model.py:1";
  return node;
}

// Bases: 0 arena; 1 x f32[2,4]; 2 cache f32[8,4] (donated); 3 index i32[2]; 4 w f32[4,4];
// 5 result, the cache; 6 result f32[2,4].
inline Program SampleProgram() {
  Program p;
  p.function = "model.decode_step";
  p.function_id = 0x1234567890abcdefu;
  p.split = 3;
  p.key.fill(0x5a);
  p.arena_bytes = 512;
  p.options.chunk_size = 64;
  p.options.warmup_calls = 3;
  p.options.max_variants = 4;
  p.options.max_failures = 5;
  p.options.fusion = false;
  p.options.concurrency = false;
  p.options.rewarm_on_address_change = true;
  p.options.update_depth = UpdateDepth::kInstantiate;
  p.options.idle_ms = 6;
  p.options.sweep_ms = 7;
  p.options.max_executables = 8;
  p.options.memory_budget = 9;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"),
             MakeBase(BaseKind::kOperand, 0, 32, "x"),
             MakeBase(BaseKind::kOperand, 1, 128, "cache"),
             MakeBase(BaseKind::kOperand, 2, 8, "index"),
             MakeBase(BaseKind::kOperand, 3, 64, "w"),
             MakeBase(BaseKind::kResult, 0, 128, "result[0]"),
             MakeBase(BaseKind::kResult, 1, 32, "result[1]")};
  p.bases[2].written = true;
  p.bases[3].hint = BaseHint::kWanders;
  p.bases[5].alias = 1;

  const TensorRef x = Dense(DType::kF32, 1, 0, {2, 4});
  const TensorRef cache = Dense(DType::kF32, 2, 0, {8, 4});
  const TensorRef cache_out = Dense(DType::kF32, 5, 0, {8, 4});
  const TensorRef index = Dense(DType::kS32, 3, 0, {2});
  const TensorRef sum = Dense(DType::kF32, 0, 0, {2, 4});
  const TensorRef normal = Dense(DType::kF32, 0, 64, {2, 4});
  const TensorRef best = Dense(DType::kS32, 0, 128, {2, 1});
  const TensorRef rows = Dense(DType::kF32, 0, 192, {2, 1, 4});
  TensorRef reversed = Dense(DType::kF32, 0, 0, {2, 4});
  reversed.offset = 12;  // the last element of the first row
  reversed.strides[1] = -1;

  p.nodes.push_back(MakeNode(Op::kExpr, {sum}, {x, x}, EncodeExpr(AddExpr())));
  p.nodes.push_back(MakeNode(Op::kRow, {normal, best}, {sum}, EncodeExpr(NormalizeExpr())));
  p.nodes.push_back(MakeNode(Op::kView, {reversed}, {sum}));
  p.nodes.push_back(MakeNode(Op::kGather, {rows}, {cache, index}, EncodeIndexParams(1, 0)));
  p.nodes.push_back(MakeNode(Op::kSetRows, {cache_out},
                             {cache, Dense(DType::kF32, 0, 64, {2, 1, 4}), index},
                             EncodeIndexParams(1, 0)));
  p.nodes.push_back(
      MakeNode(Op::kMatmul, {Dense(DType::kF32, 0, 256, {1, 1, 2, 4})},
               {Dense(DType::kF32, 0, 64, {1, 1, 2, 4}), Dense(DType::kF32, 4, 0, {1, 1, 4, 4})}));
  p.nodes.push_back(MakeNode(Op::kCopy, {Dense(DType::kF32, 6, 0, {2, 4})}, {reversed}));
  TensorRef position = Dense(DType::kS32, 3, 0, {1, 1, 2, 4});
  position.strides = {0, 0, 1, 0};
  const TensorRef w = Dense(DType::kF32, 4, 0, {1, 1, 4, 4});
  p.nodes.push_back(MakeNode(Op::kAttention, {Dense(DType::kF32, 0, 320, {1, 1, 2, 4})},
                             {Dense(DType::kF32, 0, 64, {1, 1, 2, 4}), w, w, position},
                             EncodeAttentionParams(CausalExpr())));
  SortParams best_two;
  best_two.order = SortOrder::kDescending;
  best_two.source[0] = kSortPositions;
  p.nodes.push_back(
      MakeNode(Op::kSort, {Dense(DType::kS32, 0, 288, {2, 2})}, {sum}, EncodeSortParams(best_two)));
  p.nodes[3].region = 1;
  p.nodes[4].region = 1;
  p.nodes[4].branch = 1;
  p.nodes[5].flags = kFlagNotCapturable;
  return p;
}

}  // namespace jaxgraph
