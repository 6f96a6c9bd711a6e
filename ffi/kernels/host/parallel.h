// Ranges of work on a ParallelFor. How work is cut never changes what a kernel computes: each
// output element is computed whole, by one thread, in an order that its position does not change.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/device/launch.h"

namespace jaxgraph {

// Calls fn(begin, end) for ranges that cover [0, n), their borders multiples of `grain`. `cost` is
// the whole work in elementary steps (about a tenth of a nanosecond each): what is small stays on
// the calling thread, for which the hand-off would take longer than the work.
template <typename Fn>
void ParallelRanges(ParallelFor& pool, int64_t n, int64_t grain, int64_t cost, const Fn& fn) {
  constexpr int64_t kCostWorthAThread = 30000;
  constexpr int64_t kRangesPerThread = 4;  // so that a thread that starts late does less
  const int64_t grains = (n + grain - 1) / grain;
  const int64_t ranges =
      std::min({grains, cost / kCostWorthAThread, pool.num_threads() * kRangesPerThread});
  if (ranges <= 1 || pool.num_threads() <= 1) {
    if (n > 0) fn(int64_t{0}, n);
    return;
  }
  struct Context {
    const Fn& fn;
    int64_t n, grain, grains, ranges;
  } context{fn, n, grain, grains, ranges};
  pool.Run(
      static_cast<int>(ranges),
      [](void* raw, int i) {
        const Context& c = *static_cast<const Context*>(raw);
        const int64_t begin = c.grains * i / c.ranges * c.grain;
        const int64_t end = std::min(c.n, c.grains * (i + 1) / c.ranges * c.grain);
        if (begin < end) c.fn(begin, end);
      },
      &context);
}

}  // namespace jaxgraph
