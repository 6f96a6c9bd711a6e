#include "ffi/core/statistics.h"

#include <algorithm>

namespace jaxgraph {
namespace {

constexpr size_t kMaxEvents = 1024;

}  // namespace

void FunctionStats::RaiseArena(uint64_t bytes) {
  uint64_t present = arena_bytes_.load(std::memory_order_relaxed);
  while (present < bytes &&
         !arena_bytes_.compare_exchange_weak(present, bytes, std::memory_order_relaxed)) {
  }
}

void FunctionStats::Zero() {
  for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
  arena_bytes_.store(0, std::memory_order_relaxed);
}

void FunctionStats::AddTo(Counters* sum) const {
  const auto value = [&](Counter c) {
    return counters_[static_cast<size_t>(c)].load(std::memory_order_relaxed);
  };
  sum->executions += value(Counter::kExecutions);
  sum->eager += value(Counter::kEager);
  sum->captures += value(Counter::kCaptures);
  sum->replays += value(Counter::kReplays);
  sum->patches += value(Counter::kPatches);
  sum->exec_updates += value(Counter::kExecUpdates);
  sum->instantiations += value(Counter::kInstantiations);
  sum->uid_hits += value(Counter::kUidHits);
  sum->property_compares += value(Counter::kPropertyCompares);
  sum->nodes_compared += value(Counter::kNodesCompared);
  sum->resets += value(Counter::kResets);
  sum->evictions += value(Counter::kEvictions);
  sum->failures += value(Counter::kFailures);
  sum->chunk_launches += value(Counter::kChunkLaunches);
  sum->live_execs += static_cast<uint64_t>(live_execs_.load(std::memory_order_relaxed));
  sum->arena_bytes = std::max(sum->arena_bytes, arena_bytes_.load(std::memory_order_relaxed));
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

void Statistics::Clear(uint64_t function_id) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, stats] : functions_) {
    if (function_id == 0 || id == function_id) stats->Zero();
  }
  const auto cleared = [&](const Event& e) {
    return function_id == 0 || e.function_id == function_id;
  };
  events_.erase(std::remove_if(events_.begin(), events_.end(), cleared), events_.end());
}

void Statistics::Log(const Program& program, std::string what, std::string why) {
  const double now = clock_();
  std::lock_guard lock(mutex_);
  Event event;
  event.sequence = next_sequence_++;
  event.time_s = now;
  event.device = device_;
  event.function_id = program.function_id;
  event.split = program.split;
  event.what = std::move(what);
  event.why = std::move(why);
  events_.push_back(std::move(event));
  if (events_.size() > kMaxEvents) events_.pop_front();
}

std::vector<Event> Statistics::Events(uint64_t function_id) const {
  std::lock_guard lock(mutex_);
  std::vector<Event> found;
  for (const Event& event : events_) {
    if (function_id == 0 || event.function_id == function_id) found.push_back(event);
  }
  return found;
}

}  // namespace jaxgraph
