// HostDevice: a GraphDevice on the CPU. It records kernel calls with their parameters by value and
// replays them in order, under the rules of CUDA graphs: an executable takes an update only from a
// graph of the same nodes and edges, patches address the graph that it was instantiated from, and
// a capture whose forks were not joined fails. Everything runs before the call returns.
//
// Handles are numbers that are never used twice and live in a registry, so a handle used after it
// was destroyed gives kInternal instead of undefined behaviour.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ffi/device/graph_device.h"

namespace jaxgraph {

class HostDevice : public GraphDevice {
 public:
  explicit HostDevice(int ordinal = 0);
  ~HostDevice() override;

  std::string_view name() const override { return "host"; }
  int ordinal() const override { return ordinal_; }
  bool streams_are_transient() const override { return true; }

  Status EnterDevice(int* previous) override;
  void LeaveDevice(int previous) override;

  // `stream`: a ParallelFor*, null (this thread alone), or a stream of CreateStream. On one that is
  // capturing, the launch is recorded instead of run.
  Status LaunchKernel(const Launch& launch, Stream stream) override;
  Status IsCapturing(Stream stream, bool* capturing) override;
  Status CreateStream(Stream* stream) override;
  void DestroyStream(Stream stream) override;

  Status BeginCapture(Stream stream) override;
  Status CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) override;
  Status Fork(Stream from, Stream to) override;
  Status Join(Stream from, Stream to) override;
  Status EndCapture(Stream stream, GraphHandle* graph) override;

  Status Instantiate(GraphHandle graph, ExecHandle* exec) override;
  Status Update(ExecHandle exec, GraphHandle graph) override;
  Status Patch(ExecHandle exec, NodeHandle node, const Launch& launch) override;
  Status LaunchGraph(ExecHandle exec, Stream stream) override;
  void DestroyGraph(GraphHandle graph) override;
  void DestroyExec(ExecHandle exec) override;

  Status ArenaReserve(Stream stream, uint64_t bytes, void** base, uint64_t* capacity,
                      bool* moved) override;
  void ArenaRelease(Stream stream, void* base) override;

  Status WriteDot(GraphHandle graph, const std::string& path) override;

  HandleCounts live_handles() const override;

  // From now on graphs run their nodes in a random order that their edges allow, so that an edge
  // that is missing shows in the results. 0: in the order of capture.
  void Shuffle(uint64_t seed) { shuffle_ = seed; }

  // Handles destroyed that were not alive: the destroying calls cannot report it themselves.
  int64_t misuses() const { return misuses_; }

 private:
  struct Graph;
  struct Exec;
  struct HostStream;

  uintptr_t NextId();
  ParallelFor& PoolOf(Stream stream) const;
  HostStream* FindStream(Stream stream);
  Status CapturingStream(Stream stream, HostStream** found);
  void Record(const Launch& launch, HostStream* stream, NodeHandle* node);
  std::shared_ptr<Exec> FindExec(ExecHandle exec);

  const int ordinal_;
  mutable std::mutex mutex_;  // guards all below, for as long as a look-up takes
  uintptr_t next_id_ = 1;
  std::unordered_map<void*, std::unique_ptr<HostStream>> streams_;
  std::unordered_map<void*, std::shared_ptr<const Graph>> graphs_;
  std::unordered_map<void*, std::shared_ptr<Exec>> execs_;
  std::unordered_set<void*> arenas_;
  std::atomic<int64_t> misuses_{0};
  std::atomic<uint64_t> shuffle_{0};
};

}  // namespace jaxgraph
