// What the bindings share: errors as Python's exceptions, and the core's plain data as Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "ffi/core/executor.h"
#include "ffi/core/status.h"

namespace jaxgraph {

// Executors hold their locks while a call is enqueued, on threads that may be waiting for the GIL
// (a callback): so whatever takes such a lock gives the GIL up first.
template <typename F>
auto WithoutGil(F&& f) {
  nanobind::gil_scoped_release release;
  return f();
}

// ValueError, MemoryError or RuntimeError, if it is not ok.
void Raise(const Status& status);

nanobind::dict ToDict(const Counters& counters);
nanobind::dict ToDict(const Execution& execution);
nanobind::dict ToDict(const VariantDescription& variant);
nanobind::list ToList(const std::vector<Event>& events);

}  // namespace jaxgraph
