// Branches: runs launches in order, those of a fork-join region on a stream for each branch. The
// eager run and the capture go through it alike; events inside Fork and Join give the order.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"
#include "ffi/device/launch.h"

namespace jaxgraph {

// The side streams of one context, made when first needed.
class SideStreams {
 public:
  explicit SideStreams(GraphDevice* device) : device_(device) {}
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  Status Get(size_t index, Stream* stream);

 private:
  GraphDevice* device_;
  std::vector<Stream> streams_;
};

class Branches {
 public:
  Branches(GraphDevice* device, SideStreams* side, Stream main)
      : device_(device), side_(side), main_(main) {}

  // Calls fn(launch, stream) for each launch in order, one of branch b with b's stream. Every
  // region has been joined when it returns, also after a failure if that is possible. A fork that
  // fails is a failure where `must_fork`; else the region runs on the main stream.
  template <typename F>
  Status Run(const std::vector<Launch>& launches, bool must_fork, F fn) {
    Status status;
    for (size_t i = 0; i < launches.size() && status.ok(); ++i) {
      if (launches[i].region != region_) status = Enter(launches, i, must_fork);
      if (status.ok()) status = fn(launches[i], StreamOf(launches[i]));
    }
    const Status joined = Join();
    return status.ok() ? joined : status;
  }

  // Forks that failed and were survived: how many, and the last.
  uint64_t fork_failures() const { return fork_failures_; }
  const Status& last_fork_failure() const { return last_fork_failure_; }

 private:
  struct Branch {
    uint32_t number;
    Stream stream;
  };

  // All branches fork where the region starts, not where each is first seen: by then the others
  // have work on their streams that it need not wait for.
  Status Fork(const std::vector<Launch>& launches, size_t first);
  Status Enter(const std::vector<Launch>& launches, size_t first, bool must_fork);
  Status Join();
  Stream StreamOf(const Launch& launch) const;

  GraphDevice* device_;
  SideStreams* side_;
  Stream main_;
  uint32_t region_ = 0;
  std::vector<Branch> open_;  // the first is on the main stream
  uint64_t fork_failures_ = 0;
  Status last_fork_failure_;
};

}  // namespace jaxgraph
