#include "ffi/runtime/worker_team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

namespace jaxgraph {
namespace {

constexpr auto kIdle = std::chrono::microseconds(100);  // a worker without work leaves after this
constexpr int kSpinsPerCheck = 64;

// The ticket: generation (one a Run) in the upper half, the next item to begin in the lower.
// kNoItems there means that no Run is open.
constexpr uint64_t kNoItems = 0xffffffffu;
constexpr uint64_t Ticket(uint64_t generation, uint64_t next) { return generation << 32 | next; }
constexpr uint64_t NextOf(uint64_t ticket) { return ticket & 0xffffffffu; }

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

struct WorkerTeam::Shared {
  std::atomic<uint64_t> ticket{Ticket(0, kNoItems)};
  std::atomic<bool> ended{false};
  std::atomic<int> workers{0};
  std::atomic<int> done{0};

  // The open Run. Written while the ticket says kNoItems, with release, and read with acquire: a
  // worker that sees a value of the next Run also sees the ticket closed in between, so that its
  // exchange on the old ticket fails.
  std::atomic<int> n{0};
  std::atomic<void (*)(void*, int)> fn{nullptr};
  std::atomic<void*> ctx{nullptr};

  // Begins and finishes one item; false if there is none to begin.
  bool Step() {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      const int count = n.load(std::memory_order_acquire);
      auto* const function = fn.load(std::memory_order_acquire);
      void* const argument = ctx.load(std::memory_order_acquire);
      if (NextOf(seen) >= static_cast<uint64_t>(count)) return false;
      if (ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
        function(argument, static_cast<int>(NextOf(seen)));
        done.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void Work() {
    auto idle_since = std::chrono::steady_clock::now();
    while (!ended.load(std::memory_order_acquire)) {
      if (Step()) {
        idle_since = std::chrono::steady_clock::now();
        continue;
      }
      for (int i = 0; i < kSpinsPerCheck; ++i) Pause();
      if (std::chrono::steady_clock::now() - idle_since > kIdle) break;
    }
    workers.fetch_sub(1, std::memory_order_release);
  }
};

WorkerTeam::WorkerTeam(int num_threads, Schedule schedule)
    : num_threads_(std::max(1, num_threads)),
      schedule_(std::move(schedule)),
      shared_(std::make_shared<Shared>()) {}

WorkerTeam::~WorkerTeam() { shared_->ended.store(true, std::memory_order_release); }

void WorkerTeam::StartWorkers(int wanted) {
  for (int have = shared_->workers.load(std::memory_order_acquire); have < wanted; ++have) {
    shared_->workers.fetch_add(1, std::memory_order_relaxed);
    schedule_([shared = shared_] { shared->Work(); });
  }
}

void WorkerTeam::Run(int n, void (*fn)(void* ctx, int i), void* ctx) {
  const int helpers = std::min(num_threads_, n) - 1;
  if (helpers <= 0) {
    for (int i = 0; i < n; ++i) fn(ctx, i);
    return;
  }
  Shared& shared = *shared_;
  const uint64_t generation = (shared.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  shared.done.store(0, std::memory_order_relaxed);
  shared.n.store(n, std::memory_order_release);
  shared.fn.store(fn, std::memory_order_release);
  shared.ctx.store(ctx, std::memory_order_release);
  shared.ticket.store(Ticket(generation, 0), std::memory_order_release);
  StartWorkers(helpers);

  while (shared.Step()) {
  }
  // Others may still be at their items, which are as long as ours were: spin first, then make room.
  for (int spins = 0; shared.done.load(std::memory_order_acquire) < n; ++spins) {
    if (spins < 2000) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  shared.ticket.store(Ticket(generation, kNoItems), std::memory_order_release);
}

}  // namespace jaxgraph
