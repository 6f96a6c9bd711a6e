// jaxgraph._native: hands the FFI handlers to JAX, encodes programs, and reads what the executors
// count. Nothing here is on the path of a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "ffi/bind/handlers.h"
#include "ffi/bind/program_spec.h"
#include "ffi/core/program.h"
#include "ffi/runtime/runtime.h"

namespace nb = nanobind;

namespace jaxgraph {
namespace {

// Executors hold their locks while a call is enqueued, on threads that may be waiting for the GIL
// (a callback): so whatever takes such a lock gives the GIL up first.
template <typename F>
auto WithoutGil(F&& f) {
  nb::gil_scoped_release release;
  return f();
}

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

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

nb::dict Registration(Handler* instantiate, Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
  return stages;
}

nb::dict Registrations() {
  nb::dict platforms;
  platforms["cpu"] = Registration(JaxgraphInstantiateHost, JaxgraphExecuteHost);
  if (GetBuildInfo().cuda) {
    platforms["CUDA"] = Registration(JaxgraphInstantiateCuda, JaxgraphExecuteCuda);
  }
  return platforms;
}

nb::bytes EncodeProgram(const nb::dict& spec) {
  const std::string bytes = Encode(ProgramFromSpec(spec));
  Program decoded;  // a program that XLA would refuse later is refused here, where a person is
  Raise(Decode(bytes, &decoded));
  return nb::bytes(bytes.data(), bytes.size());
}

nb::dict Describe(const nb::bytes& bytes) {
  Program program;
  Raise(Decode({bytes.c_str(), bytes.size()}, &program));
  return DescribeProgram(program);
}

nb::dict StatsOf(uint64_t function_id) {
  const Counters c = WithoutGil([&] { return Runtime::Get().Stats(function_id); });
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

nb::list EventsOf(uint64_t function_id) {
  const std::vector<Event> events = WithoutGil([&] { return Runtime::Get().Events(function_id); });
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

Platform PlatformOf(const std::string& name) {
  if (name == "cpu") return Platform::kHost;
  if (name == "CUDA") return Platform::kCuda;
  throw nb::value_error(("unknown platform '" + name + "': 'cpu' or 'CUDA'").c_str());
}

void Reserve(const std::string& platform, int ordinal, uint64_t bytes) {
  const Platform p = PlatformOf(platform);
  Raise(WithoutGil([&] { return Runtime::Get().Reserve(p, ordinal, bytes); }));
}

nb::dict BuildInfoDict() {
  const BuildInfo info = GetBuildInfo();
  nb::dict out;
  out["version"] = JAXGRAPH_VERSION;
  out["cuda"] = info.cuda;
  out["cuda_runtime"] = info.cuda_runtime;
  out["cuda_architectures"] = info.cuda_architectures;
  out["compiler"] = info.compiler;
  return out;
}

}  // namespace
}  // namespace jaxgraph

NB_MODULE(_native, m) {
  using namespace jaxgraph;
  m.doc() = "The native core of jaxgraph.";
  m.def("registrations", Registrations,
        "FFI handlers of `jaxgraph_execute`: {platform: {stage: capsule}}.");
  m.def("encode_program", EncodeProgram, nb::arg("spec"),
        "A program's bytes from its spec; raises ValueError where the core would refuse it.");
  m.def("describe_program", Describe, nb::arg("program"), "A program's bytes as plain data.");
  m.def("stats", StatsOf, nb::arg("function_id"), "Counters of a function (0: all).");
  m.def("events", EventsOf, nb::arg("function_id"), "Events of a function (0: all), oldest first.");
  m.def(
      "describe",
      [](uint64_t id) { return WithoutGil([&] { return Runtime::Get().Describe(id); }); },
      nb::arg("function_id"), "Per split: chunks, launches, placements; lines of text.");
  m.def(
      "clear", [](uint64_t id) { WithoutGil([&] { Runtime::Get().Clear(id); }); },
      nb::arg("function_id"), "Forgets executables and counters of a function (0: all).");
  m.def("reserve", Reserve, nb::arg("platform"), nb::arg("ordinal"), nb::arg("nbytes"),
        "Sizes a device's arena ahead of time.");
  m.def("build_info", BuildInfoDict, "What the native library was built with.");
}
