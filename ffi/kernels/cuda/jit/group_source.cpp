#include "ffi/kernels/cuda/jit/group_source.h"

#include <cinttypes>
#include <cstdio>

#include "ffi/kernels/cuda/jit/expression.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

std::string Str(int64_t v) { return std::to_string(v); }
std::string Wide(int64_t v) { return "i64(" + Str(v) + ")"; }

std::string PartName(size_t part) { return "p.n" + Str(static_cast<int64_t>(part)); }
std::string StartName(size_t part) {
  return std::string(KernelSource::kName) + "_start" + Str(static_cast<int64_t>(part));
}

std::string Address(size_t part, const char* kind, int tensor) {
  return PartName(part) + kind + Str(tensor);
}

std::string ValueName(const PartIndex& index) {
  return std::string(KernelSource::kName) + "_value" + Str(index.expr) + "_" + Str(index.out);
}

// A function of the kernel that finds where slice `slice` starts in the whole. False: an index lies
// outside, and the mode says that the slice is dropped or filled; or, for SET_ROWS, a later slice
// is written to the same place.
std::string StartFunction(const GroupPart& part, size_t number) {
  const MoveParams& m = part.move;
  const auto start = [&](int c, const char* slice, const char* inside) {
    const PartIndex& index = part.indices[c];
    const std::string type = RegisterType(m.index_dtype[c]);
    const std::string value = index.expr >= 0
                                  ? ValueName(index) + "(p, " + slice + ")"
                                  : "*(const " + type + "*)(" + Address(number, "s", index.src) +
                                        " + i64(" + slice + ") * " + Wide(m.index_stride[c]) + ")";
    return "start_at<" + type + ">(" + value + ", " + Wide(m.limit[c]) + ", " + inside + ")";
  };
  std::string text = "DEV bool " + StartName(number) + "(const " + KernelSource::kName +
                     "_p& p, u32 slice, i64& at) {\nbool inside = true;\nat = 0;\n";
  for (int c = 0; c < m.num_components; ++c) {
    text += "const i64 b" + Str(c) + " = " + start(c, "slice", "inside") + ";\n";
    text += "at += b" + Str(c) + " * " + Wide(m.component_stride[c]) + ";\n";
  }
  if (m.mode == IndexMode::kFillOrDrop) text += "if (!inside) return false;\n";
  if (part.sets && m.num_slices > 1) {
    // All of them are looked at, so that their indices are read at once.
    text += "bool last = true;\n#pragma unroll 8\n";
    text += "for (u32 later = slice + 1; later < " + Str(m.num_slices) + "u; ++later) {\n";
    text += "bool in = true, same = true;\n";
    for (int c = 0; c < m.num_components; ++c) {
      text += "same = same & (" + start(c, "later", "in") + " == b" + Str(c) + ");\n";
    }
    if (m.mode == IndexMode::kFillOrDrop) text += "same = same & in;\n";
    return text + "last = last & !same;\n}\nreturn last;\n}\n";
  }
  return text + "return true;\n}\n";
}

// Where word `word` of a slice lies, in bytes from the slice's start.
std::string WordOffset(const MoveParams& m, const int64_t* strides, const std::string& word) {
  std::string text = Wide(0), rest = word;
  for (int d = m.rank - 1; d >= 0; --d) {
    const std::string size = Str(m.divide[d].divisor) + "u";
    if (m.divide[d].divisor > 1 && strides[d] != 0) {
      text += " + i64(" + (d > 0 ? "(" + rest + ") % " + size : rest) + ") * " + Wide(strides[d]);
    }
    rest = "(" + rest + ") / " + size;
  }
  return "(" + text + ")";
}

// Where a byte of the rows, one slice behind the other, is stored.
std::string PlaceFunction(const GroupPart& part, size_t number) {
  const MoveParams& m = part.move;
  std::string text = "DEV char* " + PlaceName(number) + "(const " + KernelSource::kName +
                     "_p& p, u32 byte) {\ni64 at;\n";
  text += "const u32 slice = byte / " + Str(int64_t{m.words} * m.word) + "u;\n";
  text += "if (!" + StartName(number) + "(p, slice, at)) return 0;\n";
  text += "const u32 word = byte / " + Str(m.word) + "u % " + Str(m.words) + "u;\n";
  return text + "return " + Address(number, "o", 0) + " + at + " +
         WordOffset(m, m.whole_strides, "word") + " + byte % " + Str(m.word) + "u;\n}\n";
}

// A thread a word.
std::string MoveBody(const GroupPart& part, size_t number) {
  const MoveParams& m = part.move;
  const int64_t words = int64_t{m.num_slices} * m.words;
  std::string text = "const u32 i = block * " + Str(kExprThreads) + "u + threadIdx.x;\n";
  if (words % kExprThreads != 0) text += "if (i >= " + Str(words) + "u) return;\n";
  text += "const u32 word = i % " + Str(m.words) + "u, slice = i / " + Str(m.words) + "u;\n";
  text += "i64 at;\nconst bool on = " + StartName(number) + "(p, slice, at);\n";
  const std::string whole = Address(number, part.sets ? "o" : "s", 0) + " + at + i64(slice) * " +
                            Wide(m.whole_outer) + " + " + WordOffset(m, m.whole_strides, "word");
  const std::string slices = Address(number, part.sets ? "s" : "o", part.sets ? 1 : 0) +
                             " + i64(slice) * " + Wide(m.slices_outer) + " + " +
                             WordOffset(m, m.slices_strides, "word");
  const std::string word = "Raw<" + Str(m.word) + ">::T";
  const std::string to = "*(" + word + "*)(" + (part.sets ? whole : slices) + ")";
  const std::string from = "*(const " + word + "*)(" + (part.sets ? slices : whole) + ")";
  if (part.sets) {
    return text + "const " + word + " w = " + from + ";\nif (on) " + to + " = w;\n";
  }
  if (m.mode != IndexMode::kFillOrDrop) return text + to + " = " + from + ";\n";
  char fill[32];
  std::snprintf(fill, sizeof fill, "0x%" PRIx64 "ull", m.fill);
  return text + "if (on) " + to + " = " + from + ";\nelse " + to + " = filled<" + Str(m.word) +
         ">(" + fill + ");\n";
}

// The functions for components that are computed again, each once.
bool AppendValues(const std::vector<GroupPart>& parts, const GroupPart& part, std::string* text) {
  for (size_t c = 0; c < part.indices.size(); ++c) {
    const PartIndex& index = part.indices[c];
    if (index.expr < 0) continue;
    std::string body;
    if (!GenerateExprValue(parts[index.expr].expr, PartName(index.expr), index.out, &body)) {
      return false;
    }
    const std::string function = std::string("DEV ") + RegisterType(part.move.index_dtype[c]) +
                                 " " + ValueName(index) + "(const " + KernelSource::kName +
                                 "_p& p, u32 i) {\n" + body + "}\n";
    if (text->find(function) == std::string::npos) *text += function;
  }
  return true;
}

}  // namespace

std::string PlaceName(size_t part) {
  return std::string(KernelSource::kName) + "_place" + Str(static_cast<int64_t>(part));
}

bool GenerateGroup(const std::vector<GroupPart>& parts, KernelSource* source) {
  const std::string name = KernelSource::kName;
  std::string fields, functions, bodies;
  source->grid = 0;
  source->block = kExprThreads;
  for (size_t k = 0; k < parts.size(); ++k) {
    const GroupPart& part = parts[k];
    const std::string field = "n" + Str(static_cast<int64_t>(k));
    for (int s = 0; s < part.num_srcs; ++s) fields += " const char* " + field + "s" + Str(s) + ";";
    for (int o = 0; o < part.num_outs; ++o) fields += " char* " + field + "o" + Str(o) + ";";
    KernelSource body;
    if (part.expr.piece != nullptr) {
      if (!GenerateExprBody(part.expr, PartName(k), "block", &body)) return false;
    } else {
      if (!AppendValues(parts, part, &functions)) return false;
      functions += StartFunction(part, k);
      if (part.fed) {
        functions += PlaceFunction(part, k);
        continue;
      }
      body.text = MoveBody(part, k);
      body.grid = static_cast<uint32_t>(
          CeilDiv(int64_t{part.move.num_slices} * part.move.words, kExprThreads));
    }
    const std::string first = Str(source->grid) + "u";
    source->grid += body.grid;
    bodies += "if (blockIdx.x < " + Str(source->grid) + "u) {\nconst u32 block = blockIdx.x - " +
              first + ";\n" + body.text + "return;\n}\n";
  }
  source->text = "// group\nstruct " + name + "_p {" + fields + " };\n" + functions +
                 "extern \"C\" __global__ void __launch_bounds__(" + Str(kExprThreads) + ")\n" +
                 name + "(const __grid_constant__ " + name + "_p p) {\nbegin();\n" + bodies + "}\n";
  return true;
}

}  // namespace jaxgraph
