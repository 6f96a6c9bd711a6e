// Description: what the ledger holds of a variant, as plain data for people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/core/placement.h"
#include "ffi/core/program.h"
#include "ffi/core/status.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

struct Entry;
struct LaunchPlan;
struct Variant;

struct ChunkDescription {
  uint32_t first_node = 0;
  uint32_t node_count = 0;
  uint32_t launches = 0;  // of its nodes, after fusion
};

struct BaseDescription {
  std::string label;
  BaseKind kind = BaseKind::kArena;
  uint64_t nbytes = 0;
  Place place = Place::kInPlace;
  uint32_t nodes = 0;  // that launch something and touch it
  uint32_t moves = 0;  // of late
  uint32_t calls = 0;  // in which it had the opportunity
  std::string why;     // the place; may be empty
};

struct VariantDescription {
  uint64_t function_id = 0;
  uint32_t split = 0;
  Hash128 program_id{};
  uint64_t number = 0;  // in its executor; 0: of no variant, but what one would be
  std::string stage;    // "cold", "warming", "captured"
  uint32_t calls = 0;   // identical ones so far, while it warms up
  std::vector<ChunkDescription> chunks;
  uint64_t arena_bytes = 0;    // intermediates and slots
  std::string not_capturable;  // the node that forbids capture, and why; empty: none does
  uint32_t failures = 0;       // of the program
  std::string last_failure;
  std::vector<BaseDescription> bases;  // without the arena
};

VariantDescription DescribeVariant(const Entry& entry, const Variant& variant);

// What a recording of the program would be, by an emission with made-up addresses.
Status DescribeUnrecorded(const Program& program, const Emitter& emitter,
                          VariantDescription* description);

// The node that forbids a capture, for people; empty: none does.
std::string FindNotCapturable(const Program& program, const Emitter& emitter);

}  // namespace jaxgraph
