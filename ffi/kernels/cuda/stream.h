// Streaming products (Hopper): up to four matrices that multiply the same rows, up to 64, in one
// kernel that reads the weights as fast as memory gives them, with the norm that makes the rows in
// front and the activation that takes the products behind. stream_group.cpp finds such groups.
#pragma once

#include <cstdint>

#include "ffi/core/dtype.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/stream_argmax.h"

namespace jaxgraph {

constexpr int kMaxStreamed = 4;  // matrices
constexpr int kMaxStreamRows = 64;
constexpr int kMaxStreamLength = 1 << 28;  // of a row: its bytes are counted in 32 bits
// Every block computes the norms for itself: beyond so many elements that costs more than a kernel
// of its own, which several rows share better than one.
constexpr int kMaxNormElements = 8 * 1024;
constexpr int kMaxNormElementsOfRows = 4 * 1024;
inline bool NormFits(int64_t rows, int64_t length) {
  return rows * length <= (rows == 1 ? kMaxNormElements : kMaxNormElementsOfRows);
}

// out[m, n] = sum over k of row[m, k] * weights[k, n]; strides in bytes.
struct StreamedProduct {
  const char* weights;
  char* out;
  int64_t pitch;  // from one column of the product to the next (along k), or one k to the next
  int64_t out_m;
  int32_t n;
  int32_t end;  // of this matrix's pieces, counted from the first matrix's: the launcher's
  DType out_dtype;
  uint8_t reserved[7];
};

// What is behind products whose columns are heads of kStreamedHead elements: rotations, and rows of
// caches. By product: where its heads go when they are turned, without gaps, and where they go
// (then) in a cache; null: nowhere.
constexpr int kStreamedHead = 64;
struct StreamedHeads {
  const float* cos;  // of half a head, the same for all heads and rows; null: no rotations
  const float* sin;
  const int32_t* position;  // of the caches' new rows; null: no caches
  char* turned[kMaxStreamed];
  char* cached[kMaxStreamed];
  int64_t cache_m, cache_head, cache_position;  // of all caches, in bytes
  int32_t num_positions;
  uint8_t drops;  // a position beyond them; else it is clamped
  uint8_t reserved[3];
};

struct StreamParams {
  StreamedProduct product[kMaxStreamed];

  // The rows. With `norm`: sum = row (+ added), norm = rms_norm(sum) (* weight), both stored, and
  // `norm` is what is multiplied. See RmsNormForm.
  const char* row;
  const char* added;
  const char* weight;
  char* sum;
  char* norm;
  int64_t row_m, added_m, sum_m, norm_m;
  uint32_t length,
      eps;  // bits of floats: floats have two zeros, and equal nodes must give equal bytes

  // If not null, the launch before left the squares of `row`, which is the sum then, in `num_parts`
  // parts of kMaxFewRows floats, and `added` and `sum` are null.
  const float* squares;

  // What a norm behind the only product begins with, if not null: the product is added to
  // `residual`, and parts of the sum's squares are left for the launch behind.
  const char* residual;
  char* residual_sum;
  float* squares_out;
  int64_t residual_m, residual_sum_m;

  StreamedHeads heads;

  // The activation: silu(product 0) * product 1, if not null.
  char* activated;
  int64_t activated_m;

  // Of an argmax behind the only product, [m, places]: what the kernel's warps leave. Null: none.
  StreamCandidate* candidates;

  int32_t m, k, num_products;
  int32_t pieces;       // of all matrices: tiles of columns; the vector kernel's: see there
  int32_t stages;       // of a ring: a warp's, the wide kernel's a block's
  int32_t splits;       // what k is shared by: blocks of a cluster; the vector kernel's: warps
  int32_t row_pitch;    // bytes of a row in shared memory
  int32_t slice_bytes;  // the vector kernel's: of a piece, in a warp
  int32_t places;       // candidates of a row
  int32_t columns;      // the vector kernel's: of a piece
  int32_t num_parts;    // of squares

  uint8_t has_norm, divides, rounds_first, silu_rounds;
  uint8_t fetches_early;  // no node writes the weights: they are read before the wait
  uint8_t reserved[7];
};

// stream_vector.cu, stream_tiles.cu, stream_rows.cu, stream_wide.cu; stream_launchers.h says what
// each can take.
enum class StreamKernel : uint8_t { kVector, kTiles, kRows, kWide };

// Which kernel, and how much of the chip a launch takes; constants of Hopper's, found by
// benchmarks/stream_products.
struct StreamTuning {
  StreamKernel kernel;
  int32_t blocks;   // wanted at most
  int32_t stages;   // of a ring at most: a warp's, 4 KB each, or the wide kernel's, a block's
  int32_t cluster;  // blocks that share k, at most; the vector kernel has no clusters
};
StreamTuning DefaultTuning(const StreamParams& params, bool along_k);

// Whether the tuning's kernel can take them: the rows, and with them all that a block needs, fit
// into its shared memory, it knows norm, activation and layout, and candidates find room.
bool FitsStream(const StreamParams& params, bool along_k, const StreamTuning& tuning);

// `along_k`: every matrix is contiguous along k ("[out, in]"), else along n ("[in, out]"). bf16 or
// f16 throughout (but for the products' own dtypes); rows, weights and outputs start at multiples
// of 16 bytes, k is a multiple of 8 and, along n, so is every n. FitsStream must have agreed. Gives
// the number of candidates that a row is left.
int32_t LaunchStream(const StreamParams& params, DType dtype, bool along_k,
                     const StreamTuning& tuning, Launches* launches);

}  // namespace jaxgraph
