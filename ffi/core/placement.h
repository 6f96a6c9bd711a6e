// Placement: where each base of a program lives during a call, and what it costs when its address
// moves. One function, ChoosePlace, decides.
//
//   in place  the address is part of what is recorded and of the uid; when it moves, the node
//             properties are compared and the variant is updated, or another address set is found
//   patched   the address is recorded but no part of the uid: the nodes that touch it are patched
//             whenever it moves, and it costs nothing while it stays
//   slot      the nodes find it in the arena; a copy that is launched in front of the executables
//             brings it there, so that these never change. Results are brought out by the last
//             launch of the last executable, which finds written down in the arena where they go
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/program.h"
#include "ffi/core/status.h"

namespace jaxgraph {

constexpr uint64_t kArenaAlignment = 256;
constexpr uint64_t kMaxSlotBytes = 1 << 20;  // larger bases are never copied

enum class Place : uint8_t {
  kArena,    // base 0
  kInPlace,  // at the address that the call gives; part of the uid
  kPatched,  // at the address that the call gives; its nodes are patched when it moves
  kSlot,     // in the arena, copied in before the first node or out after the last
  kNowhere,  // empty: no address matters
};
const char* NameOf(Place place);

// What is known of a base when its place is chosen.
struct BaseFacts {
  BaseKind kind = BaseKind::kOperand;
  uint64_t nbytes = 0;
  uint32_t nodes = 0;     // that launch something and touch it
  bool aliased = false;   // a result and an operand share its address
  bool written = false;   // an operand that the program writes: its address is looked at later
  bool expected = false;  // to wander: hinted, or a result, which gets a new buffer every call
  uint32_t moves = 0;     // of late
  uint32_t calls = 0;     // in which it had the opportunity
  bool recorded = false;  // an executable knows its present place
};

// May the base be anything else than in place? If not, its addresses make up the address sets.
bool MayWander(const BaseFacts& facts);
// Is a copy allowed, and can it ever pay?
bool MayUseSlot(const BaseFacts& facts);
Place ChoosePlace(const BaseFacts& facts);

class Placement {
 public:
  // `slots` false: everything in place, for runs whose launches nobody keeps.
  explicit Placement(const Program& program, bool slots = true);

  Place place(size_t base) const { return bases_[base].place; }
  // Those that may not wander make up an address set of the program.
  bool may_wander(size_t base) const { return bases_[base].may_wander; }
  bool has_slots() const { return num_slots_ > 0; }
  // Bytes of the arena: the program's own, scratch memory, then one slot for every base that may
  // ever want one, so that a change of mind never grows it.
  uint64_t arena_bytes() const { return arena_bytes_; }
  // Where in the arena the kernels' scratch memory is (ResolvedNode::scratch); negative: nowhere.
  int64_t scratch() const { return scratch_; }
  // Where in the arena the addresses of results in slots are, for the launch that takes those out
  // (SlotDrain). It is part of what is recorded from the first such result on, for ever: one that
  // is there and has nothing to do costs less than recording anew each time results come to rest.
  uint64_t table() const { return table_; }
  bool drains() const { return drains_; }
  // Pairs (base of a result, base of the operand whose address it must have).
  const std::vector<std::pair<size_t, size_t>>& aliases() const { return aliases_; }

  void BeginCall() { ++calls_; }
  // The base's address was seen to move, in the present call. True if that changes its place.
  // `recorded`: executables know the present one.
  bool NoteMoved(size_t base, bool recorded);
  // Is it time to ask whether bases in slots have come to rest?
  bool DueToSettle() const { return num_slots_ > 0 && calls_ % kRestCalls == 0; }
  // Takes bases that came to rest out of their slots. True if there was one.
  bool Settle();

  // Where the nodes find each base, given the call's addresses and the arena.
  void Resolve(const std::vector<char*>& addresses, char* arena,
               std::vector<char*>* resolved) const;
  char* ResolveOne(size_t base, const std::vector<char*>& addresses, char* arena) const;

  const BaseFacts& facts(size_t base) const { return bases_[base].facts; }
  // For people: how often the base moved of late, up to the present call.
  struct Motion {
    uint32_t moves = 0;
    uint32_t calls = 0;  // in which it had the opportunity
    uint64_t rest = 0;   // calls since the last move, where that is too long ago to count
  };
  Motion MotionOf(size_t base) const;
  // For people: why the base has its place (may be empty), and the choice with it.
  std::string Why(size_t base) const;
  std::string Explain(const Base& base, size_t index) const;

 private:
  // Moves that are so many calls ago say nothing of the present.
  static constexpr uint64_t kMemoryCalls = 64;
  // A base in a slot that did not move in so many calls is at rest, as inside a loop: its copy has
  // cost more by then than the patches that take it out of its slot.
  static constexpr uint64_t kRestCalls = 128;

  struct State {
    BaseFacts facts;
    Place place = Place::kInPlace;
    bool may_wander = false;
    uint64_t slot = 0;        // offset in the arena
    uint64_t first_call = 0;  // since when moves are counted
    uint64_t last_move = 0;
  };
  void SetPlace(State* state, Place place);

  std::vector<State> bases_;
  std::vector<std::pair<size_t, size_t>> aliases_;
  uint64_t arena_bytes_ = 0;
  int64_t scratch_ = -1;
  uint64_t table_ = 0;
  bool drains_ = false;
  uint64_t calls_ = 0;
  size_t num_slots_ = 0;
};

// What no earlier call has vouched for: addresses that are there, and aliases that hold.
Status CheckAddresses(const Program& program, const Placement& placement,
                      const std::vector<char*>& addresses);

// What `reserve` must ask for, so that a call of this program never grows the arena.
uint64_t ArenaBytesOf(const Program& program);

}  // namespace jaxgraph
