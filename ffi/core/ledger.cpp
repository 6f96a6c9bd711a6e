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
    if (placement.may_wander(b) || placement.place(b) != Place::kInPlace) continue;
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

const Failures* Entry::FindFailures(const Program& program) const {
  for (const Failures& f : failures) {
    if (f.program == program.id) return &f;
  }
  return nullptr;
}

void Entry::NoteFailure(const Program& program, const std::string& why) {
  Failures* found = const_cast<Failures*>(FindFailures(program));
  if (found == nullptr) {
    found = &failures.emplace_back();
    found->program = program.id;
    found->function_id = program.function_id;
  }
  ++found->count;
  found->last = why;
}

void Ledger::DropIf(const std::function<bool(const Variant&)>& drop) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& variants = it->second.variants;
    variants.erase(
        std::remove_if(variants.begin(), variants.end(), [&](const auto& v) { return drop(*v); }),
        variants.end());
    const bool empty = variants.empty() && it->second.failures.empty();
    it = empty ? entries_.erase(it) : std::next(it);
  }
}

void Ledger::Clear(uint64_t function_id) {
  const auto cleared = [&](uint64_t id) { return function_id == 0 || id == function_id; };
  for (auto& [key, entry] : entries_) {
    auto& failures = entry.failures;
    failures.erase(std::remove_if(failures.begin(), failures.end(),
                                  [&](const Failures& f) { return cleared(f.function_id); }),
                   failures.end());
    // Another function may share the key: what was seen of the cleared one must go all the same.
    const bool any = std::any_of(entry.variants.begin(), entry.variants.end(),
                                 [&](const auto& v) { return cleared(v->program().function_id); });
    if (any) entry.history = {};
  }
  DropIf([&](const Variant& v) { return cleared(v.program().function_id); });
}

}  // namespace jaxgraph
