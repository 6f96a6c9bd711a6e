#include "ffi/kernels/cuda/stream.h"

#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {
namespace {

// From here on the launch's own blocks must be spread evenly, whatever room the launch before it
// leaves: where two share a multiprocessor they take longer than all others.
constexpr int64_t kLongLaunch = int64_t{256} << 20;  // bytes of weights

int64_t ColumnsOf(const StreamParams& params) {
  int64_t columns = 0;
  for (int i = 0; i < params.num_products; ++i) columns += params.product[i].n;
  return columns;
}

// Long rings for as many blocks as there are multiprocessors, or short ones that leave room for a
// second: clusters of long ones find no place for more than these at once, and more blocks than
// multiprocessors would take two rounds.
StreamTuning WideTuning(const StreamParams& params) {
  if (params.m <= 16) return {264, 4, 8, true};
  const int64_t tiles = WideTiles(params);
  if (tiles <= 24 || (tiles > 66 && tiles <= 132)) return {132, 6, 4, true};
  return {264, params.m > 32 ? 3 : 4, 4, true};
}

}  // namespace

// Measured with benchmarks/stream_products; docs/kernels.md has the figures.
StreamTuning DefaultTuning(const StreamParams& params, bool along_k) {
  if (along_k && FitsStreamVector(params)) {
    if (params.k <= 1024) return {264, 3, 1, false};
    // Four stages are more than half of a multiprocessor's shared memory: one block each.
    return {132, 2 * params.k * ColumnsOf(params) >= kLongLaunch ? 4 : 3, 1, false};
  }
  if (params.m > 1) {
    // Rows take the room of a second block, and clusters of four such blocks find no place at once.
    const StreamTuning tiles = {132, 5, 2, false};
    if (FitsStreamTiles(params, along_k, tiles)) return tiles;
    return WideTuning(params);
  }
  const int64_t columns = params.activated != nullptr ? params.product[0].n : ColumnsOf(params);
  // Few columns: more blocks share each of them, and the launches around find room beside them.
  if (columns <= 2112) return {264, 2, 8, false};
  return params.k < 4096 ? StreamTuning{264, 3, 4, false} : StreamTuning{132, 5, 4, false};
}

bool FitsStream(const StreamParams& params, bool along_k) {
  if (params.m > kMaxStreamRows) return false;
  if (along_k && FitsStreamVector(params)) return true;
  const StreamTuning tuning = DefaultTuning(params, along_k);
  return tuning.wide ? FitsStreamWide(params) : FitsStreamTiles(params, along_k, tuning);
}

void LaunchStream(const StreamParams& params, DType dtype, bool along_k, const StreamTuning& tuning,
                  Launches* launches) {
  if (along_k && FitsStreamVector(params)) {
    LaunchStreamVector(params, dtype, tuning, launches);
  } else if (tuning.wide) {
    LaunchStreamWide(params, dtype, along_k, tuning, launches);
  } else {
    LaunchStreamTiles(params, dtype, along_k, tuning, launches);
  }
}

}  // namespace jaxgraph
