#include "ffi/kernels/cuda/attention_early.h"

#include <algorithm>
#include <climits>

#include "ffi/kernels/cuda/memory_range.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

// Smallest stride first.
Dims SortedDimsOf(const TensorRef& t) {
  Dims dims = DimsOf(t);
  std::sort(dims.begin(), dims.end());
  return dims;
}

// No two elements share an address, and rows along any dimension are apart.
bool Apart(const Dims& dims) {
  int64_t reach = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < reach) return false;
    reach = stride * size;
  }
  return true;
}

// Does `set_rows` write rows of the cache (keys or values; `along` is its dimension of positions),
// one slice of them, at the place that one index says?
bool WritesRows(const ResolvedNode& set_rows, const TensorRef& cache, const char* address,
                int along, RewrittenRows* rows) {
  const Node& node = *set_rows.node;
  if (node.op != Op::kSetRows) return false;
  const IndexParams params = IndexParamsOf(node);
  const TensorRef &whole = node.outs[0], &slices = node.srcs[1];
  if (params.num_components != 1 || slices.shape[0] != 1) return false;
  const Dims dims = SortedDimsOf(cache);
  if (set_rows.outs[0] != address || whole.dtype != cache.dtype || SortedDimsOf(whole) != dims ||
      !Apart(dims)) {
    return false;
  }
  const int dim = params.dim[0];
  if (whole.shape[dim] != cache.shape[along] || whole.strides[dim] != cache.strides[along]) {
    return false;
  }
  const int64_t count = slices.shape[dim + 1];
  if (whole.shape[dim] > INT32_MAX || count < 1 || count > whole.shape[dim]) return false;
  rows->index = set_rows.srcs[2];
  rows->index_dtype = node.srcs[2].dtype;
  rows->count = static_cast<int32_t>(count);
  rows->last_start = static_cast<int32_t>(whole.shape[dim] - count);
  return true;
}

class Finder {
 public:
  Finder(const std::vector<ResolvedNode>& nodes, size_t first) : nodes_(nodes), first_(first) {}

  bool Constant(size_t source) const { return nodes_[first_].is_constant(source); }

  // Which rows of a source may not be read early; false: none may.
  bool Find(size_t source, int along, RewrittenRows* rows) const {
    if (Constant(source)) return true;
    const TensorRef& cache = nodes_[first_].node->srcs[source];
    const char* const address = nodes_[first_].srcs[source];
    const MemoryRange range = RangeOf(cache, address);
    for (size_t n = 0; n < first_; ++n) {
      if (!Writes(n, range)) continue;
      if (rows->index != nullptr) return false;  // a second one
      if (!WritesRows(nodes_[n], cache, address, along, rows)) return false;
      if (!IndexStays(n)) return false;
    }
    return true;
  }

 private:
  bool Writes(size_t n, const MemoryRange& range) const {
    const Node& node = *nodes_[n].node;
    if (node.op == Op::kView) return false;
    for (size_t i = 0; i < node.outs.size(); ++i) {
      if (Overlap(RangeOf(node.outs[i], nodes_[n].outs[i]), range)) return true;
    }
    return false;
  }

  // The index of the SET_ROWS `n` is still what it was when the attention runs, and if it moves,
  // the attention's launch is made anew: it lies in the arena, or where a source of the attention
  // does.
  bool IndexStays(size_t n) const {
    const TensorRef& index = nodes_[n].node->srcs[2];
    const MemoryRange range = RangeOf(index, nodes_[n].srcs[2]);
    for (size_t m = n; m <= first_; ++m)
      if (Writes(m, range)) return false;
    if (index.base == 0) return true;
    const auto& srcs = nodes_[first_].node->srcs;
    return std::any_of(srcs.begin(), srcs.end(),
                       [&](const TensorRef& t) { return t.base == index.base; });
  }

  const std::vector<ResolvedNode>& nodes_;
  const size_t first_;
};

}  // namespace

EarlyCache FindEarlyCache(const std::vector<ResolvedNode>& nodes, size_t first,
                          const Attention& attention, int position) {
  EarlyCache early;
  const Finder finder(nodes, first);
  const uint8_t bound = attention.params.bound_source;
  early.position = (position < 0 || finder.Constant(attention.SourceOf(position))) &&
                   (bound == 0xff || finder.Constant(bound));
  // In a region other branches run meanwhile, and may use memory that only looks free from here.
  if (!early.position || nodes[first].node->region != 0) return early;
  RewrittenRows keys, values;
  if (!finder.Find(1, 3, &keys) || !finder.Find(2, 2, &values)) return early;
  early.cache = 1;
  early.keys = keys;
  early.values = values;
  return early;
}

}  // namespace jaxgraph
