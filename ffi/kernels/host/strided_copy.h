// Copies between strided tensors of one element type.
#pragma once

#include <cstdint>

#include "ffi/core/program.h"

namespace jaxgraph {

// What to copy, in as few dimensions as the strides allow; part of kernels' parameters.
struct CopyPlan {
  int32_t rank = 0;
  int32_t element_bytes = 0;
  int64_t shape[kMaxRank] = {};
  int64_t dst_strides[kMaxRank] = {};  // bytes
  int64_t src_strides[kMaxRank] = {};  // bytes

  int64_t num_bytes() const;
};

// Strides in elements, `rank` dimensions.
CopyPlan PlanCopy(int rank, size_t element_bytes, const int64_t* shape, const int64_t* dst_strides,
                  const int64_t* src_strides);

void RunCopy(const CopyPlan& plan, char* dst, const char* src);

}  // namespace jaxgraph
