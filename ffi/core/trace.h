// Trace: spans of time, gathered while somebody asked for them. Off, it costs one relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"

namespace jaxgraph {

struct TraceSpan {
  std::string name;
  std::string category;  // "execution", "phase", "launch": on the host; "device": on the GPU
  double begin_s = 0;    // by the steady clock
  double end_s = 0;
  uint64_t track = 0;  // host: thread; device: stream
  int device = 0;      // ordinal, for those of category "device"
};

// Of the process.
class Trace {
 public:
  static constexpr size_t kMost = 1u << 20;  // spans; what comes later is counted only

  static bool Active() { return active_.load(std::memory_order_relaxed); }
  static bool Begin();  // false: there is one already
  static std::vector<TraceSpan> End(uint64_t* dropped);
  static void Add(TraceSpan span);  // if one is active
  // A span of the calling thread.
  static void AddOnHost(std::string name, const char* category, double begin_s, double end_s);
  static double Now();

 private:
  static std::atomic<bool> active_;
  static std::mutex mutex_;  // guards the two below
  static std::vector<TraceSpan> spans_;
  static uint64_t dropped_;
};

// Times work on a device's streams: a mark before and one after it, read when the trace ends, so
// that nothing waits for the device meanwhile.
class DeviceTimeline {
 public:
  explicit DeviceTimeline(GraphDevice* device) : device_(device) {}
  ~DeviceTimeline() { Discard(); }
  DeviceTimeline(const DeviceTimeline&) = delete;
  DeviceTimeline& operator=(const DeviceTimeline&) = delete;

  // Runs `work`, which enqueues on `stream`, as a span of this name on the host and the device.
  template <typename F>
  Status Run(const std::string& name, Stream stream, F&& work) {
    Pending pending;
    const bool marked = BeginMark(stream, &pending);
    const double begin = Trace::Now();
    Status status = work();
    Trace::AddOnHost(name, "launch", begin, Trace::Now());
    if (marked) EndMark(name, stream, std::move(pending));
    return status;
  }

  // Makes spans of all marks; waits for the work between them.
  void Flush();

 private:
  struct Pending {
    std::string name;
    Stream stream = nullptr;
    Mark begin = nullptr, end = nullptr;
  };
  bool BeginMark(Stream stream, Pending* pending);
  void EndMark(const std::string& name, Stream stream, Pending pending);
  bool FindOrigin();
  void Discard();

  static constexpr size_t kMostMarks = 1u << 15;

  GraphDevice* const device_;
  std::mutex mutex_;  // guards what follows
  std::vector<Pending> pending_;
  Mark origin_ = nullptr;  // was reached at origin_s_
  double origin_s_ = 0;
  bool without_marks_ = false;  // the device has none
};

}  // namespace jaxgraph
