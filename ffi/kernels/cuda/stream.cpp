#include "ffi/kernels/cuda/stream.h"

#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {
namespace {

// Of shared memory; what is left beside them holds two stages of the rings, mostly.
constexpr int64_t kMaxRowBytes = 133 * 1024;
constexpr int64_t kMostPadding = 144;       // behind a row
constexpr int64_t kOneStage = 37 * 1024;    // of all warps
constexpr int64_t kSumBytes = 9 * 128 * 4;  // along n, of a row: 128 columns, by warp and in all

}  // namespace

// The settings whose results were tested on a GPU. Others were faster in timings (docs/kernels.md).
StreamTuning DefaultTuning(const StreamParams& params, bool along_k) {
  const bool alone = params.m * int64_t{params.k} > 16 * 1024;  // its rows fill a multiprocessor
  return {alone ? 132 : 264, 3, along_k ? 1 : 8};
}

bool RowsFit(const StreamParams& params, bool along_k) {
  const int64_t rows = params.m * (2 * int64_t{params.k} + kMostPadding);
  const int64_t sums = along_k ? 0 : params.m * kSumBytes;
  return params.m <= kMaxStreamRows && rows <= kMaxRowBytes &&
         rows + sums + kOneStage <= kMaxStreamShared;
}

void LaunchStream(const StreamParams& params, DType dtype, bool along_k, const StreamTuning& tuning,
                  Launches* launches) {
  if (along_k) {
    LaunchStreamAlongK(params, dtype, tuning, launches);
  } else {
    LaunchStreamAlongN(params, dtype, tuning, launches);
  }
}

}  // namespace jaxgraph
