// The memory that a thread asks for: counted, and refused if a test wants that.
//
// All forms of new that a delete below may be given memory of: a sanitizer brings its own
// otherwise, and the standard library mixes them (std::stable_sort's buffer comes from the one that
// throws nothing). Not inlined: the compiler would see new and delete as what they are made of, and
// warn. Weak: scripts/sanitize.sh makes one program of several tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace jaxgraph {

inline thread_local uint64_t allocations = 0;         // of this thread so far
inline thread_local uint64_t failing_allocation = 0;  // which one from now on fails; 0: none

}  // namespace jaxgraph

[[gnu::noinline, gnu::weak]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++jaxgraph::allocations;
  if (jaxgraph::failing_allocation > 0 && --jaxgraph::failing_allocation == 0) return nullptr;
  return std::malloc(bytes);
}
[[gnu::noinline, gnu::weak]] void* operator new(size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline, gnu::weak]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline, gnu::weak]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
