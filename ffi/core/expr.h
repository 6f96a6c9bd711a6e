// ExprProgram: the small expression program inside EXPR and ROW nodes.
//
// It runs over an iteration space shape[0..rank). Every LOAD reads srcs[aux] at the current index
// through that source's strides (0 = broadcast), every STORE writes outs[aux]; sources and outputs
// have exactly the iteration shape (except stores and loads of a scalar section, see below).
//
// EXPR has one stage. ROW reduces over the last axis: the space is rows x L. A stage is
//   1. its scalar section: instructions run once per row (constants, 1/sqrt(mean + eps), ...), on
//      scalar registers only; LOAD and STORE there use the row index, last axis 0;
//   2. its element section: instructions run for every element of the row; they may read both
//      register files and write element registers only. Reductions accumulate here into a scalar
//      register, whose value is complete when the stage ends.
// Element registers do not survive a stage: what a later stage needs, it computes again.
// A stage with an empty element section costs no pass.
//
// Registers: 0..31 element, 32..63 scalar. A register holds a float for f16/bf16/f32 values, a
// double for f64, an int64 (sign- or zero-extended from its dtype) for integers, 0/1 for bool.
// Every instruction rounds (or wraps) its result to `dtype`, so a fused cluster gives the bits that
// the separate operations would give.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ffi/core/dtype.h"
#include "ffi/core/host_device.h"
#include "ffi/core/program.h"
#include "ffi/core/status.h"

namespace jaxgraph {

constexpr int kExprMaxRank = 6;
constexpr int kExprMaxInstrs = 112;
constexpr int kExprMaxSrcs = 16;
constexpr int kExprMaxOuts = 8;
constexpr int kExprMaxIndices = 4;
constexpr int kExprMaxImms = 32;
constexpr int kExprMaxStages = 6;
constexpr int kExprNumElementRegs = 32;
constexpr int kExprNumScalarRegs = 32;  // registers 32..63

// The numbers are part of the program format: never renumber; append only.
enum class ExprOp : uint8_t {
  kLoad = 0,     // dst <- srcs[aux]; dtype = the source's
  kIndex = 1,    // dst <- indices[aux]: offset + sum(stride[d] * index[d]); converted to dtype
  kConst = 2,    // dst <- imms[aux]: bit pattern of float (f16/bf16/f32), double (f64) or int64
  kStore = 3,    // outs[aux] <- a; dtype = the output's
  kConvert = 4,  // dst <- a, from dtype `aux` to `dtype` (JAX's convert_element_type: floats to
                 // integers truncate toward zero and saturate, NaN gives 0; to bool: != 0)
  kBitcast = 5,  // dst <- the bits of a, of dtype `aux`, as `dtype` of the same size; neither is
                 // bool. A NaN of f16 or bf16 may have other bits than the one it was made from
  // Unary.
  kNeg = 8,
  kAbs,
  kSign,
  kFloor,
  kCeil,
  kRoundAway,
  kRoundEven,
  kNot,
  kIsFinite,
  kExp,
  kExp2,
  kExpm1,
  kLog,
  kLog1p,
  kSqrt,
  kRsqrt,
  kCbrt,
  kSin,
  kCos,
  kTan,
  kAsin,
  kAcos,
  kAtan,
  kSinh,
  kCosh,
  kTanh,
  kAsinh,
  kAcosh,
  kAtanh,
  kLogistic,
  kErf,
  kErfc,
  kErfInv,
  kPopcnt,
  kClz,
  // Binary (a, b).
  kAdd = 64,
  kSub,
  kMul,
  kDiv,
  kRem,
  kPow,
  kAtan2,
  kMax,
  kMin,  // max/min propagate NaN
  kAnd,
  kOr,
  kXor,
  kShl,
  kShrLogical,
  kShrArithmetic,  // shift >= width: as lax defines
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,          // dtype = the operands'; the result is bool
  kIntegerPow,  // a ** int16(aux)
  // Ternary.
  kSelect = 112,  // a (bool) ? c : b  -- lax.select_n(a, b, c)
  kClamp = 113,   // min(max(b, a), c) -- lax.clamp(a=min, b=x, c=max)
  // Reductions over the last axis: dst (scalar register) <- all a of the row.
  kReduceSum = 160,
  kReduceMax,
  kReduceMin,
  kReduceProd,
  kReduceAnd,
  kReduceOr,
  kReduceArgmax,
  kReduceArgmin,  // aux = index dtype; the first NaN wins, else the first extremum
  kReduceXor,
};

JAXGRAPH_HOST_DEVICE constexpr bool IsArgReduce(ExprOp op) {
  return op == ExprOp::kReduceArgmax || op == ExprOp::kReduceArgmin;
}
// How many of an instruction's a, b and c an op reads.
constexpr int NumOperands(ExprOp op) {
  if (op < ExprOp::kStore) return 0;
  if (op < ExprOp::kAdd || op >= ExprOp::kReduceSum || op == ExprOp::kIntegerPow) return 1;
  return op < ExprOp::kSelect ? 2 : 3;
}

struct ExprInstr {
  ExprOp op;
  DType dtype;
  uint8_t dst;
  uint8_t a, b, c;
  uint16_t aux;
};
static_assert(sizeof(ExprInstr) == 8);

struct ExprStage {
  uint16_t scalar_begin, scalar_end;  // instruction ranges
  uint16_t elem_begin, elem_end;
};
static_assert(sizeof(ExprStage) == 8);

struct ExprIndex {  // an iota seen through views
  int64_t offset;
  int64_t strides[kExprMaxRank];
};

struct ExprProgram {
  uint8_t rank = 0;  // iteration space; for ROW the last axis is the reduced one, rank >= 1
  uint8_t num_stages = 0, num_srcs = 0, num_outs = 0, num_indices = 0, num_imms = 0;
  uint16_t num_instrs = 0;
  int64_t shape[kExprMaxRank] = {};
  ExprStage stages[kExprMaxStages] = {};
  ExprInstr instrs[kExprMaxInstrs] = {};
  ExprIndex indices[kExprMaxIndices] = {};
  uint64_t imms[kExprMaxImms] = {};
};

// Wire format (Node::params of EXPR and ROW), little endian, no padding beyond what is written:
//   u8 rank, u8 num_stages, u8 num_srcs, u8 num_outs, u8 num_indices, u8 num_imms, u16 num_instrs,
//   i64 shape[rank], stages[num_stages] (4 x u16), instrs[num_instrs] (8 bytes each),
//   indices[num_indices] (i64 offset, i64 strides[rank]), u64 imms[num_imms].
std::string EncodeExpr(const ExprProgram& program);

// Parses bytes of the wire format. Only what needs no tensors is checked: limits, sizes, overflow.
Status ParseExpr(std::string_view bytes, ExprProgram* program);

// Parses and validates params against the node's sources and outputs (dtypes, shapes, register
// files, section rules, limits).
Status DecodeExpr(const Node& node, ExprProgram* program);

}  // namespace jaxgraph
