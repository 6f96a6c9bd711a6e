#include "ffi/kernels/cuda/jit/node_source.h"

#include <array>
#include <utility>

#include "ffi/kernels/cuda/jit/group_source.h"
#include "ffi/kernels/cuda/memory_range.h"

namespace jaxgraph {
namespace {

uint8_t AlignmentOf(const char* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 16;
  return static_cast<uint8_t>(bits & (~bits + 1));
}

template <typename T>
void Put(const T& value, std::string* key) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}
void Put(const TensorRef& t, std::string* key) {
  Put(t.dtype, key);
  Put(t.rank, key);
  key->append(reinterpret_cast<const char*>(t.shape.data()), t.rank * sizeof t.shape[0]);
  key->append(reinterpret_cast<const char*>(t.strides.data()), t.rank * sizeof t.strides[0]);
}

// Everything of a node but its program: how its addresses are aligned, and whether an output shares
// bytes with a source. Part of the key, for the addresses themselves are not.
KernelRequest RequestOf(const ResolvedNode& resolved, bool clusters) {
  const Node& node = *resolved.node;
  KernelRequest request;
  request.row = node.op == Op::kRow;
  request.clusters = clusters;
  request.num_srcs = static_cast<int>(node.srcs.size());
  request.num_outs = static_cast<int>(node.outs.size());
  std::array<MemoryRange, kExprMaxSrcs> srcs;
  for (size_t s = 0; s < node.srcs.size(); ++s) {
    request.src_alignment[s] = AlignmentOf(resolved.srcs[s]);
    srcs[s] = RangeOf(node.srcs[s], resolved.srcs[s]);
  }
  for (size_t o = 0; o < node.outs.size(); ++o) {
    request.out_alignment[o] = AlignmentOf(resolved.outs[o]);
    const MemoryRange out = RangeOf(node.outs[o], resolved.outs[o]);
    for (size_t s = 0; s < node.srcs.size(); ++s) {
      request.overlapping[o] |= static_cast<uint16_t>(Overlap(out, srcs[s]) << s);
    }
  }
  return request;
}

// Appends all that decides an expression's source.
void PutExpression(const Node& node, const KernelRequest& request, std::string* key) {
  Put(node.op, key);
  Put(node.params.size(), key);
  *key += node.params;
  for (int s = 0; s < request.num_srcs; ++s) {
    Put(node.srcs[s], key);
    Put(request.src_alignment[s], key);
  }
  for (int o = 0; o < request.num_outs; ++o) {
    Put(node.outs[o], key);
    Put(request.out_alignment[o], key);
    Put(request.overlapping[o], key);
  }
}

void PutMove(const ResolvedNode& at, std::string* key) {
  const Node& node = *at.node;
  Put(node.op, key);
  *key += node.params;
  for (size_t s = 0; s < node.srcs.size(); ++s) {
    Put(node.srcs[s], key);
    Put(AlignmentOf(at.srcs[s]), key);
  }
  Put(node.outs[0], key);
  Put(AlignmentOf(at.outs[0]), key);
}

// The only piece of a node's expression. False: it has several, or no work.
bool PieceOf(const ResolvedNode& node, ExprPiece* piece) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  if (!PrepareExpr(node, &wide, &pieces).ok() || pieces.size() != 1) return false;
  *piece = pieces[0];
  return true;
}

Status PrepareMove(const ResolvedNode& at, MoveParams* move) {
  if (at.node->op == Op::kSetRows) return PrepareSetRows(at, move);
  return at.node->op == Op::kGather ? PrepareGather(at, move) : PrepareCopy(at, move);
}

}  // namespace

bool IsExpression(const Node& node) {
  return (node.op == Op::kExpr || node.op == Op::kRow) && node.srcs.size() <= kExprMaxSrcs &&
         node.outs.size() <= kExprMaxOuts;
}

std::string KeyOf(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
                  bool clusters) {
  std::string key;
  key.reserve(1024 * group.count);
  Put(group.count, &key);
  for (size_t n = first; n < first + group.count; ++n) {
    if (IsExpression(*nodes[n].node)) {
      PutExpression(*nodes[n].node, RequestOf(nodes[n], clusters), &key);
    } else {
      PutMove(nodes[n], &key);
    }
  }
  Put(group.feeds.size(), &key);
  for (const GroupFeed& feed : group.feeds) {
    Put(feed.expr, &key);
    Put(feed.out, &key);
    Put(feed.rows, &key);
    Put(feed.offset, &key);
  }
  for (const GroupIndex& index : group.indices) {
    Put(index.user, &key);
    Put(index.src, &key);
    Put(index.expr, &key);
    Put(index.out, &key);
  }
  return key;
}

bool SourceOf(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
              bool clusters, KernelSource* source) {
  std::vector<ExprPiece> pieces(group.count);
  if (group.count == 1) {
    KernelRequest request = RequestOf(nodes[first], clusters);
    request.piece = &pieces[0];
    return PieceOf(nodes[first], &pieces[0]) && GenerateSource(request, source);
  }
  std::vector<GroupPart> parts(group.count);
  for (size_t k = 0; k < group.count; ++k) {
    const ResolvedNode& at = nodes[first + k];
    GroupPart& part = parts[k];
    part.num_srcs = static_cast<int>(at.srcs.size());
    part.num_outs = static_cast<int>(at.outs.size());
    if (at.node->op == Op::kExpr) {
      part.expr = RequestOf(at, clusters);
      part.expr.piece = &pieces[k];
      if (!PieceOf(at, &pieces[k])) return false;
    } else {
      part.sets = at.node->op == Op::kSetRows;
      for (const int src : IndexSources(*at.node)) part.indices.push_back({src});
      if (!PrepareMove(at, &part.move).ok()) return false;
    }
  }
  for (const GroupFeed& feed : group.feeds) {
    parts[feed.expr].expr.fed.push_back({feed.out, feed.offset, PlaceName(feed.rows)});
    parts[feed.rows].fed = true;
  }
  for (const GroupIndex& index : group.indices) {
    for (PartIndex& component : parts[index.user].indices) {
      if (component.src != index.src) continue;
      component.expr = static_cast<int>(index.expr);
      component.out = index.out;
    }
  }
  return GenerateGroup(parts, source);
}

}  // namespace jaxgraph
