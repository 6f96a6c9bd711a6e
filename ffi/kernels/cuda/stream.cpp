#include "ffi/kernels/cuda/stream.h"

#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {
// Measured with benchmarks/stream_products; docs/kernels.md has the figures.
StreamTuning DefaultTuning(const StreamParams& params, bool along_k) {
  if (along_k && FitsStreamVector(params)) return {params.k > 1024 ? 132 : 264, 3, 1};
  // Rows take the room of a second block, and clusters of four such blocks find no place at once.
  if (params.m > 1) return {132, 5, 2};
  int64_t columns = params.product[0].n;
  for (int i = 1; i < params.num_products && params.activated == nullptr; ++i) {
    columns += params.product[i].n;
  }
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
