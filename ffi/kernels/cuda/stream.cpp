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

}  // namespace

// Measured with benchmarks/stream_products; docs/kernels.md has the figures.
StreamTuning DefaultTuning(const StreamParams& params, bool along_k) {
  if (along_k && FitsStreamVector(params)) {
    if (params.k <= 1024) return {264, 3, 1};
    // Four stages are more than half of a multiprocessor's shared memory: one block each.
    return {132, 2 * params.k * ColumnsOf(params) >= kLongLaunch ? 4 : 3, 1};
  }
  // Rows take the room of a second block, and clusters of four such blocks find no place at once.
  if (params.m > 1) return {132, 5, 2};
  const int64_t columns = params.activated != nullptr ? params.product[0].n : ColumnsOf(params);
  // Few columns: more blocks share each of them, and the launches around find room beside them.
  if (columns <= 2112) return {264, 2, 8};
  return params.k < 4096 ? StreamTuning{264, 3, 4} : StreamTuning{132, 5, 4};
}

bool FitsStream(const StreamParams& params, bool along_k) {
  if (params.m > kMaxStreamRows) return false;
  return (along_k && FitsStreamVector(params)) ||
         FitsStreamTiles(params, along_k, DefaultTuning(params, along_k));
}

void LaunchStream(const StreamParams& params, DType dtype, bool along_k, const StreamTuning& tuning,
                  Launches* launches) {
  if (along_k && FitsStreamVector(params)) {
    LaunchStreamVector(params, dtype, tuning, launches);
  } else {
    LaunchStreamTiles(params, dtype, along_k, tuning, launches);
  }
}

}  // namespace jaxgraph
