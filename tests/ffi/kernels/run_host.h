// Running a case's node through the host kernels.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "ffi/kernels/host/host_emitter.h"
#include "tests/ffi/kernels/node_case.h"

namespace jaxgraph::testing {

// Threads that live for one Run, taking items from the end, so that the order is not the plain one.
class Threads final : public ParallelFor {
 public:
  explicit Threads(int n) : n_(n) {}
  int num_threads() const override { return n_; }
  void Run(int n, void (*fn)(void* ctx, int i), void* ctx) override {
    std::atomic<int> next{n};
    auto work = [&] {
      for (int i; (i = next.fetch_sub(1) - 1) >= 0;) fn(ctx, i);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < n_; ++t) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
  }

 private:
  int n_;
};

// A block as kernels get it: aligned, and no longer than they are told.
inline void RunLaunch(const Launch& launch, ParallelFor& pool) {
  ASSERT_EQ(launch.params.size(), launch.kernel->param_bytes);
  std::vector<uint64_t> block((launch.params.size() + 7) / 8);
  std::memcpy(block.data(), launch.params.data(), launch.params.size());
  launch.kernel->host_function(block.data(), pool);
}

// Runs the node in `buffers`.
inline void RunHostIn(const Node& node, int threads, Buffers* buffers) {
  std::vector<ResolvedNode> nodes = {Resolve(node, Addresses(*buffers))};
  std::vector<Launch> launches;
  size_t covered = 0;
  const Status status = HostEmitter().Emit(nodes, 0, true, &launches, &covered);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(covered, 1u);
  Threads pool(threads);
  for (const Launch& launch : launches) RunLaunch(launch, pool);
}

// Runs the case's node on a copy of its buffers.
inline Buffers RunHost(const NodeCase& c, int threads = 1) {
  Buffers buffers = c.buffers;
  RunHostIn(c.node, threads, &buffers);
  return buffers;
}

// Runs nodes one after the other on a copy of their buffers.
inline Buffers RunHost(const std::vector<Node>& nodes, const Buffers& given) {
  Buffers buffers = given;
  for (const Node& node : nodes) RunHostIn(node, 1, &buffers);
  return buffers;
}

}  // namespace jaxgraph::testing
