// The streaming kernels' launchers, and what they keep to.
#pragma once

#include <algorithm>

#include "ffi/kernels/cuda/stream.h"
#include "ffi/kernels/cuda/strided_space.h"

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

// Cuts every matrix into pieces of `columns` columns, and sets its `end`. Gives how many pieces the
// launch makes: the two matrices of an activation are cut alike, and their pieces made together.
inline int32_t CutColumns(int columns, StreamParams* params) {
  int32_t pieces = 0;
  for (int i = 0; i < params->num_products; ++i) {
    pieces += static_cast<int32_t>(CeilDiv(params->product[i].n, columns));
    params->product[i].end = pieces;
  }
  return params->activated != nullptr ? params->product[0].end : pieces;
}
// Sets `splits`, the blocks of a cluster, which share k in multiples of `step`: more than one only
// where each cluster makes one piece. Gives the number of clusters.
inline int32_t ShareAmongBlocks(const StreamTuning& tuning, int step, StreamParams* params) {
  StreamParams& p = *params;
  p.splits = 1;
  while (p.splits < tuning.cluster && int64_t{p.pieces} * p.splits * 2 <= tuning.blocks &&
         p.k >= 4 * p.splits * step) {
    p.splits *= 2;
  }
  return std::min(p.pieces, std::max(tuning.blocks / p.splits, 1));
}

// The launchers give the number of candidates of a row.

// One row times matrices that are contiguous along k, without an activation.
bool FitsStreamVector(const StreamParams& params);
int32_t LaunchStreamVector(StreamParams params, DType dtype, const StreamTuning& tuning,
                           Launches* launches);
// One row, either layout.
bool FitsStreamTiles(StreamParams params, bool along_k, const StreamTuning& tuning);
int32_t LaunchStreamTiles(StreamParams params, DType dtype, bool along_k,
                          const StreamTuning& tuning, Launches* launches);
// Several rows, up to 8, either layout, with what goes on from one launch to the next.
constexpr int kMaxFewRows = 8;
bool FitsStreamRows(StreamParams params, bool along_k, const StreamTuning& tuning);
int32_t LaunchStreamRows(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                         Launches* launches);
int32_t RowsTiles(const StreamParams& params, bool along_k);  // that it cuts the matrices into
// Up to 64 rows, either layout, without a norm or an argmax.
bool FitsStreamWide(const StreamParams& params);
int32_t WideTiles(const StreamParams& params);  // that it cuts the matrices into
void LaunchStreamWide(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                      Launches* launches);

}  // namespace jaxgraph
