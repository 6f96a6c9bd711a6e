#include "ffi/core/launch_plan.h"

#include <iterator>
#include <string>

#include "ffi/core/chunking.h"

namespace jaxgraph {
namespace {

Status PlanCopies(const Emitter& emitter, const Program& program, const Placement& placement,
                  const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                  BaseKind kind, std::vector<Launch>* launches) {
  std::vector<SlotCopy> copies;
  for (size_t b = 1; b < program.bases.size(); ++b) {
    if (program.bases[b].kind != kind || placement.place(b) != Place::kSlot) continue;
    const bool in = kind == BaseKind::kOperand;
    copies.push_back({in ? resolved[b] : addresses[b], in ? addresses[b] : resolved[b],
                      program.bases[b].nbytes});
  }
  if (copies.empty()) return Status::Ok();
  JAXGRAPH_RETURN_IF_ERROR(emitter.EmitSlotCopies(copies, launches));
  // A kernel that starts early reads operands that no node writes before it waits, and a slot looks
  // like one of them: it must be complete before any dependent launch can start.
  for (Launch& launch : *launches) launch.dependent = false;
  return Status::Ok();
}

std::vector<ResolvedNode> ResolveNodes(const Program& program, const std::vector<char*>& resolved) {
  std::vector<ResolvedNode> nodes(program.nodes.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node& node = program.nodes[n];
    nodes[n].node = &node;
    nodes[n].outs.reserve(node.outs.size());
    nodes[n].srcs.reserve(node.srcs.size());
    for (const TensorRef& t : node.outs) nodes[n].outs.push_back(resolved[t.base] + t.offset);
    for (const TensorRef& t : node.srcs) nodes[n].srcs.push_back(resolved[t.base] + t.offset);
  }
  return nodes;
}

// A group that breaks its promise would run a node twice, or never, or cut a branch in two.
Status CheckGroup(const Program& program, size_t first, size_t covered) {
  bool right = covered >= 1 && covered <= program.nodes.size() - first;
  for (size_t n = first; right && n < first + covered; ++n) {
    right = program.nodes[n].region == program.nodes[first].region &&
            program.nodes[n].branch == program.nodes[first].branch;
  }
  if (right) return Status::Ok();
  return Status(Code::kInternal, "the emission at node " + std::to_string(first) + " covers " +
                                     std::to_string(covered) + " nodes, which it may not");
}

}  // namespace

Status PlanCopiesIn(const Emitter& emitter, const Program& program, const Placement& placement,
                    const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                    std::vector<Launch>* launches) {
  return PlanCopies(emitter, program, placement, addresses, resolved, BaseKind::kOperand, launches);
}

Status PlanCopiesOut(const Emitter& emitter, const Program& program, const Placement& placement,
                     const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                     std::vector<Launch>* launches) {
  return PlanCopies(emitter, program, placement, addresses, resolved, BaseKind::kResult, launches);
}

Status MakePlan(const Emitter& emitter, const Program& program, const Placement& placement,
                const std::vector<char*>& addresses, const std::vector<char*>& resolved,
                LaunchPlan* plan) {
  const std::vector<ResolvedNode> nodes = ResolveNodes(program, resolved);
  std::vector<Group> groups;
  std::vector<std::vector<Launch>> emitted;  // by group
  for (size_t n = 0; n < nodes.size();) {
    size_t covered = 0;
    emitted.emplace_back();
    JAXGRAPH_RETURN_IF_ERROR(
        emitter.Emit(nodes, n, program.options.fusion, &emitted.back(), &covered));
    JAXGRAPH_RETURN_IF_ERROR(CheckGroup(program, n, covered));
    groups.push_back({static_cast<uint32_t>(n), static_cast<uint32_t>(covered)});
    n += covered;
  }

  std::vector<Launch> in;
  std::vector<Launch> out;
  JAXGRAPH_RETURN_IF_ERROR(PlanCopiesIn(emitter, program, placement, addresses, resolved, &in));
  JAXGRAPH_RETURN_IF_ERROR(PlanCopiesOut(emitter, program, placement, addresses, resolved, &out));
  plan->copies_in = in.size();
  plan->copies_out = out.size();
  plan->chunks.clear();
  for (const ChunkRange& range : CutChunks(program, groups, program.options.chunk_size)) {
    PlannedChunk& chunk = plan->chunks.emplace_back();
    if (plan->chunks.size() == 1) chunk.launches = std::move(in);
    // Dependent launch holds within a chunk only, and not on the slot copies (see PlanCopies).
    bool dependent = false;
    for (size_t g = range.begin; g < range.end; ++g) {
      chunk.node_count += groups[g].node_count;
      for (Launch& launch : emitted[g]) {
        launch.dependent &= dependent;
        dependent = true;
        chunk.launches.push_back(std::move(launch));
      }
    }
    if (range.begin < range.end) chunk.first_node = groups[range.begin].first_node;
  }
  std::vector<Launch>& last = plan->chunks.back().launches;
  std::move(out.begin(), out.end(), std::back_inserter(last));
  return Status::Ok();
}

}  // namespace jaxgraph
