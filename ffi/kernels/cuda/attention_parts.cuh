// What warps and blocks have of an attention's outputs, how blocks of a cluster exchange it, and
// how it is combined and stored: always in a fixed order. What a block sends to another goes
// straight into that one's shared memory, whose barrier counts the bytes that have come.
#pragma once

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/attention_mma.cuh"
#include "ffi/kernels/cuda/cluster.cuh"

namespace jaxgraph {

// Of a query and 4 columns.
struct Part {
  float4 sum;
  float peak, total;
};

// Adds `part`, whose peak is at most `peak`.
__device__ __forceinline__ void Add(const Part& part, Part* all) {
  const float scale = ScaleOf(part.peak, all->peak);
  all->total = fmaf(part.total, scale, all->total);
  all->sum.x = fmaf(part.sum.x, scale, all->sum.x);
  all->sum.y = fmaf(part.sum.y, scale, all->sum.y);
  all->sum.z = fmaf(part.sum.z, scale, all->sum.z);
  all->sum.w = fmaf(part.sum.w, scale, all->sum.w);
}

__device__ __forceinline__ Part NoPart() { return {{0, 0, 0, 0}, -INFINITY, 0}; }

// `count` of them, the i-th is part(i), at most `kMost`.
template <int kMost, typename F>
__device__ __forceinline__ Part Combined(int count, F part) {
  Part all = NoPart();
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i < count) all.peak = fmaxf(all.peak, part(i).peak);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i < count) Add(part(i), &all);
  }
  return all;
}

template <typename Math>
__device__ __forceinline__ void Store(const AttentionArgs& p, bool vectors_out, int b0, int b1,
                                      int query, int column, const Part& all) {
  float total = all.total;
  const float scale = TakeSink(p, b0, b1, query, all.peak, &total);
  char* const to = p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] +
                   query * p.out_strides[2] + column * p.out_strides[3];
  const float x = all.sum.x * scale / total, y = all.sum.y * scale / total,
              z = all.sum.z * scale / total, w = all.sum.w * scale / total;
  if (vectors_out) {
    *reinterpret_cast<uint2*>(to) = {Pair(Math::Narrow(x), Math::Narrow(y)),
                                     Pair(Math::Narrow(z), Math::Narrow(w))};
  } else {
    StoreFloat(to, p.out_dtype, x);
    StoreFloat(to + p.out_strides[3], p.out_dtype, y);
    StoreFloat(to + 2 * p.out_strides[3], p.out_dtype, z);
    StoreFloat(to + 3 * p.out_strides[3], p.out_dtype, w);
  }
}

// Parts in a workspace: of each block and query the sums of all columns, the peak and the total.
struct PartRow {
  float* row;
  __device__ __forceinline__ PartRow(float* workspace, int width, int64_t number)
      : row(workspace + number * (width + kPartRest)) {}
  __device__ __forceinline__ void Store(int width, int column, const Part& part) const {
    *reinterpret_cast<float4*>(row + column) = part.sum;
    if (column == 0) *reinterpret_cast<float2*>(row + width) = {part.peak, part.total};
  }
  __device__ __forceinline__ Part Load(int width, int column) const {
    const float2 rest = __ldcg(reinterpret_cast<const float2*>(row + width));
    return {__ldcg(reinterpret_cast<const float4*>(row + column)), rest.x, rest.y};
  }
};

}  // namespace jaxgraph
