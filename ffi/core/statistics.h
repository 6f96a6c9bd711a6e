// Statistics: the counters of each wrapped function in one context.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ffi/core/counters.h"
#include "ffi/core/status.h"
#include "ffi/core/trace.h"

namespace jaxgraph {

// Lives as long as its context, so that variants may point at it. Read by any thread, but written
// only by whoever holds the context's lock: so nothing has to be added to atomically, which every
// replay would pay for several times.
class FunctionStats {
 public:
  void Add(Counter counter, uint64_t n = 1) {
    Increase(&counters_[static_cast<size_t>(counter)], n);
  }
  // Counts a device call that failed, if it is one to be survived.
  void AddFailure(Counter counter, const Status& status) {
    if (status.code() != Code::kContextPoisoned) Add(counter);
  }
  void AddLive(int64_t execs, int64_t nodes) {
    Increase(&live_execs_, execs);
    Increase(&live_nodes_, nodes);
  }
  void RaiseArena(uint64_t bytes);
  void Zero();  // not the gauges, which say what is there
  void AddTo(Counters* sum) const;

 private:
  template <typename T>
  static void Increase(std::atomic<T>* number, T by) {
    number->store(number->load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }

  std::array<std::atomic<uint64_t>, kNumCounters> counters_{};
  std::atomic<int64_t> live_execs_{0};
  std::atomic<int64_t> live_nodes_{0};
  std::atomic<uint64_t> arena_bytes_{0};
};

// Adds the nanoseconds that it lives to a counter, and is a span of a trace.
class PhaseTimer {
 public:
  PhaseTimer(FunctionStats* stats, Counter counter) : stats_(stats), counter_(counter) {}
  ~PhaseTimer() {
    const double end = Trace::Now();
    stats_->Add(counter_, static_cast<uint64_t>((end - begin_) * 1e9));
    if (Trace::Active()) Trace::AddOnHost(PhaseName(counter_), "phase", begin_, end);
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  FunctionStats* const stats_;
  const Counter counter_;
  const double begin_ = Trace::Now();
};

// What is said of FunctionStats holds for Zero, too.
class Statistics {
 public:
  FunctionStats* Of(uint64_t function_id);
  Counters Sum(uint64_t function_id) const;  // 0: over all functions
  void Zero(uint64_t function_id);           // 0: all

 private:
  mutable std::mutex mutex_;  // guards the map, for as long as a look-up takes
  std::map<uint64_t, std::unique_ptr<FunctionStats>> functions_;
};

}  // namespace jaxgraph
