#include "ffi/kernels/cuda/jit/node_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ffi/core/expr.h"
#include "ffi/kernels/cuda/memory_range.h"

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
  IndexParams params;
  std::memcpy(static_cast<void*>(&params), node.params.data(), sizeof params);
  return rows.shape[0] == 1 || std::all_of(params.dim, params.dim + params.num_components,
                                           [&](uint8_t dim) { return rows.shape[dim + 1] == 1; });
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
  for (size_t o = 0; o < at.outs.size(); ++o) {
    touched.writes.push_back(RangeOf(at.node->outs[o], at.outs[o]));
  }
  return touched;
}
bool Meets(const std::vector<MemoryRange>& a, const std::vector<MemoryRange>& b) {
  return std::any_of(a.begin(), a.end(), [&](const MemoryRange& r) { return OverlapAny(r, b); });
}
bool InConflict(const Touched& a, const Touched& b) {
  return Meets(a.writes, b.writes) || Meets(a.writes, b.reads) || Meets(a.reads, b.writes);
}
bool ReadsItsOutputs(const Touched& t) { return Meets(t.writes, t.reads); }

// Dimensions as (stride, size), without those of size 1.
using Dims = std::vector<std::pair<int64_t, int64_t>>;
Dims DimsOf(const TensorRef& t) {
  Dims dims;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] != 1) dims.emplace_back(t.strides[d], t.shape[d]);
  }
  return dims;
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

}  // namespace

NodeGroup FindGroup(const std::vector<ResolvedNode>& nodes, size_t first) {
  const size_t end = std::min(nodes.size(), first + kMaxNodes);
  NodeGroup group;
  std::vector<Touched> all;
  for (size_t n = first; n < end; ++n) {
    const ResolvedNode& at = nodes[n];
    if (at.node->region != nodes[first].node->region ||
        at.node->branch != nodes[first].node->branch || !IsSmall(*at.node)) {
      break;
    }
    Touched touched = TouchedBy(at);
    if (at.node->op != Op::kExpr && ReadsItsOutputs(touched)) break;

    std::vector<GroupFeed> feeds;
    if (at.node->op == Op::kSetRows) {
      size_t writers = 0, writer = 0;  // of the rows
      for (size_t k = 0; k < all.size(); ++k) {
        if (!OverlapAny(touched.reads[0], all[k].writes)) continue;
        ++writers;
        writer = k;
      }
      const ResolvedNode& source = nodes[first + writer];
      if (writers == 1 && source.node->op == Op::kExpr && !ReadsItsOutputs(all[writer])) {
        feeds = FeedsFrom(source, at);
        for (GroupFeed& feed : feeds) {
          feed.expr = writer;
          feed.rows = n - first;
        }
      }
    }
    Touched outer = touched;  // what is read from memory
    if (!feeds.empty()) outer.reads.erase(outer.reads.begin());
    if (std::any_of(all.begin(), all.end(),
                    [&](const Touched& other) { return InConflict(outer, other); })) {
      break;
    }
    group.feeds.insert(group.feeds.end(), feeds.begin(), feeds.end());
    all.push_back(std::move(outer));
  }
  group.count = std::max<size_t>(all.size(), 1);
  return group;
}

}  // namespace jaxgraph
