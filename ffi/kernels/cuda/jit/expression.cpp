#include "ffi/kernels/cuda/jit/expression.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "ffi/kernels/cuda/expr_params.h"

namespace jaxgraph {
namespace {

std::string Call(const std::string& function, const std::string& argument) {
  return function + "(" + argument + ")";
}

std::string Hex(uint64_t bits, const char* suffix) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%" PRIx64 "%s", bits, suffix);
  return text;
}

std::string Rounded(DType t, const std::string& value) {
  if (t == DType::kBF16) return Call("round_bf16", value);
  if (t == DType::kF16) return Call("round_f16", value);
  return value;
}

bool IsFloatRegister(DType t) { return IsFloat(t) && t != DType::kF64; }

const char* FunctionOf(ExprOp op) {
  switch (op) {
    case ExprOp::kNeg:
      return "op_neg";
    case ExprOp::kAbs:
      return "op_abs";
    case ExprOp::kSign:
      return "op_sign";
    case ExprOp::kFloor:
      return "op_floor";
    case ExprOp::kCeil:
      return "op_ceil";
    case ExprOp::kRoundAway:
      return "op_round";
    case ExprOp::kRoundEven:
      return "op_rint";
    case ExprOp::kNot:
      return "op_not";
    case ExprOp::kIsFinite:
      return "op_isfinite";
    case ExprOp::kExp:
      return "op_exp";
    case ExprOp::kExp2:
      return "op_exp2";
    case ExprOp::kExpm1:
      return "op_expm1";
    case ExprOp::kLog:
      return "op_log";
    case ExprOp::kLog1p:
      return "op_log1p";
    case ExprOp::kSqrt:
      return "op_sqrt";
    case ExprOp::kRsqrt:
      return "op_rsqrt";
    case ExprOp::kCbrt:
      return "op_cbrt";
    case ExprOp::kSin:
      return "op_sin";
    case ExprOp::kCos:
      return "op_cos";
    case ExprOp::kTan:
      return "op_tan";
    case ExprOp::kAsin:
      return "op_asin";
    case ExprOp::kAcos:
      return "op_acos";
    case ExprOp::kAtan:
      return "op_atan";
    case ExprOp::kSinh:
      return "op_sinh";
    case ExprOp::kCosh:
      return "op_cosh";
    case ExprOp::kTanh:
      return "op_tanh";
    case ExprOp::kAsinh:
      return "op_asinh";
    case ExprOp::kAcosh:
      return "op_acosh";
    case ExprOp::kAtanh:
      return "op_atanh";
    case ExprOp::kLogistic:
      return "op_logistic";
    case ExprOp::kErf:
      return "op_erf";
    case ExprOp::kErfc:
      return "op_erfc";
    case ExprOp::kErfInv:
      return "op_erfinv";
    case ExprOp::kPopcnt:
      return "op_popcnt";
    case ExprOp::kClz:
      return "op_clz";
    case ExprOp::kAdd:
      return "op_add";
    case ExprOp::kSub:
      return "op_sub";
    case ExprOp::kMul:
      return "op_mul";
    case ExprOp::kDiv:
      return "op_div";
    case ExprOp::kRem:
      return "op_rem";
    case ExprOp::kPow:
      return "op_pow";
    case ExprOp::kAtan2:
      return "op_atan2";
    case ExprOp::kMax:
      return "op_max";
    case ExprOp::kMin:
      return "op_min";
    case ExprOp::kAnd:
      return "op_and";
    case ExprOp::kOr:
      return "op_or";
    case ExprOp::kXor:
      return "op_xor";
    case ExprOp::kShl:
      return "op_shl";
    case ExprOp::kShrLogical:
      return "op_shrl";
    case ExprOp::kShrArithmetic:
      return "op_shra";
    case ExprOp::kEq:
      return "op_eq";
    case ExprOp::kNe:
      return "op_ne";
    case ExprOp::kLt:
      return "op_lt";
    case ExprOp::kLe:
      return "op_le";
    case ExprOp::kGt:
      return "op_gt";
    case ExprOp::kGe:
      return "op_ge";
    case ExprOp::kIntegerPow:
      return "op_ipow";
    case ExprOp::kSelect:
      return "op_select";
    case ExprOp::kClamp:
      return "op_clamp";
    default:
      return nullptr;
  }
}

std::string ConvertText(DType from, DType to, const std::string& value) {
  if (to == DType::kPred) return "(" + value + " != " + RegisterType(from) + "(0))";
  if (IsFloat(to)) return Rounded(to, Call(RegisterType(to), value));
  if (IsFloat(from)) return std::string("to_int<") + RegisterType(to) + ">(" + value + ")";
  return Call(RegisterType(to), value);
}

}  // namespace

bool SameRegister(DType a, DType b) { return a == b || (IsFloatRegister(a) && IsFloatRegister(b)); }

const char* RegisterType(DType t) {
  constexpr const char* names[kNumDTypes] = {"bool",  "i8",    "i16",   "i32", "i64",
                                             "u8",    "u16",   "u32",   "u64", "float",
                                             "float", "float", "double"};
  return names[static_cast<int>(t)];
}

const char* MemoryType(DType t) {
  if (t == DType::kPred) return "u8";
  return t == DType::kF16 || t == DType::kBF16 ? "u16" : RegisterType(t);
}

std::string FromMemory(DType t, const std::string& element) {
  if (t == DType::kPred) return "(" + element + " != 0)";
  if (t == DType::kBF16) return Call("from_bf16", element);
  return t == DType::kF16 ? Call("from_f16", element) : element;
}

std::string ToMemory(DType t, const std::string& value) {
  if (t == DType::kPred) return Call("u8", value);
  if (t == DType::kBF16) return Call("to_bf16", value);
  return t == DType::kF16 ? Call("to_f16", value) : value;
}

std::string ConstantText(DType t, uint64_t bits) {
  if (t == DType::kF64) return "__longlong_as_double(i64(" + Hex(bits, "ull") + "))";
  if (IsFloat(t)) return Call("__uint_as_float", Hex(bits & 0xffffffffu, "u"));
  return Call(RegisterType(t), Hex(bits, "ull"));
}

std::string IndexText(DType t, const std::string& position) {
  return Rounded(t, Call(RegisterType(t), position));
}

DType ResultType(const ExprInstr& instr, ExprOp op) {
  const bool test = (op >= ExprOp::kEq && op <= ExprOp::kGe) || op == ExprOp::kIsFinite;
  if (IsArgReduce(op)) return static_cast<DType>(instr.aux);
  return test ? DType::kPred : instr.dtype;
}

std::string ValueText(const ExprInstr& instr, ExprOp op, const NamedRegisters& registers) {
  if (op == ExprOp::kConvert) {
    const DType from = static_cast<DType>(instr.aux);
    const NamedValue& a = registers[instr.a];
    return SameRegister(a.dtype, from) ? ConvertText(from, instr.dtype, a.name) : std::string();
  }
  if (op == ExprOp::kBitcast) {
    const DType from = static_cast<DType>(instr.aux);
    const NamedValue& a = registers[instr.a];
    if (!SameRegister(a.dtype, from)) return {};
    const std::string cast = std::string("bits_as<") + MemoryType(instr.dtype) + ">";
    return FromMemory(instr.dtype,
                      cast + "(" + MemoryType(from) + "(" + ToMemory(from, a.name) + "))");
  }
  const char* function = FunctionOf(op);
  if (function == nullptr) return {};
  const uint8_t operands[] = {instr.a, instr.b, instr.c};
  std::string arguments;
  for (int i = 0; i < NumOperands(op); ++i) {
    const NamedValue& operand = registers[operands[i]];
    const DType expected = op == ExprOp::kSelect && i == 0 ? DType::kPred : instr.dtype;
    if (!SameRegister(operand.dtype, expected)) return {};
    arguments += (i > 0 ? ", " : "") + operand.name;
  }
  if (op == ExprOp::kIntegerPow) {
    arguments += ", " + std::to_string(static_cast<int16_t>(instr.aux));
  }
  const std::string value = Call(function, arguments);
  const bool exact = op == ExprOp::kSelect || ResultType(instr, op) == DType::kPred;
  return exact ? value : Rounded(instr.dtype, value);
}

const char* CombinerText(ExprOp op) {
  switch (op) {
    case ExprOp::kReduceSum:
      return "Sum";
    case ExprOp::kReduceProd:
      return "Prod";
    case ExprOp::kReduceMax:
      return "Max";
    case ExprOp::kReduceMin:
      return "Min";
    case ExprOp::kReduceAnd:
      return "And";
    case ExprOp::kReduceOr:
      return "Or";
    case ExprOp::kReduceXor:
      return "Xor";
    case ExprOp::kReduceArgmax:
      return "Arg<true>";
    default:
      return "Arg<false>";
  }
}

std::string IdentityText(ExprOp op, DType t) {
  const std::string type = RegisterType(t);
  const bool max = op == ExprOp::kReduceMax, min = op == ExprOp::kReduceMin;
  if (op == ExprOp::kReduceProd) return Call(type, "1");
  if (!max && !min) return Call(type, op == ExprOp::kReduceAnd ? "-1" : "0");
  if (IsFloat(t))
    return Call(type, max ? "-__int_as_float(0x7f800000)" : "__int_as_float(0x7f800000)");
  if (t == DType::kPred || IsUnsigned(t)) return Call(type, max ? "0" : "-1");
  const uint64_t largest = ~uint64_t{0} >> (65 - 8 * SizeOf(t));
  return ConstantText(t, max ? ~largest : largest);
}

}  // namespace jaxgraph
