// ROW: one block a row, or one cluster of blocks where rows are few and long. Every thread runs the
// scalar sections for itself (the values are the same), the threads share the elements, and
// reductions are combined by a tree of fixed shape, so that every run gives the same bits.
#include <cooperative_groups.h>

#include <algorithm>

#include "ffi/kernels/cuda/interpreter.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kMaxThreads = 512;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr uint32_t kMaxCluster = 8;

template <typename W>
constexpr int kLanesOf = sizeof(W) == 8 ? 2 : 4;

struct RowParams {
  ExprParams expr;
  uint32_t splits;  // blocks that share a row
  uint32_t reserved;
};

// kLanes elements of one row, `apart` from each other; or its scalar section.
template <int kLanes>
struct RowSpace {
  const uint32_t (&row)[kExprMaxRank];
  int row_dims;
  uint32_t first, apart, count;
  bool stores;

  __device__ __forceinline__ uint32_t Position(int j) const { return first + j * apart; }
  __device__ __forceinline__ bool Active(int j) const { return stores && Position(j) < count; }
  __device__ __forceinline__ void Offsets(const int64_t (&strides)[kExprMaxRank],
                                          int64_t (&offset)[kLanes]) const {
    int64_t start = row[0] * strides[0];
#pragma unroll
    for (int d = 1; d < kExprMaxRank - 1; ++d) {
      if (d >= row_dims) break;
      start += row[d] * strides[d];
    }
    const int64_t along = strides[row_dims];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) offset[j] = start + min(Position(j), count - 1) * along;
  }
};

__device__ __forceinline__ void SyncRow(uint32_t splits) {
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    cooperative_groups::this_cluster().sync();
    return;
  }
#endif
  __syncthreads();
}

// A value, and for argmax and argmin where in the row it stands.
template <typename W>
struct Candidate {
  W value;
  uint32_t where;
};

template <typename W>
__device__ __forceinline__ Candidate<W> Combine(const ExprInstr& in, const Candidate<W>& a,
                                                const Candidate<W>& b) {
  if (!IsArgReduce(in.op)) return {Step(in, a.value, b.value), 0};
  // kNoIndex is the largest index, so a thread without elements is always the later one.
  const bool a_first = a.where < b.where;
  const bool takes_b = a_first ? b.where != kNoIndex && TakesOver(in, b.value, a.value)
                               : a.where == kNoIndex || !TakesOver(in, a.value, b.value);
  return takes_b ? b : a;
}

template <typename W>
__device__ __forceinline__ Candidate<W> AcrossWarp(const ExprInstr& in, Candidate<W> mine) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) {
    const Candidate<W> other = {__shfl_xor_sync(kAllLanes, mine.value, o),
                                __shfl_xor_sync(kAllLanes, mine.where, o)};
    mine = Combine(in, mine, other);
  }
  return mine;
}

// Combines the candidates of all threads of the row; every thread gets the result.
template <typename W>
__device__ __forceinline__ Candidate<W> AcrossRow(const ExprInstr& in, Candidate<W> mine,
                                                  uint32_t splits, Candidate<W>* by_warp,
                                                  Candidate<W>* by_block) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const Candidate<W> nothing = {Identity<W>(in), kNoIndex};
  mine = AcrossWarp(in, mine);
  if (warps > 1) {
    if (lane == 0) by_warp[warp] = mine;
    __syncthreads();
    mine = AcrossWarp(in, lane < warps ? by_warp[lane] : nothing);
    __syncthreads();  // by_warp is free again
  }
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) *by_block = mine;
    cluster.sync();
    const bool there = lane < static_cast<int>(splits);
    mine = AcrossWarp(in, there ? *cluster.map_shared_rank(by_block, lane) : nothing);
    cluster.sync();  // by_block is free again
  }
#endif
  return mine;
}

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) RowKernel(const __grid_constant__ RowParams rp) {
  constexpr int kLanes = kLanesOf<W>;
  __shared__ Candidate<W> by_warp[kMaxThreads / kWarp];
  __shared__ Candidate<W> by_block;
  const ExprParams& p = rp.expr;
  Registers<W, kLanes> registers;
  Extrema<W, kLanes> extrema;

  uint32_t row[kExprMaxRank] = {};
  uint32_t rest = blockIdx.x / rp.splits;
  const uint32_t split = blockIdx.x % rp.splits;
#pragma unroll
  for (int d = kExprMaxRank - 2; d > 0; --d) {
    if (d >= p.rank - 1) continue;
    const uint32_t quotient = p.divide[d].Quotient(rest);
    row[d] = rest - quotient * p.divide[d].divisor;
    rest = quotient;
  }
  row[0] = rest;

  const uint8_t* reductions = p.reductions;
  // Even passes are scalar sections, odd ones element sections.
  for (int pass = 0; pass < 2 * p.num_stages; ++pass) {
    const bool scalar = pass % 2 == 0;
    const ExprStage stage = p.stages[pass / 2];
    const int num_reductions = scalar ? 0 : p.num_reductions[pass / 2];
    for (int i = 0; i < num_reductions; ++i) {
      ExprInstr in = p.instrs[reductions[i]];
      in.op = p.ops[reductions[i]];
      const W start = IsArgReduce(in.op) ? W(kNoIndex) : Identity<W>(in);
#pragma unroll
      for (int j = 0; j < kLanes; ++j) registers.value[in.dst].lane[j] = start;
    }
    const int begin = scalar ? stage.scalar_begin : stage.elem_begin;
    const int end = scalar ? stage.scalar_end : stage.elem_end;
    const uint32_t first = scalar ? 0 : split * blockDim.x * kLanes + threadIdx.x;
    RowSpace<kLanes> space = {row,
                              p.rank - 1,
                              first,
                              scalar ? 1 : blockDim.x,
                              scalar ? 1 : p.count,
                              !scalar || (split == 0 && threadIdx.x == 0)};
    if (begin < end) {
      for (; space.first < space.count; space.first += rp.splits * blockDim.x * kLanes) {
        Run<W, kLanes, true>(p, begin, end, space, registers, &extrema);
        if (scalar) break;
      }
    }
    for (int i = 0; i < num_reductions; ++i) {
      ExprInstr in = p.instrs[reductions[i]];
      in.op = p.ops[reductions[i]];
      const bool arg = IsArgReduce(in.op);
      Candidate<W> mine;
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const W value = registers.value[in.dst].lane[j];
        Candidate<W> other = {value, 0};
        if (arg) {
          other = {extrema.value[in.dst - kExprNumElementRegs].lane[j],
                   static_cast<uint32_t>(value)};
        }
        mine = j == 0 ? other : Combine(in, mine, other);
      }
      mine = AcrossRow(in, mine, rp.splits, by_warp, &by_block);
      W result = mine.value;
      if (arg) {
        result = Wrap(static_cast<DType>(in.aux), static_cast<W>(mine.where));
      } else if (ClassOf<W>(in.dtype) == Class::kFloat) {
        result = FromFloat<W>(RoundTo(in.dtype, AsFloat(result)));
      }
#pragma unroll
      for (int j = 0; j < kLanes; ++j) registers.value[in.dst].lane[j] = result;
    }
    reductions += num_reductions;
    // A source may be the output itself: what one section wrote, the next may read.
    SyncRow(rp.splits);
  }
}

template <typename W>
const KernelInfo kRow = {sizeof(W) == 8 ? "row_wide" : "row", sizeof(RowParams), nullptr,
                         reinterpret_cast<const void*>(&RowKernel<W>)};

// Splitting a row costs its reductions a microsecond, and pays where a block would need several
// rounds for it and the rows leave most of the chip idle.
constexpr uint32_t kLongRow = 4 * kMaxThreads * kLanesOf<uint32_t>;
constexpr uint32_t kFewRows = 16;

}  // namespace

Status EmitRow(const ResolvedNode& node, bool clusters, Launches* launches) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  JAXGRAPH_RETURN_IF_ERROR(PrepareExpr(node, &wide, &pieces));
  for (const ExprPiece& piece : pieces) {
    const uint32_t count = piece.params.count;
    RowParams params = {};
    params.expr = piece.params;
    params.splits = clusters && count >= kLongRow && piece.rows <= kFewRows ? kMaxCluster : 1;
    Launch launch;
    launch.kernel = wide ? &kRow<uint64_t> : &kRow<uint32_t>;
    launch.grid[0] = piece.rows * params.splits;
    const int64_t warps = CeilDiv(count, kWarp * (wide ? kLanesOf<uint64_t> : kLanesOf<uint32_t>));
    launch.block[0] = static_cast<uint32_t>(std::clamp<int64_t>(warps * kWarp, kWarp, kMaxThreads));
    launch.cluster = params.splits;
    SetParams(params, &launch);
    launches->push_back(std::move(launch));
  }
  return Status::Ok();
}

}  // namespace jaxgraph
