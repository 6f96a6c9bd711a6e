// Executor: runs programs on one device. Per call: key -> entry -> uid -> (properties) ->
// capturable? -> warmup state -> eager, capture, update, or replay.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ffi/core/program.h"
#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// Counters of one wrapped function (function_id) over all devices. Exact and monotone until clear.
struct Counters {
  uint64_t executions = 0;      // of native splits
  uint64_t eager = 0;           // executions that launched kernels one by one
  uint64_t captures = 0;        // executions that captured (and ran what they captured)
  uint64_t replays = 0;         // executions that launched existing executables, patched or not
  uint64_t patches = 0;         // nodes whose parameters were set in an executable
  uint64_t exec_updates = 0;    // chunks updated in place
  uint64_t instantiations = 0;  // chunks instantiated
  uint64_t uid_hits = 0;
  uint64_t property_compares = 0;
  uint64_t nodes_compared = 0;
  uint64_t resets = 0;     // variants sent back to warmup
  uint64_t evictions = 0;  // variants dropped
  uint64_t failures = 0;   // device calls that failed and were survived
  uint64_t chunk_launches = 0;
  uint64_t live_execs = 0;   // gauge
  uint64_t arena_bytes = 0;  // gauge: largest arena that ran this function
};

// What happened in one execution, for people: bounded ring, oldest dropped.
struct Event {
  uint64_t sequence = 0;
  double time_s = 0;  // seconds since the epoch
  int device = 0;
  uint64_t function_id = 0;
  uint32_t split = 0;
  std::string what;  // "eager", "capture", "replay" (first of a run), "update", "instantiate",
                     // "reset", "evict", "failure", "placement"
  std::string why;   // one sentence; with the node diff where one exists
};

// Where an arena lies.
struct ArenaExtent {
  void* base = nullptr;
  uint64_t capacity = 0;
};

class Executor {
 public:
  // The device and emitter must outlive the executor. `clock` gives seconds (injectable).
  Executor(GraphDevice* device, const Emitter* emitter, std::function<double()> clock = {});
  ~Executor();

  // Runs `program` in stream order on `stream`. `operands` and `results` are the call's addresses
  // in the order of the bases' indices. Thread-safe. `program` is shared because executables made
  // from it may outlive the call.
  Status Execute(const std::shared_ptr<const Program>& program, const std::vector<char*>& operands,
                 const std::vector<char*>& results, Stream stream);

  // Sizes the arena for `bytes` ahead of time (all contexts made later start at this size).
  Status Reserve(uint64_t bytes);
  // Destroys executables and variants of one function (0: all) and zeroes its counters.
  void Clear(uint64_t function_id);
  // The arenas of all contexts, for tests that look at what lies between the intermediates.
  std::vector<ArenaExtent> Arenas() const;
  Counters Stats(uint64_t function_id) const;  // 0: sum over all functions
  std::vector<Event> Events(uint64_t function_id) const;
  // Per split of a function: chunks, launches after fusion, placements; text lines for explain.
  std::vector<std::string> Describe(uint64_t function_id) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace jaxgraph
