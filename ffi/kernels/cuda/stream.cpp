#include "ffi/kernels/cuda/stream.h"

#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {
namespace {

constexpr int64_t kMaxRowBytes = 132 * 1024;  // of shared memory, beside one stage of the rings

}  // namespace

StreamTuning DefaultTuning(const StreamParams& params, bool along_k) {
  const bool many = params.m * int64_t{params.k} > 16 * 1024;  // one block's rows fill a processor
  if (along_k) return {many ? 132 : 264, 3, 1};
  return {many ? 132 : 264, 3, 8};
}

bool RowsFit(const StreamParams& params) {
  return params.m <= kMaxStreamRows && params.m * (2 * int64_t{params.k} + 128) <= kMaxRowBytes;
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
