// What a call may take of the device's memory: its arena, and which executables are dropped so that
// they stay within bounds: idle ones, too many, too large.
#include <algorithm>
#include <mutex>

#include "ffi/core/executor_impl.h"

namespace jaxgraph {

// Gives the context's arena what a call needs, and what `Reserve` asked for ahead of time; where
// that much cannot be had, the call still gets its own.
Status Executor::Impl::ReserveArena(Context& context, uint64_t bytes, FunctionStats* stats) {
  const uint64_t ahead = reserved.load();
  if (ahead > bytes) {
    const Status status = context.Reserve(ahead, stats);
    if (status.code() != Code::kOutOfMemory) return status;
  }
  return context.Reserve(bytes, stats);
}

// Learns what a node of an executable costs, from copies of the first that was made.
void Executor::Impl::Calibrate(const Recording& recording) {
  constexpr uint64_t kNodes = 4096;  // enough for the allocator's granularity not to matter
  constexpr double kLeast = 64;
  constexpr double kMost = 16 * 1024;  // others on the device may have allocated meanwhile
  const RecordedChunk& chunk = recording.chunks.front();
  uint64_t before = 0;
  uint64_t after = 0;
  if (!chunk.captured() || !device->FreeMemory(&before).ok()) return;
  std::vector<ExecHandle> copies;
  for (uint64_t nodes = 0; nodes < kNodes; nodes += chunk.launches().size()) {
    ExecHandle exec = nullptr;
    if (!device->Instantiate(chunk.graph(), &exec).ok()) break;
    copies.push_back(exec);
  }
  const bool measured = device->FreeMemory(&after).ok() && !copies.empty() && after < before;
  for (ExecHandle exec : copies) device->DestroyExec(exec);
  if (!measured) return;
  const double nodes = static_cast<double>(copies.size() * chunk.launches().size());
  bytes_per_node = std::clamp(static_cast<double>(before - after) / nodes, kLeast, kMost);
}

void Executor::Impl::Drop(Context& context, const Variant* variant, Counter cause,
                          const std::string& why) {
  variant->stats->Add(cause);
  Log(*variant, "evict", why);
  context.ledger.DropIf([&](const Variant& v) { return &v == variant; });
}

// Drops the variants that nobody called for a while. Each program looks as often as its own options
// say, whoever looked last. Contexts in use by other threads are left for another time; nothing
// waits here.
void Executor::Impl::Sweep(Context& context, const ExecOptions& options, double now) {
  double last = last_sweep_s.load();
  if (now < last + options.sweep_ms * 1e-3) return;
  if (!last_sweep_s.compare_exchange_strong(last, now)) return;
  for (Context* other : contexts.All()) {
    std::unique_lock lock(other->mutex, std::defer_lock);
    if (other != &context && !lock.try_lock()) continue;
    other->ledger.DropIf([&](const Variant& v) {
      const uint32_t limit_ms = v.program().options.idle_ms;
      if (limit_ms == 0 || now - v.last_used_s < limit_ms * 1e-3) return false;
      v.stats->Add(Counter::kEvictionsIdle);
      Log(v, "evict",
          "idle for " + std::to_string(static_cast<int64_t>(now - v.last_used_s)) + " s");
      return true;
    });
  }
}

// Keeps the number of executables and their memory within bounds; never drops the present variant.
void Executor::Impl::Trim(Context& context, const Variant* present) {
  const ExecOptions& options = present->program().options;
  if (options.max_executables == 0 && options.memory_budget == 0) return;
  if (options.memory_budget > 0) {
    std::call_once(calibrated, [&] { Calibrate(present->recording); });
  }
  struct Candidate {
    Context* context;
    const Variant* variant;
  };
  std::vector<std::unique_lock<std::mutex>> locks;
  std::vector<Candidate> candidates;
  uint64_t executables = present->recording.chunks.size();
  uint64_t nodes = present->recording.nodes;
  for (Context* other : contexts.All()) {
    std::unique_lock lock(other->mutex, std::defer_lock);
    if (other != &context && !lock.try_lock()) continue;
    locks.push_back(std::move(lock));
    other->ledger.ForEach([&](const Entry&, const Variant& v) {
      if (&v == present || v.recording.chunks.empty()) return;
      candidates.push_back({other, &v});
      executables += v.recording.chunks.size();
      nodes += v.recording.nodes;
    });
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.variant->last_call < b.variant->last_call;
  });
  for (const Candidate& c : candidates) {
    const bool many = options.max_executables > 0 && executables > options.max_executables;
    const bool large = options.memory_budget > 0 && MemoryOf(nodes) > options.memory_budget;
    if (!many && !large) return;
    executables -= c.variant->recording.chunks.size();
    nodes -= c.variant->recording.nodes;
    Drop(*c.context, c.variant, many ? Counter::kEvictionsCount : Counter::kEvictionsMemory,
         many ? "more than " + std::to_string(options.max_executables) + " executables"
              : "the memory budget of " + std::to_string(options.memory_budget) + " bytes");
  }
}

}  // namespace jaxgraph
