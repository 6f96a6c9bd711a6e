// The params of an ATTENTION node, decoded; see AttentionParams in program.h.
#pragma once

#include "ffi/core/expr.h"
#include "ffi/core/program.h"
#include "ffi/core/status.h"

namespace jaxgraph {

struct Attention {
  AttentionParams params;
  ExprProgram program;  // raw score to masked score
  // The program as a node of its own, over [b0, b1, g, s]. Its source `raw_source` and its output
  // stand for one row of scores in a kernel's own memory: their strides are 0, 0, 0, 1.
  Node scores;

  bool has_sink() const { return params.sink_source != 0; }
  DType raw() const { return scores.srcs[params.raw_source].dtype; }
  DType masked() const { return scores.outs[0].dtype; }
  // The node's source that source `i` of the program is; it is not the raw score.
  int SourceOf(int i) const { return 3 + i - (i > params.raw_source); }
  // Is anything computed in f64?
  bool in_double(const Node& node) const;
};

// Parses and validates the params against the node's sources and output.
Status DecodeAttention(const Node& node, Attention* attention);

}  // namespace jaxgraph
