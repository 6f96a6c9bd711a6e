#include "ffi/core/statistics.h"

#include <algorithm>

namespace jaxgraph {

const char* NameOf(Counter counter) {
  constexpr const char* names[] = {
#define JAXGRAPH_NAME(enumerator, name) #name,
      JAXGRAPH_COUNTERS(JAXGRAPH_NAME)
#undef JAXGRAPH_NAME
  };
  return names[static_cast<size_t>(counter)];
}

std::string PhaseName(Counter counter) {
  const std::string name = NameOf(counter);
  return name.substr(0, name.rfind("_ns"));
}

void Counters::Add(const Counters& other) {
#define JAXGRAPH_ADD(enumerator, name) name += other.name;
  JAXGRAPH_COUNTERS(JAXGRAPH_ADD)
#undef JAXGRAPH_ADD
  executions += other.executions;
  eager += other.eager;
  warmups += other.warmups;
  resets += other.resets;
  evictions += other.evictions;
  failures += other.failures;
  live_execs += other.live_execs;
  live_exec_nodes += other.live_exec_nodes;
  exec_bytes += other.exec_bytes;
  arena_bytes = std::max(arena_bytes, other.arena_bytes);
}

void FunctionStats::RaiseArena(uint64_t bytes) {
  if (bytes > arena_bytes_.load(std::memory_order_relaxed)) {
    arena_bytes_.store(bytes, std::memory_order_relaxed);
  }
}

void FunctionStats::Zero() {
  for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
  arena_bytes_.store(0, std::memory_order_relaxed);
}

void FunctionStats::AddTo(Counters* sum) const {
  Counters now;
#define JAXGRAPH_LOAD(enumerator, name) \
  now.name = counters_[static_cast<size_t>(Counter::enumerator)].load(std::memory_order_relaxed);
  JAXGRAPH_COUNTERS(JAXGRAPH_LOAD)
#undef JAXGRAPH_LOAD
  now.eager = now.eager_warmup + now.eager_not_capturable + now.eager_failures + now.eager_memory +
              now.eager_crowded + now.eager_outside + now.eager_recovered;
  now.executions = now.eager + now.captures + now.replays;
  now.warmups = now.warmups_first + now.warmups_variant;
  now.resets = now.resets_address + now.resets_arena + now.resets_failure;
  now.evictions =
      now.evictions_variants + now.evictions_idle + now.evictions_count + now.evictions_memory;
  now.failures = now.failures_query + now.failures_fork + now.failures_capture +
                 now.failures_instantiate + now.failures_update + now.failures_patch +
                 now.failures_launch;
  now.live_execs = static_cast<uint64_t>(live_execs_.load(std::memory_order_relaxed));
  now.live_exec_nodes = static_cast<uint64_t>(live_nodes_.load(std::memory_order_relaxed));
  now.arena_bytes = arena_bytes_.load(std::memory_order_relaxed);
  sum->Add(now);
}

FunctionStats* Statistics::Of(uint64_t function_id) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<FunctionStats>& stats = functions_[function_id];
  if (stats == nullptr) stats = std::make_unique<FunctionStats>();
  return stats.get();
}

Counters Statistics::Sum(uint64_t function_id) const {
  std::lock_guard lock(mutex_);
  Counters sum;
  for (const auto& [id, stats] : functions_) {
    if (function_id == 0 || id == function_id) stats->AddTo(&sum);
  }
  return sum;
}

void Statistics::Zero(uint64_t function_id) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, stats] : functions_) {
    if (function_id == 0 || id == function_id) stats->Zero();
  }
}

}  // namespace jaxgraph
