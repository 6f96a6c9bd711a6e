// jaxgraph._native.testing: the identity layer driven directly, for this project's tests and
// benchmarks. No part of the public interface.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxgraph {

void DefineTesting(nanobind::module_& m);

}  // namespace jaxgraph
