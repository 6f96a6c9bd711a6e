#include "ffi/kernels/host/strided_copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "ffi/kernels/host/layout.h"

namespace jaxgraph {
namespace {

struct Bytes1 {
  char b[1];
};
struct Bytes2 {
  char b[2];
};
struct Bytes4 {
  char b[4];
};
struct Bytes8 {
  char b[8];
};

template <typename T>
void CopyRun(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(dst + i * dst_stride, src + i * src_stride, sizeof(T));
}

void CopyLast(const CopyPlan& p, char* dst, const char* src) {
  const int d = p.rank - 1;
  const int64_t n = p.shape[d], to = p.dst_strides[d], from = p.src_strides[d];
  if (to == p.element_bytes && from == p.element_bytes) {
    std::memcpy(dst, src, n * p.element_bytes);
    return;
  }
  switch (p.element_bytes) {
    case 1:
      return CopyRun<Bytes1>(dst, to, src, from, n);
    case 2:
      return CopyRun<Bytes2>(dst, to, src, from, n);
    case 4:
      return CopyRun<Bytes4>(dst, to, src, from, n);
    default:
      return CopyRun<Bytes8>(dst, to, src, from, n);
  }
}

void CopyFrom(const CopyPlan& p, int d, char* dst, const char* src) {
  if (d == p.rank - 1) return CopyLast(p, dst, src);
  for (int64_t i = 0; i < p.shape[d]; ++i)
    CopyFrom(p, d + 1, dst + i * p.dst_strides[d], src + i * p.src_strides[d]);
}

}  // namespace

int64_t CopyPlan::num_bytes() const {
  int64_t n = element_bytes;
  for (int d = 0; d < rank; ++d) n *= shape[d];
  return n;
}

CopyPlan PlanCopy(int rank, size_t element_bytes, const int64_t* shape, const int64_t* dst_strides,
                  const int64_t* src_strides) {
  // The destination's order in memory, so that transposes write in runs.
  int order[kMaxRank];
  std::iota(order, order + rank, 0);
  std::stable_sort(order, order + rank, [&](int a, int b) {
    return std::abs(dst_strides[a]) > std::abs(dst_strides[b]);
  });
  Space space;
  Strides dst{}, src{};
  space.rank = rank;
  for (int d = 0; d < rank; ++d) {
    space.shape[d] = shape[order[d]];
    dst[d] = dst_strides[order[d]];
    src[d] = src_strides[order[d]];
  }
  Collapse(&space, {&dst, &src});
  if (space.rank == 0) {  // one element
    space.rank = 1;
    space.shape[0] = dst[0] = src[0] = 1;
  }
  CopyPlan p;
  p.rank = space.rank;
  p.element_bytes = static_cast<int32_t>(element_bytes);
  for (int d = 0; d < space.rank; ++d) {
    p.shape[d] = space.shape[d];
    p.dst_strides[d] = dst[d] * p.element_bytes;
    p.src_strides[d] = src[d] * p.element_bytes;
  }
  return p;
}

void RunCopy(const CopyPlan& plan, char* dst, const char* src) {
  if (plan.num_bytes() > 0) CopyFrom(plan, 0, dst, src);
}

}  // namespace jaxgraph
