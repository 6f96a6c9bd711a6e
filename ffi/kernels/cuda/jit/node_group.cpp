#include "ffi/kernels/cuda/jit/node_group.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "ffi/core/expr.h"
#include "ffi/kernels/cuda/memory_range.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr size_t kMaxNodes = 8;
// Beyond this much work a launch of its own costs little, and a node's own kernel may take several
// elements a thread.
constexpr int64_t kMaxElements = 1 << 16;
// Every slice of a SET_ROWS looks whether a later one is written to the same place.
constexpr int64_t kMaxSlices = 64;

bool IsWithin(int64_t value, int64_t most) { return value >= 1 && value <= most; }

bool IsSmallExpr(const Node& node) {
  return !node.outs.empty() && node.outs.size() <= kExprMaxOuts &&
         node.srcs.size() <= kExprMaxSrcs && IsWithin(node.outs[0].num_elements(), kMaxElements);
}

// Slices that lie half over each other are left to SET_ROWS' own kernel.
bool IsSmallSetRows(const Node& node) {
  const TensorRef& rows = node.srcs[1];
  if (!IsWithin(rows.num_elements(), kMaxElements) || !IsWithin(rows.shape[0], kMaxSlices)) {
    return false;
  }
  const IndexParams params = IndexParamsOf(node);
  return rows.shape[0] == 1 ||
         std::all_of(params.dim, params.dim + params.num_components, [&](uint8_t dim) {
           const int64_t extent = rows.shape[dim + 1];
           return extent == 1 || extent == node.outs[0].shape[dim];
         });
}

bool IsSmall(const Node& node) {
  switch (node.op) {
    case Op::kExpr:
      return IsSmallExpr(node);
    case Op::kSetRows:
      return IsSmallSetRows(node);
    case Op::kGather:
    case Op::kCopy:
      return IsWithin(node.outs[0].num_elements(), kMaxElements);
    default:
      return false;
  }
}

// What a node's kernel reads and writes. SET_ROWS does not read what it writes into.
struct Touched {
  std::vector<MemoryRange> reads, writes;
};
Touched TouchedBy(const ResolvedNode& at) {
  Touched touched;
  for (size_t s = at.node->op == Op::kSetRows ? 1 : 0; s < at.srcs.size(); ++s) {
    touched.reads.push_back(RangeOf(at.node->srcs[s], at.srcs[s]));
  }
  touched.writes = WrittenBy(at);
  return touched;
}
bool Meets(const std::vector<MemoryRange>& a, const std::vector<MemoryRange>& b) {
  return std::any_of(a.begin(), a.end(), [&](const MemoryRange& r) { return OverlapAny(r, b); });
}
bool InConflict(const Touched& a, const Touched& b) {
  return Meets(a.writes, b.writes) || Meets(a.writes, b.reads) || Meets(a.reads, b.writes);
}
// How many elements lie in a row, each once, if that is what the dimensions say; else 0.
int64_t DenseSize(Dims dims) {
  std::sort(dims.begin(), dims.end());
  int64_t size = 1;
  for (const auto& [stride, n] : dims) {
    if (stride != size) return 0;
    size *= n;
  }
  return size;
}
bool IsRowMajor(const TensorRef& t) {
  const Dims dims = DimsOf(t);
  return std::is_sorted(dims.rbegin(), dims.rend()) && DenseSize(dims) != 0;
}

// How the rows of a SET_ROWS are the outputs of an EXPR, all of them and each element once; empty
// if they are not. Several outputs are equal parts of a concatenation: one more dimension.
std::vector<GroupFeed> FeedsFrom(const ResolvedNode& expr, const ResolvedNode& set) {
  const TensorRef& rows = set.node->srcs[1];
  const int64_t item = static_cast<int64_t>(SizeOf(rows.dtype));
  const MemoryRange range = RangeOf(rows, set.srcs[1]);
  std::vector<GroupFeed> feeds;
  Dims dims;
  for (size_t o = 0; o < expr.outs.size(); ++o) {
    const TensorRef& out = expr.node->outs[o];
    if (!Overlap(RangeOf(out, expr.outs[o]), range)) continue;
    const int64_t offset = expr.outs[o] - set.srcs[1];
    if (out.dtype != rows.dtype || offset % item != 0) return {};
    if (!feeds.empty() && DimsOf(out) != dims) return {};
    dims = DimsOf(out);
    feeds.push_back({0, static_cast<int>(o), 0, offset});
  }
  if (feeds.empty() || !IsRowMajor(rows)) return {};
  std::vector<int64_t> offsets;
  for (const GroupFeed& feed : feeds) offsets.push_back(feed.offset);
  std::sort(offsets.begin(), offsets.end());
  if (offsets[0] != 0) return {};
  const int64_t parts = static_cast<int64_t>(offsets.size());
  for (int64_t i = 1; i < parts; ++i) {
    if (offsets[i] != i * offsets[1]) return {};
  }
  if (parts > 1) dims.emplace_back(offsets[1] / item, parts);
  if (DenseSize(dims) != rows.num_elements()) return {};
  return feeds;
}

// The output of an EXPR that an index is, element by element; -1: none.
int IndexFrom(const ResolvedNode& expr, const ResolvedNode& at, int src) {
  const TensorRef& index = at.node->srcs[src];
  const Dims dims = DimsOf(index);
  const MemoryRange range = RangeOf(index, at.srcs[src]);
  int found = -1;
  for (size_t o = 0; o < expr.outs.size(); ++o) {
    const TensorRef& out = expr.node->outs[o];
    if (!Overlap(RangeOf(out, expr.outs[o]), range)) continue;
    if (out.dtype != index.dtype || DimsOf(out) != dims) return -1;
    if (expr.outs[o] == at.srcs[src]) {
      if (found >= 0) return -1;
      found = static_cast<int>(o);
      continue;
    }
    // Another output may lie between the elements.
    const int64_t item = static_cast<int64_t>(SizeOf(index.dtype));
    const int64_t stride = dims.empty() ? 0 : dims[0].first * item;
    const int64_t distance = std::abs(expr.outs[o] - at.srcs[src]);
    if (distance < item || distance > stride - item) return -1;
  }
  return found;
}

// The members of a group so far.
class Members {
 public:
  // Adds the node, if it may run at once with the others.
  bool Add(const ResolvedNode& at, NodeGroup* group) {
    const Op op = at.node->op;
    const size_t number = nodes_.size();
    const Touched all = TouchedBy(at);
    const bool in_place = Meets(all.writes, all.reads);
    if (in_place && op != Op::kExpr) return false;

    NodeGroup inner;
    Touched touched;  // but for what is not read from memory
    touched.writes = all.writes;
    const int first_index = op == Op::kGather ? 1 : op == Op::kSetRows ? 2 : kExprMaxSrcs;
    for (size_t r = 0; r < all.reads.size(); ++r) {
      const int src = static_cast<int>(op == Op::kSetRows ? r + 1 : r);
      size_t writer = 0;
      if (WrittenByOneExpr(all.reads[r], &writer)) {
        const ResolvedNode& expr = *nodes_[writer];
        if (src >= first_index) {
          const int out = IndexFrom(expr, at, src);
          if (out >= 0) {
            inner.indices.push_back({number, src, writer, out});
            continue;
          }
        } else if (op == Op::kSetRows) {
          std::vector<GroupFeed> feeds = FeedsFrom(expr, at);
          for (GroupFeed& feed : feeds) {
            feed.expr = writer;
            feed.rows = number;
          }
          inner.feeds = std::move(feeds);
          if (!inner.feeds.empty()) continue;
        }
      }
      touched.reads.push_back(all.reads[r]);
    }
    for (const Touched& other : touched_) {
      if (InConflict(touched, other)) return false;
    }
    nodes_.push_back(&at);
    touched_.push_back(std::move(touched));
    in_place_.push_back(in_place);
    group->count = nodes_.size();
    group->feeds.insert(group->feeds.end(), inner.feeds.begin(), inner.feeds.end());
    group->indices.insert(group->indices.end(), inner.indices.begin(), inner.indices.end());
    return true;
  }

 private:
  // Is the only writer to these bytes an EXPR that writes nothing that it reads?
  bool WrittenByOneExpr(const MemoryRange& range, size_t* writer) const {
    size_t writers = 0;
    for (size_t k = 0; k < nodes_.size(); ++k) {
      if (!OverlapAny(range, touched_[k].writes)) continue;
      ++writers;
      *writer = k;
    }
    return writers == 1 && nodes_[*writer]->node->op == Op::kExpr && !in_place_[*writer];
  }

  std::vector<const ResolvedNode*> nodes_;
  std::vector<Touched> touched_;
  std::vector<bool> in_place_;
};

}  // namespace

NodeGroup FindGroup(const std::vector<ResolvedNode>& nodes, size_t first) {
  NodeGroup group;
  Members members;
  for (size_t n = first; n < std::min(nodes.size(), first + kMaxNodes); ++n) {
    const Node& node = *nodes[n].node;
    const bool stands_by =
        node.region == nodes[first].node->region && node.branch == nodes[first].node->branch;
    if (!stands_by || !IsSmall(node) || !members.Add(nodes[n], &group)) break;
  }
  return group;
}

}  // namespace jaxgraph
