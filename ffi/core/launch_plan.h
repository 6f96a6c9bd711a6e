// LaunchPlan: every launch of one call, in order, cut into chunks. The eager run, the capture and
// the update all start from it, so that they can never differ.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ffi/core/placement.h"
#include "ffi/core/program.h"
#include "ffi/core/status.h"
#include "ffi/device/launch.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

struct PlannedChunk {
  uint32_t first_node = 0;
  uint32_t node_count = 0;
  std::vector<Launch> launches;
};

// A run of nodes that one emission covered, and where its launches are.
struct PlannedGroup {
  uint32_t first_node = 0;
  uint32_t node_count = 0;
  uint32_t chunk = 0;
  uint32_t first_launch = 0;  // in the chunk
  uint32_t launch_count = 0;
  uint32_t reads_to = 0;  // see Launch
  bool follows = false;   // may its first launch be a dependent one?
};

// Where the launches of a plan come from, kept beside what was recorded of it: with it, the
// launches of a few nodes are made again without the rest. Behind those of all nodes, in the last
// chunk, are those that take results out of slots.
class PlanIndex {
 public:
  const std::vector<PlannedGroup>& groups() const { return groups_; }

 private:
  friend class Planner;
  std::vector<ResolvedNode> nodes_;
  std::vector<PlannedGroup> groups_;
  std::vector<std::vector<uint32_t>> groups_of_base_;  // that touch it, ascending
  PlannedGroup drain_;                                 // of no nodes
};

struct LaunchPlan {
  std::vector<PlannedChunk> chunks;  // at least one
  std::vector<Launch> fill;          // of slots: launched before the chunks, and no part of them
  PlanIndex index;
};

// One launch of a recorded plan that is another one now.
struct LaunchChange {
  uint32_t chunk = 0;
  uint32_t launch = 0;  // in the chunk
  Launch fresh;
};

// The addresses of one call: as it gives them, and where the nodes find them.
struct CallAddresses {
  const std::vector<char*>& given;
  const std::vector<char*>& resolved;
};

// Makes plans of one program. Cheap to construct.
class Planner {
 public:
  Planner(const Emitter& emitter, const Program& program, const Placement& placement)
      : emitter_(emitter), program_(program), placement_(placement) {}

  Status Make(const CallAddresses& addresses, LaunchPlan* plan) const;

  // What is launched before the chunks, in every call with other addresses.
  Status Fill(const CallAddresses& addresses, std::vector<Launch>* launches) const;

  // The launches that are other ones because these bases moved, in order. *same is false where the
  // emission covers other nodes, or takes another number of launches, than before: then the plan
  // must be made anew. After a failure, too.
  Status Remake(const CallAddresses& addresses, const std::vector<uint32_t>& moved_bases,
                PlanIndex* index, std::vector<LaunchChange>* changes, bool* same) const;

 private:
  std::vector<uint32_t> TouchedGroups(const PlanIndex& index,
                                      const std::vector<uint32_t>& moved_bases) const;
  void Place(bool follows, Launch* launch) const;
  template <typename F>
  void ForSlots(BaseKind kind, F fn) const;
  // Appends what takes results out of slots. `follows`: may its first launch be a dependent one?
  Status Drain(const CallAddresses& addresses, bool follows, std::vector<Launch>* launches) const;
  char* ScratchOf(const CallAddresses& addresses) const;

  const Emitter& emitter_;
  const Program& program_;
  const Placement& placement_;
};

}  // namespace jaxgraph
