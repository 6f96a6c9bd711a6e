// jaxgraph._native: hands the FFI handlers to JAX, encodes programs, and reads what the executors
// count. Nothing here is on the path of a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "ffi/bind/handlers.h"
#include "ffi/bind/plain_data.h"
#include "ffi/bind/program_spec.h"
#include "ffi/bind/testing.h"
#include "ffi/core/placement.h"
#include "ffi/core/program.h"
#include "ffi/runtime/runtime.h"

namespace nb = nanobind;

namespace jaxgraph {
namespace {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

nb::dict Registration(Handler* instantiate, Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
  return stages;
}

nb::dict Registrations() {
  nb::dict platforms;
  nb::dict host;
  host["jaxgraph_execute"] = Registration(JaxgraphInstantiateHost, JaxgraphExecuteHost);
  host["jaxgraph_launch"] = Registration(JaxgraphInstantiateHost, JaxgraphLaunchHost);
  platforms["cpu"] = host;
  if (GetBuildInfo().cuda) {
    nb::dict cuda;
    cuda["jaxgraph_execute"] = Registration(JaxgraphInstantiateCuda, JaxgraphExecuteCuda);
    cuda["jaxgraph_launch"] = Registration(JaxgraphInstantiateCuda, JaxgraphLaunchCuda);
    platforms["CUDA"] = cuda;
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

uint64_t ArenaBytes(const nb::bytes& bytes) {
  Program program;
  Raise(Decode({bytes.c_str(), bytes.size()}, &program));
  return ArenaBytesOf(program);
}

nb::dict StatsOf(uint64_t function_id) {
  return ToDict(WithoutGil([&] { return Runtime::Get().Stats(function_id); }));
}

nb::list EventsOf(uint64_t function_id, uint64_t after) {
  return ToList(WithoutGil([&] { return Runtime::Get().Events(function_id, after); }));
}

nb::list ExecutionsOf(uint64_t function_id) {
  nb::list out;
  for (const DeviceExecution& e :
       WithoutGil([&] { return Runtime::Get().Executions(function_id); })) {
    nb::dict execution = ToDict(e.execution);
    execution["platform"] = std::string(e.device->name());
    execution["device"] = e.device->ordinal();
    out.append(execution);
  }
  return out;
}

void BeginTrace() {
  if (WithoutGil([] { return Runtime::Get().BeginTrace(); })) return;
  Raise(Status(Code::kInternal, "a trace is running already: there can be one in a process"));
}

nb::tuple EndTrace() {
  uint64_t dropped = 0;
  nb::list spans;
  for (const TraceSpan& s : WithoutGil([&] { return Runtime::Get().EndTrace(&dropped); })) {
    spans.append(nb::make_tuple(s.name, s.category, s.begin_s, s.end_s, s.track, s.device));
  }
  return nb::make_tuple(spans, dropped);
}

std::vector<std::string> WriteGraphs(uint64_t function_id, const std::string& folder) {
  std::vector<std::string> files;
  Raise(WithoutGil([&] { return Runtime::Get().WriteGraphs(function_id, folder, &files); }));
  return files;
}

Platform PlatformOf(const std::string& name) {
  if (name == "cpu") return Platform::kHost;
  if (name == "CUDA") return Platform::kCuda;
  throw nb::value_error(("unknown platform '" + name + "': 'cpu' or 'CUDA'").c_str());
}

nb::list VariantsOf(uint64_t function_id) {
  nb::list out;
  for (const DeviceVariant& v : WithoutGil([&] { return Runtime::Get().Variants(function_id); })) {
    nb::dict variant = ToDict(v.variant);
    variant["device"] = v.device->ordinal();
    out.append(variant);
  }
  return out;
}

nb::dict Preview(const std::string& platform, int ordinal, const nb::bytes& bytes) {
  Program program;
  Raise(Decode({bytes.c_str(), bytes.size()}, &program));
  const Platform p = PlatformOf(platform);
  VariantDescription description;
  Raise(WithoutGil([&] { return Runtime::Get().Preview(p, ordinal, program, &description); }));
  nb::dict variant = ToDict(description);
  variant["device"] = ordinal;
  return variant;
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
  m.def("registrations", Registrations, "FFI handlers: {platform: {target: {stage: capsule}}}.");
  m.def("encode_program", EncodeProgram, nb::arg("spec"),
        "A program's bytes from its spec; raises ValueError where the core would refuse it.");
  m.def("describe_program", Describe, nb::arg("program"), "A program's bytes as plain data.");
  m.def("arena_bytes", ArenaBytes, nb::arg("program"),
        "What a program needs of the arena: intermediates, and a slot for each base that may want "
        "one.");
  m.def("stats", StatsOf, nb::arg("function_id"), "Counters of a function (0: all).");
  m.def("events", EventsOf, nb::arg("function_id"), nb::arg("after") = 0,
        "Events of a function (0: all) newer than number `after`, oldest first.");
  m.def("last_event", LastEvent, "Number of the newest event of the process.");
  m.def("executions", ExecutionsOf, nb::arg("function_id"),
        "The last executions of a function's splits (0: of all), in order of their beginning.");
  m.def("begin_trace", BeginTrace, "Begins the process's trace; RuntimeError if there is one.");
  m.def("end_trace", EndTrace,
        "Ends it: ([(name, category, begin_s, end_s, track, device)], spans dropped).");
  m.def("write_graphs", WriteGraphs, nb::arg("function_id"), nb::arg("folder"),
        "Writes every captured chunk as a DOT file; returns the files' names.");
  m.def(
      "reset_stats", [](uint64_t id) { WithoutGil([&] { Runtime::Get().ResetStats(id); }); },
      nb::arg("function_id"), "Zeroes counters, forgets events; executables stay. 0: all.");
  m.def("variants", VariantsOf, nb::arg("function_id"),
        "What the ledgers hold of a function (0: of all): stages, chunks, places of bases.");
  m.def("preview", Preview, nb::arg("platform"), nb::arg("ordinal"), nb::arg("program"),
        "What a recording of a program would be on a device: as in `variants`. Runs nothing.");
  m.def(
      "clear", [](uint64_t id) { WithoutGil([&] { Runtime::Get().Clear(id); }); },
      nb::arg("function_id"), "Forgets executables and counters of a function (0: all).");
  m.def("reserve", Reserve, nb::arg("platform"), nb::arg("ordinal"), nb::arg("nbytes"),
        "Sizes a device's arena ahead of time.");
  m.def("build_info", BuildInfoDict, "What the native library was built with.");
  m.def("set_compiler_folders", SetCompilerFolders, nb::arg("folders"),
        "Where NVRTC is looked for first; counts until it is first needed.");
  m.def(
      "compiler_status", [] { return WithoutGil([] { return DescribeCompiler(); }); },
      "Whether CUDA kernels are compiled at run time, and what has been so far; one line.");

  nb::module_ testing = m.def_submodule("testing", "For this project's own tests and benchmarks.");
  DefineTesting(testing);
}
