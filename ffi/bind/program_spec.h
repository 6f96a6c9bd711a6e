// Programs as plain Python data: what the planner hands over, and what a person reads.
#pragma once

#include <nanobind/nanobind.h>

#include "ffi/core/program.h"

namespace jaxgraph {

// A Program from the planner's dict; see jaxgraph/runtime/native.py for its fields. Throws
// nanobind's exceptions (TypeError, KeyError, ValueError) on a malformed one.
Program ProgramFromSpec(const nanobind::dict& spec);

// The same fields back, enums by name.
nanobind::dict DescribeProgram(const Program& program);

}  // namespace jaxgraph
