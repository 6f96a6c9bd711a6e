// ROW: one block a row, or one cluster of blocks where rows are few and long. Every thread runs the
// scalar sections for itself (the values are the same), the threads share the elements, and
// reductions are combined by a tree of fixed shape, so that every run gives the same bits.
#include <cooperative_groups.h>

#include <algorithm>

#include "ffi/kernels/cuda/dependent.cuh"
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

struct alignas(16) RowParams {
  ExprParams expr;
  uint32_t splits;  // blocks that share a row
  uint32_t reserved[3];
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

__device__ __forceinline__ float FromLane(float mine, int mask) {
  return __shfl_xor_sync(kAllLanes, mine, mask);
}
template <typename W>
__device__ __forceinline__ Candidate<W> FromLane(const Candidate<W>& mine, int mask) {
  return {__shfl_xor_sync(kAllLanes, mine.value, mask),
          __shfl_xor_sync(kAllLanes, mine.where, mask)};
}

template <typename T, typename F>
__device__ __forceinline__ T AcrossWarp(T mine, F combine) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) mine = combine(mine, FromLane(mine, o));
  return mine;
}

template <typename T>
struct Scratch {
  T by_warp[kMaxThreads / kWarp];
  T by_block;
};

// Combines what all threads of the row have; every thread gets the result.
template <typename T, typename F>
__device__ __forceinline__ T AcrossRow(T mine, T nothing, uint32_t splits, Scratch<T>* scratch,
                                       F combine) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  mine = AcrossWarp(mine, combine);
  if (warps > 1) {
    if (lane == 0) scratch->by_warp[warp] = mine;
    __syncthreads();
    mine = AcrossWarp(lane < warps ? scratch->by_warp[lane] : nothing, combine);
    __syncthreads();  // by_warp is free again
  }
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) scratch->by_block = mine;
    cluster.sync();
    const bool there = lane < static_cast<int>(splits);
    mine =
        AcrossWarp(there ? *cluster.map_shared_rank(&scratch->by_block, lane) : nothing, combine);
    cluster.sync();  // by_block is free again
  }
#endif
  return mine;
}

// The sums and maxima of norms and softmax: the same as below, without its generality.
template <typename W, int kLanes>
__device__ __forceinline__ float ReduceFloats(const Lanes<W, kLanes>& lanes, bool max,
                                              uint32_t splits, Scratch<float>* scratch) {
  const auto reduce = [&](float nothing, auto combine) {
    float mine = AsFloat(lanes.lane[0]);
#pragma unroll
    for (int j = 1; j < kLanes; ++j) mine = combine(mine, AsFloat(lanes.lane[j]));
    return AcrossRow(mine, nothing, splits, scratch, combine);
  };
  return max ? reduce(-INFINITY, [](float a, float b) { return MaxOf(a, b); })
             : reduce(0.0f, [](float a, float b) { return a + b; });
}

template <typename W, int kLanes>
__device__ __noinline__ W Reduce(const ExprInstr& in, const Lanes<W, kLanes>& lanes,
                                 const Lanes<W, kLanes>& extrema, uint32_t splits,
                                 Scratch<Candidate<W>>* scratch) {
  const bool arg = IsArgReduce(in.op);
  const auto combine = [&in](const Candidate<W>& a, const Candidate<W>& b) {
    return Combine(in, a, b);
  };
  Candidate<W> mine;
#pragma unroll
  for (int j = 0; j < kLanes; ++j) {
    const Candidate<W> other =
        arg ? Candidate<W>{extrema.lane[j], static_cast<uint32_t>(lanes.lane[j])}
            : Candidate<W>{lanes.lane[j], 0};
    mine = j == 0 ? other : combine(mine, other);
  }
  mine = AcrossRow(mine, {Identity<W>(in), kNoIndex}, splits, scratch, combine);
  return arg ? Wrap(static_cast<DType>(in.aux), static_cast<W>(mine.where)) : mine.value;
}

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1)
    RowKernel(const __grid_constant__ RowParams params) {
  __shared__ uint4 shared[sizeof(RowParams) / sizeof(uint4)];
  const RowParams& rp = ToShared(params, shared);
  BeginLaunch();
  constexpr int kLanes = kLanesOf<W>;
  __shared__ Scratch<Candidate<W>> scratch;
  __shared__ Scratch<float> float_scratch;
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
      Lanes<W, kLanes>& lanes = registers.value[in.dst];
      W result;
      // These two numbers mean floats of up to 32 bits: see Specialized.
      if (in.op == ExprOp::kReduceSum || in.op == ExprOp::kReduceMax) {
        const bool max = in.op == ExprOp::kReduceMax;
        result =
            FromFloat<W>(RoundTo(in.dtype, ReduceFloats(lanes, max, rp.splits, &float_scratch)));
      } else {
        in.op = p.ops[reductions[i]];
        const int slot = in.dst - kExprNumElementRegs;
        result = Reduce(in, lanes, extrema.value[slot], rp.splits, &scratch);
        if (ClassOf<W>(in.dtype) == Class::kFloat && !IsArgReduce(in.op)) {
          result = FromFloat<W>(RoundTo(in.dtype, AsFloat(result)));
        }
      }
#pragma unroll
      for (int j = 0; j < kLanes; ++j) lanes.lane[j] = result;
    }
    reductions += num_reductions;
    // A source may be the output itself: what one section wrote, the next may read.
    if (begin < end) SyncRow(rp.splits);
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
