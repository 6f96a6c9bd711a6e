// NodeCase: one node with buffers behind its tensors, for tests that run the same node through
// different kernels (host, CUDA, the plain reference) and compare what they leave in memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ffi/core/program.h"
#include "ffi/kernels/emitter.h"
#include "ffi/kernels/host/float_convert.h"

namespace jaxgraph::testing {

using Rng = std::mt19937_64;
using Buffers = std::vector<std::vector<char>>;

inline int64_t UniformInt(Rng& rng, int64_t lo, int64_t hi) {
  return std::uniform_int_distribution<int64_t>(lo, hi)(rng);
}
inline double UniformReal(Rng& rng, double lo, double hi) {
  return std::uniform_real_distribution<double>(lo, hi)(rng);
}
inline bool Chance(Rng& rng, double p) { return UniformReal(rng, 0, 1) < p; }
template <typename T>
const T& Pick(Rng& rng, const std::vector<T>& from) {
  return from[UniformInt(rng, 0, static_cast<int64_t>(from.size()) - 1)];
}

// Tensor::base is an index into `buffers`. Outputs are poisoned, everything else is initialised.
struct NodeCase {
  Node node;
  Buffers buffers;
  // For every output: the largest absolute difference between two right kernels (0: same value).
  std::vector<double> tolerance;
};

// An element: floats of every width in `f`, integers and bool in `i` (u64 as its bit pattern).
struct Value {
  double f = 0;
  int64_t i = 0;
};

// The tensor's memory as a dense one of this shape, row-major.
inline TensorRef Viewed(TensorRef t, const std::vector<int64_t>& shape) {
  int64_t stride = 1;
  t.rank = static_cast<uint8_t>(shape.size());
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) {
    t.shape[d] = shape[d];
    t.strides[d] = stride;
  }
  return t;
}

template <typename T>
T LoadAs(const char* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
void StoreAs(char* p, T v) {
  std::memcpy(p, &v, sizeof v);
}

inline Value ReadElement(DType t, const char* p) {
  switch (t) {
    case DType::kPred:
      return {0, LoadAs<uint8_t>(p)};
    case DType::kS8:
      return {0, LoadAs<int8_t>(p)};
    case DType::kS16:
      return {0, LoadAs<int16_t>(p)};
    case DType::kS32:
      return {0, LoadAs<int32_t>(p)};
    case DType::kS64:
      return {0, LoadAs<int64_t>(p)};
    case DType::kU8:
      return {0, LoadAs<uint8_t>(p)};
    case DType::kU16:
      return {0, LoadAs<uint16_t>(p)};
    case DType::kU32:
      return {0, LoadAs<uint32_t>(p)};
    case DType::kU64:
      return {0, static_cast<int64_t>(LoadAs<uint64_t>(p))};
    case DType::kF16:
      return {ToFloat(LoadAs<F16>(p)), 0};
    case DType::kBF16:
      return {ToFloat(LoadAs<BF16>(p)), 0};
    case DType::kF32:
      return {LoadAs<float>(p), 0};
    case DType::kF64:
      return {LoadAs<double>(p), 0};
  }
  return {};
}

inline void WriteElement(DType t, Value v, char* p) {
  switch (t) {
    case DType::kF16:
      return StoreAs(p, ToF16(static_cast<float>(v.f)));
    case DType::kBF16:
      return StoreAs(p, ToBF16(static_cast<float>(v.f)));
    case DType::kF32:
      return StoreAs(p, static_cast<float>(v.f));
    case DType::kF64:
      return StoreAs(p, v.f);
    default:
      std::memcpy(p, &v.i, SizeOf(t));  // little endian
  }
}

// The smallest and largest value of an integer type (u64 as far as int64 goes).
inline int64_t IntMin(DType t) {
  return IsSigned(t) ? -(int64_t{1} << (8 * SizeOf(t) - 2)) * 2 : 0;
}
inline int64_t IntMax(DType t) {
  if (t == DType::kPred) return 1;
  if (SizeOf(t) == 8) return std::numeric_limits<int64_t>::max();
  return (int64_t{1} << (8 * SizeOf(t) - (IsSigned(t) ? 1 : 0))) - 1;
}

inline int64_t NumElements(const TensorRef& t) {
  int64_t n = 1;
  for (int d = 0; d < t.rank; ++d) n *= t.shape[d];
  return n;
}

// Calls fn(index) for every index of `shape`, the last dimension fastest.
template <typename Fn>
void ForEachIndex(const int64_t* shape, int rank, Fn fn) {
  std::array<int64_t, kMaxRank + 1> index{};
  for (int d = 0; d < rank; ++d)
    if (shape[d] == 0) return;
  for (;;) {
    fn(static_cast<const int64_t*>(index.data()));
    int d = rank - 1;
    while (d >= 0 && ++index[d] == shape[d]) index[d--] = 0;
    if (d < 0) return;
  }
}
template <typename Fn>
void ForEachIndex(const TensorRef& t, Fn fn) {
  ForEachIndex(t.shape.data(), t.rank, fn);
}

// Byte offset of an element from the start of its base.
inline int64_t OffsetOf(const TensorRef& t, const int64_t* index) {
  int64_t element = 0;
  for (int d = 0; d < t.rank; ++d) element += index[d] * t.strides[d];
  return t.offset + element * static_cast<int64_t>(SizeOf(t.dtype));
}
inline Value Read(const Buffers& buffers, const TensorRef& t, const int64_t* index) {
  return ReadElement(t.dtype, buffers[t.base].data() + OffsetOf(t, index));
}
inline void Write(Buffers& buffers, const TensorRef& t, const int64_t* index, Value v) {
  WriteElement(t.dtype, v, buffers[t.base].data() + OffsetOf(t, index));
}

enum class Layout {
  kDense,      // row-major
  kStrided,    // any order of dimensions, gaps, negative strides; elements never overlap
  kBroadcast,  // kStrided, and some dimensions have stride 0 (sources only)
};

constexpr char kPoison = static_cast<char>(0xa5);

// Adds a tensor on a poisoned buffer of its own to the case.
inline TensorRef MakeTensor(Rng& rng, NodeCase* c, DType dtype, const std::vector<int64_t>& shape,
                            Layout layout) {
  TensorRef t;
  t.dtype = dtype;
  t.rank = static_cast<uint8_t>(shape.size());
  std::vector<int> order(shape.size());  // dimensions, the fastest first
  for (size_t d = 0; d < shape.size(); ++d) {
    order[d] = static_cast<int>(shape.size() - 1 - d);
    t.shape[d] = shape[d];
  }
  if (layout != Layout::kDense && Chance(rng, 0.5)) std::shuffle(order.begin(), order.end(), rng);
  int64_t span = 1, first = 0;  // elements covered; position of the element with index 0
  for (int d : order) {
    if (layout == Layout::kBroadcast && Chance(rng, 0.25)) continue;  // stride 0
    if (layout != Layout::kDense && Chance(rng, 0.3)) span += UniformInt(rng, 0, 3);
    t.strides[d] = span;
    const int64_t reach = span * std::max<int64_t>(t.shape[d] - 1, 0);
    if (layout != Layout::kDense && Chance(rng, 0.2)) {
      t.strides[d] = -span;
      first += reach;
    }
    span += reach;
  }
  const int64_t before = UniformInt(rng, 0, 5), after = UniformInt(rng, 0, 5);
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  t.base = static_cast<uint32_t>(c->buffers.size());
  t.offset = (before + first) * size;
  c->buffers.emplace_back((before + span + after) * size, kPoison);
  return t;
}

// Fills a tensor with random values in [lo, hi], rounded to its type.
template <typename Case>
void FillRandom(Rng& rng, Case* c, const TensorRef& t, double lo, double hi) {
  ForEachIndex(t, [&](const int64_t* index) {
    Value v;
    if (IsFloat(t.dtype)) {
      v.f = UniformReal(rng, lo, hi);
    } else {
      v.i = UniformInt(rng, static_cast<int64_t>(lo), static_cast<int64_t>(hi));
    }
    Write(c->buffers, t, index, v);
  });
}

// The node with addresses: bases[i] is where a copy of buffers[i] lies.
inline ResolvedNode Resolve(const Node& node, const std::vector<char*>& bases) {
  ResolvedNode r;
  r.node = &node;
  for (const TensorRef& t : node.outs) r.outs.push_back(bases[t.base] + t.offset);
  for (const TensorRef& t : node.srcs) r.srcs.push_back(bases[t.base] + t.offset);
  return r;
}
inline std::vector<char*> Addresses(Buffers& buffers) {
  std::vector<char*> bases;
  for (auto& b : buffers) bases.push_back(b.data());
  return bases;
}

inline std::string Describe(const NodeCase& c) {
  auto tensor = [](const TensorRef& t) {
    std::string s = std::string(NameOf(t.dtype)) + "[";
    for (int d = 0; d < t.rank; ++d)
      s += (d ? "," : "") + std::to_string(t.shape[d]) + ":" + std::to_string(t.strides[d]);
    return s + "]";
  };
  std::string s = "op " + std::to_string(static_cast<int>(c.node.op)) + " outs";
  for (const TensorRef& t : c.node.outs) s += " " + tensor(t);
  s += " srcs";
  for (const TensorRef& t : c.node.srcs) s += " " + tensor(t);
  return s + " " + c.node.label;
}

// Do `got` and `want` (buffers after the node ran) agree within the case's tolerance, and did `got`
// leave every byte outside the outputs as it was?
inline ::testing::AssertionResult SameResult(const NodeCase& c, const Buffers& got,
                                             const Buffers& want) {
  std::vector<std::vector<bool>> written;
  for (const auto& b : c.buffers) written.emplace_back(b.size(), false);
  for (size_t o = 0; o < c.node.outs.size(); ++o) {
    const TensorRef& t = c.node.outs[o];
    std::string trouble;
    ForEachIndex(t, [&](const int64_t* index) {
      const int64_t at = OffsetOf(t, index);
      for (size_t b = 0; b < SizeOf(t.dtype); ++b) written[t.base][at + b] = true;
      const Value g = Read(got, t, index), w = Read(want, t, index);
      bool same = g.i == w.i;
      if (IsFloat(t.dtype)) {
        same = g.f == w.f || (std::isnan(g.f) && std::isnan(w.f)) ||
               std::abs(g.f - w.f) <= c.tolerance[o];
      }
      if (same || std::isinf(c.tolerance[o]) || !trouble.empty()) return;
      trouble = "out " + std::to_string(o) + " at [";
      for (int d = 0; d < t.rank; ++d) trouble += (d ? "," : "") + std::to_string(index[d]);
      trouble += "]: got " + (IsFloat(t.dtype) ? std::to_string(g.f) : std::to_string(g.i)) +
                 ", want " + (IsFloat(t.dtype) ? std::to_string(w.f) : std::to_string(w.i)) +
                 ", tolerance " + std::to_string(c.tolerance[o]);
    });
    if (!trouble.empty()) return ::testing::AssertionFailure() << trouble << "\n" << Describe(c);
  }
  for (size_t b = 0; b < c.buffers.size(); ++b)
    for (size_t i = 0; i < c.buffers[b].size(); ++i)
      if (!written[b][i] && got[b][i] != c.buffers[b][i])
        return ::testing::AssertionFailure()
               << "byte " << i << " of buffer " << b << " was overwritten\n"
               << Describe(c);
  return ::testing::AssertionSuccess();
}

}  // namespace jaxgraph::testing
