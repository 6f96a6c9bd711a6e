#include "ffi/core/observation.h"

#include <algorithm>

#include "ffi/core/trace.h"

namespace jaxgraph {
namespace {

uint64_t Nanoseconds(double seconds) {
  return seconds > 0 ? static_cast<uint64_t>(seconds * 1e9) : 0;
}

Counter PhaseOf(Outcome outcome) {
  switch (outcome) {
    case Outcome::kEager:
      return Counter::kEagerNs;
    case Outcome::kCapture:
    case Outcome::kUpdate:
      return Counter::kRecordNs;
    case Outcome::kReplay:
      break;
  }
  return Counter::kReplayNs;
}

}  // namespace

std::string SplitName(const Program& program) {
  return program.function + " split " + std::to_string(program.split);
}

void NoteExecution(const Program& program, FunctionStats* stats, ExecutionLog* log,
                   const ExecutionResult& result) {
  const uint64_t decide = Nanoseconds(result.decided_s - result.start_s);
  const uint64_t run = Nanoseconds(result.end_s - result.decided_s);
  if (decide > 0) stats->Add(Counter::kDecideNs, decide);
  stats->Add(PhaseOf(result.outcome), run);
  // Once for all chunks: each would pay 5 ns.
  if (result.chunk_launches > 0) stats->Add(Counter::kChunkLaunches, result.chunk_launches);
  if (Trace::Active()) {
    Trace::AddOnHost(SplitName(program) + ": " + NameOf(result.outcome), "execution",
                     result.start_s, result.end_s);
    if (decide > 0) Trace::AddOnHost("decide", "phase", result.start_s, result.decided_s);
  }
  constexpr uint64_t kMost = UINT32_MAX;
  log->Push({result.start_s, static_cast<uint32_t>(std::min(decide, kMost)),
             static_cast<uint32_t>(std::min(run, kMost)), program.function_id, result.variant,
             program.split, result.outcome, result.counted});
}

}  // namespace jaxgraph
