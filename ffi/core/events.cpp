#include "ffi/core/events.h"

#include <algorithm>
#include <utility>

namespace jaxgraph {
namespace {

std::atomic<uint64_t> last_sequence{0};

}  // namespace

uint64_t LastSequence() { return last_sequence.load(std::memory_order_acquire); }

void EventRing::Push(Event event, const Program& program) {
  event.time_s = clock_();
  event.device = device_;
  event.function_id = program.function_id;
  event.function = program.function;
  event.split = program.split;
  event.key = program.key;
  std::lock_guard lock(mutex_);
  // Under the lock, so that the ring's numbers ascend and a reader who asks for those after n can
  // never miss one that comes later with a smaller number.
  event.sequence = last_sequence.fetch_add(1, std::memory_order_acq_rel) + 1;
  events_.push_back(std::move(event));
  if (events_.size() > kCapacity) events_.pop_front();
}

std::vector<Event> EventRing::Since(uint64_t function_id, uint64_t after) const {
  std::lock_guard lock(mutex_);
  std::vector<Event> found;
  for (const Event& event : events_) {
    if (event.sequence <= after) continue;
    if (function_id == 0 || event.function_id == function_id) found.push_back(event);
  }
  return found;
}

std::string EventRing::LastEviction(const Program& program) const {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(events_.rbegin(), events_.rend(), [&](const Event& e) {
    return e.what == "evict" && e.function_id == program.function_id && e.key == program.key;
  });
  return found == events_.rend() ? std::string() : found->why;
}

void EventRing::Clear(uint64_t function_id) {
  std::lock_guard lock(mutex_);
  const auto cleared = [&](const Event& e) {
    return function_id == 0 || e.function_id == function_id;
  };
  events_.erase(std::remove_if(events_.begin(), events_.end(), cleared), events_.end());
}

const char* NameOf(Outcome outcome) {
  constexpr const char* names[] = {"eager", "capture", "update", "replay"};
  return names[static_cast<int>(outcome)];
}

void ExecutionLog::AppendTo(uint64_t function_id, std::vector<Execution>* out) const {
  const uint64_t held = std::min<uint64_t>(next_, kCapacity);
  for (uint64_t i = next_ - held; i < next_; ++i) {
    const Execution& e = ring_[i & (kCapacity - 1)];
    if (e.function_id != 0 && (function_id == 0 || e.function_id == function_id)) out->push_back(e);
  }
}

void ExecutionLog::Clear(uint64_t function_id) {
  for (Execution& e : ring_) {
    if (function_id == 0 || e.function_id == function_id) e.function_id = 0;  // nobody's
  }
}

}  // namespace jaxgraph
