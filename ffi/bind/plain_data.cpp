#include "ffi/bind/plain_data.h"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace jaxgraph {

void Raise(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return;
    case Code::kInvalidArgument:
      throw nb::value_error(status.message().c_str());
    case Code::kOutOfMemory:
      PyErr_SetString(PyExc_MemoryError, status.message().c_str());
      throw nb::python_error();
    default:
      PyErr_SetString(PyExc_RuntimeError, status.message().c_str());
      throw nb::python_error();
  }
}

nb::dict ToDict(const Counters& c) {
  nb::dict out;
  out["executions"] = c.executions;
  out["eager"] = c.eager;
  out["captures"] = c.captures;
  out["replays"] = c.replays;
  out["patches"] = c.patches;
  out["exec_updates"] = c.exec_updates;
  out["instantiations"] = c.instantiations;
  out["uid_hits"] = c.uid_hits;
  out["property_compares"] = c.property_compares;
  out["nodes_compared"] = c.nodes_compared;
  out["resets"] = c.resets;
  out["evictions"] = c.evictions;
  out["failures"] = c.failures;
  out["chunk_launches"] = c.chunk_launches;
  out["live_execs"] = c.live_execs;
  out["arena_bytes"] = c.arena_bytes;
  return out;
}

nb::list ToList(const std::vector<Event>& events) {
  nb::list out;
  for (const Event& e : events) {
    nb::dict event;
    event["sequence"] = e.sequence;
    event["time_s"] = e.time_s;
    event["device"] = e.device;
    event["function_id"] = e.function_id;
    event["split"] = e.split;
    event["what"] = e.what;
    event["why"] = e.why;
    out.append(event);
  }
  return out;
}

}  // namespace jaxgraph
