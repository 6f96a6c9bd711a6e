#include "ffi/core/placement.h"

#include <algorithm>

#include "ffi/kernels/emitter.h"

namespace jaxgraph {
namespace {

// Measured on an H200, in µs.
constexpr double kPatchMicros = 0.9;   // the parameters of one node, set in an executable
constexpr double kPatchedMicros = 20;  // what the next launch of it takes longer, however many
constexpr double kCopyMicros = 5;      // a kernel beside the executables
constexpr double kCopyBytesPerMicro = 4.3e6 / 2;  // a copy reads and writes

// Aliased bases up to this size are counters and tokens that somebody donates, and get another
// buffer at nearly every call all the same; larger ones are caches, which stay or alternate.
constexpr uint64_t kMaxAliasedWanderer = 4096;

// Up to this size every base that may wander has a slot set aside for it. Of the larger ones, many
// are weights, which stay, so that slots for all of them would cost memory for nothing.
constexpr uint64_t kSmall = kArenaAlignment;

// A large result that so few nodes touch (logits: the product, the choice) is patched at them.
constexpr uint32_t kFewNodes = 4;

// So many moves must be seen before an executable is changed for the sake of a slot.
constexpr uint32_t kMovesOnceRecorded = 4;

uint64_t AlignUp(uint64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// What a base costs in each call in which it moves, and in each call.
double PatchCost(const BaseFacts& facts) {
  return facts.nodes > 0 ? facts.nodes * kPatchMicros + kPatchedMicros : 0;
}
double CopyCost(const BaseFacts& facts) {
  return kCopyMicros + static_cast<double>(facts.nbytes) / kCopyBytesPerMicro;
}

std::vector<uint32_t> NodesOfBases(const Program& program) {
  std::vector<uint32_t> counts(program.bases.size());
  std::vector<size_t> last(program.bases.size(), SIZE_MAX);  // node that was counted last
  for (size_t n = 0; n < program.nodes.size(); ++n) {
    if (program.nodes[n].op == Op::kView) continue;
    for (const auto* tensors : {&program.nodes[n].outs, &program.nodes[n].srcs}) {
      for (const TensorRef& t : *tensors) {
        if (last[t.base] == n) continue;
        last[t.base] = n;
        ++counts[t.base];
      }
    }
  }
  return counts;
}

}  // namespace

const char* NameOf(Place place) {
  constexpr const char* names[] = {"arena", "in place", "patched", "slot", "empty"};
  return names[static_cast<int>(place)];
}

bool MayWander(const BaseFacts& facts) {
  if (facts.kind == BaseKind::kArena || facts.nbytes == 0) return false;
  if (facts.aliased || facts.written) return facts.nbytes <= kMaxAliasedWanderer;
  if (facts.nbytes <= kMaxSlotBytes) return true;
  return facts.kind == BaseKind::kResult && facts.nodes <= kFewNodes;
}

// Never one that the program writes into in place: whoever looks for the new value looks at the
// operand's own address.
bool MayUseSlot(const BaseFacts& facts) {
  if (!MayWander(facts) || facts.aliased || facts.written || facts.nodes == 0) return false;
  return facts.nbytes <= kSmall || (facts.expected && facts.nbytes <= kMaxSlotBytes);
}

// A base that stays put costs nothing in place, and its first move is worth a look at the node
// properties. One that wanders is patched at its nodes, or copied: a copy is paid for in every
// call, patches only in those in which it moves.
Place ChoosePlace(const BaseFacts& facts) {
  if (facts.kind == BaseKind::kArena) return Place::kArena;
  if (facts.nbytes == 0) return Place::kNowhere;
  if (!MayWander(facts)) return Place::kInPlace;
  if (facts.moves == 0) return facts.expected ? Place::kPatched : Place::kInPlace;
  if (!MayUseSlot(facts)) return Place::kPatched;
  if (facts.recorded && facts.moves < kMovesOnceRecorded) return Place::kPatched;
  const double rate = static_cast<double>(facts.moves) / std::max(facts.calls, facts.moves);
  return CopyCost(facts) < rate * PatchCost(facts) ? Place::kSlot : Place::kPatched;
}

Placement::Placement(const Program& program, bool slots)
    : bases_(program.bases.size()), arena_bytes_(AlignUp(program.arena_bytes)) {
  // Without slots the arena is a buffer of the program's own size.
  const uint64_t scratch_bytes = slots ? ScratchBytesOf(program) : 0;
  if (scratch_bytes > 0) {
    scratch_ = static_cast<int64_t>(arena_bytes_);
    arena_bytes_ += AlignUp(scratch_bytes);
  }
  const std::vector<uint32_t> nodes = NodesOfBases(program);
  for (size_t b = 0; b < program.bases.size(); ++b) {
    const Base& base = program.bases[b];
    BaseFacts& facts = bases_[b].facts;
    facts.kind = base.kind;
    facts.nbytes = base.nbytes;
    facts.nodes += nodes[b];
    facts.written = base.kind == BaseKind::kOperand && base.written;
    facts.expected = base.hint == BaseHint::kWanders || base.kind == BaseKind::kResult;
    if (base.alias < 0) continue;
    const size_t operand = 1 + static_cast<size_t>(base.alias);
    facts.aliased = bases_[operand].facts.aliased = true;
    facts.expected = bases_[operand].facts.expected = false;  // donated: it stays until it moves
    aliases_.emplace_back(b, operand);
  }
  uint64_t addresses = 0;  // that the table may hold
  for (State& state : bases_) {
    state.may_wander = slots && MayWander(state.facts);
    state.place = slots || state.facts.kind == BaseKind::kArena || state.facts.nbytes == 0
                      ? ChoosePlace(state.facts)
                      : Place::kInPlace;
    if (!slots || !MayUseSlot(state.facts)) continue;
    state.slot = arena_bytes_;
    arena_bytes_ += AlignUp(state.facts.nbytes);
    addresses += state.facts.kind == BaseKind::kResult;
  }
  table_ = arena_bytes_;
  arena_bytes_ += AlignUp(addresses * sizeof(char*));
}

void Placement::SetPlace(State* state, Place place) {
  num_slots_ += place == Place::kSlot;
  num_slots_ -= state->place == Place::kSlot;
  drains_ |= place == Place::kSlot && state->facts.kind == BaseKind::kResult;
  state->place = place;
}

bool Placement::NoteMoved(size_t base, bool recorded) {
  State& state = bases_[base];
  // What it did before a rest says little of what it does now.
  if (state.facts.moves == 0 || calls_ - state.last_move > kMemoryCalls) {
    state.facts.moves = 0;
    state.first_call = std::max(state.last_move, calls_ > kMemoryCalls ? calls_ - kMemoryCalls : 1);
  }
  ++state.facts.moves;
  state.facts.calls = static_cast<uint32_t>(calls_ - state.first_call);
  state.facts.recorded = recorded;
  state.last_move = calls_;
  if (!state.may_wander || state.place == Place::kSlot) return false;  // Settle takes it out
  const Place place = ChoosePlace(state.facts);
  if (place == state.place) return false;
  SetPlace(&state, place);
  return true;
}

bool Placement::Settle() {
  bool any = false;
  for (State& state : bases_) {
    if (state.place != Place::kSlot || calls_ - state.last_move < kRestCalls) continue;
    SetPlace(&state, Place::kPatched);
    any = true;
  }
  return any;
}

char* Placement::ResolveOne(size_t base, const std::vector<char*>& addresses, char* arena) const {
  switch (bases_[base].place) {
    case Place::kInPlace:
    case Place::kPatched:
      return addresses[base];
    case Place::kSlot:
      return arena + bases_[base].slot;
    case Place::kArena:
    case Place::kNowhere:
      break;
  }
  return arena;
}

void Placement::Resolve(const std::vector<char*>& addresses, char* arena,
                        std::vector<char*>* resolved) const {
  resolved->resize(bases_.size());
  for (size_t b = 0; b < bases_.size(); ++b) (*resolved)[b] = ResolveOne(b, addresses, arena);
}

Placement::Motion Placement::MotionOf(size_t base) const {
  const State& state = bases_[base];
  const uint32_t moves = state.facts.moves;
  if (moves == 0) return {};
  const uint64_t rest = calls_ - state.last_move;
  if (rest > kMemoryCalls) return {0, 0, rest};
  return {moves, std::max(static_cast<uint32_t>(calls_ - state.first_call), moves), 0};
}

std::string Placement::Why(size_t base) const {
  const State& state = bases_[base];
  const BaseFacts& facts = state.facts;
  if (state.place == Place::kArena || state.place == Place::kNowhere) return {};
  const Motion motion = MotionOf(base);
  std::string moved = "has not moved";
  if (motion.rest > 0) moved += " for " + std::to_string(motion.rest) + " calls";
  if (motion.moves > 0) {
    moved = "moved in " + std::to_string(motion.moves) + " of " + std::to_string(motion.calls) +
            " calls";
  }
  std::string text =
      std::to_string(facts.nodes) + (facts.nodes == 1 ? " node, " : " nodes, ") + moved;
  if (state.place == Place::kInPlace && !state.may_wander) {
    text += facts.aliased || facts.written ? "; updated in place" : "; too large to follow";
  }
  if (state.place == Place::kSlot) {
    text += facts.kind == BaseKind::kResult ? "; copied out at the graph's end"
                                            : "; copied beside the graph";
  }
  return text;
}

std::string Placement::Explain(const Base& base, size_t index) const {
  const std::string why = Why(index);
  return base.label + ": " + NameOf(bases_[index].place) + ", " + std::to_string(base.nbytes) +
         " bytes" + (why.empty() ? "" : " (" + why + ")");
}

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

uint64_t ArenaBytesOf(const Program& program) { return Placement(program).arena_bytes(); }

}  // namespace jaxgraph
