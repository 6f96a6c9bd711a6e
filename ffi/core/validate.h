// Validate: is a decoded program safe to run? Kernels trust what passed here.
#pragma once

#include "ffi/core/program.h"
#include "ffi/core/status.h"

namespace jaxgraph {

// Checks the table of bases, that every tensor lies inside its base (negative strides included),
// and per op the number, shapes and dtypes of its tensors and its params. kInvalidArgument names
// the node.
Status Validate(const Program& program);

}  // namespace jaxgraph
