// The executor, as one call goes through it: RunCall below reads top to bottom as the gates.
#include "ffi/core/executor.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "ffi/core/device_scope.h"
#include "ffi/core/executor_impl.h"
#include "ffi/core/standalone.h"

namespace jaxgraph {
namespace {

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

}  // namespace

double WallClock() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

double SteadyClock() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

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
    context.statistics.Of(program.function_id)->AddFailure(Counter::kFailuresQuery, asked);
    return RunOutside(context, call, "the state of the stream is unknown");
  }
  if (nested) return RunOutside(context, call, "the stream is being captured by somebody else");

  const double start = clock();
  context.decided_s = start;
  context.chunk_launches = 0;
  Variant* variant = nullptr;
  const Status status = RunGates(context, call, &variant);
  if (variant != nullptr) {
    const double now = clock();
    if (status.ok()) {
      NoteExecution(program, variant->stats, &context.executions,
                    {context.outcome, context.counted, variant->number, context.chunk_launches,
                     start, context.decided_s, now});
    }
    variant->last_used_s = now;
    variant->last_call = next_call++;
    Sweep(context, program.options, now);
  }
  return status;
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

  if (std::string why; variant->stage != Stage::kCaptured && WaitsForRoom(program, &why)) {
    return RunEager(context, call, variant, Counter::kEagerCrowded, why);
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
  FunctionStats* stats = context.statistics.Of(program.function_id);
  const double start = clock();
  JAXGRAPH_RETURN_IF_ERROR(ReserveArena(context, program.arena_bytes, stats));
  std::vector<char*> addresses = context.addresses;
  addresses[0] = context.arena.data();
  JAXGRAPH_RETURN_IF_ERROR(LaunchStandalone(device, *emitter, program, addresses, call.stream));
  stats->RaiseArena(context.arena.capacity);
  Note(context, stats, Outcome::kEager, Counter::kEagerOutside);
  NoteExecution(program, stats, &context.executions,
                {Outcome::kEager, Counter::kEagerOutside, 0, 0, start, start, clock()});
  if (why != nullptr) Log(program, "eager", why);
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
  std::optional<ProfilerRange> range;
  if (impl_->device->profiled()) range.emplace(impl_->device, SplitName(*program));
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
  impl_->contexts.MakeFirst();
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
  impl_->crowding.Clear(function_id);
  ResetStats(function_id);
}

void Executor::ResetStats(uint64_t function_id) {
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->executions.Clear(function_id);
    context->statistics.Zero(function_id);
  }
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
  Counters counters = impl_->SumOf(function_id);
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

void Executor::FlushTrace() {
  const DeviceScope scope(impl_->device);
  impl_->timeline.Flush();
}

Status Executor::WriteGraphs(uint64_t function_id, const std::string& folder,
                             std::vector<std::string>* files) const {
  const DeviceScope scope(impl_->device);
  JAXGRAPH_RETURN_IF_ERROR(scope.status());
  Status status;
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->ledger.ForEach([&](const Entry&, const Variant& variant) {
      const Program& program = variant.program();
      if (function_id != 0 && program.function_id != function_id) return;
      for (size_t c = 0; c < variant.recording.chunks.size() && status.ok(); ++c) {
        const RecordedChunk& chunk = variant.recording.chunks[c];
        if (!chunk.captured()) continue;
        files->push_back(std::string(impl_->device->name()) +
                         std::to_string(impl_->device->ordinal()) + "_split" +
                         std::to_string(program.split) + "_variant" +
                         std::to_string(variant.number) + "_chunk" + std::to_string(c) + ".dot");
        status = impl_->device->WriteDot(chunk.graph(), folder + "/" + files->back());
      }
    });
  }
  return status;
}

std::vector<VariantDescription> Executor::Variants(uint64_t function_id) const {
  std::vector<VariantDescription> out;
  for (Context* context : impl_->contexts.All()) {
    std::lock_guard lock(context->mutex);
    context->ledger.ForEach([&](const Entry& entry, const Variant& variant) {
      if (function_id != 0 && variant.program().function_id != function_id) return;
      out.push_back(DescribeVariant(entry, variant));
    });
  }
  std::sort(out.begin(), out.end(), [](const VariantDescription& a, const VariantDescription& b) {
    return std::tie(a.split, a.number) < std::tie(b.split, b.number);
  });
  return out;
}

Status Executor::Preview(const Program& program, VariantDescription* description) const {
  const DeviceScope scope(impl_->device);
  JAXGRAPH_RETURN_IF_ERROR(scope.status());
  return DescribeUnrecorded(program, *impl_->emitter, description);
}

}  // namespace jaxgraph
