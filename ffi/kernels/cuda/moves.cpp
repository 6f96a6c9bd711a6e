#include "ffi/kernels/cuda/moves.h"

#include <algorithm>
#include <vector>

#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

int64_t Bytes(const TensorRef& t, int d) {
  return t.strides[d] * static_cast<int64_t>(SizeOf(t.dtype));
}

// How slices are walked: `shape` per dimension; flattened where no component needs a dimension by
// itself, and in the widest words that fit.
Status Finish(int rank, int64_t* shape, int64_t num_slices, uint32_t item, bool keep_dims,
              MoveParams* p) {
  int64_t elements = 1;
  for (int d = 0; d < rank; ++d) elements *= shape[d];
  if (elements > INT32_MAX || num_slices > INT32_MAX) {
    return Status(Code::kUnsupported, "moving 2^31 elements or slices");
  }
  p->num_slices = static_cast<int32_t>(num_slices);
  if (elements == 0 || num_slices == 0) {
    p->words = 0;
    return Status::Ok();
  }
  if (!keep_dims || rank == 0) Flatten(&rank, shape, {p->whole_strides, p->slices_strides});

  uint32_t word = item;
  const int last = rank - 1;
  if (p->whole_strides[last] == item && p->slices_strides[last] == item) {
    // Every address that is the start of a run must be a multiple of the word.
    uint64_t all = reinterpret_cast<uintptr_t>(p->whole) | reinterpret_cast<uintptr_t>(p->slices) |
                   static_cast<uint64_t>(p->whole_outer | p->slices_outer) |
                   static_cast<uint64_t>(shape[last] * item);
    for (int d = 0; d < last; ++d) {
      all |= static_cast<uint64_t>(p->whole_strides[d] | p->slices_strides[d]);
    }
    bool indexed = false;  // the run itself may start anywhere, and must be told element by element
    for (int c = 0; c < p->num_components; ++c) {
      all |= static_cast<uint64_t>(p->component_stride[c]);
      indexed = indexed || (keep_dims && p->component_dim[c] == last);
    }
    while (!indexed && word < 16 && all % (2 * word) == 0) word *= 2;
    shape[last] = shape[last] * item / word;
    p->whole_strides[last] = p->slices_strides[last] = word;
    elements = elements * item / word;
  }
  p->word = word;
  p->words = static_cast<uint32_t>(elements);
  p->rank = static_cast<uint8_t>(rank);
  for (int d = 0; d < rank; ++d) p->divide[d] = FastDiv::By(static_cast<uint32_t>(shape[d]));
  return Status::Ok();
}

// The parts that GATHER and SET_ROWS have in common.
Status PrepareIndexed(const ResolvedNode& resolved, const TensorRef& whole, const TensorRef& slices,
                      size_t first_index, bool keep_overlaps, MoveParams* p) {
  const Node& node = *resolved.node;
  const IndexParams params = IndexParamsOf(node);
  const uint32_t item = static_cast<uint32_t>(SizeOf(whole.dtype));

  int64_t shape[kMaxRank] = {};
  for (int d = 0; d < whole.rank; ++d) {
    shape[d] = slices.shape[d + 1];
    p->whole_strides[d] = Bytes(whole, d);
    p->slices_strides[d] = Bytes(slices, d + 1);
  }
  p->slices_outer = slices.shape[0] == 1 ? 0 : Bytes(slices, 0);
  p->mode = params.mode;
  for (uint32_t i = 0; i < 8; i += item) {
    p->fill |= (item == 8 ? params.fill : params.fill & ((uint64_t{1} << (8 * item)) - 1))
               << (8 * i);
  }
  p->single = true;
  for (const int src : IndexSources(node)) {
    const uint8_t dim = params.dim[src - static_cast<int>(first_index)];
    const TensorRef& index = node.srcs[src];
    const int c = p->num_components++;
    p->index[c] = resolved.srcs[src];
    p->index_stride[c] = Bytes(index, 0);
    p->index_dtype[c] = index.dtype;
    p->component_dim[c] = dim;
    p->extent[c] = shape[dim];
    p->limit[c] = whole.shape[dim] - shape[dim];
    // A slice as long as the dimension starts at 0, whatever the index.
    p->component_stride[c] = p->limit[c] > 0 ? Bytes(whole, dim) : 0;
    p->single = p->single && (shape[dim] == 1 || p->limit[c] == 0);
  }
  const bool keep_dims = keep_overlaps && !p->single && slices.shape[0] > 1;
  return Finish(whole.rank, shape, slices.shape[0], item, keep_dims, p);
}

}  // namespace

std::vector<int> IndexSources(const Node& node) {
  std::vector<int> sources;
  if (node.op != Op::kGather && node.op != Op::kSetRows) return sources;
  const int first_index = node.op == Op::kGather ? 1 : 2;
  const IndexParams params = IndexParamsOf(node);
  const uint8_t* const end = params.dim + params.num_components;
  for (int c = 0; c < params.num_components; ++c) {
    // Of two components in one dimension the later counts.
    const uint8_t* const dim = params.dim + c;
    if (std::find(dim + 1, end, *dim) == end) sources.push_back(first_index + c);
  }
  return sources;
}

Status PrepareGather(const ResolvedNode& node, MoveParams* p) {
  *p = {};
  p->whole = const_cast<char*>(node.srcs[0]);
  p->slices = node.outs[0];
  return PrepareIndexed(node, node.node->srcs[0], node.node->outs[0], 1, false, p);
}

Status PrepareSetRows(const ResolvedNode& node, MoveParams* p) {
  *p = {};
  p->whole = node.outs[0];
  p->slices = const_cast<char*>(node.srcs[1]);
  return PrepareIndexed(node, node.node->outs[0], node.node->srcs[1], 2, true, p);
}

Status PrepareCopy(const ResolvedNode& resolved, MoveParams* p) {
  const TensorRef& from = resolved.node->srcs[0];
  const TensorRef& to = resolved.node->outs[0];
  *p = {};
  p->whole = const_cast<char*>(resolved.srcs[0]);
  p->slices = resolved.outs[0];
  int64_t shape[kMaxRank], whole[kMaxRank], slices[kMaxRank];
  int rank = to.rank;
  for (int d = 0; d < rank; ++d) {
    if (to.shape[d] == 0) return Status::Ok();
    shape[d] = to.shape[d];
    whole[d] = Bytes(from, d);
    slices[d] = Bytes(to, d);
  }
  Flatten(&rank, shape, {whole, slices});
  // What one dimension cannot walk, the grid does: the outermost is the stack of slices.
  const int outer = rank > 1 ? 1 : 0;
  if (outer == 1) {
    p->whole_outer = whole[0];
    p->slices_outer = slices[0];
  }
  std::copy(whole + outer, whole + rank, p->whole_strides);
  std::copy(slices + outer, slices + rank, p->slices_strides);
  return Finish(rank - outer, shape + outer, outer == 1 ? shape[0] : 1,
                static_cast<uint32_t>(SizeOf(to.dtype)), false, p);
}

}  // namespace jaxgraph
