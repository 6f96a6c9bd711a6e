#include "ffi/core/context.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace jaxgraph {

Context::~Context() {
  ledger.Clear(0);
  if (capture_stream != nullptr) device_->DestroyStream(capture_stream);
  if (arena.base != nullptr) device_->ArenaRelease(stream, arena.base);
}

Status Context::Reserve(uint64_t bytes, FunctionStats* stats) {
  // Never empty, so that it has an address for bases without bytes.
  bytes = std::max<uint64_t>(bytes, kArenaAlignment);
  if (bytes <= arena.capacity) return Status::Ok();
  bool moved = false;
  const Arena before = arena;
  const Status status = device_->ArenaReserve(stream, bytes, &arena.base, &arena.capacity, &moved);
  if (!status.ok()) {
    return Status(status.code(), "the arena cannot grow from " + std::to_string(arena.capacity) +
                                     " to " + std::to_string(bytes) +
                                     " bytes: " + status.message());
  }
  if (moved) ++arena.generation;
  if (before.base != nullptr && stats != nullptr) {
    stats->Add(!moved                              ? Counter::kArenaGrowths
               : before.capacity == arena.capacity ? Counter::kArenaMovesSameSize
                                                   : Counter::kArenaMovesResized);
  }
  return Status::Ok();
}

ContextPool::Lease::Lease(ContextPool* pool, Context* context, Stream stream)
    : pool_(pool), context_(context), lock_(context->mutex) {
  context->stream = stream;
}

ContextPool::Lease::~Lease() {
  lock_.unlock();
  pool_->Return(context_);
}

ContextPool::Lease ContextPool::Acquire(Stream stream) {
  return Lease(this, Find(stream), device_->streams_are_transient() ? nullptr : stream);
}

void ContextPool::MakeFirst() {
  std::lock_guard lock(mutex_);
  if (slots_.empty()) slots_.emplace_back().context = std::make_unique<Context>(device_);
}

Context* ContextPool::Find(Stream stream) {
  const bool pooled = device_->streams_are_transient();
  std::lock_guard lock(mutex_);
  const auto is_ours = [&](const Slot& slot) {
    return pooled ? !slot.leased : slot.claimed && slot.stream == stream;
  };
  auto found = std::find_if(slots_.begin(), slots_.end(), is_ours);
  if (found == slots_.end()) {
    found = std::find_if(slots_.begin(), slots_.end(),
                         [&](const Slot& slot) { return !pooled && !slot.claimed; });
  }
  if (found == slots_.end()) {
    slots_.emplace_back().context = std::make_unique<Context>(device_);
    found = std::prev(slots_.end());
  }
  found->stream = stream;
  found->claimed = true;
  found->leased = pooled;
  return found->context.get();
}

void ContextPool::Return(const Context* context) {
  if (!device_->streams_are_transient()) return;
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    if (slot.context.get() == context) slot.leased = false;
  }
}

std::vector<Context*> ContextPool::All() const {
  std::lock_guard lock(mutex_);
  std::vector<Context*> all;
  for (const Slot& slot : slots_) all.push_back(slot.context.get());
  return all;
}

void ContextPool::DestroyAll() {
  std::lock_guard lock(mutex_);
  slots_.clear();
}

}  // namespace jaxgraph
