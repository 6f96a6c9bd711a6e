// Placement: where each base of a program lives during a call. A base is used in place, and then
// its address is part of what is recorded, or it is copied through a slot of the arena, and then
// only the copy knows its address.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/program.h"

namespace jaxgraph {

constexpr uint64_t kArenaAlignment = 256;
constexpr uint64_t kMaxSlotBytes = 1 << 20;  // larger bases are never copied

enum class Place : uint8_t {
  kArena,    // base 0
  kInPlace,  // at the address that the call gives; part of the uid
  kSlot,     // in the arena, copied in before the first node or out after the last
  kNowhere,  // empty: no address matters
};
const char* NameOf(Place place);

class Placement {
 public:
  // `slots` false: everything in place, for runs whose launches nobody keeps.
  explicit Placement(const Program& program, bool slots = true);

  Place place(size_t base) const { return bases_[base].place; }
  // May this base ever get a slot? Those that may not make up an address set of the program.
  bool slottable(size_t base) const { return bases_[base].slottable; }
  // Bytes of the arena: the program's own, then one slot for every base that may ever want one, so
  // that a change of mind never grows it.
  uint64_t arena_bytes() const { return arena_bytes_; }
  // Pairs (base of a result, base of the operand whose address it must have).
  const std::vector<std::pair<size_t, size_t>>& aliases() const { return aliases_; }

  // The base's address was seen to move. True if that changes its place.
  bool NoteMoved(size_t base);

  // Where the nodes find each base, given the call's addresses and the arena.
  void Resolve(const std::vector<char*>& addresses, char* arena,
               std::vector<char*>* resolved) const;

  // For people: the choice and why.
  std::string Explain(const Base& base, size_t index) const;

 private:
  struct State {
    Place place = Place::kInPlace;
    bool slottable = false;
    bool moved = false;
    uint64_t slot = 0;  // offset in the arena
  };

  std::vector<State> bases_;
  std::vector<std::pair<size_t, size_t>> aliases_;
  uint64_t arena_bytes_ = 0;
};

// What `reserve` must ask for, so that a call of this program never grows the arena.
uint64_t ArenaBytesOf(const Program& program);

}  // namespace jaxgraph
