// The score program that nearly every model has: a scaled score, masked where a position cannot be
// seen. Recognised by what it computes, it needs no interpreter.
#pragma once

#include <cstdint>

#include "ffi/core/attention.h"

namespace jaxgraph {

// masked(s) = s <= srcs[position] - offset ? scaled : fill, or scaled alone if position < 0
//    scaled = raw * factor, or raw / factor
// rounded to `raw`, `scaled` and `masked` where the program does; all at most f32.
struct ScoreForm {
  uint32_t factor = 0x3f800000, fill = 0;  // bits of floats
  int32_t position = -1;  // source of the program, an integer that does not move along s
  int32_t offset = 0;
  uint8_t known = 0;
  uint8_t divides = 0;
  DType raw = DType::kF32, scaled = DType::kF32, masked = DType::kF32;
  DType position_dtype = DType::kS32;
  uint8_t reserved[2] = {};
};

// known = 0 if the program computes something else.
ScoreForm MatchScoreForm(const Attention& attention);

}  // namespace jaxgraph
