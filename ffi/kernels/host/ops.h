// What each op's file gives the emitter: the launch of one node.
#pragma once

#include <vector>

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

Status EmitExpr(const ResolvedNode& node, Launch* launch);  // EXPR and ROW
Status EmitMatmul(const ResolvedNode& node, Launch* launch);
Status EmitGather(const ResolvedNode& node, Launch* launch);
Status EmitSetRows(const ResolvedNode& node, Launch* launch);
Status EmitCopy(const ResolvedNode& node, Launch* launch);
Status EmitAttention(const ResolvedNode& node, Launch* launch);
Status EmitSort(const ResolvedNode& node, Launch* launch);
void EmitHostSlotFill(const SlotFill& fill, Launch* launch);
void EmitHostSlotDrain(const SlotDrain& drain, Launch* launch);

}  // namespace jaxgraph
