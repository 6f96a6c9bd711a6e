// The streaming kernels' launchers, and what they keep to.
#pragma once

#include "ffi/kernels/cuda/stream.h"

namespace jaxgraph {

constexpr int kMaxStages = 8;
// Dynamic shared memory of a block, which leaves room for the kernels' own.
constexpr int32_t kMaxStreamShared = 208 * 1024;

// Of all matrices.
inline int64_t ColumnsOf(const StreamParams& params) {
  int64_t columns = 0;
  for (int i = 0; i < params.num_products; ++i) columns += params.product[i].n;
  return columns;
}

// One row times matrices that are contiguous along k, without an activation.
bool FitsStreamVector(const StreamParams& params);
void LaunchStreamVector(StreamParams params, DType dtype, const StreamTuning& tuning,
                        Launches* launches);
// Up to 8 rows, either layout.
constexpr int kMaxTileRows = 8;
bool FitsStreamTiles(StreamParams params, bool along_k, const StreamTuning& tuning);
void LaunchStreamTiles(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                       Launches* launches);
// Up to 64 rows, either layout, without a norm.
bool FitsStreamWide(const StreamParams& params);
int32_t WideTiles(const StreamParams& params);  // that it cuts the matrices into
void LaunchStreamWide(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                      Launches* launches);

}  // namespace jaxgraph
