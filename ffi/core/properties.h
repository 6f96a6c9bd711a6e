// Node properties: the snapshot of what a program computes with which addresses, and the
// comparison of two. The comparison is a diff, not a bool: which nodes, which fields.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/core/program.h"

namespace jaxgraph {

// A program is immutable, so the program and the resolved addresses of its bases are all that a
// snapshot of every node has to hold.
struct Snapshot {
  std::shared_ptr<const Program> program;
  std::vector<char*> bases;
};

enum class Change : uint8_t {
  kNone = 0,       // nothing that a launch depends on
  kAddresses = 1,  // the same launches with other addresses
  kStructure = 2,  // another computation
};
const char* NameOf(Change change);

enum class Field : uint8_t {
  kNodeCount,
  kOp,
  kParams,
  kFlags,
  kRegion,
  kBranch,
  kTensorCount,
  kDType,
  kShape,
  kStrides,
  kAddress,
};
const char* NameOf(Field field);

struct FieldChange {
  uint32_t node = 0;
  Field field = Field::kNodeCount;
  Change change = Change::kNone;  // what this change means: kNone in a VIEW, which launches nothing
  bool source = false;            // of a source, else of an output (where it is about a tensor)
  uint16_t tensor = 0;
};

struct Diff {
  Change change = Change::kNone;  // the worst of all
  std::vector<FieldChange> fields;
  uint64_t nodes_compared = 0;
};

// Compares every field of every node. Nodes beyond the shorter list count as one kNodeCount.
Diff Compare(const Snapshot& before, const Snapshot& after);

// One changed field with its values, for people.
struct NodeChange {
  uint32_t node = 0;
  std::string op, label;  // of the node as it is now; empty where there is none
  std::string field;
  bool source = false;
  uint16_t tensor = 0;
  std::string before, after;
};

// The first decisive changes, `limit` of them at most.
std::vector<NodeChange> DescribeChanges(const Diff& diff, const Snapshot& before,
                                        const Snapshot& after, size_t limit);

// One sentence for people: the first decisive change with its values, and how many more there are.
std::string Summarize(const Diff& diff, const Snapshot& before, const Snapshot& after);

}  // namespace jaxgraph
