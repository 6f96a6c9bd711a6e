// Running a call: eagerly, captured, or replayed; and going on after a failure.
#include <algorithm>
#include <utility>

#include "ffi/core/executor_impl.h"

namespace jaxgraph {

Status Executor::Impl::RunEager(Context& context, const Call& call, Variant* variant,
                                Counter reason, const std::string& why, const Identity* identity) {
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
  JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.fill, call.stream));
  for (const PlannedChunk& chunk : plan.chunks) {
    JAXGRAPH_RETURN_IF_ERROR(LaunchBranches(context, chunk.launches, call));
  }
  Note(context, variant->stats, Outcome::kEager, reason);
  if (std::exchange(variant->run, reason) != reason) Log(*variant, "eager", why, identity);
  return Status::Ok();
}

// Captures what is not captured, updates what is, and launches chunk by chunk, so that a failure
// leaves only launches undone that the plan still holds.
Status Executor::Impl::Record(Context& context, Entry& entry, const Call& call,
                              const Identity& identity) {
  Variant* variant = identity.variant;
  Recording& recording = variant->recording;
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
  JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.fill, call.stream));

  Recorder recorder = MakeRecorder(context, *variant);
  const bool first = variant->stage != Stage::kCaptured;
  recording.index = PlanIndex();  // of other chunks; what comes may be cut short by an exception
  while (recording.chunks.size() > plan.chunks.size()) recording.chunks.pop_back();
  while (recording.chunks.size() < plan.chunks.size()) {
    recording.chunks.emplace_back(device, variant->stats);
  }
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    RecordedChunk& chunk = recording.chunks[c];
    Status status = recorder.Rebuild(&chunk, plan.chunks[c].launches);
    if (status.ok()) status = RunChunk(context, &chunk, c, call);
    if (!status.ok()) return GoOnEagerly(context, plan, c, entry, call, variant, status);
  }
  recording.index = std::move(plan.index);
  recording.nodes = 0;
  for (const PlannedChunk& chunk : plan.chunks) recording.nodes += chunk.launches.size();
  recording.current = true;
  variant->stage = Stage::kCaptured;
  variant->replays = first ? 0 : variant->replays + 1;
  variant->run = Counter::kNumCounters;
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

  std::vector<LaunchChange> changes;  // in order of chunk and launch
  if (!identity.moved.empty()) {
    bool same = false;
    JAXGRAPH_RETURN_IF_ERROR(
        planner.Remake(addresses, identity.moved, &recording.index, &changes, &same));
    if (!same) return Record(context, entry, call, identity);
  }
  if (variant->placement.has_slots()) {
    std::vector<Launch> fill;
    JAXGRAPH_RETURN_IF_ERROR(planner.Fill(addresses, &fill));
    JAXGRAPH_RETURN_IF_ERROR(LaunchAll(fill, call.stream));
  }
  Recorder recorder = MakeRecorder(context, *variant);
  LaunchChange* next = changes.data();
  LaunchChange* const end = next + changes.size();
  for (size_t c = 0; c < chunks.size(); ++c) {
    LaunchChange* const begin = next;
    while (next != end && next->chunk == c) ++next;
    Status status = recorder.Change(&chunks[c], begin, next);
    if (status.ok()) status = RunChunk(context, &chunks[c], c, call);
    if (!status.ok()) {
      LaunchPlan plan;  // the same launches and chunks as were recorded: emission is pure
      JAXGRAPH_RETURN_IF_ERROR(Plan(context, *variant, &plan));
      return GoOnEagerly(context, plan, c, entry, call, variant, status);
    }
  }
  recording.current = true;
  ++variant->replays;
  const bool updated = recorder.captured() || identity.addresses_changed;
  Note(context, variant->stats, updated ? Outcome::kUpdate : Outcome::kReplay,
       recorder.captured() ? Counter::kCaptures : Counter::kReplays);
  if (updated) {
    variant->run = Counter::kNumCounters;
    Log(*variant, "update",
        (recorder.captured() ? "re-captured; " : "patched; ") +
            (identity.why.empty() ? "bases wandered" : identity.why),
        &identity);
  } else if (std::exchange(variant->run, Counter::kReplays) != Counter::kReplays) {
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
  variant->run = Counter::kNumCounters;
  variant->stats->Add(Counter::kResetsFailure);
  Log(*variant, "failure",
      failure.message() + "; eager from node " + std::to_string(plan.chunks[chunk].first_node) +
          " on");
  for (size_t c = chunk; c < plan.chunks.size(); ++c) {
    JAXGRAPH_RETURN_IF_ERROR(LaunchAll(plan.chunks[c].launches, call.stream));
  }
  Note(context, variant->stats, Outcome::kEager, Counter::kEagerRecovered);
  return Status::Ok();
}

Status Executor::Impl::RunChunk(Context& context, RecordedChunk* chunk, size_t c,
                                const Call& call) {
  if (!chunk->captured()) return Status::Ok();  // views alone
  const auto run = [&] {
    const Status status = chunk->Run(call.stream);
    if (status.ok()) ++context.chunk_launches;
    return status;
  };
  if (!Trace::Active() && !device->profiled()) return run();
  const std::string name = SplitName(*call.program) + " chunk " + std::to_string(c);
  const ProfilerRange range(device, name);
  return timeline.Run(name, call.stream, run);
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
    FunctionStats* stats = context.statistics.Of(call.program->function_id);
    stats->Add(Counter::kFailuresFork, branches.fork_failures());
    Log(*call.program, "failure",
        branches.last_fork_failure().message() + "; branches ran one after the other");
  }
  return Status::Ok();
}

}  // namespace jaxgraph
