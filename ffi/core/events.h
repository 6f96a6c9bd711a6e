// Events: what happened and why, for people; and the log of executions. Both are bounded rings.
// A replay that is as the one before it writes one execution record and no event.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/core/counters.h"
#include "ffi/core/program.h"
#include "ffi/core/properties.h"

namespace jaxgraph {

struct Event {
  uint64_t sequence = 0;  // in the process; ascending, without gaps while none was dropped
  double time_s = 0;      // seconds since the epoch
  int device = 0;
  uint64_t function_id = 0;
  std::string function;
  uint32_t split = 0;
  Hash128 key{};
  uint64_t variant = 0;  // number of the variant in its executor; 0: none
  std::string what;      // "eager", "capture", "replay" (first of a run), "update", "instantiate",
                         // "reset", "evict", "failure", "placement"
  std::string why;       // one sentence; with the first node that differs where there is one
  std::vector<NodeChange> changes;  // the first few fields of nodes that differ
  uint64_t changes_total = 0;
};

// Number of the newest event of the process; 0: none yet.
uint64_t LastSequence();

class EventRing {
 public:
  static constexpr size_t kCapacity = 1024;

  EventRing(int device, std::function<double()> clock)
      : device_(device), clock_(std::move(clock)) {}

  // Takes what the event says; adds what, why, number and time. The lock is held for the move of
  // one event: everything that allocates is done before it.
  void Push(Event event, const Program& program);
  // Those newer than `after`, of one function (0: all); oldest first.
  std::vector<Event> Since(uint64_t function_id, uint64_t after) const;
  // Why a variant of the program's key was evicted last; empty: none is remembered.
  std::string LastEviction(const Program& program) const;
  void Clear(uint64_t function_id);  // 0: all

 private:
  const int device_;
  const std::function<double()> clock_;
  mutable std::mutex mutex_;
  std::deque<Event> events_;
};

// What an execution came to.
enum class Outcome : uint8_t { kEager, kCapture, kUpdate, kReplay };
const char* NameOf(Outcome outcome);

// One execution of a native split.
struct Execution {
  double start_s = 0;      // by the executor's steady clock
  uint32_t decide_ns = 0;  // until it was known what may be done
  uint32_t run_ns = 0;     // from then until everything was enqueued
  uint64_t function_id = 0;
  uint64_t variant = 0;  // 0: none
  uint32_t split = 0;
  Outcome outcome = Outcome::kEager;
  Counter counted = Counter::kEagerWarmup;  // as what: of an eager one, why
};

// The last executions of one context. Guarded by the context's lock, which its writer holds anyway.
class ExecutionLog {
 public:
  static constexpr size_t kCapacity = 4096;  // a power of two

  void Push(const Execution& execution) {
    if (ring_.empty()) ring_.resize(kCapacity);
    ring_[next_++ & (kCapacity - 1)] = execution;
  }
  void AppendTo(uint64_t function_id, std::vector<Execution>* out) const;  // oldest first; 0: all
  void Clear(uint64_t function_id);

 private:
  std::vector<Execution> ring_;
  uint64_t next_ = 0;
};

}  // namespace jaxgraph
