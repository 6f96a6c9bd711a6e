// The executor, as one call goes through it: RunCall below reads top to bottom as the gates.
#include "ffi/core/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "ffi/core/context.h"
#include "ffi/core/launch_plan.h"
#include "ffi/core/ledger.h"
#include "ffi/core/placement.h"
#include "ffi/core/properties.h"
#include "ffi/core/recording.h"
#include "ffi/core/statistics.h"

namespace jaxgraph {
namespace {

double WallClock() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

double SteadyClock() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Makes the device current for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(GraphDevice* device) : device_(device) {
    status_ = device->EnterDevice(&previous_);
  }
  ~DeviceScope() {
    if (status_.ok()) device_->LeaveDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  GraphDevice* device_;
  int previous_ = 0;
  Status status_;
};

// What a node of an executable takes of the device's memory, until it is calibrated.
constexpr double kDefaultBytesPerNode = 1024;

struct Call {
  const std::shared_ptr<const Program>& program;
  const std::vector<char*>& operands;
  const std::vector<char*>& results;
  Stream stream;
};

Status CheckCounts(const Call& call) {
  const std::vector<Base>& bases = call.program->bases;
  const size_t operands = call.operands.size();
  const size_t results = call.results.size();
  const bool right = bases.size() == 1 + operands + results &&
                     (operands == 0 || bases[operands].kind == BaseKind::kOperand) &&
                     (results == 0 || bases[1 + operands].kind == BaseKind::kResult);
  if (right) return Status::Ok();
  return Status(Code::kInvalidArgument, "a call of " + call.program->function + " with " +
                                            std::to_string(operands) + " operands and " +
                                            std::to_string(results) +
                                            " results does not fit the program");
}

// What no earlier call has vouched for: addresses that are there, and aliases that hold.
Status CheckAddresses(const Program& program, const Placement& placement,
                      const std::vector<char*>& addresses) {
  for (size_t b = 1; b < addresses.size(); ++b) {
    if (addresses[b] == nullptr && program.bases[b].nbytes > 0) {
      return Status(Code::kInvalidArgument, program.bases[b].label + " has no address");
    }
  }
  for (const auto& [result, operand] : placement.aliases()) {
    if (addresses[result] != addresses[operand] && program.bases[result].nbytes > 0) {
      return Status(Code::kInternal, program.bases[result].label + " must share the address of " +
                                         program.bases[operand].label + ", but does not");
    }
  }
  return Status::Ok();
}

// The node that forbids a capture, for people; empty: none does.
std::string FindNotCapturable(const Program& program, const Emitter& emitter) {
  for (size_t n = 0; n < program.nodes.size(); ++n) {
    const Node& node = program.nodes[n];
    if ((node.flags & kFlagNotCapturable) == 0 && emitter.Capturable(node)) continue;
    return "node " + std::to_string(n) + " (" + NameOf(node.op) + " " + node.label +
           ") cannot be captured";
  }
  return {};
}

// How the present call stands to the variant's last one.
struct Identity {
  Variant* variant = nullptr;
  bool uid_hit = false;
  bool addresses_changed = false;  // of nodes, in bases that are used in place
  // The recording differs from what this call asks for in the nodes that touch `moved` and in the
  // slot copies alone.
  bool partial = false;
  std::vector<uint32_t> moved;  // bases that the nodes find elsewhere now
  bool copies_in = false;       // a slot must be filled from another buffer
  bool copies_out = false;
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

uint64_t Nanoseconds(double seconds) {
  return seconds > 0 ? static_cast<uint64_t>(seconds * 1e9) : 0;
}

Counter PhaseOf(Outcome outcome) {
  switch (outcome) {
    case Outcome::kEager:
      return Counter::kEagerNs;
    case Outcome::kCapture:
    case Outcome::kUpdate:
      return Counter::kRecordNs;
    case Outcome::kReplay:
      break;
  }
  return Counter::kReplayNs;
}

}  // namespace

struct Executor::Impl {
  Impl(GraphDevice* device, const Emitter* emitter, std::function<double()> clock)
      : device(device),
        emitter(emitter),
        clock(clock ? clock : SteadyClock),
        events(device->ordinal(), clock ? std::move(clock) : WallClock),
        contexts(device) {}

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

  bool Warm(const Identity& identity);
  Status RunEager(Context& context, const Call& call, Variant* variant, Counter reason,
                  const std::string& why, const Identity* identity = nullptr);
  Status Record(Context& context, Entry& entry, const Call& call, const Identity& identity);
  Status Replay(Context& context, Entry& entry, const Call& call, const Identity& identity);
  Status GoOnEagerly(Context& context, const LaunchPlan& plan, size_t chunk, Entry& entry,
                     const Call& call, Variant* variant, const Status& failure);
  Status LaunchAll(const std::vector<Launch>& launches, Stream stream);
  Status LaunchBranches(Context& context, const std::vector<Launch>& launches, const Call& call);

  void Calibrate(const Recording& recording);
  uint64_t MemoryOf(uint64_t nodes) const {
    return static_cast<uint64_t>(static_cast<double>(nodes) * bytes_per_node.load());
  }
  void Sweep(Context& context, const ExecOptions& options, double now);
  void Trim(Context& context, const Variant* present);
  void Drop(Context& context, const Variant* variant, Counter cause, const std::string& why);

  // What an execution came to, for the counters and the log.
  void Note(Context& context, FunctionStats* stats, Outcome outcome, Counter counter) {
    context.outcome = outcome;
    stats->Add(counter);
  }
  void NoteTime(Context& context, const Variant& variant, double start, double end);
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
  Statistics statistics;
  EventRing events;
  ContextPool contexts;
  std::atomic<uint64_t> reserved{0};
  std::atomic<uint64_t> next_call{1};
  std::atomic<uint64_t> next_variant{1};
  std::atomic<double> next_sweep_s{0};
  std::atomic<double> bytes_per_node{kDefaultBytesPerNode};
  std::once_flag calibrated;
};

Status Executor::Impl::RunCall(Context& context, const Call& call) {
  const Program& program = *call.program;
  JAXGRAPH_RETURN_IF_ERROR(CheckCounts(call));
  context.addresses.resize(program.bases.size());
  context.addresses[0] = nullptr;  // the arena's is told by its generation
  std::copy(call.operands.begin(), call.operands.end(), context.addresses.begin() + 1);
  std::copy(call.results.begin(), call.results.end(),
            context.addresses.begin() + 1 + static_cast<ptrdiff_t>(call.operands.size()));

  if (program.options.disabled) return RunOutside(context, call, nullptr);
  bool nested = false;
  const Status asked = device->IsCapturing(call.stream, &nested);
  if (asked.code() == Code::kContextPoisoned) return asked;
  if (!asked.ok()) {
    // Kernels launched one by one are right whether the stream is capturing or not.
    statistics.Of(program.function_id)->AddFailure(Counter::kFailuresQuery, asked);
    return RunOutside(context, call, "the state of the stream is unknown");
  }
  if (nested) return RunOutside(context, call, "the stream is being captured by somebody else");

  const double start = clock();
  context.decided_s = start;
  Variant* variant = nullptr;
  const Status status = RunGates(context, call, &variant);
  if (variant != nullptr) {
    const double now = clock();
    if (status.ok()) NoteTime(context, *variant, start, now);
    variant->last_used_s = now;
    variant->last_call = next_call++;
    Sweep(context, program.options, now);
  }
  return status;
}

void Executor::Impl::NoteTime(Context& context, const Variant& variant, double start, double end) {
  const uint64_t decide = Nanoseconds(context.decided_s - start);
  const uint64_t run = Nanoseconds(end - context.decided_s);
  variant.stats->Add(Counter::kDecideNs, decide);
  variant.stats->Add(PhaseOf(context.outcome), run);
  const Program& program = variant.program();
  constexpr uint64_t kMost = UINT32_MAX;
  context.executions.Push({start, static_cast<uint32_t>(std::min(decide, kMost)),
                           static_cast<uint32_t>(std::min(run, kMost)), program.function_id,
                           program.split, context.outcome});
}

Status Executor::Impl::RunGates(Context& context, const Call& call, Variant** found) {
  const Program& program = *call.program;

  // Gate 1: the key finds the entry.
  Entry& entry = context.ledger.EntryOf(program.key);

  // Gate 2: the uid, else the node properties, find the variant and what has changed.
  Identity identity;
  JAXGRAPH_RETURN_IF_ERROR(Identify(context, entry, call, &identity));
  Variant* variant = *found = identity.variant;
  variant->stats->RaiseArena(context.arena.capacity);
  // Where the uid is the same, deciding takes less than asking for the time does.
  if (!identity.uid_hit) context.decided_s = clock();

  // Gate 3: may it be captured at all, and is it still worth trying?
  if (!variant->not_capturable.empty()) {
    return RunEager(context, call, variant, Counter::kEagerNotCapturable, variant->not_capturable);
  }
  if (!entry.failures.empty()) {
    const Failures* failures = entry.FindFailures(program);
    if (failures != nullptr && failures->count >= program.options.max_failures) {
      return RunEager(context, call, variant, Counter::kEagerFailures,
                      "too many failures: " + failures->last);
    }
  }
  const uint64_t budget = program.options.memory_budget;
  if (budget > 0 && MemoryOf(program.nodes.size()) > budget) {
    return RunEager(context, call, variant, Counter::kEagerMemory,
                    "its executables alone exceed the memory budget");
  }

  // Gate 4: is it warm?
  if (!Warm(identity)) {
    return RunEager(context, call, variant, Counter::kEagerWarmup, identity.why, &identity);
  }

  // Gate 5: captured, and with what has changed known? Else capture, or compare every launch.
  if (variant->stage != Stage::kCaptured || !(variant->recording.current || identity.partial)) {
    return Record(context, entry, call, identity);
  }

  // Gate 6: replay, after the launches that have changed were updated.
  return Replay(context, entry, call, identity);
}

// Runs without identity, arena slots or recording: what is launched here is not ours to keep.
Status Executor::Impl::RunOutside(Context& context, const Call& call, const char* why) {
  const Program& program = *call.program;
  const Placement placement(program, /*slots=*/false);
  JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, placement, context.addresses));
  FunctionStats* stats = statistics.Of(program.function_id);
  JAXGRAPH_RETURN_IF_ERROR(
      context.Reserve(std::max(placement.arena_bytes(), reserved.load()), stats));
  std::vector<char*> resolved;
  placement.Resolve(context.addresses, context.arena.data(), &resolved);
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(
      Planner(*emitter, program, placement).Make({context.addresses, resolved}, &plan));
  for (const PlannedChunk& chunk : plan.chunks) {
    JAXGRAPH_RETURN_IF_ERROR(LaunchAll(chunk.launches, call.stream));
  }
  stats->RaiseArena(context.arena.capacity);
  Note(context, stats, Outcome::kEager, Counter::kEagerOutside);
  if (why != nullptr) Log(program, "eager", why);
  return Status::Ok();
}

Status Executor::Impl::Identify(Context& context, Entry& entry, const Call& call,
                                Identity* identity) {
  const Program& program = *call.program;
  for (const std::unique_ptr<Variant>& at : entry.variants) {
    Variant* variant = at.get();
    if (!HitsUid(context, *variant, program)) continue;
    identity->variant = variant;
    identity->uid_hit = true;
    variant->stats->Add(Counter::kUidHits);
    variant->placement.BeginCall();
    if (variant != entry.variants.front().get()) entry.Touch(variant);
    if (!context.wandered.empty()) JAXGRAPH_RETURN_IF_ERROR(Follow(context, identity));
    if (variant->placement.DueToSettle()) Settle(context, variant, identity);
    return Status::Ok();
  }

  Variant* variant = FindSameProgram(context, entry, program);
  if (variant == nullptr) return AddVariant(context, entry, call, identity);
  identity->variant = variant;
  JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, variant->placement, context.addresses));
  JAXGRAPH_RETURN_IF_ERROR(ChangeAddresses(context, variant, identity));
  entry.Touch(variant);
  return Status::Ok();
}

// The shortcut: the same program, the same arena, and every base that is used in place where it
// was. Gathers the bases that wandered.
bool Executor::Impl::HitsUid(Context& context, const Variant& variant,
                             const Program& program) const {
  context.wandered.clear();
  if (!variant.Runs(program) || variant.arena_generation != context.arena.generation) return false;
  const std::vector<char*>& last = variant.addresses;
  const std::vector<char*>& now = context.addresses;
  if (std::memcmp(last.data(), now.data(), now.size() * sizeof now[0]) == 0) return true;
  for (size_t b = 1; b < now.size(); ++b) {
    if (last[b] == now[b]) continue;
    const Place place = variant.placement.place(b);
    if (place == Place::kInPlace) return false;
    if (place != Place::kNowhere) context.wandered.push_back(static_cast<uint32_t>(b));
  }
  return true;
}

void Executor::Impl::NoteMoved(Variant* variant, size_t base) {
  if (!variant->placement.NoteMoved(base, !variant->recording.chunks.empty())) return;
  const Program& program = variant->program();
  Log(*variant, "placement", variant->placement.Explain(program.bases[base], base));
}

// Follows the bases that wandered: the nodes that touch them and the slots' copies are others now.
Status Executor::Impl::Follow(Context& context, Identity* identity) {
  Variant* variant = identity->variant;
  JAXGRAPH_RETURN_IF_ERROR(
      CheckAddresses(variant->program(), variant->placement, context.addresses));
  identity->partial = std::exchange(variant->recording.current, false);
  for (const uint32_t b : context.wandered) {
    NoteMoved(variant, b);
    if (variant->placement.place(b) == Place::kSlot) {
      const bool in = variant->program().bases[b].kind == BaseKind::kOperand;
      (in ? identity->copies_in : identity->copies_out) = true;
    }
    char* now = variant->placement.ResolveOne(b, context.addresses, context.arena.data());
    if (std::exchange(variant->snapshot.bases[b], now) != now) identity->moved.push_back(b);
  }
  variant->addresses = context.addresses;
  return Status::Ok();
}

// Takes bases that have come to rest out of their slots, whose copies every call pays for.
void Executor::Impl::Settle(Context& context, Variant* variant, Identity* identity) {
  if (!variant->placement.Settle()) return;
  variant->placement.Resolve(context.addresses, context.arena.data(), &variant->snapshot.bases);
  variant->recording.current = false;
  identity->partial = false;
  identity->why = "bases that came to rest are used in place again";
  Log(*variant, "placement", identity->why);
}

// Which variant of this program should take the new addresses over? None, if they form an address
// set that comes back: then it gets a variant of its own, and each keeps its recording; unless that
// would only push out another address set of the same program, for then they might push each other
// out for ever.
Variant* Executor::Impl::FindSameProgram(Context& context, Entry& entry,
                                         const Program& program) const {
  Variant* latest = nullptr;
  for (const std::unique_ptr<Variant>& variant : entry.variants) {
    if (!variant->Runs(program)) continue;
    if (latest == nullptr) latest = variant.get();
    bool same_set = true;
    for (size_t b = 1; same_set && b < context.addresses.size(); ++b) {
      same_set = variant->addresses[b] == context.addresses[b] ||
                 variant->placement.may_wander(b) || variant->placement.place(b) != Place::kInPlace;
    }
    if (same_set) return variant.get();  // only bases that may wander moved, or the arena did
  }
  const size_t limit = std::max<size_t>(program.options.max_variants, 1);
  const bool seen =
      entry.history.SeenBefore(program, latest != nullptr ? latest->placement : Placement(program),
                               context.addresses, limit);
  if (latest == nullptr || !seen) return latest;
  Variant* oldest = entry.variants.back().get();
  return entry.variants.size() >= limit && oldest->Runs(program) ? oldest : nullptr;
}

// Gives the variant the call's addresses.
Status Executor::Impl::ChangeAddresses(Context& context, Variant* variant, Identity* identity) {
  JAXGRAPH_RETURN_IF_ERROR(
      context.Reserve(std::max(variant->placement.arena_bytes(), reserved.load()), variant->stats));
  variant->placement.BeginCall();
  for (size_t b = 1; b < context.addresses.size(); ++b) {
    if (variant->addresses[b] != context.addresses[b]) NoteMoved(variant, b);
  }
  Snapshot now{variant->snapshot.program, {}};
  variant->placement.Resolve(context.addresses, context.arena.data(), &now.bases);
  const Diff diff = Compare(variant->snapshot, now);
  variant->stats->Add(Counter::kPropertyCompares);
  variant->stats->Add(Counter::kNodesCompared, diff.nodes_compared);
  identity->addresses_changed = diff.change != Change::kNone;
  identity->arena_moved = variant->arena_generation != context.arena.generation;
  if (identity->addresses_changed) {
    identity->why = (identity->arena_moved ? "the arena moved; " : "") +
                    Summarize(diff, variant->snapshot, now);
    identity->Describe(diff, variant->snapshot, now);
  }
  for (uint32_t b = 0; b < now.bases.size(); ++b) {
    if (variant->snapshot.bases[b] != now.bases[b]) identity->moved.push_back(b);
  }
  identity->partial = std::exchange(variant->recording.current, false);
  identity->copies_in = identity->copies_out = true;  // which ones moved does not matter here
  variant->snapshot = std::move(now);
  variant->addresses = context.addresses;
  variant->arena_generation = context.arena.generation;
  return Status::Ok();
}

Status Executor::Impl::AddVariant(Context& context, Entry& entry, const Call& call,
                                  Identity* identity) {
  const Program& program = *call.program;
  FunctionStats* stats = statistics.Of(program.function_id);
  auto variant = std::make_unique<Variant>(call.program, stats);
  JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, variant->placement, context.addresses));
  JAXGRAPH_RETURN_IF_ERROR(
      context.Reserve(std::max(variant->placement.arena_bytes(), reserved.load()), stats));
  variant->number = next_variant++;

  // What is known of the program's bases holds for all its variants.
  for (const std::unique_ptr<Variant>& other : entry.variants) {
    if (!other->Runs(program)) continue;
    variant->placement = other->placement;
    variant->placement.BeginRecording();
    break;
  }
  variant->placement.BeginCall();
  variant->placement.Resolve(context.addresses, context.arena.data(), &variant->snapshot.bases);
  variant->addresses = context.addresses;
  variant->arena_generation = context.arena.generation;
  variant->not_capturable = FindNotCapturable(program, *emitter);

  identity->why = "the first call";
  stats->Add(entry.variants.empty() ? Counter::kWarmupsFirst : Counter::kWarmupsVariant);
  if (!entry.variants.empty()) {
    const Variant& last = *entry.variants.front();
    const Diff diff = Compare(last.snapshot, variant->snapshot);
    stats->Add(Counter::kPropertyCompares);
    stats->Add(Counter::kNodesCompared, diff.nodes_compared);
    identity->why = "a new variant: " + Summarize(diff, last.snapshot, variant->snapshot);
    identity->Describe(diff, last.snapshot, variant->snapshot);
  }
  const size_t limit = std::max<size_t>(program.options.max_variants, 1);
  while (entry.variants.size() >= limit) {
    const Variant& oldest = *entry.variants.back();
    oldest.stats->Add(Counter::kEvictionsVariants);
    Log(oldest, "evict", "more than " + std::to_string(limit) + " variants under one key");
    entry.variants.pop_back();
  }
  identity->variant = variant.get();
  entry.variants.insert(entry.variants.begin(), std::move(variant));
  return Status::Ok();
}

// Counts the identical calls. An address that changes is updated, not warmed up again, unless the
// options say so.
bool Executor::Impl::Warm(const Identity& identity) {
  Variant* variant = identity.variant;
  const ExecOptions& options = variant->program().options;
  if (identity.addresses_changed && options.rewarm_on_address_change &&
      variant->stage != Stage::kCold) {
    variant->stage = Stage::kCold;
    variant->calls = 0;
    variant->stats->Add(identity.arena_moved ? Counter::kResetsArena : Counter::kResetsAddress);
    Log(*variant, "reset", identity.why, &identity);
  }
  if (variant->stage == Stage::kCaptured) return true;
  variant->stage = Stage::kWarming;
  ++variant->calls;
  return variant->calls >= options.warmup_calls;
}

Status Executor::Impl::RunEager(Context& context, const Call& call, Variant* variant,
                                Counter reason, const std::string& why, const Identity* identity) {
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
  JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.before, call.stream));
  for (const PlannedChunk& chunk : plan.chunks) {
    JAXGRAPH_RETURN_IF_ERROR(LaunchBranches(context, chunk.launches, call));
  }
  JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.after, call.stream));
  Note(context, variant->stats, Outcome::kEager, reason);
  if (!std::exchange(variant->in_run, true)) Log(*variant, "eager", why, identity);
  return Status::Ok();
}

// Captures what is not captured, updates what is, and launches chunk by chunk, so that a failure
// leaves only launches undone that the plan still holds.
Status Executor::Impl::Record(Context& context, Entry& entry, const Call& call,
                              const Identity& identity) {
  Variant* variant = identity.variant;
  Recording& recording = variant->recording;
  variant->placement.BeginRecording();
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));

  Recorder recorder = MakeRecorder(context, *variant);
  const bool first = variant->stage != Stage::kCaptured;
  while (recording.chunks.size() > plan.chunks.size()) recording.chunks.pop_back();
  while (recording.chunks.size() < plan.chunks.size()) {
    recording.chunks.emplace_back(device, variant->stats);
  }
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    RecordedChunk& chunk = recording.chunks[c];
    Status status = recorder.Rebuild(&chunk, plan.chunks[c].launches);
    if (status.ok()) status = chunk.Run(call.stream);
    if (!status.ok()) return GoOnEagerly(context, plan, c, entry, call, variant, status);
  }
  recording.copies_in = plan.copies_in;
  recording.copies_out = plan.copies_out;
  recording.index = std::move(plan.index);
  recording.nodes = 0;
  for (const PlannedChunk& chunk : plan.chunks) recording.nodes += chunk.launches.size();
  recording.current = true;
  variant->stage = Stage::kCaptured;
  variant->in_run = false;
  Note(context, variant->stats, first ? Outcome::kCapture : Outcome::kUpdate,
       first || recorder.captured() ? Counter::kCaptures : Counter::kReplays);
  if (first) {
    Log(*variant, "capture",
        std::to_string(plan.chunks.size()) + " chunks after " + std::to_string(variant->calls) +
            " identical calls");
  } else {
    Log(*variant, "update", (recorder.captured() ? "re-captured; " : "patched; ") + identity.why,
        &identity);
  }
  if (recorder.captured()) Trim(context, variant);
  return Status::Ok();
}

// Launches the executables, each after the update of its launches that have changed.
Status Executor::Impl::Replay(Context& context, Entry& entry, const Call& call,
                              const Identity& identity) {
  Variant* variant = identity.variant;
  Recording& recording = variant->recording;
  std::vector<RecordedChunk>& chunks = recording.chunks;
  const Program& program = variant->program();
  const Planner planner(*emitter, program, variant->placement);
  const CallAddresses addresses{context.addresses, variant->snapshot.bases};

  // In order of chunk and launch: copies into slots, nodes, copies out of slots.
  std::vector<LaunchChange> changes;
  bool same = true;
  const auto change_copies = [&](BaseKind kind, uint32_t chunk, size_t first, size_t count) {
    std::vector<Launch> copies;
    JAXGRAPH_RETURN_IF_ERROR(planner.Copies(addresses, kind, /*late=*/false, &copies));
    same &= copies.size() == count;
    for (size_t i = 0; i < copies.size(); ++i) {
      changes.push_back({chunk, static_cast<uint32_t>(first + i), std::move(copies[i])});
    }
    return Status::Ok();
  };
  if (identity.copies_in && recording.copies_in > 0) {
    JAXGRAPH_RETURN_IF_ERROR(change_copies(BaseKind::kOperand, 0, 0, recording.copies_in));
  }
  if (same && !identity.moved.empty()) {
    JAXGRAPH_RETURN_IF_ERROR(
        planner.Remake(addresses, identity.moved, &recording.index, &changes, &same));
  }
  if (same && identity.copies_out && recording.copies_out > 0) {
    const size_t first = chunks.back().launches().size() - recording.copies_out;
    JAXGRAPH_RETURN_IF_ERROR(change_copies(
        BaseKind::kResult, static_cast<uint32_t>(chunks.size() - 1), first, recording.copies_out));
  }
  if (!same) return Record(context, entry, call, identity);

  std::vector<Launch> before;
  std::vector<Launch> after;
  if (variant->placement.has_late_slots()) {
    JAXGRAPH_RETURN_IF_ERROR(planner.Copies(addresses, BaseKind::kOperand, true, &before));
    JAXGRAPH_RETURN_IF_ERROR(planner.Copies(addresses, BaseKind::kResult, true, &after));
    JAXGRAPH_RETURN_IF_ERROR(LaunchAll(before, call.stream));
  }
  Recorder recorder = MakeRecorder(context, *variant);
  LaunchChange* next = changes.data();
  LaunchChange* const end = next + changes.size();
  for (size_t c = 0; c < chunks.size(); ++c) {
    LaunchChange* const begin = next;
    while (next != end && next->chunk == c) ++next;
    Status status = recorder.Change(&chunks[c], begin, next);
    if (status.ok()) status = chunks[c].Run(call.stream);
    if (!status.ok()) {
      LaunchPlan plan;  // the same launches and chunks as were recorded: emission is pure
      JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
      return GoOnEagerly(context, plan, c, entry, call, variant, status);
    }
  }
  JAXGRAPH_RETURN_IF_ERROR(LaunchAll(after, call.stream));
  recording.current = true;
  const bool updated = recorder.captured() || identity.addresses_changed;
  Note(context, variant->stats, updated ? Outcome::kUpdate : Outcome::kReplay,
       recorder.captured() ? Counter::kCaptures : Counter::kReplays);
  if (updated) {
    variant->in_run = false;
    Log(*variant, "update",
        (recorder.captured() ? "re-captured; " : "patched; ") +
            (identity.why.empty() ? "bases wandered" : identity.why),
        &identity);
  } else if (!std::exchange(variant->in_run, true)) {
    Log(*variant, "replay", std::to_string(chunks.size()) + " chunks");
  }
  return Status::Ok();
}

// Chunks before `chunk` have run, and may have changed donated buffers; the rest runs kernel by
// kernel. The recording may be half changed and goes; the next call tries again, up to the limit.
Status Executor::Impl::GoOnEagerly(Context& context, const LaunchPlan& plan, size_t chunk,
                                   Entry& entry, const Call& call, Variant* variant,
                                   const Status& failure) {
  variant->recording.Clear();
  variant->stage = Stage::kWarming;
  if (failure.code() == Code::kContextPoisoned) return failure;
  entry.NoteFailure(variant->program(), failure.message());
  variant->in_run = false;
  variant->stats->Add(Counter::kResetsFailure);
  Log(*variant, "failure",
      failure.message() + "; eager from node " + std::to_string(plan.chunks[chunk].first_node) +
          " on");
  for (size_t c = chunk; c < plan.chunks.size(); ++c) {
    JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.chunks[c].launches, call.stream));
  }
  JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.after, call.stream));
  Note(context, variant->stats, Outcome::kEager, Counter::kEagerRecovered);
  return Status::Ok();
}

// One after the other: where nothing may be forked from the stream, or something has just failed.
Status Executor::Impl::LaunchAll(const std::vector<Launch>& launches, Stream stream) {
  for (const Launch& launch : launches) {
    JAXGRAPH_RETURN_IF_ERROR(device->LaunchKernel(launch, stream));
  }
  return Status::Ok();
}

// Branches of regions on side streams.
Status Executor::Impl::LaunchBranches(Context& context, const std::vector<Launch>& launches,
                                      const Call& call) {
  Branches branches(device, &context.side_streams, call.stream);
  JAXGRAPH_RETURN_IF_ERROR(branches.Run(
      launches, /*must_fork=*/false,
      [&](const Launch& launch, Stream stream) { return device->LaunchKernel(launch, stream); }));
  if (branches.fork_failures() > 0) {
    statistics.Of(call.program->function_id)->Add(Counter::kFailuresFork, branches.fork_failures());
    Log(*call.program, "failure",
        branches.last_fork_failure().message() + "; branches ran one after the other");
  }
  return Status::Ok();
}

// Learns what a node of an executable costs, from copies of the first that was made.
void Executor::Impl::Calibrate(const Recording& recording) {
  constexpr uint64_t kNodes = 4096;  // enough for the allocator's granularity not to matter
  constexpr double kLeast = 64;
  const RecordedChunk& chunk = recording.chunks.front();
  uint64_t before = 0;
  uint64_t after = 0;
  if (!chunk.captured() || !device->FreeMemory(&before).ok()) return;
  std::vector<ExecHandle> copies;
  for (uint64_t nodes = 0; nodes < kNodes; nodes += chunk.launches().size()) {
    ExecHandle exec = nullptr;
    if (!device->Instantiate(chunk.graph(), &exec).ok()) break;
    copies.push_back(exec);
  }
  const bool measured = device->FreeMemory(&after).ok() && !copies.empty() && after < before;
  for (ExecHandle exec : copies) device->DestroyExec(exec);
  if (!measured) return;
  const double nodes = static_cast<double>(copies.size() * chunk.launches().size());
  bytes_per_node = std::max(kLeast, static_cast<double>(before - after) / nodes);
}

void Executor::Impl::Drop(Context& context, const Variant* variant, Counter cause,
                          const std::string& why) {
  variant->stats->Add(cause);
  Log(*variant, "evict", why);
  context.ledger.DropIf([&](const Variant& v) { return &v == variant; });
}

// Drops the variants that nobody called for a while. Contexts in use by other threads are left for
// another time; nothing waits here.
void Executor::Impl::Sweep(Context& context, const ExecOptions& options, double now) {
  double due = next_sweep_s.load();
  if (now < due || !next_sweep_s.compare_exchange_strong(due, now + options.sweep_ms * 1e-3)) {
    return;
  }
  for (Context* other : contexts.All()) {
    std::unique_lock lock(other->mutex, std::defer_lock);
    if (other != &context && !lock.try_lock()) continue;
    other->ledger.DropIf([&](const Variant& v) {
      const uint32_t limit_ms = v.program().options.idle_ms;
      if (limit_ms == 0 || now - v.last_used_s < limit_ms * 1e-3) return false;
      v.stats->Add(Counter::kEvictionsIdle);
      Log(v, "evict",
          "idle for " + std::to_string(static_cast<int64_t>(now - v.last_used_s)) + " s");
      return true;
    });
  }
}

// Keeps the number of executables and their memory within bounds; never drops the present variant.
void Executor::Impl::Trim(Context& context, const Variant* present) {
  const ExecOptions& options = present->program().options;
  if (options.max_executables == 0 && options.memory_budget == 0) return;
  if (options.memory_budget > 0) {
    std::call_once(calibrated, [&] { Calibrate(present->recording); });
  }
  struct Candidate {
    Context* context;
    const Variant* variant;
  };
  std::vector<std::unique_lock<std::mutex>> locks;
  std::vector<Candidate> candidates;
  uint64_t executables = present->recording.chunks.size();
  uint64_t nodes = present->recording.nodes;
  for (Context* other : contexts.All()) {
    std::unique_lock lock(other->mutex, std::defer_lock);
    if (other != &context && !lock.try_lock()) continue;
    locks.push_back(std::move(lock));
    other->ledger.ForEach([&](const Entry&, const Variant& v) {
      if (&v == present || v.recording.chunks.empty()) return;
      candidates.push_back({other, &v});
      executables += v.recording.chunks.size();
      nodes += v.recording.nodes;
    });
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.variant->last_call < b.variant->last_call;
  });
  for (const Candidate& c : candidates) {
    const bool many = options.max_executables > 0 && executables > options.max_executables;
    const bool large = options.memory_budget > 0 && MemoryOf(nodes) > options.memory_budget;
    if (!many && !large) return;
    executables -= c.variant->recording.chunks.size();
    nodes -= c.variant->recording.nodes;
    Drop(*c.context, c.variant, many ? Counter::kEvictionsCount : Counter::kEvictionsMemory,
         many ? "more than " + std::to_string(options.max_executables) + " executables"
              : "the memory budget of " + std::to_string(options.memory_budget) + " bytes");
  }
}

Executor::Executor(GraphDevice* device, const Emitter* emitter, std::function<double()> clock)
    : impl_(std::make_unique<Impl>(device, emitter, std::move(clock))) {}

Executor::~Executor() {
  const DeviceScope scope(impl_->device);
  impl_->contexts.DestroyAll();
}

Status Executor::Execute(const std::shared_ptr<const Program>& program,
                         const std::vector<char*>& operands, const std::vector<char*>& results,
                         Stream stream) {
  const DeviceScope scope(impl_->device);
  JAXGRAPH_RETURN_IF_ERROR(scope.status());
  const ContextPool::Lease context = impl_->contexts.Acquire(stream);
  const Status status = impl_->RunCall(*context, {program, operands, results, stream});
  if (status.code() != Code::kContextPoisoned) return status;
  return Status(status.code(),
                "the context of device " + std::to_string(impl_->device->ordinal()) +
                    " is lost, and with it everything on the device; start the process anew: " +
                    status.message());
}

Status Executor::Reserve(uint64_t bytes) {
  const DeviceScope scope(impl_->device);
  JAXGRAPH_RETURN_IF_ERROR(scope.status());
  // A pool's first context serves whoever calls next; one of a stream is made when its stream
  // comes.
  if (impl_->device->streams_are_transient()) impl_->contexts.Acquire(nullptr);
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    JAXGRAPH_RETURN_IF_ERROR(context->Reserve(bytes, nullptr));
  }
  uint64_t present = impl_->reserved.load();
  while (present < bytes && !impl_->reserved.compare_exchange_weak(present, bytes)) {
  }
  return Status::Ok();
}

void Executor::Clear(uint64_t function_id) {
  const DeviceScope scope(impl_->device);
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->ledger.Clear(function_id);
  }
  ResetStats(function_id);
}

void Executor::ResetStats(uint64_t function_id) {
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->executions.Clear(function_id);
  }
  impl_->statistics.Zero(function_id);
  impl_->events.Clear(function_id);
}

std::vector<ArenaExtent> Executor::Arenas() const {
  std::vector<ArenaExtent> arenas;
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    arenas.push_back({context->arena.base, context->arena.capacity});
  }
  return arenas;
}

Counters Executor::Stats(uint64_t function_id) const {
  Counters counters = impl_->statistics.Sum(function_id);
  counters.exec_bytes = impl_->MemoryOf(counters.live_exec_nodes);
  return counters;
}

std::vector<Event> Executor::Events(uint64_t function_id, uint64_t after) const {
  return impl_->events.Since(function_id, after);
}

std::vector<Execution> Executor::Executions(uint64_t function_id) const {
  std::vector<Execution> executions;
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->executions.AppendTo(function_id, &executions);
  }
  std::stable_sort(executions.begin(), executions.end(),
                   [](const Execution& a, const Execution& b) { return a.start_s < b.start_s; });
  return executions;
}

std::vector<std::string> Executor::Describe(uint64_t function_id) const {
  std::vector<std::string> lines;
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->ledger.ForEach([&](const Entry& entry, const Variant& variant) {
      const Program& program = variant.program();
      if (function_id != 0 && program.function_id != function_id) return;
      size_t launches = 0;
      for (const RecordedChunk& chunk : variant.recording.chunks) {
        launches += chunk.launches().size();
      }
      lines.push_back(program.function + " split " + std::to_string(program.split) + ": " +
                      NameOf(variant.stage) + ", " + std::to_string(program.nodes.size()) +
                      " nodes, " + std::to_string(launches) + " launches, " +
                      std::to_string(variant.recording.chunks.size()) + " chunks, arena of " +
                      std::to_string(variant.placement.arena_bytes()) + " bytes");
      if (!variant.not_capturable.empty()) lines.push_back("  eager: " + variant.not_capturable);
      if (const Failures* failures = entry.FindFailures(program)) {
        lines.push_back("  failures: " + std::to_string(failures->count) +
                        ", the last: " + failures->last);
      }
      for (size_t b = 1; b < program.bases.size(); ++b) {
        lines.push_back("  " + variant.placement.Explain(program.bases[b], b));
      }
    });
  }
  return lines;
}

}  // namespace jaxgraph
