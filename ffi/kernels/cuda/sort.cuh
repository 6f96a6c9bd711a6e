// What the kernels of SORT share: the node as they see it, and how an element reaches its place.
#pragma once

#include "ffi/core/sort_key.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/scalar.cuh"

namespace jaxgraph {

constexpr int kSortOuts = 8;

struct SortedOut {
  char* out;
  const char* src;                               // null: positions
  int64_t out_row, out_step, src_row, src_step;  // bytes
};

struct SortKernelParams {
  const char* keys;
  int64_t keys_row, keys_step;  // bytes
  int64_t n;
  SortedOut outs[kSortOuts];
  uint32_t chunks;
  uint32_t kept;  // of a piece; 0: all of it
  uint32_t room;  // elements of the network: a power of two, not less than a piece
  DType dtype;
  SortOrder order;
  uint8_t num_outs, merged;
  uint8_t item[kSortOuts];  // bytes of an element
};

// Element `at` of the row goes where place `rank` of piece `chunk` is.
__device__ __forceinline__ void StoreSorted(const SortKernelParams& p, int64_t row, int64_t chunk,
                                            int64_t rank, int64_t at) {
  const int64_t first = p.kept == 0 ? SortPieceBegin(chunk, p.n, p.chunks) : chunk * p.kept;
  for (int o = 0; o < p.num_outs; ++o) {
    const SortedOut& out = p.outs[o];
    char* to = out.out + row * out.out_row + (first + rank) * out.out_step;
    if (out.src == nullptr) {
      *reinterpret_cast<int32_t*>(to) = static_cast<int32_t>(at);
    } else {
      const char* from = out.src + row * out.src_row + at * out.src_step;
      StoreBits(to, p.item[o], LoadBits(from, p.item[o]));
    }
  }
}

// Pieces that are in order become larger ones: `p.merged` is not 0.
void LaunchMerge(const SortKernelParams& p, int64_t rows, Launches* launches);

}  // namespace jaxgraph
