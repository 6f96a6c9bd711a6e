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
constexpr uint64_t kScratchBytes = 88 << 10;

// kScratchBytes, or 0 where no emitter needs them: kernels of whole layers do, and a layer has an
// attention; an argmax behind a product uses them where they are. One answer for all devices: how
// much to reserve is asked before it is known where a program will run.
inline uint64_t ScratchBytesOf(const Program& program) {
  const bool any = std::any_of(program.nodes.begin(), program.nodes.end(),
                               [](const Node& node) { return node.op == Op::kAttention; });
  return any ? kScratchBytes : 0;
}

// What is done in front of the nodes for bases in slots: operands are copied in, and where results
// go is written down, so that the launch that brings them there (below) is the same in every call.
struct SlotCopy {
  char* dst;
  const char* src;
  uint64_t bytes;
};
constexpr size_t kMaxSlots = 16;  // that one launch fills or drains
struct SlotFill {
  uint64_t num_copies = 0, num_addresses = 0;
  char* table = nullptr;  // takes the addresses; aligned to 8 bytes
  SlotCopy copies[kMaxSlots] = {};
  char* addresses[kMaxSlots] = {};
};

// ... and behind the nodes: sources[i] is copied to the i-th address of the table.
struct SlotSource {
  const char* src;
  uint64_t bytes;
};
struct SlotDrain {
  uint64_t num_sources = 0;
  const char* table = nullptr;
  SlotSource sources[kMaxSlots] = {};
};

class Emitter {
 public:
  virtual ~Emitter() = default;

  // Appends the launches for nodes[first..) that one kernel (or one fused group) covers and sets
  // *covered >= 1, the number of nodes consumed. VIEW emits nothing. `fusion` false: always 1.
  // A fused group never crosses a region's or branch's border.
  virtual Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                      std::vector<Launch>* launches, size_t* covered) const = 0;

  // One launch each, also where there is nothing to do.
  virtual Status EmitSlotFill(const SlotFill& fill, Launch* launch) const = 0;
  virtual Status EmitSlotDrain(const SlotDrain& drain, Launch* launch) const = 0;

  // False: the node needs host work, so the split that holds it runs eagerly.
  virtual bool Capturable(const Node& node) const = 0;
};

}  // namespace jaxgraph
