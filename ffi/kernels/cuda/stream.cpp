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
  constexpr StreamKernel kWide = StreamKernel::kWide;
  if (params.m <= 16) return {kWide, 264, 4, 8};
  const int64_t tiles = WideTiles(params);
  if (tiles <= 24 || (tiles > 66 && tiles <= 132)) return {kWide, 132, 6, 4};
  return {kWide, 264, params.m > 32 ? 3 : 4, 4};
}

// Up to 8 rows. Few columns: more blocks share each of them, and the launches around find room
// beside them; but where columns are short, too, clusters cost more than they bring.
StreamTuning FewColumnsTuning(StreamKernel kernel, const StreamParams& params, bool along_k) {
  const bool pair = params.activated != nullptr;
  if (params.m > 1 && along_k && params.k > 4096) return {kernel, 132, 4, 2};
  if (params.num_products == 1 || params.k > 1024) return {kernel, 264, 2, along_k ? 4 : 8};
  if (along_k) return {kernel, pair ? 264 : 132, 3, 1};
  return pair ? StreamTuning{kernel, 132, 3, 2} : StreamTuning{kernel, 264, 3, 4};
}

// Several rows make more work of a stage, and take more room. A launch of many tiles, or of two
// blocks for each, does best with a multiprocessor for each block and deep rings; but along k
// a stage has so few columns that it takes two blocks to keep up.
StreamTuning RowsTuning(const StreamParams& params, bool along_k) {
  constexpr StreamKernel kRows = StreamKernel::kRows;
  const int32_t tiles = RowsTiles(params, along_k);
  if (tiles > 132) {
    const bool keeps_up = !along_k || (params.k >= 4096 && tiles > 264);
    return keeps_up ? StreamTuning{kRows, 132, 4, 1} : StreamTuning{kRows, 264, 2, 1};
  }
  const bool halves = tiles <= 66 && !along_k && (params.k <= 2048 || params.k > 8192);
  return halves ? StreamTuning{kRows, 132, 5, 2} : StreamTuning{kRows, 264, 3, 4};
}

StreamTuning TilesTuning(const StreamParams& params, bool along_k) {
  const StreamKernel kernel = params.m == 1 ? StreamKernel::kTiles : StreamKernel::kRows;
  const int64_t columns = params.activated != nullptr ? params.product[0].n : ColumnsOf(params);
  if (columns <= 2112) return FewColumnsTuning(kernel, params, along_k);
  if (params.m > 1) return RowsTuning(params, along_k);
  return params.k >= 4096 ? StreamTuning{kernel, 132, 5, 4} : StreamTuning{kernel, 264, 3, 4};
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
    constexpr StreamKernel kVector = StreamKernel::kVector;
    if (params.k <= 1024) return {kVector, 264, 3, 1};
    // Four stages are more than half of a multiprocessor's shared memory: one block each.
    return {kVector, 132, 2 * params.k * ColumnsOf(params) >= kLongLaunch ? 4 : 3, 1};
  }
  const StreamTuning tiles = TilesTuning(params, along_k);
  return params.m == 1 || FitsStreamRows(params, along_k, tiles) ? tiles : WideTuning(params);
}

bool FitsStream(const StreamParams& params, bool along_k, const StreamTuning& tuning) {
  const bool carries = params.squares != nullptr || params.residual != nullptr;
  const bool heads = params.heads.cos != nullptr || params.heads.position != nullptr;
  if ((carries || heads) && tuning.kernel != StreamKernel::kRows) return false;
  switch (tuning.kernel) {
    case StreamKernel::kVector:
      return along_k && FitsStreamVector(params);
    case StreamKernel::kTiles:
      return FitsStreamTiles(params, along_k, tuning);
    case StreamKernel::kRows:
      return FitsStreamRows(params, along_k, tuning);
    case StreamKernel::kWide:
      return FitsStreamWide(params);
  }
  return false;
}

int32_t LaunchStream(const StreamParams& params, DType dtype, bool along_k,
                     const StreamTuning& tuning, Launches* launches) {
  switch (tuning.kernel) {
    case StreamKernel::kVector:
      return LaunchStreamVector(params, dtype, tuning, launches);
    case StreamKernel::kTiles:
      return LaunchStreamTiles(params, dtype, along_k, tuning, launches);
    case StreamKernel::kRows:
      return LaunchStreamRows(params, dtype, along_k, tuning, launches);
    case StreamKernel::kWide:
      LaunchStreamWide(params, dtype, along_k, tuning, launches);
      return 0;
  }
  return 0;
}

}  // namespace jaxgraph
