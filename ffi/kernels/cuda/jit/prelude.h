// What every generated kernel may use, in CUDA C++ without any include. The values are those of
// expr_math.cuh, bit by bit: the same functions of CUDA's library, and additions and products that
// the compiler may not contract (so that the library's own code is compiled as in the interpreter).
#pragma once

#include "ffi/kernels/cuda/delay.h"

#define JAXGRAPH_TEXT_OF(...) #__VA_ARGS__
#define JAXGRAPH_TEXT(...) JAXGRAPH_TEXT_OF(__VA_ARGS__)

namespace jaxgraph {

constexpr char kJitPrelude[] =
#ifdef JAXGRAPH_RANDOM_DELAYS
    JAXGRAPH_TEXT(JAXGRAPH_RANDOM_DELAY(static __device__ __forceinline__))
#else
    "static __device__ __forceinline__ void RandomDelay() {}"
#endif
        R"cuda(
#define DEV static __device__ __forceinline__
#define CALL static __device__ __noinline__
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Programmatic dependent launch: the next kernel may come, and this one waits for the last.
DEV void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  RandomDelay();
}

// ---- types ----
template <class T> struct Wide { typedef u32 U; };
template <> struct Wide<i64> { typedef u64 U; };
template <> struct Wide<u64> { typedef u64 U; };
template <class T> struct Plain { typedef T U; };
template <> struct Plain<i8> { typedef u8 U; };
template <> struct Plain<i16> { typedef u16 U; };
template <> struct Plain<i32> { typedef u32 U; };
template <> struct Plain<i64> { typedef u64 U; };
template <class T> struct Width { static const u32 n = 8 * sizeof(T); };
template <> struct Width<bool> { static const u32 n = 1; };
template <class T> DEV constexpr bool is_signed() { return T(-1) < T(0); }

DEV float from_bf16(u16 v) { return __uint_as_float(u32(v) << 16); }
DEV u16 to_bf16(float v) {
#if __CUDA_ARCH__ >= 800
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
#else
  const u32 b = __float_as_uint(v);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
#endif
}
DEV float from_f16(u16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}
DEV u16 to_f16(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
DEV float round_bf16(float v) { return from_bf16(to_bf16(v)); }
DEV float round_f16(float v) { return from_f16(to_f16(v)); }

// ---- memory: V neighbours at once ----
template <int N> struct Raw;
template <> struct Raw<1> { typedef u8 T; };
template <> struct Raw<2> { typedef u16 T; };
template <> struct Raw<4> { typedef u32 T; };
template <> struct Raw<8> { typedef uint2 T; };
template <> struct Raw<16> { typedef uint4 T; };
template <int V, class M> DEV void load(const char* from, M* to) {
  union { typename Raw<V * sizeof(M)>::T raw; M m[V]; } u;
  u.raw = *(const typename Raw<V * sizeof(M)>::T*)from;
#pragma unroll
  for (int j = 0; j < V; ++j) to[j] = u.m[j];
}
template <int V, class M> DEV void store(char* to, const M* from) {
  union { typename Raw<V * sizeof(M)>::T raw; M m[V]; } u;
#pragma unroll
  for (int j = 0; j < V; ++j) u.m[j] = from[j];
  *(typename Raw<V * sizeof(M)>::T*)to = u.raw;
}

template <class T, class S> DEV T bits_as(S v) {
  union { S from; T to; } u;
  u.from = v;
  return u.to;
}

// ---- integers and bool ----
template <class T> DEV T op_neg(T a) { typedef typename Wide<T>::U U; return T(U(0) - U(a)); }
template <class T> DEV T op_abs(T a) { return a < T(0) ? op_neg(a) : a; }
template <class T> DEV T op_sign(T a) { return a < T(0) ? T(-1) : T(a != T(0)); }
template <class T> DEV T op_not(T a) { return T(~a); }
DEV bool op_not(bool a) { return !a; }
template <class T> DEV T op_popcnt(T a) { return T(__popcll(u64(typename Plain<T>::U(a)))); }
template <class T> DEV T op_clz(T a) {
  return T(__clzll(u64(typename Plain<T>::U(a))) - int(64 - Width<T>::n));
}
template <class T> DEV T op_add(T a, T b) { typedef typename Wide<T>::U U; return T(U(a) + U(b)); }
template <class T> DEV T op_sub(T a, T b) { typedef typename Wide<T>::U U; return T(U(a) - U(b)); }
template <class T> DEV T op_mul(T a, T b) { typedef typename Wide<T>::U U; return T(U(a) * U(b)); }
template <class T> DEV T op_div(T a, T b) {
  typedef typename Wide<T>::U U;
  if (b == T(0)) return T(~U(0));
  if (is_signed<T>() && b == T(-1)) return op_neg(a);
  return T(a / b);
}
template <class T> DEV T op_rem(T a, T b) {
  if (b == T(0)) return a;
  if (is_signed<T>() && b == T(-1)) return T(0);
  return T(a % b);
}
template <class T> DEV T op_pow(T a, T b) {
  typedef typename Wide<T>::U U;
  if (b < T(0)) return a == T(1) ? T(1) : a == T(-1) ? (b & 1 ? T(-1) : T(1)) : T(0);
  U result = 1, base = U(a);
  for (U n = U(b); n != 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return T(result);
}
template <class T> DEV T op_ipow(T a, int n) {
  typedef typename Wide<T>::U U;
  if (is_signed<T>() && n < 0) {
    return a == T(1) ? T(1) : a == T(-1) ? (n & 1 ? T(-1) : T(1)) : T(0);
  }
  U result = 1, base = U(a);
  for (U m = U(n); m != 0; m >>= 1) {
    if (m & 1) result *= base;
    base *= base;
  }
  return T(result);
}
template <class T> DEV T op_max(T a, T b) { return a < b ? b : a; }
template <class T> DEV T op_min(T a, T b) { return b < a ? b : a; }
template <class T> DEV T op_and(T a, T b) { return T(a & b); }
template <class T> DEV T op_or(T a, T b) { return T(a | b); }
template <class T> DEV T op_xor(T a, T b) { return T(a ^ b); }
template <class T> DEV u64 amount(T b) { return u64(typename Plain<T>::U(b)); }
template <class T> DEV T op_shl(T a, T b) {
  typedef typename Wide<T>::U U;
  return amount(b) >= Width<T>::n ? T(0) : T(U(a) << amount(b));
}
template <class T> DEV T op_shrl(T a, T b) {
  return amount(b) >= Width<T>::n ? T(0) : T(u64(typename Plain<T>::U(a)) >> amount(b));
}
// As the bits of a signed integer, whatever T is.
template <class T> DEV T op_shra(T a, T b) {
  const u32 spare = 64 - Width<T>::n;
  const i64 value = i64(u64(typename Plain<T>::U(a)) << spare) >> spare;
  return T(value >> (amount(b) >= Width<T>::n ? u64(Width<T>::n - 1) : amount(b)));
}
template <class T> DEV T op_clamp(T a, T b, T c) { return op_min(op_max(b, a), c); }
template <class T> DEV bool op_eq(T a, T b) { return a == b; }
template <class T> DEV bool op_ne(T a, T b) { return a != b; }
template <class T> DEV bool op_lt(T a, T b) { return a < b; }
template <class T> DEV bool op_le(T a, T b) { return a <= b; }
template <class T> DEV bool op_gt(T a, T b) { return a > b; }
template <class T> DEV bool op_ge(T a, T b) { return a >= b; }
template <class T> DEV T op_select(bool a, T b, T c) { return a ? c : b; }

// ---- floats ----
DEV float op_add(float a, float b) { return __fadd_rn(a, b); }
DEV float op_sub(float a, float b) { return __fsub_rn(a, b); }
DEV float op_mul(float a, float b) { return __fmul_rn(a, b); }
DEV double op_add(double a, double b) { return __dadd_rn(a, b); }
DEV double op_sub(double a, double b) { return __dsub_rn(a, b); }
DEV double op_mul(double a, double b) { return __dmul_rn(a, b); }
DEV bool op_isfinite(float a) { return (__float_as_uint(a) & 0x7fffffffu) < 0x7f800000u; }
DEV bool op_isfinite(double a) {
  return (u64(__double_as_longlong(a)) & 0x7fffffffffffffffull) < 0x7ff0000000000000ull;
}
#define FLOATS(F, s)                                                                       \
  DEV F op_neg(F a) { return -a; }                                                         \
  DEV F op_abs(F a) { return fabs##s(a); }                                                 \
  DEV F op_sign(F a) { return a > F(0) ? F(1) : a < F(0) ? F(-1) : a; }                    \
  DEV F op_floor(F a) { return floor##s(a); }                                              \
  DEV F op_ceil(F a) { return ceil##s(a); }                                                \
  DEV F op_round(F a) { return round##s(a); }                                              \
  DEV F op_rint(F a) { return rint##s(a); }                                                \
  DEV F op_exp(F a) { return exp##s(a); }                                                  \
  DEV F op_sqrt(F a) { return sqrt##s(a); }                                                \
  DEV F op_rsqrt(F a) { return F(1) / sqrt##s(a); }                                        \
  DEV F op_logistic(F a) { return F(1) / (F(1) + exp##s(-a)); }                            \
  DEV F op_div(F a, F b) { return a / b; }                                                 \
  DEV F op_max(F a, F b) { return a != a || a > b ? a : b; }                               \
  DEV F op_min(F a, F b) { return a != a || a < b ? a : b; }                               \
  DEV F op_clamp(F a, F b, F c) { return op_min(op_max(b, a), c); }                        \
  DEV F op_ipow(F base, int n) {                                                           \
    F result = 1;                                                                          \
    for (u32 m = n < 0 ? 0u - u32(n) : u32(n); m != 0; m >>= 1) {                          \
      if (m & 1) result = op_mul(result, base);                                            \
      base = op_mul(base, base);                                                           \
    }                                                                                      \
    return n < 0 ? F(1) / result : result;                                                 \
  }                                                                                        \
  DEV F op_tanh(F a) { return tanh##s(a); }                                                \
  DEV F op_log(F a) { return log##s(a); }                                                  \
  DEV F op_exp2(F a) { return exp2##s(a); }                                                \
  DEV F op_erf(F a) { return erf##s(a); }                                                  \
  CALL F op_expm1(F a) { return expm1##s(a); }                                             \
  CALL F op_log1p(F a) { return log1p##s(a); }                                             \
  CALL F op_cbrt(F a) { return cbrt##s(a); }                                               \
  CALL F op_sin(F a) { return sin##s(a); }                                                 \
  CALL F op_cos(F a) { return cos##s(a); }                                                 \
  CALL F op_tan(F a) { return tan##s(a); }                                                 \
  CALL F op_asin(F a) { return asin##s(a); }                                               \
  CALL F op_acos(F a) { return acos##s(a); }                                               \
  CALL F op_atan(F a) { return atan##s(a); }                                               \
  CALL F op_sinh(F a) { return sinh##s(a); }                                               \
  CALL F op_cosh(F a) { return cosh##s(a); }                                               \
  CALL F op_asinh(F a) { return asinh##s(a); }                                             \
  CALL F op_acosh(F a) { return acosh##s(a); }                                             \
  CALL F op_atanh(F a) { return atanh##s(a); }                                             \
  CALL F op_erfc(F a) { return erfc##s(a); }                                               \
  CALL F op_erfinv(F a) { return erfinv##s(a); }                                           \
  CALL F op_rem(F a, F b) { return fmod##s(a, b); }                                        \
  CALL F op_pow(F a, F b) { return pow##s(a, b); }                                         \
  CALL F op_atan2(F a, F b) { return atan2##s(a, b); }
FLOATS(float, f)
FLOATS(double, )

// Float to integer: toward zero, saturating, NaN gives 0.
template <class T, class F> DEV T to_int(F v) {
  if (v != v) return T(0);
  if (!is_signed<T>()) {
    const u64 largest = u64(T(-1));
    if (v <= F(0)) return T(0);
    if (v >= F(18446744073709551616.0)) return T(largest);
    const u64 whole = u64(v);
    return T(whole < largest ? whole : largest);
  }
  const i64 largest = i64(~0ull >> (65 - 8 * sizeof(T))), least = -largest - 1;
  if (v >= F(9223372036854775808.0)) return T(largest);
  if (v < F(-9223372036854775808.0)) return T(least);
  const i64 whole = i64(v);
  return T(whole > largest ? largest : whole < least ? least : whole);
}

// ---- indices ----
// Where a slice starts: what its index says, made to fit into [0, limit].
template <class T> DEV i64 start_at(T v, i64 limit, bool& inside) {
  const i64 largest = i64(~0ull >> 1);
  const i64 at = !is_signed<T>() && sizeof(T) == 8 && i64(v) < 0 ? largest : i64(v);
  if (at < 0 || at > limit) inside = false;
  return at < 0 || limit < 0 ? 0 : at < limit ? at : limit;
}
// A word of `pattern`s.
template <int N> DEV typename Raw<N>::T filled(u64 pattern) {
  union { typename Raw<N>::T raw; u64 bits[2]; } u;
  u.bits[0] = u.bits[1] = pattern;
  return u.raw;
}

// ---- reductions ----
template <class T> struct Word { typedef u32 W; };
template <> struct Word<i64> { typedef u64 W; };
template <> struct Word<u64> { typedef u64 W; };
template <> struct Word<double> { typedef u64 W; };
template <class T> DEV typename Word<T>::W to_word(T v) { return typename Word<T>::W(v); }
DEV u32 to_word(float v) { return __float_as_uint(v); }
DEV u64 to_word(double v) { return u64(__double_as_longlong(v)); }
template <class T> struct FromWord {
  DEV T of(typename Word<T>::W w) { return T(w); }
};
template <> struct FromWord<float> { DEV float of(u32 w) { return __uint_as_float(w); } };
template <> struct FromWord<double> {
  DEV double of(u64 w) { return __longlong_as_double(i64(w)); }
};
template <class T> DEV T from_lane(T v, int mask) {
  return FromWord<T>::of(__shfl_xor_sync(0xffffffffu, to_word(v), mask));
}
struct Sum { template <class T> DEV T of(T a, T b) { return op_add(a, b); } };
struct Prod { template <class T> DEV T of(T a, T b) { return op_mul(a, b); } };
struct Max { template <class T> DEV T of(T a, T b) { return op_max(a, b); } };
struct Min { template <class T> DEV T of(T a, T b) { return op_min(a, b); } };
struct And { template <class T> DEV T of(T a, T b) { return op_and(a, b); } };
struct Or { template <class T> DEV T of(T a, T b) { return op_or(a, b); } };
struct Xor { template <class T> DEV T of(T a, T b) { return op_xor(a, b); } };
template <class R, class T> DEV T tree(T v, int from) {
#pragma unroll
  for (int o = from; o > 0; o /= 2) v = R::of(v, from_lane(v, o));
  return v;
}

// A value, and where in the row it stands. The first NaN wins, else the first extremum.
template <class T> struct Best { T value; u32 where; };
template <bool kMax, class T> DEV bool takes_over(T later, T earlier) {
  if (earlier != earlier) return false;
  return later != later || (kMax ? later > earlier : later < earlier);
}
template <bool kMax> struct Arg {
  template <class T> DEV Best<T> of(const Best<T>& a, const Best<T>& b) {
    const bool a_first = a.where < b.where;
    const bool takes_b = a_first ? b.where != ~0u && takes_over<kMax>(b.value, a.value)
                                 : a.where == ~0u || !takes_over<kMax>(a.value, b.value);
    return takes_b ? b : a;
  }
};
template <class T> DEV Best<T> from_lane(Best<T> v, int mask) {
  Best<T> r;
  r.value = from_lane(v.value, mask);
  r.where = from_lane(v.where, mask);
  return r;
}

DEV void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// Shared memory of another block of the cluster.
DEV u32 in_block(const void* mine, u32 rank) {
  u32 at = u32(__cvta_generic_to_shared(mine));
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(rank));
#endif
  return at;
}
DEV u32 from_block(const u32* mine, u32 rank) {
  u32 v = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(in_block(mine, rank)) : "memory");
#endif
  return v;
}
DEV u64 from_block(const u64* mine, u32 rank) {
  u64 v = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(in_block(mine, rank)) : "memory");
#endif
  return v;
}
)cuda";

}  // namespace jaxgraph
