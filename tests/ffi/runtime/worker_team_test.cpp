#include "ffi/runtime/worker_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxgraph {
namespace {

// A thread pool as XLA's: tasks run whenever a thread is free, or never before it is destroyed.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    ready_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  WorkerTeam::Schedule Scheduler() {
    return [this](std::function<void()> task) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(std::move(task));
        ++scheduled_;
      }
      ready_.notify_one();
    };
  }
  int scheduled() {
    std::lock_guard<std::mutex> lock(mutex_);
    return scheduled_;
  }

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ready_.wait(lock, [this] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> task = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> queue_;
  bool ending_ = false;
  int scheduled_ = 0;
  std::vector<std::thread> threads_;
};

struct Items {
  explicit Items(int n) : times(n) {}
  std::vector<std::atomic<int>> times;
  static void Touch(void* self, int i) { static_cast<Items*>(self)->times[i].fetch_add(1); }
  bool EachOnce() const {
    for (const auto& t : times) {
      if (t.load() != 1) return false;
    }
    return true;
  }
};

TEST(WorkerTeam, RunsEveryItemOnce) {
  Pool pool(3);
  WorkerTeam team(4, pool.Scheduler());
  EXPECT_EQ(team.num_threads(), 4);
  for (int n : {0, 1, 2, 3, 4, 5, 64, 1000}) {
    Items items(n);
    team.Run(n, Items::Touch, &items);
    EXPECT_TRUE(items.EachOnce()) << n;
  }
}

// Runs follow each other without a pause, so workers meet every state between two runs. Each run's
// items lie on the stack of that run: one begun late would write where nothing of it is any more.
TEST(WorkerTeam, ManyShortRuns) {
  Pool pool(3);
  WorkerTeam team(4, pool.Scheduler());
  for (int run = 0; run < 20000; ++run) {
    const int n = 2 + run % 7;
    Items items(n);
    team.Run(n, Items::Touch, &items);
    ASSERT_TRUE(items.EachOnce()) << run;
  }
}

TEST(WorkerTeam, WorkersStayBetweenRuns) {
  Pool pool(1);
  WorkerTeam team(2, pool.Scheduler());
  for (int run = 0; run < 1000; ++run) {
    Items items(8);
    team.Run(8, Items::Touch, &items);
  }
  EXPECT_LT(pool.scheduled(), 500);  // a worker that stayed was not scheduled again
}

TEST(WorkerTeam, PoolWithoutThreadsDoesNotBlock) {
  std::vector<std::function<void()>> queued;
  {
    WorkerTeam team(4, [&](std::function<void()> task) { queued.push_back(std::move(task)); });
    Items items(100);
    team.Run(100, Items::Touch, &items);
    EXPECT_TRUE(items.EachOnce());
    EXPECT_EQ(queued.size(), 3u);
  }
  for (auto& task : queued) task();  // after the team is gone: nothing to do, nothing to touch
}

TEST(WorkerTeam, UsesOtherThreads) {
  Pool pool(1);
  WorkerTeam team(2, pool.Scheduler());
  // Two items that wait for each other: done only if two threads are at work.
  std::atomic<int> arrived{0};
  auto meet = [](void* ctx, int) {
    auto* count = static_cast<std::atomic<int>*>(ctx);
    count->fetch_add(1);
    while (count->load() < 2) std::this_thread::yield();
  };
  team.Run(2, meet, &arrived);
  EXPECT_EQ(arrived.load(), 2);
}

}  // namespace
}  // namespace jaxgraph
