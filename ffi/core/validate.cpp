#include "ffi/core/validate.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_set>

#include "ffi/core/attention.h"
#include "ffi/core/expr.h"

namespace jaxgraph {
namespace {

Status Invalid(const std::string& what) { return Status(Code::kInvalidArgument, what); }

// bases[0] is the arena, then operands 0, 1, ..., then results 0, 1, ...
Status CheckBases(const Program& program) {
  const std::vector<Base>& bases = program.bases;
  if (bases.empty() || bases[0].kind != BaseKind::kArena) return Invalid("base 0 is not the arena");
  size_t num_operands = 0;
  while (1 + num_operands < bases.size() && bases[1 + num_operands].kind == BaseKind::kOperand) {
    ++num_operands;
  }
  for (size_t i = 1; i < bases.size(); ++i) {
    const Base& base = bases[i];
    const bool operand = i <= num_operands;
    const std::string name = "base " + std::to_string(i);
    if (base.kind != (operand ? BaseKind::kOperand : BaseKind::kResult)) {
      return Invalid(name + " is out of order");
    }
    if (base.index != (operand ? i - 1 : i - 1 - num_operands)) {
      return Invalid(name + " has index " + std::to_string(base.index));
    }
    if (base.alias < -1 || (base.alias >= 0 && operand) ||
        base.alias >= static_cast<int64_t>(num_operands)) {
      return Invalid(name + " aliases operand " + std::to_string(base.alias));
    }
    if (base.alias >= 0 && bases[1 + base.alias].nbytes != base.nbytes) {
      return Invalid(name + " aliases an operand of another size");
    }
  }
  return Status::Ok();
}

// Every element lies in [0, size of the base), computed without overflow.
Status CheckTensor(const TensorRef& t, const Program& program) {
  if (t.base >= program.bases.size()) return Invalid("base " + std::to_string(t.base));
  const uint64_t base_bytes = t.base == 0 ? program.arena_bytes : program.bases[t.base].nbytes;
  const int64_t item = static_cast<int64_t>(SizeOf(t.dtype));
  if (t.offset < 0 || static_cast<uint64_t>(t.offset) > base_bytes || t.offset % item != 0) {
    return Invalid("offset " + std::to_string(t.offset));
  }
  int64_t elements = 1;
  int64_t low = 0;  // of the offsets reached, in elements
  int64_t high = 0;
  bool empty = false;
  bool overflow = false;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] < 0) return Invalid("shape " + std::to_string(t.shape[d]));
    if (t.shape[d] == 0) {
      empty = true;
      continue;
    }
    int64_t reach = 0;
    overflow |= __builtin_mul_overflow(elements, t.shape[d], &elements);
    overflow |= __builtin_mul_overflow(t.shape[d] - 1, t.strides[d], &reach);
    int64_t& end = reach < 0 ? low : high;
    overflow |= __builtin_add_overflow(end, reach, &end);
  }
  int64_t first = 0;
  int64_t last = 0;
  overflow |= __builtin_mul_overflow(low, item, &first);
  overflow |= __builtin_add_overflow(first, t.offset, &first);
  overflow |= __builtin_add_overflow(high, 1, &high);
  overflow |= __builtin_mul_overflow(high, item, &last);
  overflow |= __builtin_add_overflow(last, t.offset, &last);
  if (overflow) return Invalid("shape or strides overflow");
  if (!empty && (first < 0 || static_cast<uint64_t>(last) > base_bytes)) {
    return Invalid("bytes [" + std::to_string(first) + ", " + std::to_string(last) +
                   ") are outside base " + std::to_string(t.base) + " of " +
                   std::to_string(base_bytes) + " bytes");
  }
  return Status::Ok();
}

bool SameShape(const TensorRef& a, const TensorRef& b) {
  return a.rank == b.rank && std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin());
}

Status CheckCounts(const Node& node, size_t outs, size_t srcs) {
  if (node.outs.size() == outs && node.srcs.size() == srcs) return Status::Ok();
  return Invalid("has " + std::to_string(node.outs.size()) + " outputs and " +
                 std::to_string(node.srcs.size()) + " sources");
}

Status CheckMatmul(const Node& node) {
  const bool indexed = node.srcs.size() == 3;
  JAXGRAPH_RETURN_IF_ERROR(CheckCounts(node, 1, indexed ? 3 : 2));
  if (!node.params.empty()) return Invalid("has params");
  const TensorRef& out = node.outs[0];
  const TensorRef& a = node.srcs[0];
  const TensorRef& b = node.srcs[1];
  for (const TensorRef* t : {&out, &a, &b}) {
    if (t->rank != 4) return Invalid("is not of rank 4");
    if (!IsFloat(t->dtype)) return Invalid("is not of floats");
    if (t == &b && indexed) continue;
    if (t->shape[0] != out.shape[0] || t->shape[1] != out.shape[1]) {
      return Invalid("has unequal batch dimensions");
    }
  }
  if (indexed) {
    const TensorRef& index = node.srcs[2];
    if (b.shape[0] < 1 || b.shape[1] != 1) return Invalid("has no table of matrices");
    if (index.rank != 2 || index.shape[0] != out.shape[0] || index.shape[1] != out.shape[1] ||
        IsFloat(index.dtype) || index.dtype == DType::kPred) {
      return Invalid("has an index that is not one integer a matrix");
    }
  }
  if (a.shape[2] != out.shape[2] || b.shape[3] != out.shape[3] || a.shape[3] != b.shape[2]) {
    return Invalid("has shapes that do not multiply");
  }
  return Status::Ok();
}

Status CheckCopy(const Node& node) {
  JAXGRAPH_RETURN_IF_ERROR(CheckCounts(node, 1, 1));
  if (!node.params.empty()) return Invalid("has params");
  if (!SameShape(node.outs[0], node.srcs[0]) || node.outs[0].dtype != node.srcs[0].dtype) {
    return Invalid("copies between unequal shapes or dtypes");
  }
  return Status::Ok();
}

// GATHER and SET_ROWS: `whole` is indexed into, `slices` [n, ...] are its pieces, and the index
// vectors are srcs[first_index..).
Status CheckIndexed(const Node& node, const TensorRef& whole, const TensorRef& slices,
                    size_t first_index) {
  if (node.params.size() != sizeof(IndexParams)) return Invalid("has params of another size");
  const IndexParams params = IndexParamsOf(node);
  if (static_cast<uint8_t>(params.mode) > static_cast<uint8_t>(IndexMode::kPromiseInBounds)) {
    return Invalid("has an unknown index mode");
  }
  if (params.num_components > sizeof params.dim ||
      node.srcs.size() != first_index + params.num_components) {
    return Invalid("has another number of index components");
  }
  if (slices.dtype != whole.dtype) return Invalid("has unequal dtypes");
  if (slices.rank != whole.rank + 1) return Invalid("has slices of another rank");
  for (int d = 0; d < whole.rank; ++d) {
    if (slices.shape[d + 1] > whole.shape[d]) return Invalid("has slices larger than the whole");
  }
  for (int c = 0; c < params.num_components; ++c) {
    if (params.dim[c] >= whole.rank) return Invalid("indexes a dimension that is not there");
    const TensorRef& index = node.srcs[first_index + c];
    if (index.rank != 1 || index.shape[0] != slices.shape[0] || IsFloat(index.dtype) ||
        index.dtype == DType::kPred) {
      return Invalid("has an index that is no vector of integers, one a slice");
    }
  }
  return Status::Ok();
}

Status CheckGather(const Node& node) {
  if (node.outs.size() != 1 || node.srcs.empty()) return CheckCounts(node, 1, 1);
  return CheckIndexed(node, node.srcs[0], node.outs[0], 1);
}

Status CheckSetRows(const Node& node, const Program& program) {
  if (node.outs.size() != 1 || node.srcs.size() < 2) return CheckCounts(node, 1, 2);
  const TensorRef& out = node.outs[0];
  const TensorRef& dest = node.srcs[0];
  // A result that aliases an operand is another base at the same address.
  const auto storage = [&](uint32_t base) {
    const int32_t alias = program.bases[base].alias;
    return alias >= 0 ? static_cast<uint32_t>(1 + alias) : base;
  };
  if (storage(out.base) != storage(dest.base) || out.offset != dest.offset ||
      out.dtype != dest.dtype || !SameShape(out, dest) || out.strides != dest.strides) {
    return Invalid("does not write in place");
  }
  return CheckIndexed(node, dest, node.srcs[1], 2);
}

Status CheckSort(const Node& node) {
  SortParams params;
  if (node.params.size() != sizeof params) return Invalid("has params of another size");
  std::memcpy(static_cast<void*>(&params), node.params.data(), sizeof params);
  if (static_cast<uint8_t>(params.order) > static_cast<uint8_t>(SortOrder::kDescending)) {
    return Invalid("has an unknown order");
  }
  if (node.srcs.empty() || node.outs.empty() || node.srcs.size() > sizeof params.source ||
      node.outs.size() > sizeof params.source) {
    return CheckCounts(node, 1, 1);
  }
  for (const TensorRef& src : node.srcs) {
    if (src.rank != 2 || !SameShape(src, node.srcs[0])) return Invalid("has unequal sources");
  }
  for (size_t i = 0; i < node.outs.size(); ++i) {
    const TensorRef& out = node.outs[i];
    if (out.rank != 2 || !SameShape(out, node.outs[0])) return Invalid("has unequal outputs");
    const uint8_t source = params.source[i];
    if (source != kSortPositions && source >= node.srcs.size()) {
      return Invalid("orders a source that is not there");
    }
    if (out.dtype != (source == kSortPositions ? DType::kS32 : node.srcs[source].dtype)) {
      return Invalid("has an output of another dtype");
    }
  }
  const int64_t chunks = params.chunks, rows = node.srcs[0].shape[0], n = node.srcs[0].shape[1];
  const int64_t kept = node.outs[0].shape[1], merged = params.merged;
  if (node.outs[0].shape[0] != rows) return Invalid("has another number of rows");
  if (merged == 1 || merged > kSortMaxMerged) return Invalid("merges a wrong number of pieces");
  if (chunks < 1 || n > INT32_MAX || n / std::max<int64_t>(merged, 1) < chunks) {
    return Invalid("has pieces without elements");
  }
  if (merged == 0 && (n + chunks - 1) / chunks > kSortMaxLength) {
    return Invalid("has pieces of a wrong length");
  }
  if (kept != n && (kept < chunks || kept % chunks != 0 || kept / chunks > n / chunks)) {
    return Invalid("keeps a wrong number of elements");
  }
  return Status::Ok();
}

Status CheckNode(const Node& node, const Program& program) {
  for (const TensorRef& t : node.outs) {
    JAXGRAPH_RETURN_IF_ERROR(CheckTensor(t, program));
    // A slot is given to operands that nobody writes, so the flag must be true.
    const Base& base = program.bases[t.base];
    if (node.op != Op::kView && base.kind == BaseKind::kOperand && !base.written) {
      return Invalid("writes an operand that is not marked as written");
    }
  }
  for (const TensorRef& t : node.srcs) JAXGRAPH_RETURN_IF_ERROR(CheckTensor(t, program));
  switch (node.op) {
    case Op::kView:
      return CheckCounts(node, 1, 1);
    case Op::kExpr:
    case Op::kRow: {
      ExprProgram expr;
      return DecodeExpr(node, &expr);
    }
    case Op::kMatmul:
      return CheckMatmul(node);
    case Op::kGather:
      return CheckGather(node);
    case Op::kSetRows:
      return CheckSetRows(node, program);
    case Op::kCopy:
      return CheckCopy(node);
    case Op::kAttention: {
      Attention attention;
      return DecodeAttention(node, &attention);
    }
    case Op::kSort:
      return CheckSort(node);
  }
  return Invalid("is of an unknown op");
}

}  // namespace

Status Validate(const Program& program) {
  JAXGRAPH_RETURN_IF_ERROR(CheckBases(program));
  std::unordered_set<uint32_t> closed_regions;
  for (size_t i = 0; i < program.nodes.size(); ++i) {
    const Node& node = program.nodes[i];
    const Status status = CheckNode(node, program);
    if (!status.ok()) {
      return Invalid("malformed program: node " + std::to_string(i) + " (" + NameOf(node.op) + " " +
                     node.label + "): " + status.message());
    }
    // Chunks keep a region whole, which they can only if it is one run of nodes.
    if (i > 0 && program.nodes[i - 1].region != node.region) {
      closed_regions.insert(program.nodes[i - 1].region);
    }
    if (node.region != 0 && closed_regions.count(node.region) != 0) {
      return Invalid("malformed program: region " + std::to_string(node.region) +
                     " is not one run of nodes");
    }
  }
  return Status::Ok();
}

}  // namespace jaxgraph
