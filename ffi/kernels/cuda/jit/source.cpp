#include "ffi/kernels/cuda/jit/source.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <vector>

#include "ffi/kernels/cuda/jit/expression.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kWarp = 32;
constexpr int64_t kElementsPerLane = 1 << 15;  // EXPR: before a thread takes more than one element
constexpr uint32_t kMaxVectorBytes = 16;
constexpr uint32_t kMaxVector = 8;

// ROW: see Shape below.
constexpr uint32_t kUsualThreads = 512, kMostThreads = 1024;
constexpr uint32_t kMostElements = 32;  // of a thread at once
constexpr uint32_t kMostCached = 64;    // 32-bit registers that hold loaded elements
constexpr uint32_t kMostWork = 1536;    // instructions, unrolled
constexpr uint32_t kCluster = 8;
constexpr uint32_t kLongRow = 8192;  // longer rows, where they are few, are shared by a cluster
constexpr uint32_t kFewRows = 16;
constexpr uint32_t kAccumulators = 4;  // of a thread: additions that need not wait for each other

std::string Str(int64_t v) { return std::to_string(v); }

// About how many machine instructions an instruction becomes in line.
uint32_t WeightOf(const ExprInstr& instr, ExprOp op) {
  const uint32_t wide = SizeOf(instr.dtype) == 8 ? 4 : 1;
  if (op == ExprOp::kExp || op == ExprOp::kDiv || op == ExprOp::kLogistic) return 10 * wide;
  if (op >= ExprOp::kExp2 && op <= ExprOp::kErfInv) return 16 * wide;
  if (op == ExprOp::kRem || op == ExprOp::kPow || op == ExprOp::kAtan2) return 16 * wide;
  return wide;
}

struct Section {
  int begin, end;
  bool scalar;
  // A LOAD may see what a STORE of this section wrote, so all happens element by element, in order.
  bool ordered = false;
};

class Generator {
 public:
  Generator(const KernelRequest& request, KernelSource* source)
      : request_(request), p_(request.piece->params), source_(source) {
    for (int s = 0; s < p_.num_stages; ++s) {
      const ExprStage& stage = p_.stages[s];
      sections_.push_back({stage.scalar_begin, stage.scalar_end, true});
      sections_.push_back({stage.elem_begin, stage.elem_end, false});
    }
    for (Section& section : sections_) {
      for (int i = section.begin; i < section.end; ++i) {
        if (OpOf(i) == ExprOp::kLoad && IsStored(p_.instrs[i].aux, section.begin, i)) {
          section.ordered = true;
        }
      }
    }
  }

  bool Generate() {
    const bool right = IsPossible() && (request_.row ? Row() : Expr("p.", "blockIdx.x"));
    if (right) source_->text = Head() + body_ + "}\n";
    return right;
  }

  bool GenerateBody(const std::string& operands, const std::string& block) {
    const bool right = IsPossible() && Expr(operands, block);
    if (right) source_->text = body_;
    return right;
  }

  bool GenerateValue(const std::string& operands, int out, std::string* text) {
    if (!IsPossible()) return false;
    Section section = sections_[1];
    if (section.ordered) return false;
    const Tile tile = Locate(operands, 1);
    LoadSection(section, tile, true);
    if (!Compute(section, tile, p_.rank - 1)) return false;
    for (int i = section.end; i > section.begin; --i) {
      if (OpOf(i - 1) != ExprOp::kStore || p_.instrs[i - 1].aux != out) continue;
      Line("return w%d[0];", i - 1);
      *text = body_;
      return true;
    }
    return false;
  }

 private:
  bool IsPossible() const {
    if (request_.num_srcs + request_.num_outs == 0 || p_.count == 0) return false;
    return std::none_of(sections_.begin(), sections_.end(),
                        [](const Section& s) { return s.scalar && s.ordered; });
  }

  // ---- text ----
  void Line(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    va_list arguments;
    va_start(arguments, format);
    const int length = std::vsnprintf(nullptr, 0, format, arguments);
    va_end(arguments);
    const size_t at = body_.size();
    body_.resize(at + static_cast<size_t>(length) + 1);
    va_start(arguments, format);
    std::vsnprintf(&body_[at], static_cast<size_t>(length) + 1, format, arguments);
    va_end(arguments);
    body_.back() = '\n';
  }

  std::string Head() const {
    const std::string name = KernelSource::kName;
    std::string head = request_.row ? "// row\n" : "// expr\n";
    head += "struct " + name + "_p {";
    for (int s = 0; s < request_.num_srcs; ++s) head += " const char* s" + Str(s) + ";";
    for (int o = 0; o < request_.num_outs; ++o) head += " char* o" + Str(o) + ";";
    head += " };\nextern \"C\" __global__ void __launch_bounds__(" + Str(source_->block) + ")\n" +
            name + "(const __grid_constant__ " + name + "_p p) {\n";
    return head + "begin();\n";
  }

  // base + sum of stride[d] * x<d> over dimensions [0, dims), + stride[dims] * `along` if given; in
  // 32 bits where all values fit.
  std::string Linear(int64_t base, const int64_t* strides, int dims, const char* along) const {
    int64_t reach = std::abs(base);
    const int used = along != nullptr ? dims + 1 : dims;
    for (int d = 0; d < used; ++d) {
      const int64_t size = d < dims || !request_.row ? p_.divide[d].divisor : int64_t{p_.count};
      reach += (size - 1) * std::abs(strides[d]);
    }
    const std::string type = reach < (int64_t{1} << 31) ? "i32" : "i64";
    std::string text = type + "(" + Str(base) + ")";
    for (int d = 0; d < used; ++d) {
      if (strides[d] == 0 || (d < dims && p_.divide[d].divisor == 1)) continue;
      const std::string index = d < dims ? "x" + Str(d) : std::string(along);
      text += " + " + type + "(" + index + ") * " + type + "(" + Str(strides[d]) + ")";
    }
    return "(" + text + ")";
  }

  // x<d> for each of the first `dims` dimensions, from the number `from`.
  void Indices(int dims, const std::string& from) {
    std::string rest = from;
    for (int d = dims - 1; d >= 0; --d) {
      if (d > 0) {
        Line("const u32 x%d = %s %% %uu, n%d = %s / %uu;", d, rest.c_str(), p_.divide[d].divisor, d,
             rest.c_str(), p_.divide[d].divisor);
        rest = "n" + Str(d);
      } else {
        Line("const u32 x0 = %s;", rest.c_str());
      }
    }
  }

  // ---- the program ----
  ExprOp OpOf(int i) const { return p_.ops[i]; }

  // Does a STORE among these instructions write to bytes of the source?
  bool IsStored(int src, int begin, int end) const {
    for (int i = begin; i < end; ++i) {
      if (OpOf(i) != ExprOp::kStore) continue;
      if ((request_.overlapping[p_.instrs[i].aux] >> src) & 1) return true;
    }
    return false;
  }
  bool IsStoredBefore(int src, const Section& section) const {
    return std::any_of(sections_.begin(), sections_.end(), [&](const Section& s) {
      return s.end <= section.begin && IsStored(src, s.begin, s.end);
    });
  }

  // Can memory carry something from one thread in `a` to another in `b`, or be overwritten in `b`
  // while another thread still is in `a`?
  bool Conflict(const Section& a, const Section& b) const {
    for (int i = b.begin; i < b.end; ++i) {
      const int tensor = p_.instrs[i].aux;
      if (OpOf(i) == ExprOp::kLoad && IsStored(tensor, a.begin, a.end)) return true;
      if (OpOf(i) != ExprOp::kStore) continue;
      for (int j = a.begin; j < a.end; ++j) {
        if (OpOf(j) != ExprOp::kLoad) continue;
        if ((request_.overlapping[tensor] >> p_.instrs[j].aux) & 1) return true;
      }
    }
    return false;
  }

  uint32_t WorkOf(const Section& section) const {
    uint32_t work = 0;
    for (int i = section.begin; i < section.end; ++i) work += WeightOf(p_.instrs[i], OpOf(i));
    return work;
  }

  // ---- operands ----
  struct Operand {
    DType dtype;
    const int64_t* strides;  // bytes
    uint32_t alignment;
  };
  Operand OperandOf(const ExprInstr& instr, bool store) const {
    return store
               ? Operand{instr.dtype, p_.out_strides[instr.aux], request_.out_alignment[instr.aux]}
               : Operand{instr.dtype, p_.src_strides[instr.aux], request_.src_alignment[instr.aux]};
  }
  // Whether `vector` neighbours along the last dimension are one aligned access.
  bool IsVector(const Operand& o, uint32_t vector) const {
    const int last = p_.rank - 1;
    const int64_t size = static_cast<int64_t>(SizeOf(o.dtype)), bytes = size * vector;
    if (o.strides[last] != size || o.alignment % bytes != 0) return false;
    for (int d = 0; d < last; ++d) {
      if (p_.divide[d].divisor > 1 && o.strides[d] % bytes != 0) return false;
    }
    return true;
  }
  // Elements along the last dimension that a thread takes together: a power of two.
  uint32_t VectorOf(uint32_t most, int64_t length) const {
    uint32_t widest = 1, vectors = 0;
    const auto for_each = [&](auto&& f) {
      for (const Section& section : sections_) {
        for (int i = section.begin; !section.scalar && i < section.end; ++i) {
          const bool store = OpOf(i) == ExprOp::kStore;
          if (store || OpOf(i) == ExprOp::kLoad) f(OperandOf(p_.instrs[i], store));
        }
      }
    };
    for_each([&](const Operand& o) {
      widest = std::max(widest, static_cast<uint32_t>(SizeOf(o.dtype)));
    });
    uint32_t vector = kMaxVectorBytes / widest;
    while (vector > most) vector /= 2;
    for (; vector > 1; vector /= 2) {
      if (length % vector != 0) continue;
      vectors = 0;
      for_each([&](const Operand& o) { vectors += IsVector(o, vector); });
      if (vectors > 0) break;
    }
    return std::max(vector, 1u);
  }

  // ---- one section's elements: E of them a thread, V neighbours in each group ----
  struct Tile {
    uint32_t elements, vector;
    std::string base;          // prefix of the names of operands' addresses: base + "s0"
    std::string position;      // of element e along the last dimension; "e" in it
    std::string group;         // of the first element of group g
    std::string on, on_group;  // conditions under which they exist; empty: always
  };

  std::string Address(const Tile& tile, const Operand& o, const char* kind, int tensor,
                      const std::string& position) const {
    const int64_t along = o.strides[p_.rank - 1];
    std::string text = tile.base + kind + Str(tensor);
    if (along == 0) return text;
    const int64_t reach = std::abs(along) * int64_t{p_.count};
    const char* type = reach < (int64_t{1} << 31) ? "i32" : "i64";
    return text + " + " + type + "(" + position + ") * " + type + "(" + Str(along) + ")";
  }

  void LoadElements(const Tile& tile, const std::string& name, const ExprInstr& instr) {
    const Operand o = OperandOf(instr, false);
    const char* type = MemoryType(o.dtype);
    const int src = instr.aux;
    if (o.strides[p_.rank - 1] == 0) {
      Line("const %s %s = *(const %s*)(%ss%d);", type, name.c_str(), type, tile.base.c_str(), src);
      return;
    }
    const bool vector = tile.vector > 1 && IsVector(o, tile.vector);
    const uint32_t width = vector ? tile.vector : 1;
    Line("%s %s[%u];", type, name.c_str(), tile.elements);
    Line("#pragma unroll");
    Line("for (int g = 0; g < %u; ++g) {", tile.elements / width);
    const std::string& on = vector ? tile.on_group : tile.on;
    Line("const u32 e = g * %u;", width);
    const std::string from = Address(tile, o, "s", src, tile.position);
    if (!on.empty()) {
      Line("if (%s) load<%u>(%s, %s + e); else {", on.c_str(), width, from.c_str(), name.c_str());
      Line("for (int j = 0; j < %u; ++j) %s[e + j] = 0; }", width, name.c_str());
    } else {
      Line("load<%u>(%s, %s + e);", width, from.c_str(), name.c_str());
    }
    Line("}");
  }

  void StoreElements(const Tile& tile, const std::string& name, const ExprInstr& instr) {
    const Operand o = OperandOf(instr, true);
    const bool vector = tile.vector > 1 && IsVector(o, tile.vector);
    const uint32_t width = vector ? tile.vector : 1;
    const std::string& on = vector ? tile.on_group : tile.on;
    Line("#pragma unroll");
    Line("for (int g = 0; g < %u; ++g) {", tile.elements / width);
    Line("const u32 e = g * %u;", width);
    Line("%s%s%sstore<%u>(%s, %s + e);", on.empty() ? "" : "if (", on.c_str(),
         on.empty() ? "" : ") ", width, Address(tile, o, "o", instr.aux, tile.position).c_str(),
         name.c_str());
    Line("}");
  }

  // Loads that need not wait for a STORE of an earlier section, one a source.
  bool IsHoisted(const ExprInstr& load, const Section& section) const {
    return !section.ordered && !IsStoredBefore(load.aux, section);
  }
  static std::string ArrayName(const ExprInstr& load, bool scalar, const char* suffix) {
    return (scalar ? "h" : "m") + Str(load.aux) + suffix;
  }
  bool Once(const std::string& name) {
    const bool first = std::find(declared_.begin(), declared_.end(), name) == declared_.end();
    if (first) declared_.push_back(name);
    return first;
  }

  // The loads of a section that happen in front of it (`hoisted`: those in front of everything).
  void LoadSection(const Section& section, const Tile& tile, bool hoisted) {
    for (int i = section.begin; i < section.end; ++i) {
      const ExprInstr& load = p_.instrs[i];
      if (OpOf(i) != ExprOp::kLoad || section.ordered) continue;
      if (IsHoisted(load, section) != hoisted) continue;
      const std::string name =
          ArrayName(load, section.scalar, hoisted ? "" : ("_" + Str(section.begin)).c_str());
      if (!Once(name)) continue;
      if (section.scalar) {
        const char* type = MemoryType(load.dtype);
        Line("const %s %s = *(const %s*)(%ss%d);", type, name.c_str(), type, tile.base.c_str(),
             load.aux);
      } else {
        LoadElements(tile, name, load);
      }
    }
  }

  std::string LoadedName(const ExprInstr& load, const Section& section) const {
    const std::string suffix = IsHoisted(load, section) ? "" : "_" + Str(section.begin);
    const std::string name = ArrayName(load, section.scalar, suffix.c_str());
    const bool single = section.scalar || p_.src_strides[load.aux][p_.rank - 1] == 0;
    return single ? name : name + "[e]";
  }

  // One instruction other than a reduction; its value becomes v<i>. `dims`: leading dimensions with
  // an x<d>.
  bool Instruction(int i, const Section& section, const Tile& tile, int dims) {
    const ExprInstr& in = p_.instrs[i];
    const ExprOp op = OpOf(i);
    std::string value;
    switch (op) {
      case ExprOp::kLoad:
        if (section.ordered) {
          const std::string from = Address(tile, OperandOf(in, false), "s", in.aux, "pos");
          const std::string guard = tile.on.empty() ? "" : "!(" + tile.on + ") ? 0 : ";
          value =
              FromMemory(in.dtype, "(" + std::string(MemoryType(in.dtype)) + "(" + guard +
                                       "*(const " + MemoryType(in.dtype) + "*)(" + from + ")))");
        } else {
          value = FromMemory(in.dtype, LoadedName(in, section));
        }
        break;
      case ExprOp::kStore:
        return Store(i, section, tile);
      case ExprOp::kIndex: {
        const ExprIndex& index = p_.indices[in.aux];
        value = IndexText(
            in.dtype, Linear(index.offset, index.strides, dims, section.scalar ? nullptr : "pos"));
        break;
      }
      case ExprOp::kConst:
        value = ConstantText(in.dtype, p_.imms[in.aux]);
        break;
      default:
        value = ValueText(in, op, registers_);
    }
    if (value.empty()) return false;
    const DType type = ResultType(in, op);
    Line("const %s v%d = %s;", RegisterType(type), i, value.c_str());
    registers_[in.dst] = {"v" + Str(i), type};
    return true;
  }

  bool Store(int i, const Section& section, const Tile& tile) {
    const ExprInstr& in = p_.instrs[i];
    const NamedValue& a = registers_[in.a];
    if (!SameRegister(a.dtype, in.dtype)) return false;
    const std::string element = ToMemory(in.dtype, a.name);
    if (!section.scalar && !section.ordered) {
      Line("w%d[e] = %s;", i, element.c_str());
      return true;
    }
    const Operand o = OperandOf(in, true);
    const std::string to =
        section.scalar ? tile.base + "o" + Str(in.aux) : Address(tile, o, "o", in.aux, "pos");
    const std::string on = section.scalar ? "split == 0 && threadIdx.x == 0" : tile.on;
    Line("%s%s%s*(%s*)(%s) = %s;", on.empty() ? "" : "if (", on.c_str(), on.empty() ? "" : ") ",
         MemoryType(in.dtype), to.c_str(), element.c_str());
    return true;
  }

  bool IsReduction(int i) const {
    return OpOf(i) >= ExprOp::kReduceSum && OpOf(i) <= ExprOp::kReduceXor;
  }

  // All instructions of a section; what it stores is kept in w<i>, unless order matters.
  bool Compute(const Section& section, const Tile& tile, int dims) {
    for (int i = section.begin; !section.ordered && i < section.end; ++i) {
      if (OpOf(i) != ExprOp::kStore) continue;
      Line("%s w%d[%u];", MemoryType(p_.instrs[i].dtype), i, tile.elements);
    }
    Line("#pragma unroll");
    Line("for (int e = 0; e < %u; ++e) {", tile.elements);
    Line("const u32 pos = %s;", tile.position.c_str());
    for (int i = section.begin; i < section.end; ++i) {
      if (!(IsReduction(i) ? Accumulate(i, tile) : Instruction(i, section, tile, dims))) {
        return false;
      }
    }
    Line("}");
    return true;
  }

  bool Elements(const Section& section, const Tile& tile, int dims) {
    if (!Compute(section, tile, dims)) return false;
    for (int i = section.begin; !section.ordered && i < section.end; ++i) {
      if (OpOf(i) == ExprOp::kStore) StoreElements(tile, "w" + Str(i), p_.instrs[i]);
    }
    return true;
  }

  // ---- rows of SET_ROWS that are an output as well ----
  static std::string PlacesName(const FedRows& fed) {
    return "to_" + fed.place.substr(fed.place.rfind('_') + 1) + "_" + Str(fed.out);
  }

  // Where each element of the thread goes. In front of all else: an index is read while the sources
  // are.
  void FindPlaces(const FedRows& fed, const Tile& tile, int last) {
    const std::string name = PlacesName(fed);
    Line("char* %s[%u];", name.c_str(), tile.elements);
    Line("#pragma unroll");
    Line("for (int e = 0; e < %u; ++e)", tile.elements);
    Line("%s[e] = %s(p, u32%s);", name.c_str(), fed.place.c_str(),
         Linear(fed.offset, p_.out_strides[fed.out], last, tile.position.c_str()).c_str());
  }

  bool StorePlaces(const FedRows& fed, const Section& section, const Tile& tile) {
    if (section.ordered) return false;
    for (int i = section.begin; i < section.end; ++i) {
      const ExprInstr& in = p_.instrs[i];
      if (OpOf(i) != ExprOp::kStore || in.aux != fed.out) continue;
      const std::string name = PlacesName(fed);
      Line("#pragma unroll");
      Line("for (int e = 0; e < %u; ++e)", tile.elements);
      Line("if (%s[e]) *(%s*)%s[e] = w%d[e];", name.c_str(), MemoryType(in.dtype), name.c_str(), i);
    }
    return true;
  }

  // ---- EXPR ----
  // Finds the elements of number `i` and the addresses of their row.
  Tile Locate(const std::string& operands, uint32_t vector) {
    const int last = p_.rank - 1;
    // The innermost dimension in groups, the others as they are.
    const uint32_t across = p_.divide[last].divisor / vector;
    Line("const u32 first = (i %% %uu) * %uu, outer = i / %uu;", across, vector, across);
    Indices(last, "outer");
    for (int s = 0; s < request_.num_srcs; ++s) {
      Line("const char* const q_s%d = %ss%d + %s;", s, operands.c_str(), s,
           Linear(0, p_.src_strides[s], last, nullptr).c_str());
    }
    for (int o = 0; o < request_.num_outs; ++o) {
      Line("char* const q_o%d = %so%d + %s;", o, operands.c_str(), o,
           Linear(0, p_.out_strides[o], last, nullptr).c_str());
    }
    return {vector, vector, "q_", "(first + e)", "first", "", ""};
  }

  bool Expr(const std::string& operands, const std::string& block) {
    const Section& section = sections_[1];
    const int last = p_.rank - 1;
    const int64_t length = p_.divide[last].divisor;
    uint32_t most = 1;
    while (most < kMaxVector && most * 2 * kElementsPerLane <= p_.count) most *= 2;
    const uint32_t vector = section.ordered ? 1 : VectorOf(most, length);
    const uint32_t groups = p_.count / vector;
    source_->block = kExprThreads;
    source_->grid = static_cast<uint32_t>(CeilDiv(groups, kExprThreads));

    Line("const u32 i = %s * %uu + threadIdx.x;", block.c_str(), kExprThreads);
    if (groups % kExprThreads != 0) Line("if (i >= %uu) return;", groups);
    const Tile tile = Locate(operands, vector);
    for (const FedRows& fed : request_.fed) FindPlaces(fed, tile, last);
    LoadSection(section, tile, true);
    return Elements(section, tile, last) &&
           std::all_of(request_.fed.begin(), request_.fed.end(),
                       [&](const FedRows& fed) { return StorePlaces(fed, section, tile); });
  }

  // ---- ROW ----
  struct Shape {
    uint32_t splits = 1, threads = kWarp, vector = 1;
    uint32_t groups = 1;  // of a thread, at once
    uint32_t tiles = 1;   // how often; 1: what was loaded stays in registers from stage to stage
    bool exact = false;   // no thread is left without an element
  };

  Shape Choose() const {
    Shape shape;
    const uint32_t count = p_.count;
    if (request_.clusters && count >= kLongRow && request_.piece->rows <= kFewRows) {
      shape.splits = kCluster;
    }
    bool ordered = false;
    uint32_t work = 1, cached = 1;
    std::vector<int> sources;
    for (const Section& section : sections_) {
      if (section.scalar) continue;
      ordered = ordered || section.ordered;
      work += WorkOf(section);
      for (int i = section.begin; i < section.end; ++i) {
        const int src = p_.instrs[i].aux;
        if (OpOf(i) != ExprOp::kLoad) continue;
        if (std::find(sources.begin(), sources.end(), src) != sources.end()) continue;
        sources.push_back(src);
        cached += SizeOf(p_.instrs[i].dtype) == 8 ? 2 : 1;
      }
    }
    if (!ordered) {
      shape.vector = VectorOf(std::min<uint32_t>(kMaxVector, std::max(count / kWarp, 1u)), count);
    }
    const uint32_t groups = count / shape.vector;
    const uint32_t per_block = static_cast<uint32_t>(CeilDiv(groups, shape.splits));
    const uint32_t most = per_block <= 4 * kUsualThreads ? kUsualThreads : kMostThreads;
    const uint32_t rounds = static_cast<uint32_t>(CeilDiv(per_block, most));
    shape.threads = static_cast<uint32_t>(CeilDiv(CeilDiv(per_block, rounds), kWarp) * kWarp);
    const uint32_t fit = std::max(
        1u, std::min({kMostElements, kMostCached / cached, kMostWork / work}) / shape.vector);
    shape.groups = std::min(rounds, fit);
    shape.tiles = static_cast<uint32_t>(CeilDiv(rounds, shape.groups));
    shape.exact = uint64_t{shape.splits} * shape.threads * shape.groups * shape.tiles == groups;
    return shape;
  }

  bool Row() {
    const Shape shape = Choose();
    const int dims = p_.rank - 1;  // of rows
    source_->block = shape.threads;
    source_->cluster = shape.splits;
    source_->grid = request_.piece->rows * shape.splits;

    Line("const u32 row = blockIdx.x / %uu, split = blockIdx.x %% %uu;", shape.splits,
         shape.splits);
    Line("const u32 lane = threadIdx.x %% 32, warp = threadIdx.x / 32;");
    Indices(dims, "row");
    for (int s = 0; s < request_.num_srcs; ++s) {
      Line("const char* const q_s%d = p.s%d + %s;", s, s,
           Linear(0, p_.src_strides[s], dims, nullptr).c_str());
    }
    for (int o = 0; o < request_.num_outs; ++o) {
      Line("char* const q_o%d = p.o%d + %s;", o, o,
           Linear(0, p_.out_strides[o], dims, nullptr).c_str());
    }
    Tile tile;
    tile.elements = shape.groups * shape.vector;
    tile.vector = shape.vector;
    tile.base = "q_";
    const std::string first = shape.tiles > 1 ? "t * " + Str(shape.groups) + " + " : "";
    tile.position = "((((" + first + "e / " + Str(shape.vector) + ") * " + Str(shape.splits) +
                    "u + split) * " + Str(shape.threads) + "u + threadIdx.x) * " +
                    Str(shape.vector) + "u + e % " + Str(shape.vector) + ")";
    // A group lies within the row or beyond it as a whole.
    if (!shape.exact) tile.on = tile.on_group = tile.position + " < " + Str(p_.count) + "u";

    const bool resident = shape.tiles == 1;
    for (const Section& section : sections_) {
      if (resident || section.scalar) LoadSection(section, tile, true);
    }
    size_t synced = 0;  // sections in front of this one cannot be in conflict any more
    for (size_t k = 0; k < sections_.size(); ++k) {
      const Section& section = sections_[k];
      if (section.begin == section.end) continue;
      for (size_t earlier = synced; earlier < k; ++earlier) {
        if (!Conflict(sections_[earlier], section)) continue;
        Line(shape.splits > 1 ? "cluster_sync();" : "__syncthreads();");
        synced = k;
        break;
      }
      if (section.scalar) {
        LoadSection(section, tile, false);
        for (int i = section.begin; i < section.end; ++i) {
          if (!Instruction(i, section, tile, dims)) return false;
        }
        continue;
      }
      Accumulators(section, tile);
      if (!resident) {
        Line("#pragma unroll 1");
        Line("for (u32 t = 0; t < %u; ++t) {", shape.tiles);
        declared_.clear();
        LoadSection(section, tile, true);
      }
      LoadSection(section, tile, false);
      if (!Elements(section, tile, dims)) return false;
      if (!resident) Line("}");
      if (Reduce(section, shape)) synced = k + 1;
    }
    if (shape.splits > 1)
      Line("cluster_sync();");  // another block may still read this one's memory
    return true;
  }

  void Accumulators(const Section& section, const Tile& tile) {
    for (int i = section.begin; i < section.end; ++i) {
      if (!IsReduction(i)) continue;
      const DType t = p_.instrs[i].dtype;
      if (IsArgReduce(OpOf(i))) {
        Line("Best<%s> r%d; r%d.value = 0; r%d.where = ~0u;", RegisterType(t), i, i, i);
        continue;
      }
      const uint32_t n = std::min(tile.elements, kAccumulators);
      Line("%s a%d[%u];", RegisterType(t), i, n);
      Line("for (int j = 0; j < %u; ++j) a%d[j] = %s;", n, i, IdentityText(OpOf(i), t).c_str());
    }
  }

  bool Accumulate(int i, const Tile& tile) {
    const ExprInstr& in = p_.instrs[i];
    const NamedValue& a = registers_[in.a];
    if (!SameRegister(a.dtype, in.dtype)) return false;
    const std::string on = tile.on.empty() ? "" : "(" + tile.on + ")";
    if (IsArgReduce(OpOf(i))) {
      Line("if (%s%s(r%d.where == ~0u || takes_over<%s>(%s, r%d.value))) {", on.c_str(),
           on.empty() ? "" : " && ", i, OpOf(i) == ExprOp::kReduceArgmax ? "true" : "false",
           a.name.c_str(), i);
      Line("r%d.value = %s; r%d.where = pos; }", i, a.name.c_str(), i);
    } else {
      const std::string slot =
          "a" + Str(i) + "[e % " + Str(std::min(tile.elements, kAccumulators)) + "]";
      Line("%s%s%s = %s::of(%s, %s);", on.empty() ? "" : "if ", on.c_str(), slot.c_str(),
           CombinerText(OpOf(i)), slot.c_str(), a.name.c_str());
    }
    return true;
  }

  // Combines what the threads have of a section's reductions, all at once. Every thread gets all.
  // True: the threads of the row have met.
  bool Reduce(const Section& section, const Shape& shape) {
    const uint32_t warps = shape.threads / kWarp;
    uint32_t warps2 = 1;
    while (warps2 < warps) warps2 *= 2;
    std::vector<int> all;
    for (int i = section.begin; i < section.end; ++i) {
      if (IsReduction(i)) all.push_back(i);
    }
    if (all.empty()) return false;
    const auto for_each = [&](auto&& f) {
      for (const int i : all) {
        const char* type = RegisterType(p_.instrs[i].dtype);
        f(i, IsArgReduce(OpOf(i)), type, CombinerText(OpOf(i)));
      }
    };
    const uint32_t n = std::min(shape.groups * shape.vector, kAccumulators);
    for_each([&](int i, bool arg, const char* type, const char* combine) {
      if (!arg) {
        Line("%s r%d = a%d[0];", type, i, i);
        for (uint32_t j = 1; j < n; ++j) Line("r%d = %s::of(r%d, a%d[%u]);", i, combine, i, i, j);
      }
      Line("r%d = tree<%s>(r%d, 16);", i, combine, i);
    });
    if (warps > 1) {
      for_each([&](int i, bool arg, const char* type, const char*) {
        Line("__shared__ Word<%s>::W warp%d[%u];", type, i, warps);
        if (arg) Line("__shared__ u32 warp_at%d[%u];", i, warps);
        Line("if (lane == 0) warp%d[warp] = to_word(r%d%s);", i, i, arg ? ".value" : "");
        if (arg) Line("if (lane == 0) warp_at%d[warp] = r%d.where;", i, i);
      });
      Line("__syncthreads();");
      for_each([&](int i, bool arg, const char* type, const char* combine) {
        // Lanes beyond the warps repeat one whose value changes nothing, or have none.
        Line("{ const u32 w = lane %% %uu;", warps2);
        const char* member = arg ? ".value" : "";
        const std::string nothing =
            arg ? std::string(type) + "(0)" : IdentityText(OpOf(i), p_.instrs[i].dtype);
        Line("r%d%s = w < %uu ? FromWord<%s>::of(warp%d[w]) : %s;", i, member, warps, type, i,
             nothing.c_str());
        if (arg) Line("r%d.where = w < %uu ? warp_at%d[w] : ~0u;", i, warps, i);
        Line("r%d = tree<%s>(r%d, %u); }", i, combine, i, warps2 / 2);
      });
    }
    if (shape.splits > 1) {
      for_each([&](int i, bool arg, const char* type, const char*) {
        Line("__shared__ Word<%s>::W block%d;", type, i);
        if (arg) Line("__shared__ u32 block_at%d;", i);
        Line("if (threadIdx.x == 0) block%d = to_word(r%d%s);", i, i, arg ? ".value" : "");
        if (arg) Line("if (threadIdx.x == 0) block_at%d = r%d.where;", i, i);
      });
      Line("cluster_sync();");
      for_each([&](int i, bool arg, const char* type, const char* combine) {
        const uint32_t s = shape.splits;
        Line("r%d%s = FromWord<%s>::of(from_block(&block%d, lane %% %uu));", i, arg ? ".value" : "",
             type, i, s);
        if (arg) Line("r%d.where = from_block(&block_at%d, lane %% %uu);", i, i, s);
        Line("r%d = tree<%s>(r%d, %u);", i, combine, i, s / 2);
      });
    }
    for (const int i : all) {
      const ExprInstr& in = p_.instrs[i];
      const DType type = ResultType(in, OpOf(i));
      const std::string value = IsArgReduce(OpOf(i)) ? "r" + Str(i) + ".where" : "r" + Str(i);
      Line("const %s v%d = %s;", RegisterType(type), i, IndexText(type, value).c_str());
      registers_[in.dst] = {"v" + Str(i), type};
    }
    return warps > 1 || shape.splits > 1;
  }

  const KernelRequest& request_;
  const ExprParams& p_;
  KernelSource* source_;
  std::vector<Section> sections_;
  std::string body_;
  std::vector<std::string> declared_;
  NamedRegisters registers_;
};

}  // namespace

bool GenerateSource(const KernelRequest& request, KernelSource* source) {
  return Generator(request, source).Generate();
}

bool GenerateExprValue(const KernelRequest& request, const std::string& operands, int out,
                       std::string* text) {
  KernelSource unused;
  return Generator(request, &unused).GenerateValue(operands, out, text);
}

bool GenerateExprBody(const KernelRequest& request, const std::string& operands,
                      const std::string& block, KernelSource* source) {
  return Generator(request, source).GenerateBody(operands, block);
}

}  // namespace jaxgraph
