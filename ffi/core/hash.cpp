// HashBytes: MurmurHash3, x64 variant, 128 bits, seed 0 (the published algorithm).
#include <cstring>

#include "ffi/core/program.h"

namespace jaxgraph {
namespace {

constexpr uint64_t kMul1 = 0x87c37b91114253d5u;
constexpr uint64_t kMul2 = 0x4cf5ad432745937fu;

uint64_t RotateLeft(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

uint64_t ScrambleLow(uint64_t k) { return RotateLeft(k * kMul1, 31) * kMul2; }
uint64_t ScrambleHigh(uint64_t k) { return RotateLeft(k * kMul2, 33) * kMul1; }

uint64_t Finalize(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}

}  // namespace

Hash128 HashBytes(std::string_view bytes) {
  uint64_t low = 0;
  uint64_t high = 0;
  size_t at = 0;
  for (; at + 16 <= bytes.size(); at += 16) {
    uint64_t k[2];
    std::memcpy(k, bytes.data() + at, 16);
    low ^= ScrambleLow(k[0]);
    low = (RotateLeft(low, 27) + high) * 5 + 0x52dce729;
    high ^= ScrambleHigh(k[1]);
    high = (RotateLeft(high, 31) + low) * 5 + 0x38495ab5;
  }

  // The tail, padded with zeros: scrambling zero gives zero, so an absent half changes nothing.
  uint64_t tail[2] = {0, 0};
  if (at < bytes.size()) std::memcpy(tail, bytes.data() + at, bytes.size() - at);
  high ^= ScrambleHigh(tail[1]);
  low ^= ScrambleLow(tail[0]);

  low ^= bytes.size();
  high ^= bytes.size();
  low += high;
  high += low;
  low = Finalize(low);
  high = Finalize(high);
  low += high;
  high += low;

  Hash128 hash;
  std::memcpy(hash.data(), &low, 8);
  std::memcpy(hash.data() + 8, &high, 8);
  return hash;
}

}  // namespace jaxgraph
