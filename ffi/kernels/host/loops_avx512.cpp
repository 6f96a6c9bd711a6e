// The loops for x86-64 with AVX-512 as servers have had it since Skylake.
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
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for a mistake of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace jaxgraph {
namespace {

#include "ffi/kernels/host/expr_loops.inc"

using F32 = __m512;
constexpr int kVectorWidth = 16;
constexpr int kPanelRows = 12;

inline F32 Splat(float x) { return _mm512_set1_ps(x); }
inline F32 Load(const float* p) { return _mm512_loadu_ps(p); }
inline __m256i Load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline F32 Load(const BF16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load16(p)), 16));
}
inline F32 Load(const F16* p) { return _mm512_cvtph_ps(Load16(p)); }
inline void Store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline float Total(F32 v) { return _mm512_reduce_add_ps(v); }
inline F32 MultiplyAdd(F32 x, F32 y, F32 z) { return _mm512_fmadd_ps(x, y, z); }
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
const HostLoops* Avx512Loops() {
  static const bool runs = __builtin_cpu_supports("avx512f") &&
                           __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return runs ? &kLoops : nullptr;
}
}  // namespace jaxgraph

#else

namespace jaxgraph {
const HostLoops* Avx512Loops() { return nullptr; }
}  // namespace jaxgraph

#endif
