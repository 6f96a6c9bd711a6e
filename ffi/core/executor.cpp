// The executor, as one call goes through it: RunCall below reads top to bottom as the gates.
#include "ffi/core/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
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
  bool addresses_changed = false;  // of nodes
  bool operands_wandered = false;  // a slot must be filled from another buffer
  bool results_wandered = false;
  std::string why;  // of a change, or of a new variant
};

}  // namespace

struct Executor::Impl {
  Impl(GraphDevice* device, const Emitter* emitter, std::function<double()> clock)
      : device(device),
        emitter(emitter),
        statistics(device->ordinal(), clock ? std::move(clock) : WallClock),
        contexts(device) {}

  Status RunCall(Context& context, const Call& call);
  Status RunOutside(Context& context, const Call& call, const char* why);

  Status Identify(Context& context, Entry& entry, const Call& call, Identity* identity);
  bool HitsUid(const Context& context, const Variant& variant, const Program& program,
               Identity* identity) const;
  Variant* FindSameProgram(Context& context, Entry& entry, const Program& program) const;
  Status ChangeAddresses(Context& context, Variant* variant, Identity* identity);
  Status AddVariant(Context& context, Entry& entry, const Call& call, Identity* identity);

  bool Warm(const Identity& identity);
  Status RunEager(Context& context, const Call& call, Variant* variant, const std::string& why);
  Status Record(Context& context, const Call& call, const Identity& identity);
  Status Replay(Context& context, const Call& call, const Identity& identity);
  Status GoOnEagerly(const LaunchPlan& plan, size_t chunk, const Call& call, Variant* variant,
                     const Status& failure);
  Status LaunchEagerly(const LaunchPlan& plan, size_t first_chunk, Stream stream);

  Status Plan(const Context& context, const Variant& variant, LaunchPlan* plan) const {
    return MakePlan(*emitter, variant.program(), variant.placement, context.addresses,
                    variant.snapshot.bases, plan);
  }
  Recorder MakeRecorder(Context& context, const Variant& variant) {
    return Recorder(device, variant.stats, &context.capture_stream,
                    [this, &variant](std::string why) {
                      statistics.Log(variant.program(), "instantiate", std::move(why));
                    });
  }

  GraphDevice* const device;
  const Emitter* const emitter;
  Statistics statistics;
  ContextPool contexts;
  std::atomic<uint64_t> reserved{0};
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
    statistics.Of(program.function_id)->Add(Counter::kFailures);
    return RunOutside(context, call, "the state of the stream is unknown");
  }
  if (nested) return RunOutside(context, call, "the stream is being captured by somebody else");

  // Gate 1: the key finds the entry.
  Entry& entry = context.ledger.EntryOf(program.key);

  // Gate 2: the uid, else the node properties, find the variant and what has changed.
  Identity identity;
  JAXGRAPH_RETURN_IF_ERROR(Identify(context, entry, call, &identity));
  Variant* variant = identity.variant;
  variant->stats->RaiseArena(context.arena.capacity);

  // Gate 3: may it be captured at all, and is it still worth trying?
  if (!variant->not_capturable.empty()) {
    return RunEager(context, call, variant, variant->not_capturable);
  }
  if (variant->failures > 0 && variant->failures >= program.options.max_failures) {
    return RunEager(context, call, variant, "too many failures: " + variant->last_failure);
  }

  // Gate 4: is it warm?
  if (!Warm(identity)) return RunEager(context, call, variant, identity.why);

  // Gate 5: captured, and captured of these very addresses? Else capture or update.
  if (!variant->recording.current) return Record(context, call, identity);

  // Gate 6: replay.
  return Replay(context, call, identity);
}

// Runs without identity, arena slots or recording: what is launched here is not ours to keep.
Status Executor::Impl::RunOutside(Context& context, const Call& call, const char* why) {
  const Program& program = *call.program;
  const Placement placement(program, /*slots=*/false);
  JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, placement, context.addresses));
  JAXGRAPH_RETURN_IF_ERROR(context.Reserve(std::max(placement.arena_bytes(), reserved.load())));
  std::vector<char*> resolved;
  placement.Resolve(context.addresses, context.arena.data(), &resolved);
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(
      MakePlan(*emitter, program, placement, context.addresses, resolved, &plan));
  JAXGRAPH_RETURN_IF_ERROR(LaunchEagerly(plan, 0, call.stream));
  FunctionStats* stats = statistics.Of(program.function_id);
  stats->RaiseArena(context.arena.capacity);
  stats->Add(Counter::kExecutions);
  stats->Add(Counter::kEager);
  if (why != nullptr) statistics.Log(program, "eager", why);
  return Status::Ok();
}

Status Executor::Impl::Identify(Context& context, Entry& entry, const Call& call,
                                Identity* identity) {
  const Program& program = *call.program;
  for (const std::unique_ptr<Variant>& variant : entry.variants) {
    if (!HitsUid(context, *variant, program, identity)) continue;
    identity->variant = variant.get();
    variant->stats->Add(Counter::kUidHits);
    if (identity->operands_wandered || identity->results_wandered) {
      JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, variant->placement, context.addresses));
      variant->addresses = context.addresses;
    }
    if (variant != entry.variants.front()) entry.Touch(variant.get());
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
// was.
bool Executor::Impl::HitsUid(const Context& context, const Variant& variant, const Program& program,
                             Identity* identity) const {
  if (!variant.Runs(program) || variant.arena_generation != context.arena.generation) return false;
  const std::vector<char*>& last = variant.addresses;
  const std::vector<char*>& now = context.addresses;
  bool operands = false;
  bool results = false;
  if (std::memcmp(last.data(), now.data(), now.size() * sizeof now[0]) != 0) {
    for (size_t b = 1; b < now.size(); ++b) {
      if (last[b] == now[b]) continue;
      const Place place = variant.placement.place(b);
      if (place == Place::kInPlace) return false;
      if (place != Place::kSlot) continue;
      (program.bases[b].kind == BaseKind::kOperand ? operands : results) = true;
    }
  }
  identity->operands_wandered = operands;
  identity->results_wandered = results;
  return true;
}

// Which variant of this program should take the new addresses over? None, if they form an address
// set that comes back: then it gets a variant of its own, and each keeps its recording.
Variant* Executor::Impl::FindSameProgram(Context& context, Entry& entry,
                                         const Program& program) const {
  Variant* latest = nullptr;
  for (const std::unique_ptr<Variant>& variant : entry.variants) {
    if (!variant->Runs(program)) continue;
    if (latest == nullptr) latest = variant.get();
    bool same_set = true;
    for (size_t b = 1; same_set && b < context.addresses.size(); ++b) {
      same_set = variant->addresses[b] == context.addresses[b] || variant->placement.slottable(b) ||
                 variant->placement.place(b) != Place::kInPlace;
    }
    if (same_set) return variant.get();  // only small bases moved, or the arena did
  }
  const size_t limit = std::max<size_t>(program.options.max_variants, 1);
  const bool seen =
      entry.history.SeenBefore(program, latest != nullptr ? latest->placement : Placement(program),
                               context.addresses, limit);
  return seen ? nullptr : latest;
}

// Gives the variant the call's addresses; small bases that moved get a slot from now on.
Status Executor::Impl::ChangeAddresses(Context& context, Variant* variant, Identity* identity) {
  const Program& program = variant->program();
  JAXGRAPH_RETURN_IF_ERROR(
      context.Reserve(std::max(variant->placement.arena_bytes(), reserved.load())));
  for (size_t b = 1; b < context.addresses.size(); ++b) {
    if (variant->addresses[b] == context.addresses[b]) continue;
    if (variant->placement.NoteMoved(b)) {
      statistics.Log(program, "placement", variant->placement.Explain(program.bases[b], b));
    }
  }
  Snapshot now{variant->snapshot.program, {}};
  variant->placement.Resolve(context.addresses, context.arena.data(), &now.bases);
  const Diff diff = Compare(variant->snapshot, now);
  variant->stats->Add(Counter::kPropertyCompares);
  variant->stats->Add(Counter::kNodesCompared, diff.nodes_compared);
  identity->addresses_changed = diff.change != Change::kNone;
  // Slots that the last call's addresses filled are filled anew: which ones does not matter here.
  identity->operands_wandered = identity->results_wandered = true;
  if (identity->addresses_changed) {
    identity->why = Summarize(diff, variant->snapshot, now);
    variant->recording.current = false;
  }
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
      context.Reserve(std::max(variant->placement.arena_bytes(), reserved.load())));

  // What is known of the program's bases holds for all its variants.
  for (const std::unique_ptr<Variant>& other : entry.variants) {
    if (!other->Runs(program)) continue;
    variant->placement = other->placement;
    break;
  }
  variant->placement.Resolve(context.addresses, context.arena.data(), &variant->snapshot.bases);
  variant->addresses = context.addresses;
  variant->arena_generation = context.arena.generation;
  variant->not_capturable = FindNotCapturable(program, *emitter);

  identity->why = "the first call";
  if (!entry.variants.empty()) {
    const Variant& last = *entry.variants.front();
    const Diff diff = Compare(last.snapshot, variant->snapshot);
    stats->Add(Counter::kPropertyCompares);
    stats->Add(Counter::kNodesCompared, diff.nodes_compared);
    identity->why = "a new variant: " + Summarize(diff, last.snapshot, variant->snapshot);
  }
  const size_t limit = std::max<size_t>(program.options.max_variants, 1);
  while (entry.variants.size() >= limit) {
    const Variant& oldest = *entry.variants.back();
    oldest.stats->Add(Counter::kEvictions);
    statistics.Log(oldest.program(), "evict",
                   "more than " + std::to_string(limit) + " variants under one key");
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
    variant->stats->Add(Counter::kResets);
    statistics.Log(variant->program(), "reset", identity.why);
  }
  if (variant->stage == Stage::kCaptured) return true;
  variant->stage = Stage::kWarming;
  ++variant->calls;
  return variant->calls >= options.warmup_calls;
}

Status Executor::Impl::RunEager(Context& context, const Call& call, Variant* variant,
                                const std::string& why) {
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
  JAXGRAPH_RETURN_IF_ERROR(LaunchEagerly(plan, 0, call.stream));
  variant->stats->Add(Counter::kExecutions);
  variant->stats->Add(Counter::kEager);
  if (!std::exchange(variant->in_run, true)) statistics.Log(*call.program, "eager", why);
  return Status::Ok();
}

// Captures what is not captured, updates what is, and launches chunk by chunk, so that a failure
// leaves only launches undone that the plan still holds.
Status Executor::Impl::Record(Context& context, const Call& call, const Identity& identity) {
  Variant* variant = identity.variant;
  Recording& recording = variant->recording;
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
    Status status = recorder.Replace(&chunk, 0, chunk.launches().size(), plan.chunks[c].launches);
    if (status.ok()) status = chunk.Run(call.stream);
    if (!status.ok()) return GoOnEagerly(plan, c, call, variant, status);
  }
  recording.copies_in = plan.copies_in;
  recording.copies_out = plan.copies_out;
  recording.current = true;
  variant->stage = Stage::kCaptured;
  variant->in_run = false;
  variant->stats->Add(Counter::kExecutions);
  variant->stats->Add(first || recorder.captured() ? Counter::kCaptures : Counter::kReplays);
  if (first) {
    statistics.Log(*call.program, "capture",
                   std::to_string(plan.chunks.size()) + " chunks after " +
                       std::to_string(variant->calls) + " identical calls");
  } else {
    statistics.Log(*call.program, "update",
                   (recorder.captured() ? "re-captured; " : "patched; ") + identity.why);
  }
  return Status::Ok();
}

// Launches the executables, after patching the slot copies if buffers wandered.
Status Executor::Impl::Replay(Context& context, const Call& call, const Identity& identity) {
  Variant* variant = identity.variant;
  Recording& recording = variant->recording;
  const Program& program = variant->program();
  std::vector<RecordedChunk>& chunks = recording.chunks;
  Recorder recorder = MakeRecorder(context, *variant);

  const bool patch_in = identity.operands_wandered && recording.copies_in > 0;
  const bool patch_out = identity.results_wandered && recording.copies_out > 0;
  std::vector<Launch> in;
  std::vector<Launch> out;
  if (patch_in || patch_out) recording.current = false;
  if (patch_in) {
    JAXGRAPH_RETURN_IF_ERROR(PlanCopiesIn(*emitter, program, variant->placement, context.addresses,
                                          variant->snapshot.bases, &in));
  }
  if (patch_out) {
    JAXGRAPH_RETURN_IF_ERROR(PlanCopiesOut(*emitter, program, variant->placement, context.addresses,
                                           variant->snapshot.bases, &out));
  }
  for (size_t c = 0; c < chunks.size(); ++c) {
    Status status;
    if (patch_in && c == 0) {
      const size_t count = std::exchange(recording.copies_in, in.size());
      status = recorder.Replace(&chunks[c], 0, count, std::move(in));
    }
    if (status.ok() && patch_out && c + 1 == chunks.size()) {
      const size_t count = std::exchange(recording.copies_out, out.size());
      const size_t end = chunks[c].launches().size();
      status = recorder.Replace(&chunks[c], end - count, end, std::move(out));
    }
    if (status.ok()) status = chunks[c].Run(call.stream);
    if (!status.ok()) {
      LaunchPlan plan;  // the same launches and chunks as were recorded: emission is pure
      JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
      return GoOnEagerly(plan, c, call, variant, status);
    }
  }
  recording.current = true;
  variant->stats->Add(Counter::kExecutions);
  variant->stats->Add(recorder.captured() ? Counter::kCaptures : Counter::kReplays);
  if (!std::exchange(variant->in_run, true)) {
    statistics.Log(program, "replay", std::to_string(chunks.size()) + " chunks");
  }
  return Status::Ok();
}

// Chunks before `chunk` have run, and may have changed donated buffers; the rest runs kernel by
// kernel. The recording may be half changed and goes; the next call tries again, up to the limit.
Status Executor::Impl::GoOnEagerly(const LaunchPlan& plan, size_t chunk, const Call& call,
                                   Variant* variant, const Status& failure) {
  variant->recording.Clear();
  variant->stage = Stage::kWarming;
  if (failure.code() == Code::kContextPoisoned) return failure;
  ++variant->failures;
  variant->last_failure = failure.message();
  variant->in_run = false;
  variant->stats->Add(Counter::kFailures);
  statistics.Log(*call.program, "failure",
                 failure.message() + "; eager from node " +
                     std::to_string(plan.chunks[chunk].first_node) + " on");
  JAXGRAPH_RETURN_IF_ERROR(LaunchEagerly(plan, chunk, call.stream));
  variant->stats->Add(Counter::kExecutions);
  variant->stats->Add(Counter::kEager);
  return Status::Ok();
}

Status Executor::Impl::LaunchEagerly(const LaunchPlan& plan, size_t first_chunk, Stream stream) {
  for (size_t c = first_chunk; c < plan.chunks.size(); ++c) {
    for (const Launch& launch : plan.chunks[c].launches) {
      JAXGRAPH_RETURN_IF_ERROR(device->LaunchKernel(launch, stream));
    }
  }
  return Status::Ok();
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
  return impl_->RunCall(*context, {program, operands, results, stream});
}

Status Executor::Reserve(uint64_t bytes) {
  const DeviceScope scope(impl_->device);
  JAXGRAPH_RETURN_IF_ERROR(scope.status());
  // A pool's first context serves whoever calls next; one of a stream is made when its stream
  // comes.
  if (impl_->device->streams_are_transient()) impl_->contexts.Acquire(nullptr);
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    JAXGRAPH_RETURN_IF_ERROR(context->Reserve(bytes));
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
  impl_->statistics.Clear(function_id);
}

Counters Executor::Stats(uint64_t function_id) const { return impl_->statistics.Sum(function_id); }

std::vector<Event> Executor::Events(uint64_t function_id) const {
  return impl_->statistics.Events(function_id);
}

std::vector<std::string> Executor::Describe(uint64_t function_id) const {
  std::vector<std::string> lines;
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->ledger.ForEach([&](const Variant& variant) {
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
      if (variant.failures > 0) {
        lines.push_back("  failures: " + std::to_string(variant.failures) +
                        ", the last: " + variant.last_failure);
      }
      for (size_t b = 1; b < program.bases.size(); ++b) {
        lines.push_back("  " + variant.placement.Explain(program.bases[b], b));
      }
    });
  }
  return lines;
}

}  // namespace jaxgraph
