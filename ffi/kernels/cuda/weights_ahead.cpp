#include "ffi/kernels/cuda/weights_ahead.h"

#include <algorithm>

#include "ffi/kernels/cuda/memory_range.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kMostNodes = 6;  // looked at
constexpr int32_t kParts = 2;

// A product's constant matrix, all of it; an empty range if it has none.
MemoryRange WeightsOf(const ResolvedNode& at) {
  if (at.node->op != Op::kMatmul || at.node->region != 0) return {};
  for (size_t i = 0; i < 2; ++i) {
    const TensorRef& t = at.node->srcs[i];
    if (!at.is_constant(i)) continue;
    const MemoryRange range = RangeOf(t, at.srcs[i]);
    const int64_t bytes = t.num_elements() * static_cast<int64_t>(SizeOf(t.dtype));
    if (range.end - range.begin == bytes && IsAligned(range.begin, 16)) return range;
  }
  return {};
}

}  // namespace

WeightsAhead FindWeightsAhead(const std::vector<ResolvedNode>& nodes, size_t first,
                              uint32_t* reads_to) {
  WeightsAhead ahead = {};
  *reads_to = 0;
  int looked_at = 0;
  bool product = false, between = false;  // what was passed
  int64_t bytes = 0;                      // of a matrix
  for (size_t n = first + 1; n < nodes.size() && looked_at < kMostNodes; ++n) {
    const Op op = nodes[n].node->op;
    if (op == Op::kView) continue;
    ++looked_at;
    if (op != Op::kMatmul) {
      if (ahead.matrices > 0) break;
      between = product;
      continue;
    }
    product = true;
    if (!between) continue;
    // Whatever comes of the look: elsewhere the weights might be what can be asked for.
    *reads_to = static_cast<uint32_t>(n) + 1;
    const MemoryRange weights = WeightsOf(nodes[n]);
    const int64_t size = weights.end - weights.begin;
    if (size < kParts * kAheadPiece || (ahead.matrices > 0 && size != bytes)) break;
    bytes = size;
    ahead.weights[ahead.matrices++] = weights.begin;
    if (ahead.matrices == kMostAhead) break;
  }
  if (ahead.matrices == 0) return ahead;
  ahead.parts = kParts;
  ahead.part_bytes = bytes / kParts / 16 * 16;
  ahead.pieces = static_cast<int32_t>(
      std::min(ahead.part_bytes, kAheadBytes / ahead.matrices / kParts) / kAheadPiece);
  return ahead;
}

}  // namespace jaxgraph
