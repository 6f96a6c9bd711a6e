// The loops as every processor runs them: vectors of four floats, which compilers map to what the
// architecture has (SSE2, NEON) or to scalars.
#include <cmath>
#include <type_traits>

#include "ffi/kernels/host/expr_kinds.h"
#include "ffi/kernels/host/float_convert.h"
#include "ffi/kernels/host/loops.h"
#include "ffi/kernels/host/scalar_math.h"

namespace jaxgraph {
namespace {

#include "ffi/kernels/host/expr_loops.inc"

typedef float F32 __attribute__((vector_size(16)));
constexpr int kVectorWidth = 4;
constexpr int kPanelRows = 4;

inline F32 Splat(float x) { return F32{x, x, x, x}; }
inline F32 Load(const float* p) {
  F32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline F32 Load(const BF16* p) {
  return F32{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
inline F32 Load(const F16* p) {
  return F32{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
inline void Store(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }
inline float Total(F32 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
template <typename T>
T MultiplyAdd(T x, T y, T z) {
  return x * y + z;
}

#include "ffi/kernels/host/matmul_loops.inc"

constexpr HostLoops kLoops = {kExprLoops, kMatmulLoops};

}  // namespace

const HostLoops* PortableLoops() { return &kLoops; }

}  // namespace jaxgraph
