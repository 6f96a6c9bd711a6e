// WorkerTeam: a ParallelFor on somebody else's thread pool (XLA's), cheap enough for kernels of a
// few microseconds.
//
// Handing a task to a pool and waking its thread costs more than many a kernel. So a worker, once
// started, stays for the kernels that follow and leaves when none came for a while, or when the
// call ends. The caller works too and never waits for a worker that has not begun an item, so a
// pool that is busy, or has no thread at all, costs speed and never stops the call.
#pragma once

#include <functional>
#include <memory>

#include "ffi/device/launch.h"

namespace jaxgraph {

class WorkerTeam final : public ParallelFor {
 public:
  using Schedule = std::function<void(std::function<void()> task)>;

  // At most num_threads - 1 tasks of `schedule` work beside the caller. Once the team is destroyed
  // none of them begins an item; those still in the pool's queue do nothing.
  WorkerTeam(int num_threads, Schedule schedule);
  ~WorkerTeam() override;
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  int num_threads() const override { return num_threads_; }
  // One Run at a time.
  void Run(int n, void (*fn)(void* ctx, int i), void* ctx) override;

 private:
  struct Shared;
  void StartWorkers(int wanted);

  const int num_threads_;
  const Schedule schedule_;
  const std::shared_ptr<Shared> shared_;  // workers own it too: a queued one may outlive the team
};

}  // namespace jaxgraph
