#include "ffi/core/trace.h"

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace jaxgraph {

std::atomic<bool> Trace::active_{false};
std::mutex Trace::mutex_;
std::vector<TraceSpan> Trace::spans_;
uint64_t Trace::dropped_ = 0;

double Trace::Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

bool Trace::Begin() {
  std::lock_guard lock(mutex_);
  if (active_) return false;
  spans_.clear();
  dropped_ = 0;
  active_ = true;
  return true;
}

std::vector<TraceSpan> Trace::End(uint64_t* dropped) {
  std::lock_guard lock(mutex_);
  active_ = false;
  *dropped = dropped_;
  return std::move(spans_);
}

void Trace::Add(TraceSpan span) {
  std::lock_guard lock(mutex_);
  if (!active_) return;
  if (spans_.size() < kMost) {
    spans_.push_back(std::move(span));
  } else {
    ++dropped_;
  }
}

void Trace::AddOnHost(std::string name, const char* category, double begin_s, double end_s) {
  if (!Active()) return;
  const uint64_t thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  Add({std::move(name), category, begin_s, end_s, thread, 0});
}

bool DeviceTimeline::BeginMark(Stream stream, Pending* pending) {
  if (!Trace::Active()) return false;
  {
    std::lock_guard lock(mutex_);
    if (without_marks_ || pending_.size() >= kMostMarks || !FindOrigin()) return false;
  }
  return device_->MakeMark(stream, &pending->begin).ok();
}

void DeviceTimeline::EndMark(const std::string& name, Stream stream, Pending pending) {
  if (!device_->MakeMark(stream, &pending.end).ok()) {
    device_->DestroyMark(pending.begin);
    return;
  }
  pending.name = name;
  pending.stream = stream;
  std::lock_guard lock(mutex_);
  pending_.push_back(std::move(pending));
}

// A mark whose time on the host's clock is known: it is waited for, on a stream where nothing else
// is, and the clock is read right after.
bool DeviceTimeline::FindOrigin() {
  if (origin_ != nullptr) return true;
  Stream stream = nullptr;
  float zero = 0;
  without_marks_ = true;
  if (!device_->CreateStream(&stream).ok()) return false;
  if (device_->MakeMark(stream, &origin_).ok()) {
    without_marks_ = !device_->MillisecondsBetween(origin_, origin_, &zero).ok();
    origin_s_ = Trace::Now();
  }
  device_->DestroyStream(stream);
  return !without_marks_;
}

void DeviceTimeline::Flush() {
  std::lock_guard lock(mutex_);
  for (const Pending& p : pending_) {
    float begin_ms = 0;
    float end_ms = 0;
    if (!device_->MillisecondsBetween(origin_, p.begin, &begin_ms).ok()) continue;
    if (!device_->MillisecondsBetween(origin_, p.end, &end_ms).ok()) continue;
    Trace::Add({p.name, "device", origin_s_ + begin_ms * 1e-3, origin_s_ + end_ms * 1e-3,
                reinterpret_cast<uint64_t>(p.stream), device_->ordinal()});
  }
  Discard();
}

void DeviceTimeline::Discard() {
  for (const Pending& p : pending_) {
    device_->DestroyMark(p.begin);
    device_->DestroyMark(p.end);
  }
  pending_.clear();
  // The clocks drift: the next trace finds an origin of its own.
  if (origin_ != nullptr) device_->DestroyMark(std::exchange(origin_, nullptr));
}

}  // namespace jaxgraph
