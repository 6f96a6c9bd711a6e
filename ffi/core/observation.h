// What one execution leaves behind for people: its times among the counters, a record in the log,
// and spans of a trace, if there is one. Every call comes through here, replays too, so it takes
// no lock and allocates nothing (observation_test.cpp counts; benchmarks/identity.py times it).
#pragma once

#include <cstdint>
#include <string>

#include "ffi/core/events.h"
#include "ffi/core/program.h"
#include "ffi/core/statistics.h"

namespace jaxgraph {

// For people: "model.decode_step split 0".
std::string SplitName(const Program& program);

struct ExecutionResult {
  Outcome outcome = Outcome::kEager;
  Counter counted = Counter::kEagerWarmup;
  uint64_t variant = 0;
  uint64_t chunk_launches = 0;
  double start_s = 0;    // seconds by the executor's steady clock
  double decided_s = 0;  // when it was known what may run; start_s where the uid was the same
  double end_s = 0;      // when everything was enqueued
};

// The log's owner holds its lock.
void NoteExecution(const Program& program, FunctionStats* stats, ExecutionLog* log,
                   const ExecutionResult& result);

}  // namespace jaxgraph
