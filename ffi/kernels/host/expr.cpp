// EXPR and ROW: an interpreter of expression programs that works on strips of elements, so that the
// dispatch of an instruction is paid once per strip and its loop vectorises.
#include "ffi/core/expr.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "ffi/kernels/host/expr_elements.h"
#include "ffi/kernels/host/expr_kinds.h"
#include "ffi/kernels/host/layout.h"
#include "ffi/kernels/host/loops.h"
#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/parallel.h"

namespace jaxgraph {
namespace {

// ---- parameters: the program and its tensors in one block, of the smallest size class that fits
// ----

// In the block behind the header, in this order: stages, instrs, tensors (sources, then outputs),
// indices, imms. All 8-byte aligned.
struct Header {
  uint8_t rank, num_stages, num_srcs, num_outs, num_indices, num_imms;
  uint16_t num_instrs;
  uint8_t is_row;
  uint8_t reserved[3];
  uint32_t cost;  // of one element, in the steps of ParallelRanges
  int64_t shape[kExprMaxRank];
};

struct Tensor {
  char* address;
  int64_t strides[kExprMaxRank];
};

template <size_t kBytes>
struct ExprParams {
  alignas(8) char bytes[kBytes];
};
constexpr size_t kSmall = 512, kMedium = 1536, kLarge = 4096;

// A constant that only one instruction writes is set once, not once per strip: ExprInstr::b of
// kConst says so.
constexpr uint8_t kSetOnce = 1;

struct View {
  explicit View(const void* params) : header(*static_cast<const Header*>(params)) {
    const char* p = static_cast<const char*>(params) + sizeof(Header);
    stages = Take<ExprStage>(&p, header.num_stages);
    instrs = Take<ExprInstr>(&p, header.num_instrs);
    srcs = Take<Tensor>(&p, header.num_srcs);
    outs = Take<Tensor>(&p, header.num_outs);
    indices = Take<ExprIndex>(&p, header.num_indices);
    imms = Take<uint64_t>(&p, header.num_imms);
  }

  const Header& header;
  const ExprStage* stages;
  const ExprInstr* instrs;
  const Tensor *srcs, *outs;
  const ExprIndex* indices;
  const uint64_t* imms;

 private:
  template <typename T>
  static const T* Take(const char** p, int n) {
    const T* first = reinterpret_cast<const T*>(*p);
    *p += n * sizeof(T);
    return first;
  }
};

// ---- registers ----

constexpr int kStripBytes = kStripElements * 8;
constexpr int kScalarBytes = kStripPadding * 8;  // a strip of one element, padded

// One thread's registers. An instruction never writes the strip that it reads (their widths may
// differ): it writes a spare one, which then changes places with the register's.
class Registers {
 public:
  Registers() {
    constexpr size_t kElements = (kExprNumElementRegs + 1) * kStripBytes;
    constexpr size_t kWide = kExprNumScalarRegs * kStripBytes;
    constexpr size_t kScalars = (kExprNumScalarRegs + 1) * kScalarBytes;
    memory_.reset(static_cast<char*>(::operator new(kElements + kWide + kScalars, kAlignment)));
    std::memset(memory_.get(), 0, kElements + kWide + kScalars);  // tails are read, if never used
    char* p = memory_.get();
    for (char*& strip : elements_) strip = p, p += kStripBytes;
    for (char*& strip : wide_) strip = p, p += kStripBytes;
    for (char*& strip : scalars_) strip = p, p += kScalarBytes;
  }

  static Registers& OfThread() {
    thread_local Registers registers;
    return registers;
  }

  char* scalar(int reg) { return scalars_[reg - kExprNumElementRegs]; }
  char* element(int reg) { return elements_[reg]; }
  char* wide(int reg) { return wide_[reg - kExprNumElementRegs]; }

  char* spare(bool is_scalar) {
    return is_scalar ? scalars_[kExprNumScalarRegs] : elements_[kExprNumElementRegs];
  }
  // The spare strip becomes the register's.
  void SwapSpare(int reg) {
    if (reg >= kExprNumElementRegs) {
      std::swap(scalars_[reg - kExprNumElementRegs], scalars_[kExprNumScalarRegs]);
    } else {
      std::swap(elements_[reg], elements_[kExprNumElementRegs]);
    }
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<char, Free> memory_;
  char* elements_[kExprNumElementRegs + 1];
  char* wide_[kExprNumScalarRegs];  // scalar registers as strips, made when an instruction asks
  char* scalars_[kExprNumScalarRegs + 1];
};

// ---- the interpreter ----

bool IsReduction(ExprOp op) { return op >= ExprOp::kReduceSum; }

// A run of a strip's elements along the last dimension.
struct Segment {
  int begin, size;  // in the strip
  int64_t coords[kExprMaxRank];
};

class Interpreter {
 public:
  explicit Interpreter(const View& view)
      : view_(view), loops_(Loops().expr), regs_(Registers::OfThread()) {}

  // EXPR: the elements [begin, end) of the flattened space.
  void RunElements(int64_t begin, int64_t end) {
    const ExprStage& stage = view_.stages[0];
    bool first = true;
    for (int64_t at = begin; at < end; at += kStripElements) {
      CutSegments(at, static_cast<int>(std::min<int64_t>(kStripElements, end - at)));
      RunSection(stage.elem_begin, stage.elem_end, first);
      first = false;
    }
  }

  // ROW: one row.
  void RunRow(int64_t row) {
    const Header& h = view_.header;
    Segment& segment = segments_[0];
    num_segments_ = 1;
    for (int d = h.rank - 2; d >= 0; --d) {
      segment.coords[d] = row % h.shape[d];
      row /= h.shape[d];
    }
    const int64_t length = h.shape[h.rank - 1];
    for (int s = 0; s < h.num_stages; ++s) {
      const ExprStage& stage = view_.stages[s];
      segment.coords[h.rank - 1] = 0;
      SetSize(1);
      RunScalars(stage.scalar_begin, stage.scalar_end);
      if (stage.elem_begin == stage.elem_end) continue;
      StartReductions(stage);
      for (int64_t at = 0; at < length; at += kStripElements) {
        segment.coords[h.rank - 1] = at;
        SetSize(static_cast<int>(std::min<int64_t>(kStripElements, length - at)));
        RunSection(stage.elem_begin, stage.elem_end, at == 0);
      }
      FinishReductions(stage);
    }
  }

 private:
  void SetSize(int n) {
    size_ = n;
    segments_[0].begin = 0;
    segments_[0].size = n;
  }

  void CutSegments(int64_t at, int n) {
    const Header& h = view_.header;
    const int last = h.rank - 1;
    int64_t coords[kExprMaxRank];
    for (int d = last; d >= 0; --d) {
      coords[d] = at % h.shape[d];
      at /= h.shape[d];
    }
    size_ = n;
    num_segments_ = 0;
    for (int done = 0; done < n;) {
      Segment& s = segments_[num_segments_++];
      s.begin = done;
      s.size = static_cast<int>(std::min<int64_t>(n - done, h.shape[last] - coords[last]));
      std::copy_n(coords, h.rank, s.coords);
      done += s.size;
      coords[last] = 0;
      for (int d = last - 1; d >= 0 && ++coords[d] == h.shape[d]; --d) coords[d] = 0;
    }
  }

  int64_t OffsetAt(const Segment& s, const int64_t* strides) const {
    int64_t offset = 0;
    for (int d = 0; d < view_.header.rank; ++d) offset += s.coords[d] * strides[d];
    return offset;
  }

  void RunScalars(int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const ExprInstr& instr = view_.instrs[i];
      const char* operands[3] = {};
      for (int o = 0; o < NumOperands(instr.op); ++o) operands[o] = regs_.scalar(Operand(instr, o));
      Execute(instr, operands, true);
    }
  }

  // The element section over the present strip. What does not change from strip to strip is spread
  // over whole strips at the first (`fresh`), which is the longest: constants, and the scalar
  // registers that the section reads.
  void RunSection(int begin, int end, bool fresh) {
    if (fresh) widened_ = 0;
    for (int i = begin; i < end; ++i) {
      const ExprInstr& instr = view_.instrs[i];
      if (instr.op == ExprOp::kConst && instr.b == kSetOnce && !fresh) continue;
      const char* operands[3] = {};
      for (int o = 0; o < NumOperands(instr.op); ++o) {
        const int reg = Operand(instr, o);
        operands[o] =
            reg < kExprNumElementRegs ? regs_.element(reg) : Widened(reg, OperandType(instr, o));
      }
      if (IsReduction(instr.op)) {
        const int64_t first = segments_[0].coords[view_.header.rank - 1];
        loops_.reduce(instr, operands[0], size_, first, &states_[instr.dst - kExprNumElementRegs]);
      } else {
        Execute(instr, operands, false);
      }
    }
  }

  const char* Widened(int reg, DType t) {
    const uint32_t bit = 1u << (reg - kExprNumElementRegs);
    if ((widened_ & bit) == 0) {
      widened_ |= bit;
      loops_.broadcast(t, regs_.scalar(reg), size_, regs_.wide(reg));
    }
    return regs_.wide(reg);
  }

  void Execute(const ExprInstr& instr, const char* const* operands, bool scalar) {
    const DType t = instr.dtype;
    switch (instr.op) {
      case ExprOp::kLoad: {
        const Tensor& tensor = view_.srcs[instr.aux];
        char* dst = Destination(instr, scalar);
        ForEachSegment(tensor.strides, [&](const Segment& s, int64_t offset, int64_t step) {
          loops_.load(t, tensor.address + offset * static_cast<int64_t>(SizeOf(t)), step, s.size,
                      dst + s.begin * RegBytes(t));
        });
        return;
      }
      case ExprOp::kStore: {
        const Tensor& tensor = view_.outs[instr.aux];
        ForEachSegment(tensor.strides, [&](const Segment& s, int64_t offset, int64_t step) {
          loops_.store(t, operands[0] + s.begin * RegBytes(t),
                       tensor.address + offset * static_cast<int64_t>(SizeOf(t)), step, s.size);
        });
        return;
      }
      case ExprOp::kIndex: {
        const ExprIndex& index = view_.indices[instr.aux];
        char* dst = Destination(instr, scalar);
        ForEachSegment(index.strides, [&](const Segment& s, int64_t offset, int64_t step) {
          loops_.index(t, index.offset + offset, step, s.size, dst + s.begin * RegBytes(t));
        });
        return;
      }
      case ExprOp::kConst:
        loops_.broadcast(t, &view_.imms[instr.aux], size_, Destination(instr, scalar));
        return;
      default:
        loops_.compute(instr, operands[0], operands[1], operands[2], size_, regs_.spare(scalar));
        regs_.SwapSpare(instr.dst);
    }
  }

  char* Destination(const ExprInstr& instr, bool scalar) {
    return scalar ? regs_.scalar(instr.dst) : regs_.element(instr.dst);
  }

  template <typename Fn>
  void ForEachSegment(const int64_t* strides, const Fn& fn) {
    const int64_t step = strides[view_.header.rank - 1];
    for (int i = 0; i < num_segments_; ++i) fn(segments_[i], OffsetAt(segments_[i], strides), step);
  }

  static int Operand(const ExprInstr& instr, int i) {
    return i == 0 ? instr.a : i == 1 ? instr.b : instr.c;
  }

  static DType OperandType(const ExprInstr& instr, int i) {
    if (instr.op == ExprOp::kConvert || instr.op == ExprOp::kBitcast) {
      return static_cast<DType>(instr.aux);
    }
    return instr.op == ExprOp::kSelect && i == 0 ? DType::kPred : instr.dtype;
  }

  // ---- reductions ----

  void StartReductions(const ExprStage& stage) {
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      const ExprInstr& instr = view_.instrs[i];
      if (!IsReduction(instr.op)) continue;
      ReduceState& state = states_[instr.dst - kExprNumElementRegs];
      state = ReduceState{};
      if (instr.op == ExprOp::kReduceProd) state.f = 1, state.i = 1;
      if (instr.op == ExprOp::kReduceAnd) state.i = -1;
    }
  }

  void FinishReductions(const ExprStage& stage) {
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      const ExprInstr& instr = view_.instrs[i];
      if (IsReduction(instr.op)) FinishReduction(instr);
    }
  }

  // Rounds the result to its type by converting it from double, int64 or u64.
  void FinishReduction(const ExprInstr& instr) {
    ReduceState& state = states_[instr.dst - kExprNumElementRegs];
    const bool arg = IsArgReduce(instr.op);
    const bool extremum = instr.op == ExprOp::kReduceMax || instr.op == ExprOp::kReduceMin;
    if (extremum && !state.started) {
      state.f = instr.op == ExprOp::kReduceMax ? -HUGE_VAL : HUGE_VAL;
      state.i = EmptyExtremum(instr.dtype, instr.op == ExprOp::kReduceMax);
    }
    const bool is_float = IsFloat(instr.dtype) && !arg;
    alignas(64) char value[kScalarBytes] = {};
    if (is_float) {
      std::memcpy(value, &state.f, sizeof state.f);
    } else {
      std::memcpy(value, arg ? &state.index : &state.i, sizeof state.i);
    }
    ExprInstr convert{};
    convert.op = ExprOp::kConvert;
    convert.dtype = arg ? static_cast<DType>(instr.aux) : instr.dtype;
    convert.aux = static_cast<uint16_t>(is_float ? DType::kF64 : DType::kS64);
    loops_.compute(convert, value, nullptr, nullptr, 1, regs_.scalar(instr.dst));
  }

  // The identity of max or min over integers: the type's lowest or highest value.
  static int64_t EmptyExtremum(DType t, bool max) {
    const int bits = BitsOf(t);
    if (t == DType::kPred) return max ? 0 : 1;
    if (IsUnsigned(t)) return max ? 0 : static_cast<int64_t>(UINT64_MAX >> (64 - bits));
    const int64_t highest = static_cast<int64_t>(UINT64_MAX >> (65 - bits));
    return max ? -highest - 1 : highest;
  }

  const View& view_;
  const ExprLoops& loops_;
  Registers& regs_;
  int size_ = 0;          // elements of the present strip
  uint32_t widened_ = 0;  // scalar registers spread to strips for the present row
  int num_segments_ = 0;
  Segment segments_[kStripElements];
  ReduceState states_[kExprNumScalarRegs];
};

void Run(const void* params, ParallelFor& pool) {
  const View view(params);
  const Header& h = view.header;
  int64_t outer = 1;
  for (int d = 0; d + 1 < h.rank; ++d) outer *= h.shape[d];
  const int64_t inner = h.shape[h.rank - 1];
  const int64_t cost = outer * inner * h.cost;
  if (h.is_row) {
    ParallelRanges(pool, outer, 1, cost, [&](int64_t begin, int64_t end) {
      Interpreter interpreter(view);
      for (int64_t row = begin; row < end; ++row) interpreter.RunRow(row);
    });
  } else {
    ParallelRanges(pool, outer * inner, kStripElements, cost,
                   [&](int64_t begin, int64_t end) { Interpreter(view).RunElements(begin, end); });
  }
}

const KernelInfo kExprSmall = {"host_expr_512", sizeof(ExprParams<kSmall>), Run};
const KernelInfo kExprMedium = {"host_expr_1536", sizeof(ExprParams<kMedium>), Run};
const KernelInfo kExprLarge = {"host_expr_4096", sizeof(ExprParams<kLarge>), Run};

// ---- emission ----

class Packer {
 public:
  template <typename T>
  void Put(const T* values, size_t n) {
    bytes_.append(reinterpret_cast<const char*>(values), n * sizeof(T));
  }
  std::string Take(size_t size) {
    bytes_.resize(size);
    return std::move(bytes_);
  }
  size_t size() const { return bytes_.size(); }

 private:
  std::string bytes_;
};

// Marks constants of element sections that no other instruction overwrites.
void MarkConstants(ExprProgram* p) {
  for (int s = 0; s < p->num_stages; ++s) {
    const ExprStage& stage = p->stages[s];
    int writes[kExprNumElementRegs] = {};
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      const ExprInstr& instr = p->instrs[i];
      if (instr.op != ExprOp::kStore && !IsReduction(instr.op)) ++writes[instr.dst];
    }
    for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
      ExprInstr& instr = p->instrs[i];
      if (instr.op == ExprOp::kConst && writes[instr.dst] == 1) instr.b = kSetOnce;
    }
  }
}

// About what an element costs: a vectorised instruction, a vectorised function, a library call.
uint32_t CostOf(const ExprProgram& p) {
  uint32_t cost = 0;
  for (int i = 0; i < p.num_instrs; ++i) {
    const ExprOp op = p.instrs[i].op;
    const bool vectorised = (op >= ExprOp::kExp && op <= ExprOp::kRsqrt) || op == ExprOp::kTanh ||
                            op == ExprOp::kLogistic || op == ExprOp::kDiv;
    const bool call = (op >= ExprOp::kCbrt && op <= ExprOp::kErfInv) || op == ExprOp::kRem ||
                      op == ExprOp::kPow || op == ExprOp::kAtan2;
    cost += vectorised ? 8 : call ? 60 : 1;
  }
  return cost;
}

Strides StridesOf(const int64_t* strides, int rank) {
  Strides s{};
  std::copy_n(strides, rank, s.begin());
  return s;
}

}  // namespace

void RunExprElements(const char* params, int64_t begin, int64_t end) {
  const View view(params);
  Interpreter(view).RunElements(begin, end);
}

void SetExprSource(char* params, int source, char* address) {
  const_cast<Tensor&>(View(params).srcs[source]).address = address;
}

void SetExprOutput(char* params, int output, char* address) {
  const_cast<Tensor&>(View(params).outs[output]).address = address;
}

Status EmitExpr(const ResolvedNode& resolved, Launch* launch) {
  const Node& node = *resolved.node;
  ExprProgram p;
  JAXGRAPH_RETURN_IF_ERROR(DecodeExpr(node, &p));
  for (int i = 0; i < p.num_instrs; ++i)
    if (p.instrs[i].op == ExprOp::kConst) p.instrs[i].b = 0;
  MarkConstants(&p);

  Space space{p.rank, {}};
  std::copy_n(p.shape, p.rank, space.shape.begin());
  std::vector<Strides> strides;
  for (const TensorRef& t : node.srcs) strides.push_back(StridesOf(t.strides.data(), p.rank));
  for (const TensorRef& t : node.outs) strides.push_back(StridesOf(t.strides.data(), p.rank));
  for (int i = 0; i < p.num_indices; ++i)
    strides.push_back(StridesOf(p.indices[i].strides, p.rank));
  std::vector<Strides*> all;
  for (Strides& s : strides) all.push_back(&s);
  Collapse(&space, all, node.op == Op::kRow ? 1 : 0);
  if (space.rank == 0) space.shape[space.rank++] = 1;  // one element is a row of one

  Header header{};
  header.rank = static_cast<uint8_t>(space.rank);
  header.num_stages = p.num_stages;
  header.num_srcs = p.num_srcs;
  header.num_outs = p.num_outs;
  header.num_indices = p.num_indices;
  header.num_imms = p.num_imms;
  header.num_instrs = p.num_instrs;
  header.is_row = node.op == Op::kRow;
  header.cost = CostOf(p);
  std::copy_n(space.shape.begin(), space.rank, header.shape);

  Packer packer;
  packer.Put(&header, 1);
  packer.Put(p.stages, p.num_stages);
  packer.Put(p.instrs, p.num_instrs);
  size_t next = 0;
  auto put_tensor = [&](const char* address) {
    Tensor t{const_cast<char*>(address), {}};
    std::copy_n(strides[next++].begin(), space.rank, t.strides);
    packer.Put(&t, 1);
  };
  for (const char* src : resolved.srcs) put_tensor(src);
  for (const char* out : resolved.outs) put_tensor(out);
  for (int i = 0; i < p.num_indices; ++i) {
    ExprIndex index{p.indices[i].offset, {}};
    std::copy_n(strides[next++].begin(), space.rank, index.strides);
    packer.Put(&index, 1);
  }
  packer.Put(p.imms, p.num_imms);

  for (const KernelInfo* kernel : {&kExprSmall, &kExprMedium, &kExprLarge}) {
    if (packer.size() > kernel->param_bytes) continue;
    launch->kernel = kernel;
    launch->params = packer.Take(kernel->param_bytes);
    return Status::Ok();
  }
  return Status(Code::kInternal, "an expression program is larger than its limits allow");
}

}  // namespace jaxgraph
