// Emitter: turns nodes with resolved addresses into launches, for one device kind. Pure: no device
// call, no state; equal input gives equal bytes. Here (try_fuse) it is decided which kernel covers
// which run of nodes; what changes the node list was decided when the graph was built.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/core/program.h"
#include "ffi/core/status.h"
#include "ffi/device/launch.h"

namespace jaxgraph {

// One node with the addresses of the present call.
struct ResolvedNode {
  const Node* node = nullptr;
  std::vector<char*> outs;        // address of outs[i]'s first element
  std::vector<const char*> srcs;  // address of srcs[i]'s first element
  // Bit i: no node of the program writes srcs[i], so a kernel that starts before its predecessor
  // has ended may read it.
  uint32_t constant_srcs = 0;
  bool is_constant(size_t src) const { return src < 32 && (constant_srcs >> src & 1) != 0; }
  // kScratchBytes that the launches of one emission may pass on among themselves; null: none.
  char* scratch = nullptr;
};
constexpr uint64_t kScratchBytes = 72 << 10;

// kScratchBytes, or 0 where no emitter needs them: kernels of whole layers do, and a layer has an
// attention; an argmax behind a product uses them where they are. One answer for all devices: how
// much to reserve is asked before it is known where a program will run.
inline uint64_t ScratchBytesOf(const Program& program) {
  const bool any = std::any_of(program.nodes.begin(), program.nodes.end(),
                               [](const Node& node) { return node.op == Op::kAttention; });
  return any ? kScratchBytes : 0;
}

// One contiguous copy between a slot and a wandering base.
struct SlotCopy {
  char* dst;
  const char* src;
  uint64_t bytes;
};

class Emitter {
 public:
  virtual ~Emitter() = default;

  // Appends the launches for nodes[first..) that one kernel (or one fused group) covers and sets
  // *covered >= 1, the number of nodes consumed. VIEW emits nothing. `fusion` false: always 1.
  // A fused group never crosses a region's or branch's border.
  virtual Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                      std::vector<Launch>* launches, size_t* covered) const = 0;

  // Appends launches that make these copies, all independent, in as few launches as possible.
  virtual Status EmitSlotCopies(const std::vector<SlotCopy>& copies,
                                std::vector<Launch>* launches) const = 0;

  // False: the node needs host work, so the split that holds it runs eagerly.
  virtual bool Capturable(const Node& node) const = 0;
};

}  // namespace jaxgraph
