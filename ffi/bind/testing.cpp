#include "ffi/bind/testing.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/bind/plain_data.h"
#include "ffi/core/executor.h"
#include "ffi/core/launch_plan.h"
#include "ffi/core/observation.h"
#include "ffi/core/placement.h"
#include "ffi/core/properties.h"
#include "ffi/device/fault_injecting.h"
#include "ffi/device/host/host_device.h"
#include "ffi/kernels/host/host_emitter.h"
#include "ffi/runtime/runtime.h"

namespace nb = nanobind;

namespace jaxgraph {
namespace {

using Addresses = std::vector<uintptr_t>;
using CallSet = std::pair<Addresses, Addresses>;  // operands, results

// A host device whose launches do nothing, so that what is left is the cost of deciding.
class DryDevice final : public HostDevice {
 public:
  Status LaunchKernel(const Launch&, Stream) override { return Status::Ok(); }
  Status LaunchGraph(ExecHandle, Stream) override { return Status::Ok(); }
};

std::shared_ptr<const Program> Load(const nb::bytes& bytes) {
  auto program = std::make_shared<Program>();
  Raise(Decode({bytes.c_str(), bytes.size()}, program.get()));
  return program;
}

std::vector<char*> Pointers(const Addresses& addresses) {
  std::vector<char*> pointers;
  for (uintptr_t a : addresses) pointers.push_back(reinterpret_cast<char*>(a));
  return pointers;
}

DeviceCall CallByName(const std::string& name) {
  for (size_t i = 0; i < kNumDeviceCalls; ++i) {
    if (name == NameOf(static_cast<DeviceCall>(i))) return static_cast<DeviceCall>(i);
  }
  throw nb::value_error(("no device call is called " + name).c_str());
}

// A program to run and a device to run it on.
struct LoadedProgram {
  std::shared_ptr<const Program> program;
};

// An executor of its own, on a host device of its own or on the process's CUDA device, with faults
// to inject and a clock to set.
class Machine {
 public:
  Machine(const std::string& platform, bool dry) {
    const Emitter* emitter = &HostEmitter();
    GraphDevice* inner = nullptr;
    if (platform == "cpu") {
      host_ = dry ? std::make_unique<DryDevice>() : std::make_unique<HostDevice>();
      inner = host_.get();
    } else {
      DeviceRuntime* runtime = nullptr;
      Raise(Runtime::Get().ForDevice(Platform::kCuda, 0, &runtime));
      inner = runtime->device.get();
      emitter = runtime->emitter;
      Raise(inner->CreateStream(&stream_));
    }
    device_ = std::make_unique<FaultInjecting>(inner);
    std::function<double()> clock;  // where the cost of deciding is measured: the real one
    if (!dry) clock = [this] { return now_; };
    executor_ = std::make_unique<Executor>(device_.get(), emitter, std::move(clock));
  }
  ~Machine() {
    executor_.reset();
    if (stream_ != nullptr) device_->DestroyStream(stream_);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void Execute(const LoadedProgram& loaded, const Addresses& operands, const Addresses& results) {
    Raise(WithoutGil([&] {
      return executor_->Execute(loaded.program, Pointers(operands), Pointers(results), stream_);
    }));
  }

  // Nanoseconds a call, over `calls` calls that take the sets of addresses in turn.
  double Time(const LoadedProgram& loaded, const std::vector<CallSet>& sets, int calls) {
    std::vector<std::pair<std::vector<char*>, std::vector<char*>>> pointers;
    for (const CallSet& set : sets)
      pointers.emplace_back(Pointers(set.first), Pointers(set.second));
    Status status;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls && status.ok(); ++i) {
      const auto& set = pointers[static_cast<size_t>(i) % pointers.size()];
      status = executor_->Execute(loaded.program, set.first, set.second, stream_);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    Raise(status);
    return took.count() / calls;
  }

  nb::dict Stats(uint64_t function_id) { return ToDict(executor_->Stats(function_id)); }
  nb::list Events() { return ToList(executor_->Events(0)); }
  nb::list Executions() {
    nb::list out;
    for (const Execution& e : executor_->Executions(0)) out.append(ToDict(e));
    return out;
  }
  void Clear(uint64_t function_id) { executor_->Clear(function_id); }
  void Reserve(uint64_t bytes) { Raise(executor_->Reserve(bytes)); }
  void Advance(double seconds) { now_ += seconds; }
  void Shuffle(uint64_t seed) {
    if (host_ != nullptr) host_->Shuffle(seed);
  }

  void Fail(const std::string& call, uint64_t skip, uint64_t times, bool out_of_memory) {
    device_->Fail(CallByName(call), skip, times,
                  out_of_memory ? Code::kOutOfMemory : Code::kDeviceError);
  }
  void Heal() { device_->Heal(); }
  uint64_t Calls(const std::string& call) { return device_->calls(CallByName(call)); }
  uint64_t Failures() { return device_->failures(); }

  uint64_t FreeMemory() {
    uint64_t bytes = 0;
    Raise(device_->FreeMemory(&bytes));
    return bytes;
  }

  // Destroys the executor. Returns what is then still alive, which should be nothing.
  nb::dict Close() {
    executor_.reset();
    const HandleCounts live = device_->live_handles();
    nb::dict out;
    out["graphs"] = live.graphs;
    out["execs"] = live.execs;
    out["arenas"] = live.arenas;
    out["streams"] = live.streams;
    out["misuses"] = host_ != nullptr ? host_->misuses() : 0;
    return out;
  }

 private:
  double now_ = 1000;
  std::unique_ptr<HostDevice> host_;
  std::unique_ptr<FaultInjecting> device_;
  std::unique_ptr<Executor> executor_;
  Stream stream_ = nullptr;
};

Snapshot SnapshotOf(const nb::bytes& bytes, const Addresses& bases) {
  Snapshot snapshot{Load(bytes), Pointers(bases)};
  if (snapshot.bases.size() != snapshot.program->bases.size()) {
    throw nb::value_error("one address for each base, the arena's first");
  }
  return snapshot;
}

nb::dict CompareBytes(const nb::bytes& before, const Addresses& before_bases,
                      const nb::bytes& after, const Addresses& after_bases) {
  const Snapshot a = SnapshotOf(before, before_bases);
  const Snapshot b = SnapshotOf(after, after_bases);
  const Diff diff = Compare(a, b);
  nb::list fields;
  for (const FieldChange& f : diff.fields) {
    fields.append(nb::make_tuple(f.node, NameOf(f.field), NameOf(f.change), f.source, f.tensor));
  }
  nb::dict out;
  out["change"] = NameOf(diff.change);
  out["nodes_compared"] = diff.nodes_compared;
  out["fields"] = fields;
  out["summary"] = Summarize(diff, a, b);
  return out;
}

// Nanoseconds of one comparison in which every address is another.
double TimeCompare(const nb::bytes& program, const Addresses& before, const Addresses& after,
                   int times) {
  const Snapshot a = SnapshotOf(program, before);
  const Snapshot b{a.program, Pointers(after)};
  const auto begin = std::chrono::steady_clock::now();
  uint64_t nodes = 0;
  for (int i = 0; i < times; ++i) nodes += Compare(a, b).nodes_compared;
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  return nodes > 0 ? took.count() / times : 0;
}

// Nanoseconds that a replay of so many chunks pays for being observed: a look at the clock when it
// begins (that at its end is needed for the limits on idle variants), the counters, the record.
double TimeObserving(const nb::bytes& bytes, int chunks, int times) {
  const std::shared_ptr<const Program> program = Load(bytes);
  const std::function<double()> clock = Trace::Now;
  FunctionStats stats;
  ExecutionLog log;
  bool traced = false;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) {
    const double start = clock();
    stats.Add(Counter::kUidHits);
    stats.RaiseArena(program->arena_bytes);
    uint64_t launches = 0;
    for (int c = 0; c < chunks; ++c) {
      traced |= Trace::Active();
      ++launches;
    }
    stats.Add(Counter::kReplays);
    NoteExecution(*program, &stats, &log,
                  {Outcome::kReplay, Counter::kReplays, 1, launches, start, start, start + 1e-6});
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  if (traced) throw std::runtime_error("a trace is running, which costs more");
  return took.count() / times;
}

// The launches of the program, cut into chunks, as the host's emitter makes them.
nb::list PlanOf(const nb::bytes& bytes) {
  const auto program = Load(bytes);
  const Placement placement(*program);
  std::vector<char*> addresses;
  for (size_t b = 0; b < program->bases.size(); ++b) {
    addresses.push_back(reinterpret_cast<char*>((b + 1) << 32));
  }
  LaunchPlan plan;
  Raise(Planner(HostEmitter(), *program, placement).Make({addresses, addresses}, &plan));
  nb::list chunks;
  for (const PlannedChunk& planned : plan.chunks) {
    nb::list launches;
    for (const Launch& launch : planned.launches) {
      launches.append(
          nb::make_tuple(launch.first_node, launch.node_count, launch.region, launch.branch));
    }
    nb::dict chunk;
    chunk["first_node"] = planned.first_node;
    chunk["node_count"] = planned.node_count;
    chunk["launches"] = launches;
    chunks.append(chunk);
  }
  return chunks;
}

// (address, bytes) of every arena of a device of the process.
std::vector<std::pair<uintptr_t, uint64_t>> ArenasOf(const std::string& platform, int ordinal) {
  DeviceRuntime* runtime = nullptr;
  const Platform p = platform == "cpu" ? Platform::kHost : Platform::kCuda;
  Raise(Runtime::Get().ForDevice(p, ordinal, &runtime));
  std::vector<std::pair<uintptr_t, uint64_t>> arenas;
  for (const ArenaExtent& a : WithoutGil([&] { return runtime->executor->Arenas(); })) {
    arenas.emplace_back(reinterpret_cast<uintptr_t>(a.base), a.capacity);
  }
  return arenas;
}

std::vector<std::string> DeviceCallNames() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kNumDeviceCalls; ++i) names.push_back(NameOf(static_cast<DeviceCall>(i)));
  return names;
}

}  // namespace

void DefineTesting(nb::module_& m) {
  nb::class_<LoadedProgram>(m, "LoadedProgram");
  m.def("load", [](const nb::bytes& bytes) { return LoadedProgram{Load(bytes)}; });
  nb::class_<Machine>(m, "Machine")
      .def(nb::init<const std::string&, bool>(), nb::arg("platform") = "cpu",
           nb::arg("dry") = false)
      .def("execute", &Machine::Execute, nb::arg("program"), nb::arg("operands"),
           nb::arg("results"))
      .def("time", &Machine::Time, nb::arg("program"), nb::arg("sets"), nb::arg("calls"))
      .def("stats", &Machine::Stats, nb::arg("function_id") = 0)
      .def("events", &Machine::Events)
      .def("executions", &Machine::Executions)
      .def("clear", &Machine::Clear, nb::arg("function_id") = 0)
      .def("reserve", &Machine::Reserve, nb::arg("nbytes"))
      .def("advance", &Machine::Advance, nb::arg("seconds"))
      .def("shuffle", &Machine::Shuffle, nb::arg("seed"))
      .def("fail", &Machine::Fail, nb::arg("call"), nb::arg("skip") = 0, nb::arg("times") = 1,
           nb::arg("out_of_memory") = false)
      .def("heal", &Machine::Heal)
      .def("calls", &Machine::Calls, nb::arg("call"))
      .def("failures", &Machine::Failures)
      .def("free_memory", &Machine::FreeMemory)
      .def("close", &Machine::Close);
  m.def("compare", CompareBytes, nb::arg("before"), nb::arg("before_bases"), nb::arg("after"),
        nb::arg("after_bases"));
  m.def("time_compare", TimeCompare, nb::arg("program"), nb::arg("before"), nb::arg("after"),
        nb::arg("times"));
  m.def("time_observing", TimeObserving, nb::arg("program"), nb::arg("chunks"), nb::arg("times"));
  m.def("plan", PlanOf, nb::arg("program"));
  m.def("arenas", ArenasOf, nb::arg("platform"), nb::arg("ordinal"));
  m.def("device_calls", DeviceCallNames);
}

}  // namespace jaxgraph
