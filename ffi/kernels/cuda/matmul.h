// MATMUL: one product in the terms of the kernels, and the kernels' launchers. matmul.cpp chooses.
#pragma once

#include <cstdint>

#include "ffi/core/dtype.h"
#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

// out[m, n] = sum over k of a[m, k] * b[k, n], for each of batch[0] x batch[1]. Strides in bytes, 0
// in dimensions of size 1. With an index, b is the matrix that the index of the batch says, clamped
// to [0, matrices), and matrices are b_batch[0] apart.
struct MatmulParams {
  const char* a;
  const char* b;
  char* out;
  const char* index;  // or null
  int64_t index_batch[2];
  int64_t a_m, a_k, b_k, b_n, out_m, out_n;
  int64_t a_batch[2], b_batch[2], out_batch[2];
  int32_t m, n, k;
  int32_t batch[2];
  int32_t matrices;
  DType a_dtype, b_dtype, out_dtype, index_dtype;
  uint8_t reserved[4];
};

// The product of a node, turned so that it has as few rows as it can have. An empty one has a size
// 0.
Status PrepareProduct(const ResolvedNode& node, MatmulParams* product);

// The kernels that take M in pieces of up to 8 rows, which share what they read of b. Both need a
// and b of one dtype, which is bf16, f16 or f32.
constexpr int kMaxRowsAtOnce = 8;

// b contiguous along k ("[out, in]" weights, keys of a cache): lanes of a warp share a column. a is
// contiguous along k, too, and rows and columns start at multiples of 16 bytes.
bool FitsColumnKernel(const MatmulParams& p);
void LaunchColumns(const MatmulParams& p, Launches* launches);

// b contiguous along n ("[in, out]" weights, values of a cache): a block takes 128 bytes of each of
// its rows of b; K is split over the warps and, with `clusters`, over blocks that share memory.
bool FitsPanelKernel(const MatmulParams& p);
void LaunchPanels(const MatmulParams& p, bool clusters, Launches* launches);

// Everything, any strides and dtypes: for few rows, and tiled for many.
void LaunchStrided(const MatmulParams& p, Launches* launches);
void LaunchTiled(const MatmulParams& p, Launches* launches);

// Batches beyond what a grid can hold are looped over.
constexpr int64_t kMaxGridZ = 65535;

}  // namespace jaxgraph
