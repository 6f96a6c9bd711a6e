#include "ffi/core/description.h"

#include <algorithm>

#include "ffi/core/launch_plan.h"
#include "ffi/core/ledger.h"

namespace jaxgraph {
namespace {

// Made-up addresses: so far apart that no two bases touch, and as well aligned as real ones.
constexpr uintptr_t kFirstAddress = uintptr_t{1} << 40;

void DescribeProgram(const Program& program, const Placement& placement,
                     VariantDescription* description) {
  description->function_id = program.function_id;
  description->split = program.split;
  description->program_id = program.id;
  description->arena_bytes = placement.arena_bytes();
  for (size_t b = 1; b < program.bases.size(); ++b) {
    const Base& base = program.bases[b];
    const BaseFacts& facts = placement.facts(b);
    const Placement::Motion motion = placement.MotionOf(b);
    description->bases.push_back({base.label, base.kind, base.nbytes, placement.place(b),
                                  facts.nodes, motion.moves, motion.calls, placement.Why(b)});
  }
}

// Chunks of which only the number of launches is known; the groups tell their nodes.
std::vector<ChunkDescription> DescribeChunks(size_t chunks, const PlanIndex& index) {
  std::vector<ChunkDescription> out(chunks);
  for (const PlannedGroup& group : index.groups()) {
    ChunkDescription& chunk = out[group.chunk];
    if (chunk.node_count == 0) chunk.first_node = group.first_node;
    chunk.node_count += group.node_count;
  }
  return out;
}

}  // namespace

VariantDescription DescribeVariant(const Entry& entry, const Variant& variant) {
  VariantDescription out;
  DescribeProgram(variant.program(), variant.placement, &out);
  out.number = variant.number;
  out.stage = NameOf(variant.stage);
  out.calls = variant.calls;
  const Recording& recording = variant.recording;
  out.chunks = DescribeChunks(recording.chunks.size(), recording.index);
  for (size_t c = 0; c < out.chunks.size(); ++c) {
    const std::vector<Launch>& launches = recording.chunks[c].launches();
    out.chunks[c].launches = static_cast<uint32_t>(std::count_if(
        launches.begin(), launches.end(), [](const Launch& l) { return l.node_count > 0; }));
  }
  out.not_capturable = variant.not_capturable;
  if (const Failures* failures = entry.FindFailures(variant.program())) {
    out.failures = failures->count;
    out.last_failure = failures->last;
  }
  return out;
}

Status DescribeUnrecorded(const Program& program, const Emitter& emitter,
                          VariantDescription* description) {
  const Placement placement(program);
  DescribeProgram(program, placement, description);
  description->stage = NameOf(Stage::kCold);
  description->not_capturable = FindNotCapturable(program, emitter);

  std::vector<char*> given(program.bases.size());
  uintptr_t next = kFirstAddress;
  for (size_t b = 0; b < given.size(); ++b) {
    given[b] = reinterpret_cast<char*>(next);  // never read: an emission computes with addresses
    next += (std::max(program.bases[b].nbytes, placement.arena_bytes()) / 4096 + 2) * 4096;
  }
  for (const auto& [result, operand] : placement.aliases()) given[result] = given[operand];
  std::vector<char*> resolved;
  placement.Resolve(given, given[0], &resolved);
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(Planner(emitter, program, placement).Make({given, resolved}, &plan));
  description->chunks = DescribeChunks(plan.chunks.size(), plan.index);
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    description->chunks[c].launches = static_cast<uint32_t>(plan.chunks[c].launches.size());
  }
  return Status::Ok();
}

std::string FindNotCapturable(const Program& program, const Emitter& emitter) {
  for (size_t n = 0; n < program.nodes.size(); ++n) {
    const Node& node = program.nodes[n];
    if ((node.flags & kFlagNotCapturable) == 0 && emitter.Capturable(node)) continue;
    return "node " + std::to_string(n) + " (" + NameOf(node.op) + " " + node.label +
           ") cannot be captured";
  }
  return {};
}

}  // namespace jaxgraph
