// Ledger: graph key -> entry -> variants. An entry holds what was seen of the programs that share a
// key: several programs, and several address sets of one program.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffi/core/placement.h"
#include "ffi/core/program.h"
#include "ffi/core/properties.h"
#include "ffi/core/recording.h"
#include "ffi/core/statistics.h"

namespace jaxgraph {

enum class Stage : uint8_t { kCold, kWarming, kCaptured };
const char* NameOf(Stage stage);

// One program with one set of addresses, and how far it is on its way to replay.
struct Variant {
  Variant(std::shared_ptr<const Program> program, FunctionStats* stats);

  // No arena's generation: the variant hits no uid, and its nodes are compared anew.
  static constexpr uint64_t kInDoubt = UINT64_MAX;

  FunctionStats* const stats;
  Placement placement;
  Snapshot snapshot;              // the program, and where its nodes find their bases
  std::vector<char*> addresses;   // of the last call, by base
  uint64_t arena_generation = 0;  // that `snapshot` is of; kInDoubt while that is being changed

  Stage stage = Stage::kCold;
  uint32_t calls = 0;  // identical ones so far
  Recording recording;
  uint64_t replays = 0;  // of the recording

  std::string not_capturable;  // the node that forbids capture; empty: none
  // What the last call counted as. One that counts as the same needs no event; kNumCounters: any.
  Counter run = Counter::kNumCounters;
  uint64_t number = 0;     // in its executor, from 1 on, for people
  double last_used_s = 0;  // by the executor's clock
  uint64_t last_call = 0;  // number of the executor's call

  const Program& program() const { return *snapshot.program; }
  bool Runs(const Program& p) const {
    return snapshot.program.get() == &p || snapshot.program->id == p.id;
  }
};

// The address sets that an entry saw of late: the addresses of the bases that are always used in
// place. A set that comes back deserves a variant of its own; one that is new updates a variant.
class AddressHistory {
 public:
  // True if the set was among the last `limit`; it is the newest afterwards.
  bool SeenBefore(const Program& program, const Placement& placement,
                  const std::vector<char*>& addresses, size_t limit);

 private:
  std::deque<Hash128> sets_;  // newest first
};

// What went wrong with a program. It outlives the program's variants: one that is dropped and made
// again must not fail for ever.
struct Failures {
  Hash128 program{};
  uint64_t function_id = 0;
  uint32_t count = 0;
  std::string last;
};

struct Entry {
  std::vector<std::unique_ptr<Variant>> variants;  // most recently used first
  AddressHistory history;
  std::vector<Failures> failures;  // of programs that had some

  void Touch(const Variant* variant);  // makes it the most recently used
  const Failures* FindFailures(const Program& program) const;
  void NoteFailure(const Program& program, const std::string& why);
};

class Ledger {
 public:
  Entry& EntryOf(const Hash128& key) { return entries_[key]; }
  void Clear(uint64_t function_id);  // 0: all
  // Drops the variants for which drop(variant) is true.
  void DropIf(const std::function<bool(const Variant&)>& drop);
  // Calls fn(entry, variant) for every variant.
  template <typename F>
  void ForEach(F fn) const {
    for (const auto& [key, entry] : entries_) {
      for (const auto& variant : entry.variants) fn(entry, *variant);
    }
  }

 private:
  struct KeyHash {
    size_t operator()(const Hash128& key) const {  // a key is a hash already
      size_t word;
      std::memcpy(&word, key.data(), sizeof word);
      return word;
    }
  };

  std::unordered_map<Hash128, Entry, KeyHash> entries_;
};

}  // namespace jaxgraph
