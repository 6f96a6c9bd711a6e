// One function per kind of node: appends the launches that run it. See emitter.h.
#pragma once

#include <vector>

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

using Launches = std::vector<Launch>;

Status EmitExpr(const ResolvedNode& node, Launches* launches);
// `clusters`: blocks may share their memory (compute capability 9.0).
Status EmitRow(const ResolvedNode& node, bool clusters, Launches* launches);
Status EmitMatmul(const ResolvedNode& node, bool clusters, Launches* launches);
Status EmitGather(const ResolvedNode& node, Launches* launches);
Status EmitSetRows(const ResolvedNode& node, Launches* launches);
Status EmitCopy(const ResolvedNode& node, Launches* launches);
// The node nodes[first]; it looks at those before it.
Status EmitAttention(const std::vector<ResolvedNode>& nodes, size_t first, bool clusters,
                     Launches* launches);
Status EmitSort(const ResolvedNode& node, Launches* launches);
void EmitSlotFillLaunch(const SlotFill& fill, Launch* launch);
void EmitSlotDrainLaunch(const SlotDrain& drain, Launch* launch);

}  // namespace jaxgraph
