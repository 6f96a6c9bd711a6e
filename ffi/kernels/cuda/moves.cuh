// Pieces that the kernels of GATHER and SET_ROWS share.
#pragma once

#include "ffi/kernels/cuda/moves.h"
#include "ffi/kernels/cuda/scalar.cuh"

namespace jaxgraph {

constexpr uint32_t kMoveThreads = 256;

// Where slice i starts along component c. *inside: the slice lies within the bounds as it is.
__device__ __forceinline__ int64_t StartOf(const MoveParams& p, int c, int64_t i, bool* inside) {
  const int64_t at = LoadInteger(p.index[c] + i * p.index_stride[c], p.index_dtype[c]);
  if (at < 0 || at > p.limit[c]) *inside = false;
  return max(min(at, p.limit[c]), int64_t{0});
}

// Splits the number of a word into its index and its place in the whole and in the slice.
__device__ __forceinline__ void LocateWord(const MoveParams& p, uint32_t word,
                                           uint32_t (&index)[kMaxRank], int64_t* in_whole,
                                           int64_t* in_slice) {
  *in_whole = *in_slice = 0;
#pragma unroll
  for (int d = kMaxRank - 1; d >= 0; --d) {
    index[d] = 0;
    if (d >= p.rank) continue;
    const uint32_t quotient = d > 0 ? p.divide[d].Quotient(word) : 0;
    index[d] = word - quotient * p.divide[d].divisor;
    word = quotient;
    *in_whole += index[d] * p.whole_strides[d];
    *in_slice += index[d] * p.slices_strides[d];
  }
}

template <typename Word>
__device__ __forceinline__ void MoveWord(const char* from, char* to) {
  *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
}

// The kernel of the word's size, of a kernel template over words.
#define JAXGRAPH_KERNEL_OF_WORD(infos, word) \
  ((word) == 16  ? &infos<uint4>             \
   : (word) == 8 ? &infos<uint2>             \
   : (word) == 4 ? &infos<uint32_t>          \
   : (word) == 2 ? &infos<uint16_t>          \
                 : &infos<uint8_t>)

}  // namespace jaxgraph
