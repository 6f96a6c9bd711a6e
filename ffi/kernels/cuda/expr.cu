// EXPR: one thread an element.
#include <algorithm>

#include "ffi/kernels/cuda/interpreter.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kThreads = 128;
constexpr int64_t kMaxBlocks = 1 << 16;

template <typename W>
__global__ void __launch_bounds__(kThreads) ExprKernel(const __grid_constant__ ExprParams p) {
  Registers<W> registers;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < p.count; i += gridDim.x * kThreads) {
    uint32_t index[kExprMaxRank] = {};
    uint32_t rest = i;
#pragma unroll
    for (int d = kExprMaxRank - 1; d > 0; --d) {
      if (d >= p.rank) continue;
      const uint32_t quotient = p.divide[d].Quotient(rest);
      index[d] = rest - quotient * p.divide[d].divisor;
      rest = quotient;
    }
    index[0] = rest;
    Run<W, false>(p, p.stages[0].elem_begin, p.stages[0].elem_end, index, true, registers, nullptr);
  }
}

const KernelInfo kNarrow = {"expr", sizeof(ExprParams), nullptr,
                            reinterpret_cast<const void*>(&ExprKernel<uint32_t>)};
const KernelInfo kWide = {"expr_wide", sizeof(ExprParams), nullptr,
                          reinterpret_cast<const void*>(&ExprKernel<uint64_t>)};

}  // namespace

Status EmitExpr(const ResolvedNode& node, Launches* launches) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  JAXGRAPH_RETURN_IF_ERROR(PrepareExpr(node, &wide, &pieces));
  for (const ExprPiece& piece : pieces) {
    Launch launch;
    launch.kernel = wide ? &kWide : &kNarrow;
    const int64_t blocks = CeilDiv(piece.params.count, kThreads);
    launch.grid[0] = static_cast<uint32_t>(std::min(blocks, kMaxBlocks));
    launch.block[0] = kThreads;
    SetParams(piece.params, &launch);
    launches->push_back(std::move(launch));
  }
  return Status::Ok();
}

}  // namespace jaxgraph
