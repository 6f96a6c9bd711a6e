// Executor: runs programs on one device. Per call: key -> entry -> uid -> (properties) ->
// capturable? -> warmup state -> eager, capture, update, or replay.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ffi/core/counters.h"
#include "ffi/core/description.h"
#include "ffi/core/events.h"
#include "ffi/core/program.h"
#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

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

  // Sizes the arena for `bytes` ahead of time, that of the first call too, if there was none yet.
  // All contexts made later start at this size.
  Status Reserve(uint64_t bytes);
  // Destroys executables and variants of one function (0: all), zeroes its counters and forgets its
  // events.
  void Clear(uint64_t function_id);
  // The counters, events and executions alone; executables stay. 0: of all functions.
  void ResetStats(uint64_t function_id);
  // The arenas of all contexts, for tests that look at what lies between the intermediates.
  std::vector<ArenaExtent> Arenas() const;
  Counters Stats(uint64_t function_id) const;  // 0: sum over all functions
  // Those newer than number `after`; oldest first.
  std::vector<Event> Events(uint64_t function_id, uint64_t after = 0) const;
  // The last executions of every context, in order of their beginning.
  std::vector<Execution> Executions(uint64_t function_id) const;
  // The variants of a function (0: of all), by split and number.
  std::vector<VariantDescription> Variants(uint64_t function_id) const;
  // What a recording of the program on this device would be. Runs nothing.
  Status Preview(const Program& program, VariantDescription* description) const;
  // Ends the marks of a trace; waits for the device's work between them.
  void FlushTrace();
  // Writes every captured chunk of a function (0: all) as a DOT file into the folder.
  Status WriteGraphs(uint64_t function_id, const std::string& folder,
                     std::vector<std::string>* files) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace jaxgraph
