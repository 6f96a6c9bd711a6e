// SORT of pieces that are in order already: a thread an element, which finds by bisection how many
// elements of each other piece come before it. The bisections of a thread go side by side, so that
// their loads wait for memory together; neighbouring threads walk nearly the same way.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/sort.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kMergeThreads = 128;

struct MergeParams {
  SortKernelParams sort;
  uint32_t step;    // of the bisections: the largest power of two within a piece
  uint32_t pieces;  // to merge, of a row
  int32_t shift;    // where that is a power of two, its logarithm; else -1
  uint32_t reserved;
};

// SortPieceBegin and SortPieceOf, whose divisions would take longer than the merge itself.
__device__ __forceinline__ uint32_t PieceBegin(const MergeParams& m, uint32_t c) {
  const uint64_t at = static_cast<uint64_t>(c) * static_cast<uint32_t>(m.sort.n);
  return static_cast<uint32_t>(m.shift >= 0 ? at >> m.shift : at / m.pieces);
}
__device__ __forceinline__ uint32_t PieceOf(const MergeParams& m, uint32_t i) {
  return static_cast<uint32_t>(SortPieceOf(i, m.sort.n, m.pieces));
}

// Word: an unsigned integer as wide as a key.
template <typename Word, int kMost>
__global__ void __launch_bounds__(kMergeThreads)
    MergeKernel(const __grid_constant__ MergeParams m) {
  BeginLaunch();
  const SortKernelParams& p = m.sort;
  const uint32_t i = blockIdx.x * kMergeThreads + threadIdx.x;
  if (i >= p.n) return;
  const int64_t row = blockIdx.y;
  const char* keys = p.keys + row * p.keys_row;
  const auto key = [&](uint32_t at) {
    const Word bits = *reinterpret_cast<const Word*>(keys + at * p.keys_step);
    return static_cast<Word>(SortKey(p.order, p.dtype, sizeof(Word), bits));
  };
  const Word mine = key(i);
  const uint32_t piece = PieceOf(m, i), chunk = piece / p.merged;
  const int own = static_cast<int>(piece - chunk * p.merged);
  uint32_t border[kMost + 1];
#pragma unroll
  for (int w = 0; w <= kMost; ++w) {
    border[w] = PieceBegin(m, chunk * p.merged + min(w, static_cast<int>(p.merged)));
  }
  uint32_t before[kMost] = {};  // how many elements of a piece are known to come first
  for (uint32_t step = m.step; step > 0; step /= 2) {
#pragma unroll
    for (int w = 0; w < kMost; ++w) {
      const uint32_t count = before[w] + step;
      if (w == own || count > border[w + 1] - border[w]) continue;
      const Word theirs = key(border[w] + count - 1);
      // Of equals those of earlier pieces stand first.
      if (w < own ? theirs <= mine : theirs < mine) before[w] = count;
    }
  }
  uint32_t rank = i;
#pragma unroll
  for (int w = 0; w < kMost; ++w) rank += w == own ? -border[w] : before[w];
  if (p.kept == 0 || rank < p.kept) StoreSorted(p, row, chunk, rank, i);
}

template <typename Word, int kMost>
const KernelInfo kMerge = {"sort_merge", sizeof(MergeParams), nullptr,
                           reinterpret_cast<const void*>(&MergeKernel<Word, kMost>)};

template <typename Word>
const KernelInfo* KernelFor(int merged) {
  return merged <= 2 ? &kMerge<Word, 2> : merged <= 4 ? &kMerge<Word, 4> : &kMerge<Word, 8>;
}

}  // namespace

void LaunchMerge(const SortKernelParams& p, int64_t rows, Launches* launches) {
  MergeParams params = {p, 1, p.merged * p.chunks, -1, 0};
  while (2 * int64_t{params.step} * params.pieces <= p.n + params.pieces) params.step *= 2;
  if ((params.pieces & (params.pieces - 1)) == 0) {
    params.shift = 0;
    while (uint32_t{1} << params.shift < params.pieces) ++params.shift;
  }
  Launch launch;
  const size_t size = SizeOf(p.dtype);
  launch.kernel = size == 8   ? KernelFor<uint64_t>(p.merged)
                  : size == 4 ? KernelFor<uint32_t>(p.merged)
                  : size == 2 ? KernelFor<uint16_t>(p.merged)
                              : KernelFor<uint8_t>(p.merged);
  launch.grid[0] = static_cast<uint32_t>(CeilDiv(p.n, kMergeThreads));
  launch.grid[1] = static_cast<uint32_t>(rows);
  launch.block[0] = kMergeThreads;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
