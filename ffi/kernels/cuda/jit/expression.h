// Instructions as text: what one instruction computes, for the source of a kernel.
#pragma once

#include <array>
#include <string>

#include "ffi/core/expr.h"

namespace jaxgraph {

const char* RegisterType(DType t);  // of a value in a register; "float" for f16 and bf16, too
const char* MemoryType(DType t);    // of an element in memory
std::string FromMemory(DType t, const std::string& element);
std::string ToMemory(DType t, const std::string& value);
std::string ConstantText(DType t, uint64_t bits);
std::string IndexText(DType t, const std::string& position);

// What each register holds while a program is walked: a name in the text, and its dtype.
struct NamedValue {
  std::string name;
  DType dtype = DType::kF32;
};
// Whether registers hold values of both dtypes alike.
bool SameRegister(DType a, DType b);
using NamedRegisters = std::array<NamedValue, kExprNumElementRegs + kExprNumScalarRegs>;

// The value of an instruction that computes values from values, rounded to its dtype; empty where a
// register holds another type than the instruction reads.
std::string ValueText(const ExprInstr& instr, ExprOp op, const NamedRegisters& registers);
DType ResultType(const ExprInstr& instr, ExprOp op);

// Reductions. The struct of the prelude that combines two values, and what leaves the other as it
// is (not of argmax and argmin).
const char* CombinerText(ExprOp op);
std::string IdentityText(ExprOp op, DType t);

}  // namespace jaxgraph
