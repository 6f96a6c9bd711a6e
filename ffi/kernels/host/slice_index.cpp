#include "ffi/kernels/host/slice_index.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace jaxgraph {
namespace {

template <typename T>
int64_t ReadAs(const char* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return static_cast<int64_t>(v);
}

}  // namespace

int64_t ReadIndex(DType t, const char* p) {
  switch (t) {
    case DType::kS8:
      return ReadAs<int8_t>(p);
    case DType::kS16:
      return ReadAs<int16_t>(p);
    case DType::kS32:
      return ReadAs<int32_t>(p);
    case DType::kPred:
    case DType::kU8:
      return ReadAs<uint8_t>(p);
    case DType::kU16:
      return ReadAs<uint16_t>(p);
    case DType::kU32:
      return ReadAs<uint32_t>(p);
    case DType::kU64: {  // beyond int64 is beyond every bound
      const int64_t v = ReadAs<uint64_t>(p);
      return v < 0 ? std::numeric_limits<int64_t>::max() : v;
    }
    default:
      return ReadAs<int64_t>(p);
  }
}

bool SliceIndex::StartOf(int64_t i, int64_t* offset) const {
  *offset = 0;
  for (int c = 0; c < num_components; ++c) {
    const IndexComponent& component = components[c];
    const int64_t at = ReadIndex(component.dtype, component.address + i * component.stride);
    if (mode == IndexMode::kFillOrDrop && (at < 0 || at > component.last)) return false;
    *offset += std::clamp<int64_t>(at, 0, component.last) * component.operand_stride;
  }
  return true;
}

SliceIndex MakeSliceIndex(const ResolvedNode& resolved, const IndexParams& params,
                          const TensorRef& operand, const TensorRef& slices, int first_index) {
  SliceIndex s;
  s.count = slices.shape[0];
  s.mode = params.mode;
  s.num_components = params.num_components;
  for (int c = 0; c < params.num_components; ++c) {
    const TensorRef& index = resolved.node->srcs[first_index + c];
    const int d = params.dim[c];
    s.components[c] = {resolved.srcs[first_index + c],
                       index.strides[0] * static_cast<int64_t>(SizeOf(index.dtype)),
                       operand.strides[d] * static_cast<int64_t>(SizeOf(operand.dtype)),
                       std::max<int64_t>(operand.shape[d] - slices.shape[d + 1], 0),
                       index.dtype,
                       {}};
  }
  return s;
}

}  // namespace jaxgraph
