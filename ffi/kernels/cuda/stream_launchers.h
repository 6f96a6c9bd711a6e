// The two streaming kernels' launchers, and what both keep to.
#pragma once

#include "ffi/kernels/cuda/stream.h"

namespace jaxgraph {

constexpr int kMaxStages = 8;
// Dynamic shared memory of a block, which leaves room for the kernels' own.
constexpr int32_t kMaxStreamShared = 208 * 1024;

void LaunchStreamAlongK(StreamParams params, DType dtype, const StreamTuning& tuning,
                        Launches* launches);
void LaunchStreamAlongN(StreamParams params, DType dtype, const StreamTuning& tuning,
                        Launches* launches);

}  // namespace jaxgraph
