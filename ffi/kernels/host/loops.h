// The inner loops of the host kernels, compiled once per instruction set and chosen at run time, so
// that one portable build runs at the speed of the machine it finds.
//
// loops_*.cpp each include the same sources (*_loops.inc) under their own compiler target.
#pragma once

#include <cstdint>

#include "ffi/core/dtype.h"
#include "ffi/core/expr.h"

namespace jaxgraph {

// ---- EXPR and ROW ----

// A strip is what one instruction works on at a time: long enough to vectorise and to make the
// dispatch cheap, short enough that the live registers stay in the first-level cache.
constexpr int kStripElements = 512;
// Loops run to the next multiple; registers are that long, and their tails hold old values.
constexpr int kStripPadding = 16;

// A reduction over a row, from strip to strip: floats of every width in double.
struct ReduceState {
  double f = 0;
  int64_t i = 0;
  int64_t index = 0;     // argmax, argmin
  bool started = false;  // max, min, argmax, argmin
};

struct ExprLoops {
  // Elements of a tensor (stride in elements) to a register and back.
  void (*load)(DType dtype, const char* src, int64_t stride, int n, void* dst);
  void (*store)(DType dtype, const void* src, char* dst, int64_t stride, int n);
  // first, first + step, ... as `dtype`.
  void (*index)(DType dtype, int64_t first, int64_t step, int n, void* dst);
  // The value at `value`, as a register holds it, to a whole strip.
  void (*broadcast)(DType dtype, const void* value, int n, void* dst);
  // Conversions, unary, binary and ternary instructions; dst is none of a, b, c.
  void (*compute)(const ExprInstr& instr, const void* a, const void* b, const void* c, int n,
                  void* dst);
  // Adds n elements, whose first has index `first` in the row.
  void (*reduce)(const ExprInstr& instr, const void* a, int n, int64_t first, ReduceState* state);
};

// ---- MATMUL ----

struct MatmulLoops {
  // Elements of any float type and stride to float.
  void (*widen)(DType dtype, const char* src, int64_t stride, int64_t n, float* dst);
  // out[m][j] = sum over k of a[m][k] * w[k][j], j in [0, n): w has rows of contiguous elements
  // (row_stride in elements), and so have a and out (a_stride, out_stride). m <=
  // kMaxMatmulRows.
  void (*rows)(DType dtype, const char* w, int64_t row_stride, const float* a, int64_t a_stride,
               int m, int64_t k, int64_t n, float* out, int64_t out_stride);
  // The same for w[j][k] with k contiguous, row j at w + j * row_stride.
  void (*dots)(DType dtype, const char* w, int64_t row_stride, const float* a, int64_t a_stride,
               int m, int64_t k, int64_t n, float* out, int64_t out_stride);
  // out[m][0..panel) = (add ? out : 0) + a x panel: a panel of `panel_width` columns, packed.
  int panel_width;
  void (*panel)(const float* panel, const float* a, int64_t a_stride, int64_t m, int64_t k,
                bool add, float* out);
};
constexpr int kMaxMatmulRows = 16;  // of `rows` and `dots`

struct HostLoops {
  ExprLoops expr;
  MatmulLoops matmul;
};

// The best that this processor runs.
const HostLoops& Loops();

// Each of them, for tests; null where this processor or this build has it not.
const HostLoops* PortableLoops();
const HostLoops* Avx2Loops();
const HostLoops* Avx512Loops();

}  // namespace jaxgraph
