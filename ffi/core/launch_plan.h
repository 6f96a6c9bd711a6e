// LaunchPlan: every launch of one call, in order, cut into chunks. The eager run, the capture and
// the update all start from it, so that they can never differ.
#pragma once

#include <cstdint>
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

struct LaunchPlan {
  std::vector<PlannedChunk> chunks;  // at least one
  size_t copies_in = 0;              // launches in front of the first chunk
  size_t copies_out = 0;             // launches behind the last
};

// The copies between slots and the call's own buffers. `addresses`: of all bases, as the call
// gives them; `resolved`: where the nodes find them.
Status PlanCopiesIn(const Emitter& emitter, const Program& program, const Placement& placement,
                    const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                    std::vector<Launch>* launches);
Status PlanCopiesOut(const Emitter& emitter, const Program& program, const Placement& placement,
                     const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                     std::vector<Launch>* launches);

Status MakePlan(const Emitter& emitter, const Program& program, const Placement& placement,
                const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                LaunchPlan* plan);

}  // namespace jaxgraph
