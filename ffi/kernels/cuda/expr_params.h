// What the interpreter kernels of EXPR and ROW take: the expression program prepared for one
// launch.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/expr.h"
#include "ffi/kernels/cuda/fast_div.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// The kernels dispatch on ExprInstr::op once per instruction, so it is made to say all they need:
// ops on floats of up to 32 bits keep their number, and those on other dtypes get one of these.
constexpr ExprOp kRoundOp = static_cast<ExprOp>(200);             // dst <- a, rounded to dtype
constexpr ExprOp kGeneralOp = static_cast<ExprOp>(201);           // ops[i] on integers or f64
constexpr ExprOp kGeneralReduceOp = static_cast<ExprOp>(202);     // the same for sums, ...
constexpr ExprOp kGeneralArgReduceOp = static_cast<ExprOp>(203);  // ... and argmax, argmin

// A LOAD's `c` says how many LOADs in a row start here, so that the kernel can have several in
// flight. Every register number is in range, used or not.
struct alignas(16) ExprParams {
  uint32_t count = 0;  // EXPR: elements; ROW: length of a row
  uint8_t rank = 0;    // >= 1. ROW: the last dimension is the row's own
  uint8_t num_stages = 0;
  uint8_t num_reductions[kExprMaxStages] = {};
  uint8_t reductions[kExprNumScalarRegs * kExprMaxStages] = {};  // instructions, stage by stage
  FastDiv divide[kExprMaxRank] = {};
  ExprStage stages[kExprMaxStages] = {};
  uint32_t reserved = 0;
  ExprInstr instrs[kExprMaxInstrs] = {};  // 8-byte aligned: the kernels fetch each at once
  ExprOp ops[kExprMaxInstrs] = {};        // as they were in the program
  uint64_t tail = 0;                      // no hidden padding: see SetParams
  const char* srcs[kExprMaxSrcs] = {};
  char* outs[kExprMaxOuts] = {};
  int64_t src_strides[kExprMaxSrcs][kExprMaxRank] = {};  // bytes
  int64_t out_strides[kExprMaxOuts][kExprMaxRank] = {};  // bytes
  ExprIndex indices[kExprMaxIndices] = {};
  uint64_t imms[kExprMaxImms] = {};
};

// The instructions alone, for a kernel that brings its own space and operands. Registers 32 and up
// are free to a kernel whose program has no scalar sections. Returns whether some value needs
// registers of 64 bits.
bool PrepareInstructions(const ExprProgram& program, ExprParams* p);

// One launch's worth of a node.
struct ExprPiece {
  uint32_t rows = 1;  // ROW only
  ExprParams params;
};

// Prepares the node's expression; several pieces where it has 2^31 elements or rows and more, none
// where it has no work. *wide: some value needs registers of 64 bits.
Status PrepareExpr(const ResolvedNode& node, bool* wide, std::vector<ExprPiece>* pieces);

}  // namespace jaxgraph
