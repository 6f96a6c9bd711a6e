// Operands of ATTENTION and MATMUL: four dimensions with any strides, and elements of any float
// type, read and written one at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/core/program.h"
#include "ffi/kernels/host/float_convert.h"

namespace jaxgraph {

struct Operand {
  char* address;
  int64_t strides[4];  // elements
  DType dtype;
  uint8_t reserved[7];

  char* At(int64_t b0, int64_t b1, int64_t i, int64_t j) const {
    const int64_t element = b0 * strides[0] + b1 * strides[1] + i * strides[2] + j * strides[3];
    return address + element * static_cast<int64_t>(SizeOf(dtype));
  }
};

inline Operand OperandOf(const TensorRef& t, const char* address) {
  Operand o{const_cast<char*>(address), {}, t.dtype, {}};
  std::copy_n(t.strides.begin(), 4, o.strides);
  return o;
}

template <typename Real>
Real ReadFloat(DType t, const char* src) {
  switch (t) {
    case DType::kF16: {
      F16 v;
      std::memcpy(&v, src, sizeof v);
      return ToFloat(v);
    }
    case DType::kBF16: {
      BF16 v;
      std::memcpy(&v, src, sizeof v);
      return ToFloat(v);
    }
    case DType::kF32: {
      float v;
      std::memcpy(&v, src, sizeof v);
      return v;
    }
    default: {
      double v;
      std::memcpy(&v, src, sizeof v);
      return static_cast<Real>(v);
    }
  }
}

template <typename Real>
void WriteFloat(DType t, Real value, char* dst) {
  const auto put = [dst](auto v) { std::memcpy(dst, &v, sizeof v); };
  switch (t) {
    case DType::kF16:
      return put(ToF16(static_cast<float>(value)));
    case DType::kBF16:
      return put(ToBF16(static_cast<float>(value)));
    case DType::kF32:
      return put(static_cast<float>(value));
    default:
      return put(static_cast<double>(value));
  }
}

}  // namespace jaxgraph
