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

nb::dict ToDict(const Counters& counters) {
  nb::dict out;
  counters.ForEach([&](const char* name, uint64_t value) { out[name] = value; });
  return out;
}

nb::dict ToDict(const NodeChange& change) {
  nb::dict out;
  out["node"] = change.node;
  out["op"] = change.op;
  out["label"] = change.label;
  out["field"] = change.field;
  out["source"] = change.source;
  out["tensor"] = change.tensor;
  out["before"] = change.before;
  out["after"] = change.after;
  return out;
}

nb::list ToList(const std::vector<Event>& events) {
  nb::list out;
  for (const Event& e : events) {
    nb::list changes;
    for (const NodeChange& change : e.changes) changes.append(ToDict(change));
    nb::dict event;
    event["sequence"] = e.sequence;
    event["time_s"] = e.time_s;
    event["device"] = e.device;
    event["function_id"] = e.function_id;
    event["function"] = e.function;
    event["split"] = e.split;
    event["key"] = nb::bytes(e.key.data(), e.key.size());
    event["variant"] = e.variant;
    event["what"] = e.what;
    event["why"] = e.why;
    event["changes"] = changes;
    event["changes_total"] = e.changes_total;
    out.append(event);
  }
  return out;
}

nb::dict ToDict(const Execution& execution) {
  nb::dict out;
  out["start_s"] = execution.start_s;
  out["decide_ns"] = execution.decide_ns;
  out["run_ns"] = execution.run_ns;
  out["function_id"] = execution.function_id;
  out["split"] = execution.split;
  out["outcome"] = NameOf(execution.outcome);
  return out;
}

}  // namespace jaxgraph
