#include "ffi/core/placement.h"

namespace jaxgraph {
namespace {

uint64_t AlignUp(uint64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// May the base be copied? Not if it is large, and not if the program writes into the operand
// itself: the caller looks for the new value at the operand's own address.
bool MayUseSlot(const Base& base, bool aliased) {
  if (base.nbytes > kMaxSlotBytes || aliased) return false;
  return base.kind == BaseKind::kResult || !base.written;
}

// The decision. Results get a new buffer at nearly every call, so they need no proof; an operand
// stays in place until it is known to wander.
Place Choose(const Base& base, bool slottable, bool moved) {
  if (base.kind == BaseKind::kArena) return Place::kArena;
  if (base.nbytes == 0) return Place::kNowhere;
  if (!slottable) return Place::kInPlace;
  const bool wanders = base.kind == BaseKind::kResult || base.hint == BaseHint::kWanders || moved;
  return wanders ? Place::kSlot : Place::kInPlace;
}

}  // namespace

const char* NameOf(Place place) {
  constexpr const char* names[] = {"arena", "in place", "slot", "empty"};
  return names[static_cast<int>(place)];
}

Placement::Placement(const Program& program, bool slots)
    : bases_(program.bases.size()), arena_bytes_(AlignUp(program.arena_bytes)) {
  std::vector<bool> aliased(program.bases.size());
  for (size_t b = 0; b < program.bases.size(); ++b) {
    const Base& base = program.bases[b];
    if (base.alias < 0) continue;
    const size_t operand = 1 + static_cast<size_t>(base.alias);
    aliased[b] = aliased[operand] = true;
    aliases_.emplace_back(b, operand);
  }
  for (size_t b = 0; b < program.bases.size(); ++b) {
    const Base& base = program.bases[b];
    State& state = bases_[b];
    state.slottable = slots && base.kind != BaseKind::kArena && MayUseSlot(base, aliased[b]);
    state.place = Choose(base, state.slottable, /*moved=*/false);
    if (!state.slottable) continue;
    state.slot = arena_bytes_;
    arena_bytes_ += AlignUp(base.nbytes);
  }
}

bool Placement::NoteMoved(size_t base) {
  State& state = bases_[base];
  if (!state.slottable || state.moved || state.place != Place::kInPlace) return false;
  state.moved = true;
  state.place = Place::kSlot;
  return true;
}

void Placement::Resolve(const std::vector<char*>& addresses, char* arena,
                        std::vector<char*>* resolved) const {
  resolved->resize(bases_.size());
  for (size_t b = 0; b < bases_.size(); ++b) {
    switch (bases_[b].place) {
      case Place::kArena:
      case Place::kNowhere:
        (*resolved)[b] = arena;
        break;
      case Place::kInPlace:
        (*resolved)[b] = addresses[b];
        break;
      case Place::kSlot:
        (*resolved)[b] = arena + bases_[b].slot;
        break;
    }
  }
}

std::string Placement::Explain(const Base& base, size_t index) const {
  const State& state = bases_[index];
  std::string why;
  if (state.place == Place::kSlot) {
    why = state.moved                      ? "its address moved"
          : base.kind == BaseKind::kResult ? "results get a new buffer at nearly every call"
                                           : "it is expected to wander";
  } else if (state.place == Place::kInPlace) {
    why = base.nbytes > kMaxSlotBytes ? "larger than a slot"
          : !state.slottable          ? "written in place"
                                      : "its address has not moved";
  }
  std::string text =
      base.label + ": " + NameOf(state.place) + ", " + std::to_string(base.nbytes) + " bytes";
  if (!why.empty()) text += " (" + why + ")";
  return text;
}

uint64_t ArenaBytesOf(const Program& program) { return Placement(program).arena_bytes(); }

}  // namespace jaxgraph
