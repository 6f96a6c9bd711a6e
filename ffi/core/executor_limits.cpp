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

// Learns what a node of an executable costs, from copies of one of the first that are made. False
// if there was nothing to learn from.
bool Executor::Impl::Calibrate(const Recording& recording) {
  constexpr uint64_t kNodes = 4096;  // enough for the allocator's granularity not to matter
  constexpr double kLeast = 64;
  constexpr double kMost = 16 * 1024;  // others on the device may have allocated meanwhile
  const auto captured = std::find_if(recording.chunks.begin(), recording.chunks.end(),
                                     [](const RecordedChunk& c) { return c.captured(); });
  uint64_t before = 0;
  uint64_t after = 0;
  if (captured == recording.chunks.end() || !device->FreeMemory(&before).ok()) return false;
  const RecordedChunk& chunk = *captured;
  std::vector<ExecHandle> copies;
  for (uint64_t nodes = 0; nodes < kNodes; nodes += chunk.launches().size()) {
    ExecHandle exec = nullptr;
    if (!device->Instantiate(chunk.graph(), &exec).ok()) break;
    copies.push_back(exec);
  }
  const bool asked = device->FreeMemory(&after).ok();
  for (ExecHandle exec : copies) device->DestroyExec(exec);
  if (!asked || copies.empty()) return false;
  if (after >= before) return true;  // somebody gave memory back meanwhile; the default will do
  const double nodes = static_cast<double>(copies.size() * chunk.launches().size());
  bytes_per_node = std::clamp(static_cast<double>(before - after) / nodes, kLeast, kMost);
  return true;
}

// Is there no room for the program's executables, and does it wait until there is?
bool Executor::Impl::WaitsForRoom(const Program& program, std::string* why) {
  const ExecOptions& options = program.options;
  const auto is_there = [&](const Room& room) {
    const Counters all = SumOf(0);
    const uint64_t executables = all.live_execs + room.executables;
    const uint64_t bytes = MemoryOf(all.live_exec_nodes + room.nodes);
    return (options.max_executables == 0 || executables <= options.max_executables) &&
           (options.memory_budget == 0 || bytes <= options.memory_budget);
  };
  return crowding.Waits(program, is_there, why);
}

void Executor::Impl::PushOut(Context& context, const Variant* variant, Counter cause,
                             const std::string& why) {
  variant->stats->Add(cause);
  Log(*variant, "evict", why);
  const Recording& recording = variant->recording;
  crowding.NotePushedOut(variant->program(), {recording.Executables(), recording.nodes},
                         variant->replays);
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

// Keeps the number of executables and their memory within bounds. Never drops the present variant,
// but its recording, if that alone is out of bounds.
void Executor::Impl::Trim(Context& context, Variant* present) {
  const ExecOptions& options = present->program().options;
  if (options.max_executables == 0 && options.memory_budget == 0) return;
  if (options.memory_budget > 0 && !calibrated) {
    std::unique_lock lock(calibration, std::try_to_lock);
    if (lock && !calibrated) calibrated = Calibrate(present->recording);
  }
  struct Candidate {
    Context* context;
    const Variant* variant;
  };
  std::vector<std::unique_lock<std::mutex>> locks;
  std::vector<Candidate> candidates;
  const Room alone{present->recording.Executables(), present->recording.nodes};
  Room all = alone;
  for (Context* other : contexts.All()) {
    std::unique_lock lock(other->mutex, std::defer_lock);
    if (other != &context && !lock.try_lock()) continue;
    locks.push_back(std::move(lock));
    other->ledger.ForEach([&](const Entry&, const Variant& v) {
      if (&v == present || v.recording.chunks.empty()) return;
      candidates.push_back({other, &v});
      all.executables += v.recording.Executables();
      all.nodes += v.recording.nodes;
    });
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.variant->last_call < b.variant->last_call;
  });
  const auto many = [&] {
    return options.max_executables > 0 && all.executables > options.max_executables;
  };
  const auto large = [&] {
    return options.memory_budget > 0 && MemoryOf(all.nodes) > options.memory_budget;
  };
  const auto cause = [&] { return many() ? Counter::kEvictionsCount : Counter::kEvictionsMemory; };
  const auto why = [&] {
    return many() ? "more than " + std::to_string(options.max_executables) + " executables"
                  : "the memory budget of " + std::to_string(options.memory_budget) + " bytes";
  };
  for (const Candidate& c : candidates) {
    if (!many() && !large()) return;
    const Room room{c.variant->recording.Executables(), c.variant->recording.nodes};
    PushOut(*c.context, c.variant, cause(), why());
    all.executables -= room.executables;
    all.nodes -= room.nodes;
  }
  if (!many() && !large()) return;
  present->stats->Add(cause());
  Log(*present, "evict", "alone it is more than allowed: " + why());
  crowding.NoteTooLarge(present->program(), alone);
  present->recording.Clear();
  present->stage = Stage::kWarming;
}

}  // namespace jaxgraph
