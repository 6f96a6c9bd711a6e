#include "ffi/core/expr.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ffi/core/wire.h"

namespace jaxgraph {
namespace {

Status Malformed(const std::string& what) {
  return Status(Code::kInvalidArgument, "expression: " + what);
}

bool Between(ExprOp op, ExprOp first, ExprOp last) { return op >= first && op <= last; }

bool IsUnary(ExprOp op) { return Between(op, ExprOp::kNeg, ExprOp::kClz); }
bool IsBinary(ExprOp op) { return Between(op, ExprOp::kAdd, ExprOp::kGe); }
bool IsCompare(ExprOp op) { return Between(op, ExprOp::kEq, ExprOp::kGe); }
bool IsTernary(ExprOp op) { return Between(op, ExprOp::kSelect, ExprOp::kClamp); }
bool IsReduce(ExprOp op) { return Between(op, ExprOp::kReduceSum, ExprOp::kReduceXor); }
bool IsKnown(ExprOp op) {
  return Between(op, ExprOp::kLoad, ExprOp::kBitcast) || IsUnary(op) || IsBinary(op) ||
         op == ExprOp::kIntegerPow || IsTernary(op) || IsReduce(op);
}

bool NeedsFloat(ExprOp op) {
  return Between(op, ExprOp::kFloor, ExprOp::kRoundEven) || op == ExprOp::kIsFinite ||
         Between(op, ExprOp::kExp, ExprOp::kErfInv) || op == ExprOp::kAtan2;
}
bool NeedsInteger(ExprOp op) {  // or bool
  return op == ExprOp::kNot || op == ExprOp::kPopcnt || op == ExprOp::kClz ||
         Between(op, ExprOp::kAnd, ExprOp::kShrArithmetic) ||
         Between(op, ExprOp::kReduceAnd, ExprOp::kReduceOr) || op == ExprOp::kReduceXor;
}

// How a register holds a value. Reading it as another class would read other bits.
enum class Class : uint8_t { kUndefined, kFloat, kDouble, kInteger, kBool };

Class ClassOf(DType t) {
  if (t == DType::kPred) return Class::kBool;
  if (t == DType::kF64) return Class::kDouble;
  return IsFloat(t) ? Class::kFloat : Class::kInteger;
}

// Does any index value leave int64 somewhere on the way?
bool IndexOverflows(const ExprIndex& index, const ExprProgram& p) {
  int64_t low = index.offset;
  int64_t high = index.offset;
  for (int d = 0; d < p.rank; ++d) {
    if (p.shape[d] == 0) return false;
    int64_t reach = 0;
    if (__builtin_mul_overflow(p.shape[d] - 1, index.strides[d], &reach)) return true;
    int64_t& end = reach < 0 ? low : high;
    if (__builtin_add_overflow(end, reach, &end)) return true;
  }
  return false;
}

// Walks the sections in order, keeping what each register holds.
class Checker {
 public:
  Checker(const Node& node, const ExprProgram& program) : node_(node), program_(program) {}

  Status Check() {
    const bool row = node_.op == Op::kRow;
    if (row && program_.rank < 1) return Malformed("a row expression has no axis to reduce");
    if (!row && program_.num_stages != 1) return Malformed("has more than one stage");
    size_t next = 0;
    for (int s = 0; s < program_.num_stages; ++s) {
      const ExprStage& stage = program_.stages[s];
      if (!row && stage.scalar_begin != stage.scalar_end) {
        return Malformed("has a scalar section, which only rows have");
      }
      JAXGRAPH_RETURN_IF_ERROR(CheckSection(stage.scalar_begin, stage.scalar_end, true, &next));
      JAXGRAPH_RETURN_IF_ERROR(CheckSection(stage.elem_begin, stage.elem_end, false, &next));
    }
    if (next != program_.num_instrs) return Malformed("has instructions outside its stages");
    return Status::Ok();
  }

 private:
  // Sections follow each other without gap; an empty one may name any place.
  Status CheckSection(size_t begin, size_t end, bool scalar, size_t* next) {
    if (begin == end) return Status::Ok();
    if (begin != *next || end < begin || end > program_.num_instrs) {
      return Malformed("has sections that overlap or leave a gap");
    }
    *next = end;
    // Element registers do not survive a stage.
    std::fill_n(registers_.begin(), kExprNumElementRegs, Class::kUndefined);
    std::vector<std::pair<uint8_t, Class>> reduced;
    for (size_t i = begin; i < end; ++i) {
      const ExprInstr& instr = program_.instrs[i];
      const Status status = CheckInstr(instr, scalar, &reduced);
      if (!status.ok()) {
        return Malformed("instruction " + std::to_string(i) + " " + status.message());
      }
    }
    for (const auto& [reg, cls] : reduced) registers_[reg] = cls;
    return Status::Ok();
  }

  Status CheckInstr(const ExprInstr& instr, bool scalar,
                    std::vector<std::pair<uint8_t, Class>>* reduced) {
    const ExprOp op = instr.op;
    if (!IsKnown(op)) return Bad("has an unknown op");
    if (static_cast<int>(instr.dtype) >= kNumDTypes) return Bad("has an unknown dtype");
    if (NeedsFloat(op) && !IsFloat(instr.dtype)) return Bad("needs floats");
    if (NeedsInteger(op) && IsFloat(instr.dtype)) return Bad("needs integers");

    const Class own = ClassOf(instr.dtype);
    Class result = own;
    if (op == ExprOp::kLoad) {
      JAXGRAPH_RETURN_IF_ERROR(CheckAccess(node_.srcs, instr, scalar));
    } else if (op == ExprOp::kIndex) {
      if (instr.aux >= program_.num_indices) return Bad("reads an index that is not there");
    } else if (op == ExprOp::kConst) {
      if (instr.aux >= program_.num_imms) return Bad("reads a constant that is not there");
    } else if (op == ExprOp::kStore) {
      JAXGRAPH_RETURN_IF_ERROR(CheckAccess(node_.outs, instr, scalar));
      return CheckRead(instr.a, own, scalar);
    } else if (op == ExprOp::kConvert) {
      if (instr.aux >= kNumDTypes) return Bad("converts from an unknown dtype");
      JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.a, ClassOf(static_cast<DType>(instr.aux)), scalar));
    } else if (op == ExprOp::kBitcast) {
      const DType from = static_cast<DType>(instr.aux);
      if (instr.aux >= kNumDTypes || SizeOf(from) != SizeOf(instr.dtype) || from == DType::kPred ||
          instr.dtype == DType::kPred) {
        return Bad("sees bits as a dtype that does not fit");
      }
      JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.a, ClassOf(from), scalar));
    } else if (op == ExprOp::kSelect) {
      JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.a, Class::kBool, scalar));
      JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.b, own, scalar));
      JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.c, own, scalar));
    } else {
      JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.a, own, scalar));
      if (IsBinary(op) || IsTernary(op)) {
        JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.b, own, scalar));
      }
      if (IsTernary(op)) JAXGRAPH_RETURN_IF_ERROR(CheckRead(instr.c, own, scalar));
      if (IsCompare(op) || op == ExprOp::kIsFinite) result = Class::kBool;
    }

    if (IsReduce(op)) return CheckReduction(instr, scalar, result, reduced);
    const int first = scalar ? kExprNumElementRegs : 0;
    const int count = scalar ? kExprNumScalarRegs : kExprNumElementRegs;
    if (instr.dst < first || instr.dst >= first + count) return Bad("writes a wrong register");
    registers_[instr.dst] = result;
    return Status::Ok();
  }

  Status CheckReduction(const ExprInstr& instr, bool scalar, Class result,
                        std::vector<std::pair<uint8_t, Class>>* reduced) {
    if (node_.op != Op::kRow || scalar) return Bad("reduces outside a row's element section");
    if (instr.dst < kExprNumElementRegs || instr.dst >= registers_.size()) {
      return Bad("reduces into a register that is not scalar");
    }
    if (IsArgReduce(instr.op)) {
      if (instr.aux >= kNumDTypes || ClassOf(static_cast<DType>(instr.aux)) != Class::kInteger) {
        return Bad("has an index dtype that is no integer");
      }
      result = Class::kInteger;
    }
    for (const auto& earlier : *reduced) {
      if (earlier.first == instr.dst) return Bad("reduces twice into one register");
    }
    // The value is there when the stage ends; until then nobody may read the register.
    registers_[instr.dst] = Class::kUndefined;
    reduced->emplace_back(instr.dst, result);
    return Status::Ok();
  }

  Status CheckRead(uint8_t reg, Class expected, bool scalar) const {
    if (reg >= registers_.size() || (scalar && reg < kExprNumElementRegs)) {
      return Bad("reads a wrong register");
    }
    if (registers_[reg] == Class::kUndefined) return Bad("reads a register before it is written");
    if (registers_[reg] != expected) return Bad("reads a register of another type");
    return Status::Ok();
  }

  // In an element section a tensor has the iteration shape. In a scalar section it is read or
  // written at the row's index and 0 on the last axis, so its last axis may have any length but 0.
  Status CheckAccess(const std::vector<TensorRef>& tensors, const ExprInstr& instr,
                     bool scalar) const {
    if (instr.aux >= tensors.size()) return Bad("names a tensor that is not there");
    const TensorRef& t = tensors[instr.aux];
    if (t.dtype != instr.dtype) return Bad("has another dtype than its tensor");
    if (t.rank != program_.rank) return Bad("names a tensor of another rank");
    const int exact = scalar ? program_.rank - 1 : program_.rank;
    if (!std::equal(t.shape.begin(), t.shape.begin() + exact, program_.shape)) {
      return Bad("names a tensor of another shape");
    }
    if (scalar && t.shape[exact] == 0) return Bad("names an empty tensor");
    return Status::Ok();
  }

  static Status Bad(const char* what) { return Status(Code::kInvalidArgument, what); }

  const Node& node_;
  const ExprProgram& program_;
  std::array<Class, kExprNumElementRegs + kExprNumScalarRegs> registers_{};
};

}  // namespace

std::string EncodeExpr(const ExprProgram& p) {
  Writer w;
  for (uint8_t n : {p.rank, p.num_stages, p.num_srcs, p.num_outs, p.num_indices, p.num_imms}) {
    w.Put(n);
  }
  w.Put(p.num_instrs);
  w.PutBytes(p.shape, p.rank * sizeof *p.shape);
  w.PutBytes(p.stages, p.num_stages * sizeof *p.stages);
  w.PutBytes(p.instrs, p.num_instrs * sizeof *p.instrs);
  for (int i = 0; i < p.num_indices; ++i) {
    w.Put(p.indices[i].offset);
    w.PutBytes(p.indices[i].strides, p.rank * sizeof *p.indices[i].strides);
  }
  w.PutBytes(p.imms, p.num_imms * sizeof *p.imms);
  return w.Take();
}

Status ParseExpr(std::string_view bytes, ExprProgram* program) {
  Reader r(bytes);
  ExprProgram p;
  for (uint8_t* n :
       {&p.rank, &p.num_stages, &p.num_srcs, &p.num_outs, &p.num_indices, &p.num_imms}) {
    *n = r.Get<uint8_t>();
  }
  p.num_instrs = r.Get<uint16_t>();
  if (p.rank > kExprMaxRank || p.num_stages > kExprMaxStages || p.num_srcs > kExprMaxSrcs ||
      p.num_outs > kExprMaxOuts || p.num_indices > kExprMaxIndices || p.num_imms > kExprMaxImms ||
      p.num_instrs > kExprMaxInstrs) {
    return Malformed("is beyond the limits");
  }
  r.GetBytes(p.shape, p.rank * sizeof *p.shape);
  r.GetBytes(p.stages, p.num_stages * sizeof *p.stages);
  r.GetBytes(p.instrs, p.num_instrs * sizeof *p.instrs);
  for (int i = 0; i < p.num_indices; ++i) {
    p.indices[i].offset = r.Get<int64_t>();
    r.GetBytes(p.indices[i].strides, p.rank * sizeof *p.indices[i].strides);
  }
  r.GetBytes(p.imms, p.num_imms * sizeof *p.imms);
  if (!r.at_end()) return Malformed(r.ok() ? "has bytes behind its end" : "is truncated");

  int64_t elements = 1;
  for (int d = 0; d < p.rank; ++d) {
    if (p.shape[d] < 0 || __builtin_mul_overflow(elements, p.shape[d], &elements)) {
      return Malformed("has a shape that is negative or overflows");
    }
  }
  for (int i = 0; i < p.num_indices; ++i) {
    if (IndexOverflows(p.indices[i], p)) return Malformed("has an index that overflows");
  }
  *program = p;
  return Status::Ok();
}

Status DecodeExpr(const Node& node, ExprProgram* program) {
  ExprProgram p;
  JAXGRAPH_RETURN_IF_ERROR(ParseExpr(node.params, &p));
  if (p.num_srcs != node.srcs.size() || p.num_outs != node.outs.size()) {
    return Malformed("has another number of sources or outputs than its node");
  }
  JAXGRAPH_RETURN_IF_ERROR(Checker(node, p).Check());
  *program = p;
  return Status::Ok();
}

}  // namespace jaxgraph
