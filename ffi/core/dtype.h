// Element types. The numbers are part of the program format: never renumber.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxgraph {

enum class DType : uint8_t {
  kPred = 0,  // one byte, 0 or 1
  kS8 = 1,
  kS16 = 2,
  kS32 = 3,
  kS64 = 4,
  kU8 = 5,
  kU16 = 6,
  kU32 = 7,
  kU64 = 8,
  kF16 = 9,
  kBF16 = 10,
  kF32 = 11,
  kF64 = 12,
};
constexpr int kNumDTypes = 13;

constexpr size_t SizeOf(DType t) {
  // Sixteen, so that no value of a hostile byte that slipped through leads out of the table.
  constexpr size_t sizes[16] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
  return sizes[static_cast<int>(t) & 15];
}
constexpr bool IsFloat(DType t) { return t >= DType::kF16 && t <= DType::kF64; }
constexpr bool IsSigned(DType t) { return t >= DType::kS8 && t <= DType::kS64; }
constexpr bool IsUnsigned(DType t) { return t >= DType::kU8 && t <= DType::kU64; }
constexpr const char* NameOf(DType t) {
  constexpr const char* names[kNumDTypes] = {"bool", "i8",  "i16", "i32",  "i64", "u8", "u16",
                                             "u32",  "u64", "f16", "bf16", "f32", "f64"};
  return names[static_cast<int>(t)];
}

}  // namespace jaxgraph
