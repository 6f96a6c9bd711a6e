// The loops for x86-64 with AVX2 and FMA (every such processor also has F16C).
#include "ffi/kernels/host/loops.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#include <cmath>
#include <type_traits>

#include "ffi/kernels/host/expr_kinds.h"
#include "ffi/kernels/host/float_convert.h"
#include "ffi/kernels/host/scalar_math.h"

// From here on functions are compiled for this target; what the headers above define is not, so it
// stays safe to share with the rest of the library.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace jaxgraph {
namespace {

#include "ffi/kernels/host/expr_loops.inc"

using F32 = __m256;
constexpr int kVectorWidth = 8;
constexpr int kPanelRows = 6;

inline F32 Splat(float x) { return _mm256_set1_ps(x); }
inline F32 Load(const float* p) { return _mm256_loadu_ps(p); }
inline __m128i Load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F32 Load(const BF16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load16(p)), 16));
}
inline F32 Load(const F16* p) { return _mm256_cvtph_ps(Load16(p)); }
inline void Store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
inline float Total(F32 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline F32 MultiplyAdd(F32 x, F32 y, F32 z) { return _mm256_fmadd_ps(x, y, z); }
inline float MultiplyAdd(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

#include "ffi/kernels/host/matmul_loops.inc"

constexpr HostLoops kLoops = {kExprLoops, kMatmulLoops};

}  // namespace
}  // namespace jaxgraph

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace jaxgraph {
const HostLoops* Avx2Loops() {
  static const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? &kLoops : nullptr;
}
}  // namespace jaxgraph

#else

namespace jaxgraph {
const HostLoops* Avx2Loops() { return nullptr; }
}  // namespace jaxgraph

#endif
