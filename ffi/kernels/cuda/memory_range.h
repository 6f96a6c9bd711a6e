// Which bytes of memory a tensor spans, and whether two of them can meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// From a tensor's first to its last byte in memory.
struct MemoryRange {
  const char* begin = nullptr;
  const char* end = nullptr;
};

inline MemoryRange RangeOf(const TensorRef& t, const char* address) {
  const int64_t size = static_cast<int64_t>(SizeOf(t.dtype));
  MemoryRange range = {address, address + size};
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 0) return {address, address};
    const int64_t reach = (t.shape[d] - 1) * t.strides[d] * size;
    (reach < 0 ? range.begin : range.end) += reach;
  }
  return range;
}

// One range an output.
inline std::vector<MemoryRange> WrittenBy(const ResolvedNode& at) {
  std::vector<MemoryRange> writes;
  for (size_t i = 0; i < at.outs.size(); ++i) {
    writes.push_back(RangeOf(at.node->outs[i], at.outs[i]));
  }
  return writes;
}

inline bool Overlap(const MemoryRange& a, const MemoryRange& b) {
  return a.begin < b.end && b.begin < a.end;
}
inline bool OverlapAny(const MemoryRange& a, const std::vector<MemoryRange>& all) {
  return std::any_of(all.begin(), all.end(), [&](const MemoryRange& b) { return Overlap(a, b); });
}

}  // namespace jaxgraph
