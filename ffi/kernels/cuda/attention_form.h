// The score programs that models have: a scaled score, soft cap, bias, and a mask by positions,
// each but the score optional. Recognised by what they compute, they need no interpreter.
#pragma once

#include <cstdint>

#include "ffi/core/attention.h"

namespace jaxgraph {

// What is done with a raw score at position s, each result rounded to the dtype named (at most
// f32):
//    x = raw                                       raw
//    x = x * factor, or x / factor                 scaled
//    x = tanh(x * cap_in, or x / cap_in) * cap_out, if capped
//                                                  cap, each of the three steps
//    x = x + srcs[bias], if there is one           biased
//    x = fill, or x + fill if it adds, where position >= 0 and not
//        srcs[position] - window <= s <= srcs[position] - offset
//                                                  masked
// The simple form has neither cap nor bias nor window, and its fill replaces.
struct ScoreForm {
  uint32_t factor = 0x3f800000, fill = 0;              // bits of floats
  uint32_t cap_in = 0x3f800000, cap_out = 0x3f800000;  // the same
  int32_t position = -1;  // source of the program, an integer that does not move along s
  int32_t bias = -1;      // source of the program, of floats
  int32_t offset = 0;
  int32_t window = kNoWindow;
  uint8_t known = 0;
  uint8_t divides = 0, cap_divides = 0, capped = 0, adds_fill = 0;
  DType raw = DType::kF32, scaled = DType::kF32, cap = DType::kF32, biased = DType::kF32;
  DType masked = DType::kF32;
  DType position_dtype = DType::kS32, bias_dtype = DType::kF32;
  uint8_t reserved[4] = {};

  static constexpr int32_t kNoWindow = INT32_MAX;
  // The plain form is simple, in f32 throughout, and multiplies.
  bool plain() const {
    return simple() && !divides && raw == DType::kF32 && scaled == DType::kF32 &&
           masked == DType::kF32;
  }
  bool simple() const { return known && !capped && !adds_fill && bias < 0 && window == kNoWindow; }
};

// known = 0 if the program computes something else.
ScoreForm MatchScoreForm(const Attention& attention);

}  // namespace jaxgraph
