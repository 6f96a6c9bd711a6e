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
  out["variant"] = execution.variant;
  out["outcome"] = NameOf(execution.outcome);
  const bool eager = execution.outcome == Outcome::kEager;
  out["reason"] = eager ? NameOf(execution.counted) : "";
  return out;
}

nb::dict ToDict(const VariantDescription& variant) {
  nb::list chunks;
  for (const ChunkDescription& c : variant.chunks) {
    nb::dict chunk;
    chunk["first_node"] = c.first_node;
    chunk["nodes"] = c.node_count;
    chunk["launches"] = c.launches;
    chunks.append(chunk);
  }
  nb::list bases;
  for (const BaseDescription& b : variant.bases) {
    nb::dict base;
    base["label"] = b.label;
    base["kind"] = NameOf(b.kind);
    base["nbytes"] = b.nbytes;
    base["place"] = NameOf(b.place);
    base["nodes"] = b.nodes;
    base["moves"] = b.moves;
    base["calls"] = b.calls;
    base["why"] = b.why;
    bases.append(base);
  }
  nb::dict out;
  out["function_id"] = variant.function_id;
  out["split"] = variant.split;
  out["program_id"] = nb::bytes(variant.program_id.data(), variant.program_id.size());
  out["number"] = variant.number;
  out["stage"] = variant.stage;
  out["calls"] = variant.calls;
  out["chunks"] = chunks;
  out["arena_bytes"] = variant.arena_bytes;
  out["not_capturable"] = variant.not_capturable;
  out["failures"] = variant.failures;
  out["last_failure"] = variant.last_failure;
  out["bases"] = bases;
  return out;
}

}  // namespace jaxgraph
