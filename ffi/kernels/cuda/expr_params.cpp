#include "ffi/kernels/cuda/expr_params.h"

#include <algorithm>

#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int64_t kMaxCount = int64_t{1} << 31;  // what FastDiv divides

bool IsReduce(ExprOp op) { return op >= ExprOp::kReduceSum; }
bool IsWide(DType t) { return SizeOf(t) == 8; }

bool Touches(const ExprInstr& instr, uint8_t reg) {
  const int n = NumOperands(instr.op);
  return (instr.op != ExprOp::kStore && instr.dst == reg) || (n > 0 && instr.a == reg) ||
         (n > 1 && instr.b == reg) || (n > 2 && instr.c == reg);
}

bool NeedsWideRegisters(const ExprInstr& instr) {
  const bool has_second_dtype = instr.op == ExprOp::kConvert || IsArgReduce(instr.op);
  return IsWide(instr.dtype) || (has_second_dtype && IsWide(static_cast<DType>(instr.aux)));
}

// Moves the LOADs of a section to its front, where registers allow it and no STORE (which may write
// what the LOAD reads) stands between, and notes how many stand in a row.
void HoistLoads(ExprInstr* begin, ExprInstr* end) {
  ExprInstr* front = begin;  // [begin, front) are hoisted LOADs
  for (ExprInstr* at = begin; at != end; ++at) {
    if (at->op == ExprOp::kStore) break;
    if (at->op != ExprOp::kLoad) continue;
    const uint8_t reg = at->dst;
    if (std::any_of(front, at, [reg](const ExprInstr& i) { return Touches(i, reg); })) continue;
    std::rotate(front, at, at + 1);
    ++front;
  }
  uint8_t run = 0;
  for (ExprInstr* at = end; at != begin;) {
    --at;
    run = at->op == ExprOp::kLoad ? run + 1 : 0;
    if (at->op == ExprOp::kLoad) at->c = run;
  }
}

// Fields that an op does not use become harmless: the kernel reads them all.
void ClearUnused(ExprInstr* instr) {
  const int n = NumOperands(instr->op);
  if (n < 1) instr->a = 0;
  if (n < 2) instr->b = 0;
  if (n < 3) instr->c = 0;
}

bool IsNarrowFloat(DType t) { return IsFloat(t) && t != DType::kF64; }

// The op that the kernels dispatch on.
ExprOp Specialized(const ExprInstr& instr) {
  const ExprOp op = instr.op;
  if (op == ExprOp::kConvert) {
    const bool rounds = IsNarrowFloat(static_cast<DType>(instr.aux)) && IsNarrowFloat(instr.dtype);
    return rounds ? kRoundOp : op;
  }
  if (op <= ExprOp::kBitcast || op == ExprOp::kSelect || IsNarrowFloat(instr.dtype)) return op;
  if (!IsReduce(op)) return kGeneralOp;
  return IsArgReduce(op) ? kGeneralArgReduceOp : kGeneralReduceOp;
}

void CopyInstructions(const ExprProgram& program, ExprParams* p) {
  p->num_stages = program.num_stages;
  std::copy_n(program.stages, program.num_stages, p->stages);
  std::copy_n(program.instrs, program.num_instrs, p->instrs);
  std::copy_n(program.imms, program.num_imms, p->imms);
  for (int i = 0; i < program.num_instrs; ++i) ClearUnused(&p->instrs[i]);
  int reductions = 0;
  for (int s = 0; s < p->num_stages; ++s) {
    const ExprStage& stage = p->stages[s];
    HoistLoads(p->instrs + stage.scalar_begin, p->instrs + stage.scalar_end);
    HoistLoads(p->instrs + stage.elem_begin, p->instrs + stage.elem_end);
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      if (!IsReduce(p->instrs[i].op)) continue;
      p->reductions[reductions++] = static_cast<uint8_t>(i);
      ++p->num_reductions[s];
    }
  }
  for (int i = 0; i < program.num_instrs; ++i) {
    p->ops[i] = p->instrs[i].op;
    p->instrs[i].op = Specialized(p->instrs[i]);
  }
}

void CopyOperands(const ResolvedNode& resolved, const ExprProgram& program, ExprParams* p) {
  const Node& node = *resolved.node;
  const auto bytes = [&](const TensorRef& t, int64_t* strides) {
    for (int d = 0; d < program.rank; ++d) {
      strides[d] = t.strides[d] * static_cast<int64_t>(SizeOf(t.dtype));
    }
  };
  for (size_t i = 0; i < node.srcs.size(); ++i) {
    p->srcs[i] = resolved.srcs[i];
    bytes(node.srcs[i], p->src_strides[i]);
  }
  for (size_t i = 0; i < node.outs.size(); ++i) {
    p->outs[i] = resolved.outs[i];
    bytes(node.outs[i], p->out_strides[i]);
  }
  std::copy_n(program.indices, program.num_indices, p->indices);
}

// Advances every operand by `index` along dimension `d`.
void Advance(int d, int64_t index, ExprParams* p) {
  for (int i = 0; i < kExprMaxSrcs; ++i) p->srcs[i] += index * p->src_strides[i][d];
  for (int i = 0; i < kExprMaxOuts; ++i) p->outs[i] += index * p->out_strides[i][d];
  for (ExprIndex& x : p->indices) x.offset += index * x.strides[d];
}

// Splits the outermost of dimensions [from, flat) until their product can be counted in 31 bits.
void Split(const ExprParams& p, int64_t (&shape)[kExprMaxRank], int from, int flat,
           std::vector<ExprPiece>* pieces) {
  int64_t inner = 1;
  for (int d = from + 1; d < flat; ++d) inner *= shape[d];
  const int64_t size = from < flat ? shape[from] : 1;
  if (size * inner < kMaxCount) {
    ExprPiece piece;
    piece.params = p;
    piece.rows = static_cast<uint32_t>(size * inner);
    for (int d = 0; d < p.rank; ++d) {
      piece.params.divide[d] = FastDiv::By(static_cast<uint32_t>(shape[d]));
    }
    pieces->push_back(piece);
    return;
  }
  const int64_t step = std::max<int64_t>((kMaxCount - 1) / inner, 1);
  int64_t whole[kExprMaxRank];
  std::copy_n(shape, kExprMaxRank, whole);
  for (int64_t i = 0; i < size; i += step) {
    ExprParams part = p;
    Advance(from, i, &part);
    whole[from] = std::min(step, size - i);
    Split(part, whole, whole[from] == 1 ? from + 1 : from, flat, pieces);
  }
}

}  // namespace

bool PrepareInstructions(const ExprProgram& program, ExprParams* p) {
  CopyInstructions(program, p);
  return std::any_of(program.instrs, program.instrs + program.num_instrs, NeedsWideRegisters);
}

Status PrepareExpr(const ResolvedNode& resolved, bool* wide, std::vector<ExprPiece>* pieces) {
  ExprProgram program;
  JAXGRAPH_RETURN_IF_ERROR(DecodeExpr(*resolved.node, &program));
  const bool row = resolved.node->op == Op::kRow;
  const int outer =
      row ? program.rank - 1 : program.rank;  // dimensions that threads or blocks take
  if (std::any_of(program.shape, program.shape + outer, [](int64_t n) { return n == 0; })) {
    return Status::Ok();
  }
  const int64_t length = row ? program.shape[outer] : 1;
  if (length >= kMaxCount) return Status(Code::kUnsupported, "a row of 2^31 elements or more");

  ExprParams p;
  *wide = PrepareInstructions(program, &p);
  CopyOperands(resolved, program, &p);

  std::vector<int64_t*> strides;
  for (int i = 0; i < program.num_srcs; ++i) strides.push_back(p.src_strides[i]);
  for (int i = 0; i < program.num_outs; ++i) strides.push_back(p.out_strides[i]);
  for (int i = 0; i < program.num_indices; ++i) strides.push_back(p.indices[i].strides);

  int64_t shape[kExprMaxRank];
  std::copy_n(program.shape, kExprMaxRank, shape);
  std::vector<int64_t> along_row;  // strides of the last dimension, which flattening leaves alone
  if (row) {
    for (const int64_t* s : strides) along_row.push_back(s[outer]);
  }
  int flat = outer;
  Flatten(&flat, shape, strides);
  p.rank = static_cast<uint8_t>(flat);
  if (row) {
    // At most kExprMaxRank - 1 row dimensions: one of size 1 fits in front of a single axis.
    for (size_t i = 0; i < strides.size(); ++i) strides[i][flat] = along_row[i];
    shape[flat] = std::max<int64_t>(length, 1);
    p.rank = static_cast<uint8_t>(flat + 1);
  }
  Split(p, shape, 0, flat, pieces);
  for (ExprPiece& piece : *pieces) {
    piece.params.count = row ? static_cast<uint32_t>(length) : piece.rows;
  }
  return Status::Ok();
}

}  // namespace jaxgraph
