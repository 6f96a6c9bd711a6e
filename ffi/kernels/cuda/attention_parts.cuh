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

__device__ __forceinline__ Part NoPart() { return {{0, 0, 0, 0}, -INFINITY, 0}; }

template <int kCount>
__device__ __forceinline__ Part Combined(const Part (&parts)[kCount]) {
  Part all = NoPart();
#pragma unroll
  for (int i = 0; i < kCount; ++i) all.peak = fmaxf(all.peak, parts[i].peak);
  float scale[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) scale[i] = ScaleOf(parts[i].peak, all.peak);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    all.total = fmaf(parts[i].total, scale[i], all.total);
    all.sum.x = fmaf(parts[i].sum.x, scale[i], all.sum.x);
    all.sum.y = fmaf(parts[i].sum.y, scale[i], all.sum.y);
    all.sum.z = fmaf(parts[i].sum.z, scale[i], all.sum.z);
    all.sum.w = fmaf(parts[i].sum.w, scale[i], all.sum.w);
  }
  return all;
}

// `count` of them, 1 at least; the i-th is part(i). kAtOnce are fetched together: the next launch
// waits for this, and it would be waiting for one after the other.
template <int kAtOnce, typename F>
__device__ __forceinline__ Part Combined(int count, F part) {
  Part all;
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    Part some[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      some[j] = NoPart();
      if (first + j < count) some[j] = part(first + j);
    }
    const Part sum = Combined(some);
    all = first == 0 ? sum : Combined({all, sum});
  }
  return all;
}

template <typename Math>
__device__ __forceinline__ void Store(const AttentionArgs& p, bool vectors_out, int b0, int b1,
                                      int query, int column, const Part& all) {
  float total = all.total;
  const float scale = TakeSink(p, b0, b1, query, all.peak, &total) / total;
  char* const to = p.out + b0 * p.out_strides[0] + b1 * p.out_strides[1] +
                   query * p.out_strides[2] + column * p.out_strides[3];
  const float x = all.sum.x * scale, y = all.sum.y * scale, z = all.sum.z * scale,
              w = all.sum.w * scale;
  if (vectors_out) {
    *reinterpret_cast<uint2*>(to) = {Math::NarrowPair(x, y), Math::NarrowPair(z, w)};
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
