// ROW: one block a row. Every thread runs the scalar sections for itself (the values are the same),
// the threads share the elements, and reductions are combined by a tree of fixed shape, so that
// every run gives the same bits.
#include <algorithm>

#include "ffi/kernels/cuda/interpreter.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Combines the threads' values; every thread gets the result.
template <typename W, typename Combine>
__device__ __forceinline__ W AcrossBlock(W mine, W identity, W* scratch, Combine combine) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) mine = combine(mine, __shfl_xor_sync(kAllLanes, mine, o));
  if (warps == 1) return mine;
  if (lane == 0) scratch[warp] = mine;
  __syncthreads();
  mine = lane < warps ? scratch[lane] : identity;
  __syncthreads();  // the scratch is free again
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) mine = combine(mine, __shfl_xor_sync(kAllLanes, mine, o));
  return mine;
}

// The same for (value, index) pairs of argmax and argmin.
template <typename W>
__device__ __forceinline__ void ChooseAcrossWarp(const ExprInstr& in, W* best, uint32_t* where) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    const W other = __shfl_xor_sync(kAllLanes, *best, o);
    const uint32_t other_where = __shfl_xor_sync(kAllLanes, *where, o);
    // kNoIndex is the largest index, so a thread without elements is always the later one.
    const bool mine_first = *where < other_where;
    const bool switches = mine_first ? other_where != kNoIndex && TakesOver(in, other, *best)
                                     : *where == kNoIndex || !TakesOver(in, *best, other);
    if (switches) {
      *best = other;
      *where = other_where;
    }
  }
}

template <typename W>
__device__ __forceinline__ uint32_t ChooseAcrossBlock(const ExprInstr& in, W best, uint32_t where,
                                                      W* values, uint32_t* indices) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  ChooseAcrossWarp(in, &best, &where);
  if (warps == 1) return where;
  if (lane == 0) {
    values[warp] = best;
    indices[warp] = where;
  }
  __syncthreads();
  best = lane < warps ? values[lane] : W(0);
  where = lane < warps ? indices[lane] : kNoIndex;
  __syncthreads();
  ChooseAcrossWarp(in, &best, &where);
  return where;
}

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) RowKernel(const __grid_constant__ ExprParams p) {
  __shared__ W values[kWarp];
  __shared__ uint32_t indices[kWarp];
  Registers<W> registers;
  Extrema<W> extrema;

  uint32_t index[kExprMaxRank] = {};
  uint32_t rest = blockIdx.x;
#pragma unroll
  for (int d = kExprMaxRank - 2; d > 0; --d) {
    if (d >= p.rank - 1) continue;
    const uint32_t quotient = p.divide[d].Quotient(rest);
    index[d] = rest - quotient * p.divide[d].divisor;
    rest = quotient;
  }
  index[0] = rest;

  const uint8_t* reductions = p.reductions;
  // Even passes are scalar sections, odd ones element sections.
  for (int pass = 0; pass < 2 * p.num_stages; ++pass) {
    const bool scalar = pass % 2 == 0;
    const ExprStage stage = p.stages[pass / 2];
    const int num_reductions = scalar ? 0 : p.num_reductions[pass / 2];
    for (int i = 0; i < num_reductions; ++i) {
      const ExprInstr in = p.instrs[reductions[i]];
      registers.value[in.dst] = IsArgReduce(in.op) ? W(kNoIndex) : Identity<W>(in);
    }
    const int begin = scalar ? stage.scalar_begin : stage.elem_begin;
    const int end = scalar ? stage.scalar_end : stage.elem_end;
    const uint32_t count = begin == end ? 0 : scalar ? 1 : p.count;
    const uint32_t step = scalar ? 1 : blockDim.x;
    const bool store = !scalar || threadIdx.x == 0;
    for (uint32_t i = scalar ? 0 : threadIdx.x; i < count; i += step) {
#pragma unroll
      for (int d = 1; d < kExprMaxRank; ++d) {
        if (d == p.rank - 1) index[d] = i;
      }
      Run<W, true>(p, begin, end, index, store, registers, &extrema);
    }
    for (int i = 0; i < num_reductions; ++i) {
      const ExprInstr in = p.instrs[reductions[i]];
      W& result = registers.value[in.dst];
      if (IsArgReduce(in.op)) {
        const W best = extrema.value[in.dst - kExprNumElementRegs];
        result = ChooseAcrossBlock(in, best, static_cast<uint32_t>(result), values, indices);
        result = Wrap(static_cast<DType>(in.aux), result);
      } else {
        const W sum = AcrossBlock(result, Identity<W>(in), values,
                                  [&in](W a, W b) { return Step(in, a, b); });
        result = ClassOf<W>(in.dtype) == Class::kFloat
                     ? FromFloat<W>(RoundTo(in.dtype, AsFloat(sum)))
                     : sum;
      }
    }
    reductions += num_reductions;
    // A source may be the output itself: what one section wrote, the next may read.
    __syncthreads();
  }
}

const KernelInfo kNarrow = {"row", sizeof(ExprParams), nullptr,
                            reinterpret_cast<const void*>(&RowKernel<uint32_t>)};
const KernelInfo kWide = {"row_wide", sizeof(ExprParams), nullptr,
                          reinterpret_cast<const void*>(&RowKernel<uint64_t>)};

}  // namespace

Status EmitRow(const ResolvedNode& node, Launches* launches) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  JAXGRAPH_RETURN_IF_ERROR(PrepareExpr(node, &wide, &pieces));
  for (const ExprPiece& piece : pieces) {
    Launch launch;
    launch.kernel = wide ? &kWide : &kNarrow;
    launch.grid[0] = piece.rows;
    const int64_t warps = std::max<int64_t>(CeilDiv(piece.params.count, kWarp), 1);
    launch.block[0] = static_cast<uint32_t>(std::min<int64_t>(warps * kWarp, kMaxThreads));
    SetParams(piece.params, &launch);
    launches->push_back(std::move(launch));
  }
  return Status::Ok();
}

}  // namespace jaxgraph
