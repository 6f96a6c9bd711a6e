#include "ffi/core/ledger.h"

#include <algorithm>

namespace jaxgraph {

const char* NameOf(Stage stage) {
  constexpr const char* names[] = {"cold", "warming", "captured"};
  return names[static_cast<int>(stage)];
}

Variant::Variant(std::shared_ptr<const Program> program, FunctionStats* stats)
    : stats(stats), placement(*program), snapshot{std::move(program), {}} {}

bool AddressHistory::SeenBefore(const Program& program, const Placement& placement,
                                const std::vector<char*>& addresses, size_t limit) {
  std::string bytes(program.id.begin(), program.id.end());
  for (size_t b = 1; b < addresses.size(); ++b) {
    if (placement.slottable(b) || placement.place(b) != Place::kInPlace) continue;
    bytes.append(reinterpret_cast<const char*>(&addresses[b]), sizeof addresses[b]);
  }
  const Hash128 set = HashBytes(bytes);
  const auto found = std::find(sets_.begin(), sets_.end(), set);
  const bool seen = found != sets_.end();
  if (seen) sets_.erase(found);
  sets_.push_front(set);
  if (sets_.size() > limit) sets_.resize(limit);
  return seen;
}

void Entry::Touch(const Variant* variant) {
  const auto at = std::find_if(variants.begin(), variants.end(),
                               [&](const auto& v) { return v.get() == variant; });
  std::rotate(variants.begin(), at, at + 1);
}

void Ledger::Clear(uint64_t function_id) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& variants = it->second.variants;
    const auto cleared = [&](const auto& v) {
      return function_id == 0 || v->program().function_id == function_id;
    };
    const auto kept = std::remove_if(variants.begin(), variants.end(), cleared);
    // Another function may share the key: what was seen of the cleared one must go all the same.
    if (kept != variants.end()) it->second.history = {};
    variants.erase(kept, variants.end());
    it = variants.empty() ? entries_.erase(it) : std::next(it);
  }
}

}  // namespace jaxgraph
