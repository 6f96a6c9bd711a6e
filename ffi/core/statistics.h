// Statistics: the counters of each wrapped function, and the log of what happened.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/core/executor.h"
#include "ffi/core/program.h"

namespace jaxgraph {

enum class Counter : uint8_t {
  kExecutions,
  kEager,
  kCaptures,
  kReplays,
  kPatches,
  kExecUpdates,
  kInstantiations,
  kUidHits,
  kPropertyCompares,
  kNodesCompared,
  kResets,
  kEvictions,
  kFailures,
  kChunkLaunches,
};
constexpr size_t kNumCounters = static_cast<size_t>(Counter::kChunkLaunches) + 1;

// Lives as long as the executor, so that variants may point at it. Written and read by any thread.
class FunctionStats {
 public:
  void Add(Counter counter, uint64_t n = 1) {
    counters_[static_cast<size_t>(counter)].fetch_add(n, std::memory_order_relaxed);
  }
  void AddLiveExecs(int64_t n) { live_execs_.fetch_add(n, std::memory_order_relaxed); }
  void RaiseArena(uint64_t bytes);
  void Zero();  // not live_execs, which counts what is there
  void AddTo(Counters* sum) const;

 private:
  std::array<std::atomic<uint64_t>, kNumCounters> counters_{};
  std::atomic<int64_t> live_execs_{0};
  std::atomic<uint64_t> arena_bytes_{0};
};

class Statistics {
 public:
  Statistics(int device, std::function<double()> clock)
      : device_(device), clock_(std::move(clock)) {}

  FunctionStats* Of(uint64_t function_id);
  Counters Sum(uint64_t function_id) const;  // 0: over all functions
  void Clear(uint64_t function_id);          // counters and events; 0: all

  void Log(const Program& program, std::string what, std::string why);
  std::vector<Event> Events(uint64_t function_id) const;  // 0: all; oldest first

 private:
  const int device_;
  const std::function<double()> clock_;
  mutable std::mutex mutex_;  // guards what follows, for as long as a look-up takes
  std::map<uint64_t, std::unique_ptr<FunctionStats>> functions_;
  std::deque<Event> events_;
  uint64_t next_sequence_ = 0;
};

}  // namespace jaxgraph
