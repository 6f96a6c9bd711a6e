// Stages: how matrices come to tensor cores, in stream_tiles.cu and stream_rows.cu alike. A stage
// is 32 lines of 128 bytes of a matrix: 64 columns of each of 32 k where it is contiguous along n,
// 64 k of each of 32 columns where it is along k; of two matrices that are paired, half the lines
// each. A tile is the columns of such a stage.
#pragma once

#include <utility>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"

namespace jaxgraph {

constexpr int kLines = 32;  // in a stage
constexpr int kLineItems = kLineBytes / 2;
constexpr int kStageBytes = kLines * kLineBytes;

// What a stage holds of each of its matrices.
template <bool kAlongK, bool kPair>
struct Shape {
  static constexpr int kSides = kPair ? 2 : 1;
  static constexpr int kSideLines = kLines / kSides;
  static constexpr int kColumns = kAlongK ? kSideLines : kLineItems;
  static constexpr int kDepth = kAlongK ? kLineItems : kSideLines;  // of k
  static constexpr int kWidth = kSides * kColumns;
};
// Shares of k are multiples of this.
__host__ __device__ constexpr int ShareStep(bool along_k) { return along_k ? kLineItems : kLines; }

// ---- how they are planned and launched ----

// How many columns a tile of one matrix has, and how many k a stage holds of each.
struct StageSize {
  int columns, depth;
};
inline StageSize StageSizeOf(bool along_k, bool pair) {
  const int side_lines = pair ? kLines / 2 : kLines;
  return along_k ? StageSize{side_lines, kLineItems} : StageSize{kLineItems, side_lines};
}

// What a launch needs beside its parameters.
struct StagePlan {
  int32_t clusters;
  int64_t share;   // of k, of a block
  int64_t stages;  // that come through a warp's ring
  int32_t shared_bytes;
};
// Cuts the matrices into tiles and k into shares; the kernel's own plan adds the shared memory.
inline StagePlan PlanStages(bool along_k, const StreamTuning& tuning, StreamParams* params) {
  const StageSize stage = StageSizeOf(along_k, params->activated != nullptr);
  const int share_step = ShareStep(along_k);
  params->pieces = CutColumns(stage.columns, params);
  StagePlan plan = {};
  plan.clusters = ShareAmongBlocks(tuning, share_step, params);
  plan.share = CeilDiv(params->k, params->splits * share_step) * share_step;
  plan.stages = CeilDiv(CeilDiv(plan.share, stage.depth), kStreamWarps) *
                CeilDiv(params->pieces, plan.clusters);
  return plan;
}

// Of the kernels Kernel<element, along k, paired, in front of an argmax>.
template <template <typename, bool, bool, bool> class Kernel, typename T, bool kAlongK>
const KernelInfo* KernelOf(const StreamParams& p) {
  if (p.activated != nullptr) return &Kernel<T, kAlongK, true, false>::kInfo;
  return p.candidates != nullptr ? &Kernel<T, kAlongK, false, true>::kInfo
                                 : &Kernel<T, kAlongK, false, false>::kInfo;
}
template <template <typename, bool, bool, bool> class Kernel>
void LaunchStages(const StagePlan& plan, const StreamParams& params, DType dtype, bool along_k,
                  Launches* launches) {
  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? (along_k ? KernelOf<Kernel, StreamBF16, true>(params)
                                                   : KernelOf<Kernel, StreamBF16, false>(params))
                                        : (along_k ? KernelOf<Kernel, StreamF16, true>(params)
                                                   : KernelOf<Kernel, StreamF16, false>(params));
  launch.grid[0] = static_cast<uint32_t>(plan.clusters * params.splits);
  launch.block[0] = kStreamThreads;
  launch.cluster = static_cast<uint32_t>(params.splits);
  launch.shared_bytes = static_cast<uint32_t>(plan.shared_bytes);
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

#if __CUDA_ARCH__ >= 900
constexpr int kStep = 16;  // of k and of columns, in one tensor-core instruction

// The share of k of one block of the cluster.
struct Share {
  int begin, end;
};
template <bool kAlongK>
__device__ __forceinline__ Share ShareOf(const StreamParams& p, const BlockPlace& place) {
  constexpr int kUnit = ShareStep(kAlongK);
  const int rank = place.rank;
  const int size = (((p.k + kUnit - 1) / kUnit + p.splits - 1) >> place.shift) * kUnit;
  const int begin = min(rank * size, p.k);
  return {begin, min(begin + size, p.k)};
}

struct Tile {
  int first;  // matrix
  int column;
};
template <typename S>
__device__ __forceinline__ Tile TileOf(const StreamParams& p, int tile) {
  int i = 0;
  if (p.activated == nullptr) {
    while (i + 1 < p.num_products && tile >= p.product[i].end) ++i;
  }
  return {i, (tile - (i > 0 ? p.product[i - 1].end : 0)) * S::kColumns};
}
#endif

}  // namespace jaxgraph
