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

  WorkerTeam();
  ~WorkerTeam() override;
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  // Between Begin and End, Run may hand tasks to `schedule`; at most num_threads - 1 work beside
  // the caller. Afterwards no task of ours starts an item; those still in the pool's queue do
  // nothing.
  void Begin(int num_threads, Schedule schedule);
  void End();

  int num_threads() const override { return num_threads_; }
  void Run(int n, void (*fn)(void* ctx, int i), void* ctx) override;

 private:
  struct Shared;
  void StartWorkers(int wanted);

  int num_threads_ = 1;
  Schedule schedule_;
  std::shared_ptr<Shared> shared_;  // workers own it too: a queued one may outlive the team
};

}  // namespace jaxgraph
