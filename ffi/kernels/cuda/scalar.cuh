// One element, of a dtype known only at run time. Threads of a launch agree on the dtype, so the
// branches below are uniform.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/core/dtype.h"

namespace jaxgraph {

__device__ __forceinline__ float BF16ToFloat(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ float F16ToFloat(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ uint16_t FloatToBF16(float v) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}
__device__ __forceinline__ uint16_t FloatToF16(float v) {
  return __half_as_ushort(__float2half_rn(v));
}

// The value that `v` becomes when stored as `dtype` (f16, bf16 or f32).
__device__ __forceinline__ float RoundTo(DType dtype, float v) {
  if (dtype == DType::kBF16) return BF16ToFloat(FloatToBF16(v));
  if (dtype == DType::kF16) return F16ToFloat(FloatToF16(v));
  return v;
}

// Bytes of an element as they lie in memory, in the low bits.
__device__ __forceinline__ uint64_t LoadBits(const char* address, uint32_t size) {
  if (size == 2) return *reinterpret_cast<const uint16_t*>(address);
  if (size == 4) return *reinterpret_cast<const uint32_t*>(address);
  if (size == 1) return *reinterpret_cast<const uint8_t*>(address);
  return *reinterpret_cast<const uint64_t*>(address);
}
__device__ __forceinline__ void StoreBits(char* address, uint32_t size, uint64_t bits) {
  if (size == 2) {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(bits);
  } else if (size == 4) {
    *reinterpret_cast<uint32_t*>(address) = static_cast<uint32_t>(bits);
  } else if (size == 1) {
    *reinterpret_cast<uint8_t*>(address) = static_cast<uint8_t>(bits);
  } else {
    *reinterpret_cast<uint64_t*>(address) = bits;
  }
}

__device__ __forceinline__ uint32_t DeviceSizeOf(DType t) {
  // A table of nibbles: log2 of the sizes, in the order of DType.
  constexpr uint64_t log2_sizes = 0x3211321032100;
  return 1u << ((log2_sizes >> (4 * static_cast<int>(t))) & 15);
}

// Integers as int64 (u64 beyond its range becomes the largest).
__device__ __forceinline__ int64_t LoadInteger(const char* address, DType t) {
  const uint64_t bits = LoadBits(address, DeviceSizeOf(t));
  switch (t) {
    case DType::kS8:
      return static_cast<int8_t>(bits);
    case DType::kS16:
      return static_cast<int16_t>(bits);
    case DType::kS32:
      return static_cast<int32_t>(bits);
    case DType::kU64:
      return bits > INT64_MAX ? INT64_MAX : static_cast<int64_t>(bits);
    default:
      return static_cast<int64_t>(bits);
  }
}

// Floats of any width as Acc (float or double).
template <typename Acc>
__device__ __forceinline__ Acc LoadFloat(const char* address, DType t) {
  switch (t) {
    case DType::kBF16:
      return BF16ToFloat(*reinterpret_cast<const uint16_t*>(address));
    case DType::kF16:
      return F16ToFloat(*reinterpret_cast<const uint16_t*>(address));
    case DType::kF32:
      return *reinterpret_cast<const float*>(address);
    default:
      return static_cast<Acc>(*reinterpret_cast<const double*>(address));
  }
}
template <typename Acc>
__device__ __forceinline__ void StoreFloat(char* address, DType t, Acc v) {
  switch (t) {
    case DType::kBF16:
      *reinterpret_cast<uint16_t*>(address) = FloatToBF16(static_cast<float>(v));
      break;
    case DType::kF16:
      *reinterpret_cast<uint16_t*>(address) = FloatToF16(static_cast<float>(v));
      break;
    case DType::kF32:
      *reinterpret_cast<float*>(address) = static_cast<float>(v);
      break;
    default:
      *reinterpret_cast<double*>(address) = v;
  }
}

}  // namespace jaxgraph
