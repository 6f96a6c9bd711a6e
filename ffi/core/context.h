// Context: what belongs to one device and one stream: the arena, the ledger, the private stream
// that captures happen on, and the lock that is held while one call is enqueued. Where streams are
// made per call (the host), contexts form a pool instead, and calls that run at once get one each.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ffi/core/branches.h"
#include "ffi/core/events.h"
#include "ffi/core/ledger.h"
#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"

namespace jaxgraph {

struct Arena {
  void* base = nullptr;
  uint64_t capacity = 0;
  uint64_t generation = 0;  // counts moves: what was recorded in an older one is never launched

  char* data() const { return static_cast<char*>(base); }
};

class Context {
 public:
  explicit Context(GraphDevice* device) : side_streams(device), device_(device) {}
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Grows the arena if it has less. On failure it stays as it was. `stats`: of the function that
  // asks, which a move counts for; null: none.
  Status Reserve(uint64_t bytes, FunctionStats* stats);

  std::mutex mutex;         // held while one call is enqueued; guards all below
  Stream stream = nullptr;  // that calls are enqueued on; null in a pool, and before the first call
  Arena arena;
  Statistics statistics;  // may be read without the lock
  Ledger ledger;
  Stream capture_stream = nullptr;  // made at the first capture
  SideStreams side_streams;         // for branches, in captures and beside `stream`
  std::vector<char*> addresses;     // of the present call, by base
  std::vector<uint32_t> wandered;   // bases that moved since the variant's last call, uid or no uid
  ExecutionLog executions;
  Outcome outcome = Outcome::kEager;        // of the present call
  Counter counted = Counter::kEagerWarmup;  // ... and as what it was counted
  double decided_s = 0;                     // when it was known what the present call may do
  uint64_t chunk_launches = 0;              // executables that the present call has launched

 private:
  GraphDevice* device_;
};

class ContextPool {
 public:
  explicit ContextPool(GraphDevice* device) : device_(device) {}

  // A context for one call, held (locked, and in a pool leased) until the lease goes away.
  class Lease {
   public:
    Lease(ContextPool* pool, Context* context, Stream stream);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Context* operator->() const { return context_; }
    Context& operator*() const { return *context_; }

   private:
    ContextPool* pool_;
    Context* context_;
    std::unique_lock<std::mutex> lock_;
  };
  Lease Acquire(Stream stream);
  // Makes the context of the first call ahead of it, whose stream is not known yet.
  void MakeFirst();

  // All contexts there are; none goes away before DestroyAll, which no call may overlap.
  std::vector<Context*> All() const;
  void DestroyAll();

 private:
  struct Slot {
    std::unique_ptr<Context> context;
    Stream stream = nullptr;  // whose it is; not in a pool
    bool claimed = false;     // ... if it is anybody's
    bool leased = false;      // in a pool
  };
  Context* Find(Stream stream);
  void Return(const Context* context);

  GraphDevice* device_;
  mutable std::mutex mutex_;  // guards the table, for as long as a look-up takes
  std::vector<Slot> slots_;
};

}  // namespace jaxgraph
