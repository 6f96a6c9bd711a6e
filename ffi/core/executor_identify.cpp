// Which variant a call belongs to, what has changed since its last call, and whether it is warm.
#include <algorithm>
#include <cstring>
#include <utility>

#include "ffi/core/executor_impl.h"

namespace jaxgraph {

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

// Follows the bases that wandered: the nodes that touch them are others now, unless they find them
// in their slots. An exception in the middle (host memory ran out) leaves the variant in doubt.
Status Executor::Impl::Follow(Context& context, Identity* identity) {
  Variant* variant = identity->variant;
  JAXGRAPH_RETURN_IF_ERROR(
      CheckAddresses(variant->program(), variant->placement, context.addresses));
  const uint64_t generation = std::exchange(variant->arena_generation, Variant::kInDoubt);
  identity->partial = std::exchange(variant->recording.current, false);
  for (const uint32_t b : context.wandered) {
    NoteMoved(variant, b);
    char* now = variant->placement.ResolveOne(b, context.addresses, context.arena.data());
    if (std::exchange(variant->snapshot.bases[b], now) != now) identity->moved.push_back(b);
  }
  variant->addresses = context.addresses;
  variant->arena_generation = generation;
  return Status::Ok();
}

// Takes bases that have come to rest out of their slots, whose copies every call pays for. As in
// Follow, an exception leaves the variant in doubt: nobody would fill the slots any more.
void Executor::Impl::Settle(Context& context, Variant* variant, Identity* identity) {
  const uint64_t generation = std::exchange(variant->arena_generation, Variant::kInDoubt);
  if (!variant->placement.Settle()) {
    variant->arena_generation = generation;
    return;
  }
  std::vector<char*> now;
  variant->placement.Resolve(context.addresses, context.arena.data(), &now);
  for (uint32_t b = 0; b < now.size(); ++b) {
    if (variant->snapshot.bases[b] != now[b]) identity->moved.push_back(b);
  }
  variant->snapshot.bases = std::move(now);
  identity->partial |= std::exchange(variant->recording.current, false);
  variant->arena_generation = generation;
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

// Gives the variant the call's addresses. As in Follow, an exception leaves it in doubt.
Status Executor::Impl::ChangeAddresses(Context& context, Variant* variant, Identity* identity) {
  JAXGRAPH_RETURN_IF_ERROR(ReserveArena(context, variant->placement.arena_bytes(), variant->stats));
  const uint64_t generation = std::exchange(variant->arena_generation, Variant::kInDoubt);
  identity->partial = std::exchange(variant->recording.current, false);
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
  identity->arena_moved = generation != Variant::kInDoubt && generation != context.arena.generation;
  if (identity->addresses_changed) {
    identity->why = (identity->arena_moved ? "the arena moved; " : "") +
                    Summarize(diff, variant->snapshot, now);
    identity->Describe(diff, variant->snapshot, now);
  }
  for (uint32_t b = 0; b < now.bases.size(); ++b) {
    if (variant->snapshot.bases[b] != now.bases[b]) identity->moved.push_back(b);
  }
  variant->snapshot = std::move(now);
  variant->addresses = context.addresses;
  variant->arena_generation = context.arena.generation;
  return Status::Ok();
}

Status Executor::Impl::AddVariant(Context& context, Entry& entry, const Call& call,
                                  Identity* identity) {
  const Program& program = *call.program;
  FunctionStats* stats = context.statistics.Of(program.function_id);
  auto variant = std::make_unique<Variant>(call.program, stats);
  JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, variant->placement, context.addresses));
  JAXGRAPH_RETURN_IF_ERROR(ReserveArena(context, variant->placement.arena_bytes(), stats));
  variant->number = next_variant++;

  // What is known of the program's bases holds for all its variants.
  for (const std::unique_ptr<Variant>& other : entry.variants) {
    if (!other->Runs(program)) continue;
    variant->placement = other->placement;
    break;
  }
  variant->placement.BeginCall();
  variant->placement.Resolve(context.addresses, context.arena.data(), &variant->snapshot.bases);
  variant->addresses = context.addresses;
  variant->arena_generation = context.arena.generation;
  variant->not_capturable = FindNotCapturable(program, *emitter);

  const std::string evicted = events.LastEviction(program);
  identity->why =
      evicted.empty() ? "the first call" : "the first call since an eviction (" + evicted + ")";
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

}  // namespace jaxgraph
