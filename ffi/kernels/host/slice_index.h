// Where the slices of GATHER and SET_ROWS start: index tensors read and bounded.
#pragma once

#include <cstdint>

#include "ffi/core/program.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// The integer at `p`, of dtype `t`; beyond int64 it is beyond every bound.
int64_t ReadIndex(DType t, const char* p);

struct IndexComponent {
  const char* address;
  int64_t stride;          // bytes, from one slice's index to the next's
  int64_t operand_stride;  // bytes, of the dimension that it selects in
  int64_t last;            // the greatest start with which the slice fits
  DType dtype;
  uint8_t reserved[7];
};

struct SliceIndex {
  int64_t count = 0;  // slices
  IndexMode mode = IndexMode::kClip;
  uint8_t reserved[3] = {};
  int32_t num_components = 0;
  IndexComponent components[kMaxRank] = {};

  // The byte offset in the operand at which slice i starts. False: part of it is outside, and the
  // mode is kFillOrDrop.
  bool StartOf(int64_t i, int64_t* offset) const;
};

// `slices` has shape [n, s0..], index tensors are sources first_index..
SliceIndex MakeSliceIndex(const ResolvedNode& resolved, const IndexParams& params,
                          const TensorRef& operand, const TensorRef& slices, int first_index);

}  // namespace jaxgraph
