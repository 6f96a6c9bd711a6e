#include "ffi/kernels/cuda/stream.h"

#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {
namespace {

// From here on the launch's own blocks must be spread evenly, whatever room the launch before it
// leaves: where two share a multiprocessor they take longer than all others.
constexpr int64_t kLongLaunch = int64_t{256} << 20;  // bytes of weights

// Long rings for as many blocks as there are multiprocessors, or short ones that leave room for a
// second: clusters of long ones find no place for more than these at once, and more blocks than
// multiprocessors would take two rounds.
StreamTuning WideTuning(const StreamParams& params) {
  if (params.m <= 16) return {264, 4, 8, true};
  const int64_t tiles = WideTiles(params);
  if (tiles <= 24 || (tiles > 66 && tiles <= 132)) return {132, 6, 4, true};
  return {264, params.m > 32 ? 3 : 4, 4, true};
}

// One row. Few columns: more blocks share each of them, and the launches around find room beside
// them; but where columns are short, too, clusters cost more than they bring.
StreamTuning TilesTuning(const StreamParams& params, bool along_k) {
  const bool pair = params.activated != nullptr;
  const int64_t columns = pair ? params.product[0].n : ColumnsOf(params);
  if (columns <= 2112) {
    if (params.num_products == 1 || params.k > 1024) return {264, 2, along_k ? 4 : 8, false};
    if (along_k) return {pair ? 264 : 132, 3, 1, false};
    return pair ? StreamTuning{132, 3, 2, false} : StreamTuning{264, 3, 4, false};
  }
  return params.k < 4096 ? StreamTuning{264, 3, 4, false} : StreamTuning{132, 5, 4, false};
}

// Warps that stream whole columns keep up where there are many; elsewhere tiles are done sooner.
bool TakesVector(const StreamParams& params, bool along_k) {
  constexpr int64_t kManyColumns = 16384;
  return along_k && ColumnsOf(params) >= kManyColumns && FitsStreamVector(params);
}

}  // namespace

// Measured with benchmarks/stream_products; docs/kernels.md has the figures.
StreamTuning DefaultTuning(const StreamParams& params, bool along_k) {
  if (TakesVector(params, along_k)) {
    if (params.k <= 1024) return {264, 3, 1, false};
    // Four stages are more than half of a multiprocessor's shared memory: one block each.
    return {132, 2 * params.k * ColumnsOf(params) >= kLongLaunch ? 4 : 3, 1, false};
  }
  if (params.m == 1) return TilesTuning(params, along_k);
  // Rows take the room of a second block, and clusters of four such blocks find no place at once.
  const StreamTuning tiles = {132, 5, 2, false};
  return FitsStreamTiles(params, along_k, tiles) ? tiles : WideTuning(params);
}

bool FitsStream(const StreamParams& params, bool along_k) {
  if (params.m > kMaxStreamRows) return false;
  if (TakesVector(params, along_k)) return true;
  const StreamTuning tuning = DefaultTuning(params, along_k);
  return tuning.wide ? FitsStreamWide(params) : FitsStreamTiles(params, along_k, tuning);
}

void LaunchStream(const StreamParams& params, DType dtype, bool along_k, const StreamTuning& tuning,
                  Launches* launches) {
  if (TakesVector(params, along_k)) {
    LaunchStreamVector(params, dtype, tuning, launches);
  } else if (tuning.wide) {
    LaunchStreamWide(params, dtype, along_k, tuning, launches);
  } else {
    LaunchStreamTiles(params, dtype, along_k, tuning, launches);
  }
}

}  // namespace jaxgraph
