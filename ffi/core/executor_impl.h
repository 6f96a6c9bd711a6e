// The executor's inside, shared by its parts: executor.cpp (a call, gate by gate, and the public
// face), executor_identify.cpp (gates 1, 2 and 4: which variant, and what has changed),
// executor_run.cpp (gates 5 and 6: eager, record, replay) and executor_limits.cpp (what is
// dropped).
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/context.h"
#include "ffi/core/crowding.h"
#include "ffi/core/events.h"
#include "ffi/core/executor.h"
#include "ffi/core/launch_plan.h"
#include "ffi/core/ledger.h"
#include "ffi/core/observation.h"
#include "ffi/core/placement.h"
#include "ffi/core/properties.h"
#include "ffi/core/recording.h"
#include "ffi/core/statistics.h"
#include "ffi/core/trace.h"

namespace jaxgraph {

// What a node of an executable takes of the device's memory, until it is calibrated.
constexpr double kDefaultBytesPerNode = 1024;

struct Call {
  const std::shared_ptr<const Program>& program;
  const std::vector<char*>& operands;
  const std::vector<char*>& results;
  Stream stream;
};

// How the present call stands to the variant's last one.
struct Identity {
  Variant* variant = nullptr;
  bool uid_hit = false;
  bool addresses_changed = false;  // of nodes, in bases that are used in place
  // The recording differs from what this call asks for in the nodes that touch `moved` alone.
  bool partial = false;
  std::vector<uint32_t> moved;      // bases that the nodes find elsewhere now
  std::string why;                  // of a change, or of a new variant
  std::vector<NodeChange> changes;  // the first nodes that differ
  uint64_t changes_total = 0;
  bool arena_moved = false;

  void Describe(const Diff& diff, const Snapshot& before, const Snapshot& after) {
    constexpr size_t kMost = 8;
    changes = DescribeChanges(diff, before, after, kMost);
    changes_total = diff.fields.size();
  }
};

// A named range of a profiler for as long as it lives.
class ProfilerRange {
 public:
  ProfilerRange(GraphDevice* device, const std::string& name) : device_(device) {
    device->BeginRange(name);
  }
  ~ProfilerRange() { device_->EndRange(); }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  GraphDevice* device_;
};

// Seconds: since the epoch for events, and steady for everything that is compared.
double WallClock();
double SteadyClock();

struct Executor::Impl {
  Impl(GraphDevice* device, const Emitter* emitter, std::function<double()> clock)
      : device(device),
        emitter(emitter),
        clock(clock ? clock : SteadyClock),
        events(device->ordinal(), clock ? std::move(clock) : WallClock),
        contexts(device),
        timeline(device) {}

  Status RunCall(Context& context, const Call& call);
  Status RunGates(Context& context, const Call& call, Variant** variant);
  Status RunOutside(Context& context, const Call& call, const char* why);

  Status Identify(Context& context, Entry& entry, const Call& call, Identity* identity);
  bool HitsUid(Context& context, const Variant& variant, const Program& program) const;
  Status Follow(Context& context, Identity* identity);
  void Settle(Context& context, Variant* variant, Identity* identity);
  Variant* FindSameProgram(Context& context, Entry& entry, const Program& program) const;
  Status ChangeAddresses(Context& context, Variant* variant, Identity* identity);
  Status AddVariant(Context& context, Entry& entry, const Call& call, Identity* identity);
  void NoteMoved(Variant* variant, size_t base);

  // Counters over all contexts; `function_id` 0: of all functions.
  Counters SumOf(uint64_t function_id) const {
    Counters sum;
    for (const Context* context : contexts.All()) sum.Add(context->statistics.Sum(function_id));
    return sum;
  }

  bool Warm(const Identity& identity);
  bool WaitsForRoom(const Program& program, std::string* why);
  Status RunEager(Context& context, const Call& call, Variant* variant, Counter reason,
                  const std::string& why, const Identity* identity = nullptr);
  Status Record(Context& context, Entry& entry, const Call& call, const Identity& identity);
  Status Replay(Context& context, Entry& entry, const Call& call, const Identity& identity);
  Status GoOnEagerly(Context& context, const LaunchPlan& plan, size_t chunk, Entry& entry,
                     const Call& call, Variant* variant, const Status& failure);
  Status RunChunk(Context& context, RecordedChunk* chunk, size_t c, const Call& call);
  Status LaunchAll(const std::vector<Launch>& launches, Stream stream);
  Status LaunchBranches(Context& context, const std::vector<Launch>& launches, const Call& call);

  Status ReserveArena(Context& context, uint64_t bytes, FunctionStats* stats);
  bool Calibrate(const Recording& recording);
  uint64_t MemoryOf(uint64_t nodes) const {
    return static_cast<uint64_t>(static_cast<double>(nodes) * bytes_per_node.load());
  }
  void Sweep(Context& context, const ExecOptions& options, double now);
  void Trim(Context& context, Variant* present);
  void PushOut(Context& context, const Variant* variant, Counter cause, const std::string& why);

  // What an execution came to, for the counters and the log.
  void Note(Context& context, FunctionStats* stats, Outcome outcome, Counter counter) {
    context.outcome = outcome;
    context.counted = counter;
    stats->Add(counter);
  }
  void Log(const Program& program, std::string what, std::string why) {
    Event event;
    event.what = std::move(what);
    event.why = std::move(why);
    events.Push(std::move(event), program);
  }
  void Log(const Variant& variant, std::string what, std::string why,
           const Identity* identity = nullptr) {
    Event event;
    event.variant = variant.number;
    event.what = std::move(what);
    event.why = std::move(why);
    if (identity != nullptr) {
      event.changes = identity->changes;
      event.changes_total = identity->changes_total;
    }
    events.Push(std::move(event), variant.program());
  }

  Status Plan(const Context& context, const Variant& variant, LaunchPlan* plan) const {
    const PhaseTimer timer(variant.stats, Counter::kPlanNs);
    return Planner(*emitter, variant.program(), variant.placement)
        .Make({context.addresses, variant.snapshot.bases}, plan);
  }
  Recorder MakeRecorder(Context& context, const Variant& variant) {
    return Recorder(device, variant.stats, &context.capture_stream, &context.side_streams,
                    variant.program().options.update_depth, [this, &variant](std::string why) {
                      Log(variant, "instantiate", std::move(why));
                    });
  }

  GraphDevice* const device;
  const Emitter* const emitter;
  const std::function<double()> clock;
  EventRing events;
  ContextPool contexts;
  DeviceTimeline timeline;
  std::atomic<uint64_t> reserved{0};
  std::atomic<uint64_t> next_call{1};
  std::atomic<uint64_t> next_variant{1};
  std::atomic<double> last_sweep_s{-std::numeric_limits<double>::infinity()};
  std::atomic<double> bytes_per_node{kDefaultBytesPerNode};
  std::mutex calibration;  // held while a node's cost is measured
  std::atomic<bool> calibrated{false};
  Crowding crowding;
};

}  // namespace jaxgraph
