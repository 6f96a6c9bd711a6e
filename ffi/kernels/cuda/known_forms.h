// Known forms: expression programs that a streaming product can take in (see stream.h), recognised
// by what they compute and not by the order of their instructions.
#pragma once

#include <cstdint>

#include "ffi/core/expr.h"

namespace jaxgraph {

// ROW: the RMS norm of a row, of a sum of two rows, or either without a weight.
//   s = x | x + added                      rounded to `dtype`; stored too if sum_out >= 0
//   scale = 1 / sqrt(mean + eps)           mean = (sum of s * s) / length, or * length, in f32
//   h = s * scale                          in f32
//   norm = h | h * weight                  `rounds_first`: h is rounded to `dtype` before
struct RmsNormForm {
  DType dtype = DType::kBF16;           // of x, added, weight and both outputs
  int x = -1, added = -1, weight = -1;  // sources; -1: none
  int sum_out = -1, norm_out = -1;
  bool divides = true;  // by `length`; else it is the factor
  bool rounds_first = false;
  float length = 1, eps = 0;
};
bool MatchRmsNorm(const ExprProgram& program, RmsNormForm* form);

// EXPR: gate * sigmoid(gate) * up. `rounds`: every step is rounded to `dtype`, else computed in f32
// and rounded once.
struct SiluProductForm {
  DType dtype = DType::kBF16;  // of gate, up and the output
  int gate = -1, up = -1;      // sources
  bool rounds = true;
};
bool MatchSiluProduct(const ExprProgram& program, SiluProductForm* form);

// EXPR: both halves of a head rotated, in f32, each rounded once to `dtype`.
//   low_out = low * cos - high * sin
//   high_out = high * cos + low * sin
struct RotaryForm {
  DType dtype = DType::kBF16;                   // of low, high and the outputs; cos and sin are f32
  int low = -1, high = -1, cos = -1, sin = -1;  // sources
  int low_out = -1, high_out = -1;
};
bool MatchRotary(const ExprProgram& program, RotaryForm* form);

// ROW: the place of the row's largest element, and nothing else.
struct ArgmaxForm {
  DType dtype = DType::kF32;  // of the elements: bf16, f16 or f32; the place is S32 or U32
};
bool MatchArgmax(const ExprProgram& program, ArgmaxForm* form);

}  // namespace jaxgraph
