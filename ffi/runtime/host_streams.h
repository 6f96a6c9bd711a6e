// HostStreams: a host device's streams. Each call in flight holds one; they are kept and lent
// again, so that their number, and with it the number of arenas, is that of the calls that ever ran
// at once.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/runtime/worker_team.h"

namespace jaxgraph {

class HostStreams {
 public:
  // A stream for one call; its destructor gives it back.
  class Lease {
   public:
    Lease(HostStreams* owner, std::unique_ptr<WorkerTeam> team)
        : owner_(owner), team_(std::move(team)) {}
    ~Lease() {
      team_->End();
      std::lock_guard<std::mutex> lock(owner_->mutex_);
      owner_->free_.push_back(std::move(team_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    WorkerTeam* operator->() const { return team_.get(); }
    // As GraphDevice takes it: the address of the ParallelFor.
    ParallelFor* stream() const { return team_.get(); }

   private:
    HostStreams* owner_;
    std::unique_ptr<WorkerTeam> team_;
  };

  Lease Borrow() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return Lease(this, std::make_unique<WorkerTeam>());
    std::unique_ptr<WorkerTeam> team = std::move(free_.back());  // the last used: its arena is warm
    free_.pop_back();
    return Lease(this, std::move(team));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<WorkerTeam>> free_;
};

}  // namespace jaxgraph
