#include "ffi/core/context.h"

#include <algorithm>
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

ContextPool::Lease::Lease(ContextPool* pool, Context* context)
    : pool_(pool), context_(context), lock_(context->mutex) {}

ContextPool::Lease::~Lease() {
  lock_.unlock();
  pool_->Return(context_);
}

ContextPool::Lease ContextPool::Acquire(Stream stream) { return Lease(this, Find(stream)); }

Context* ContextPool::Find(Stream stream) {
  const bool pooled = device_->streams_are_transient();
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    if (pooled ? !slot.leased : slot.context->stream == stream) {
      slot.leased = pooled;
      return slot.context.get();
    }
  }
  slots_.push_back({std::make_unique<Context>(device_, pooled ? nullptr : stream), pooled});
  return slots_.back().context.get();
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
