// EXPR: a thread takes one element or, where there are plenty, four.
#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/interpreter.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kThreads = 128;
constexpr int64_t kMaxBlocks = 1 << 16;
constexpr uint32_t kPlenty = 1 << 17;

// kLanes elements, kThreads apart.
template <int kLanes>
struct ElementSpace {
  uint32_t index[kLanes][kExprMaxRank];
  uint32_t first, count;
  int rank;

  __device__ __forceinline__ ElementSpace(const ExprParams& p, uint32_t first_element)
      : first(first_element), count(p.count), rank(p.rank) {
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      uint32_t rest = min(first + j * kThreads, count - 1);
#pragma unroll
      for (int d = kExprMaxRank - 1; d > 0; --d) {
        index[j][d] = 0;
        if (d >= rank) continue;
        const uint32_t quotient = p.divide[d].Quotient(rest);
        index[j][d] = rest - quotient * p.divide[d].divisor;
        rest = quotient;
      }
      index[j][0] = rest;
    }
  }

  __device__ __forceinline__ void Offsets(const int64_t (&strides)[kExprMaxRank],
                                          int64_t (&offset)[kLanes]) const {
#pragma unroll
    for (int j = 0; j < kLanes; ++j) offset[j] = index[j][0] * strides[0];
#pragma unroll
    for (int d = 1; d < kExprMaxRank; ++d) {
      if (d >= rank) break;
#pragma unroll
      for (int j = 0; j < kLanes; ++j) offset[j] += index[j][d] * strides[d];
    }
  }
  __device__ __forceinline__ bool Active(int j) const { return first + j * kThreads < count; }
};

template <typename W, int kLanes>
__global__ void __launch_bounds__(kThreads) ExprKernel(const __grid_constant__ ExprParams params) {
  __shared__ uint4 shared[sizeof(ExprParams) / sizeof(uint4)];
  const ExprParams& p = ToShared(params, shared);
  BeginLaunch();
  Registers<W, kLanes> registers;
  const uint32_t step = gridDim.x * kThreads * kLanes;
  for (uint32_t i = blockIdx.x * kThreads * kLanes + threadIdx.x; i < p.count; i += step) {
    const ElementSpace<kLanes> space(p, i);
    Run<W, kLanes, false>(p, p.stages[0].elem_begin, p.stages[0].elem_end, space, registers,
                          nullptr);
  }
}

template <typename W, int kLanes>
const KernelInfo kExpr = {sizeof(W) == 8 ? "expr_wide" : "expr", sizeof(ExprParams), nullptr,
                          reinterpret_cast<const void*>(&ExprKernel<W, kLanes>)};

}  // namespace

Status EmitExpr(const ResolvedNode& node, Launches* launches) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  JAXGRAPH_RETURN_IF_ERROR(PrepareExpr(node, &wide, &pieces));
  for (const ExprPiece& piece : pieces) {
    const bool four = !wide && piece.params.count >= kPlenty;
    Launch launch;
    launch.kernel = wide ? &kExpr<uint64_t, 1> : four ? &kExpr<uint32_t, 4> : &kExpr<uint32_t, 1>;
    const int64_t blocks = CeilDiv(piece.params.count, kThreads * (four ? 4 : 1));
    launch.grid[0] = static_cast<uint32_t>(std::min(blocks, kMaxBlocks));
    launch.block[0] = kThreads;
    SetParams(piece.params, &launch);
    launches->push_back(std::move(launch));
  }
  return Status::Ok();
}

}  // namespace jaxgraph
