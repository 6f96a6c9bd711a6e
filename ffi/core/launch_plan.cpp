#include "ffi/core/launch_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ffi/core/chunking.h"

namespace jaxgraph {
namespace {

void ResolveNode(const std::vector<char*>& resolved, ResolvedNode* at) {
  const Node& node = *at->node;
  for (size_t i = 0; i < node.outs.size(); ++i) {
    at->outs[i] = resolved[node.outs[i].base] + node.outs[i].offset;
  }
  for (size_t i = 0; i < node.srcs.size(); ++i) {
    at->srcs[i] = resolved[node.srcs[i].base] + node.srcs[i].offset;
  }
}

// By base: operands that no node writes, under whatever name. (Validation has seen to it that the
// mark is true.)
std::vector<bool> ConstantBases(const Program& program) {
  std::vector<bool> constant;
  for (const Base& base : program.bases) {
    constant.push_back(base.kind == BaseKind::kOperand && !base.written);
  }
  for (const Base& base : program.bases) {
    if (base.alias >= 0) constant[1 + base.alias] = false;
  }
  return constant;
}

std::vector<ResolvedNode> ResolveNodes(const Program& program, const std::vector<char*>& resolved) {
  const std::vector<bool> constant = ConstantBases(program);
  std::vector<ResolvedNode> nodes(program.nodes.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    nodes[n].node = &program.nodes[n];
    nodes[n].outs.resize(program.nodes[n].outs.size());
    nodes[n].srcs.resize(program.nodes[n].srcs.size());
    for (size_t i = 0; i < std::min<size_t>(nodes[n].srcs.size(), 32); ++i) {
      if (constant[program.nodes[n].srcs[i].base]) nodes[n].constant_srcs |= 1u << i;
    }
    ResolveNode(resolved, &nodes[n]);
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

std::vector<std::vector<uint32_t>> GroupsOfBases(const Program& program,
                                                 const std::vector<PlannedGroup>& groups) {
  std::vector<std::vector<uint32_t>> of_base(program.bases.size());
  for (uint32_t g = 0; g < groups.size(); ++g) {
    const uint32_t end = std::max(groups[g].first_node + groups[g].node_count, groups[g].reads_to);
    for (uint32_t n = groups[g].first_node; n < end; ++n) {
      for (const auto* tensors : {&program.nodes[n].outs, &program.nodes[n].srcs}) {
        for (const TensorRef& t : *tensors) {
          std::vector<uint32_t>& list = of_base[t.base];
          if (list.empty() || list.back() != g) list.push_back(g);
        }
      }
    }
  }
  return of_base;
}

// May a launch of this node start before the launch in front of it has ended (dependent)? Only if
// that is of the same chunk and branch: a kernel that starts early reads operands that no node
// writes before it waits, and a slot, which a copy in front of the first chunk fills, looks like
// one of them; and where branches fork and join, full edges order them.
bool MayDepend(const std::vector<Launch>& chunk, const Program& program, const Node& node) {
  if (chunk.empty()) return false;
  if (!program.options.concurrency) return true;
  return chunk.back().region == node.region && chunk.back().branch == node.branch;
}

}  // namespace

// What a launch is by its place in the plan.
void Planner::Place(bool follows, Launch* launch) const {
  const Node& node = program_.nodes[launch->first_node];
  launch->region = program_.options.concurrency ? node.region : 0;
  launch->branch = program_.options.concurrency ? node.branch : 0;
  launch->dependent &= follows;
}

char* Planner::ScratchOf(const CallAddresses& addresses) const {
  return placement_.scratch() < 0 ? nullptr : addresses.resolved[0] + placement_.scratch();
}

// Calls fn(base) for every base of this kind that is in a slot, in order: the same for the launches
// in front, which write down where results go, and for those behind, which look there.
template <typename F>
void Planner::ForSlots(BaseKind kind, F fn) const {
  for (size_t b = 1; b < program_.bases.size(); ++b) {
    if (program_.bases[b].kind == kind && placement_.place(b) == Place::kSlot) fn(b);
  }
}

Status Planner::Fill(const CallAddresses& addresses, std::vector<Launch>* launches) const {
  SlotFill fill;
  char* const table = addresses.resolved[0] + placement_.table();
  uint64_t written = 0;  // addresses of the table that earlier launches write
  Status status;
  const auto launch = [&] {
    fill.table = table + written * sizeof(char*);
    written += fill.num_addresses;
    if (status.ok()) status = emitter_.EmitSlotFill(fill, &launches->emplace_back());
    fill = {};
  };
  ForSlots(BaseKind::kOperand, [&](size_t b) {
    if (fill.num_copies == kMaxSlots) launch();
    fill.copies[fill.num_copies++] = {addresses.resolved[b], addresses.given[b],
                                      program_.bases[b].nbytes};
  });
  ForSlots(BaseKind::kResult, [&](size_t b) {
    if (fill.num_addresses == kMaxSlots) launch();
    fill.addresses[fill.num_addresses++] = addresses.given[b];
  });
  if (fill.num_copies > 0 || fill.num_addresses > 0) launch();
  return status;
}

Status Planner::Drain(const CallAddresses& addresses, bool follows,
                      std::vector<Launch>* launches) const {
  if (!placement_.drains()) return Status::Ok();
  SlotDrain drain;
  drain.table = addresses.resolved[0] + placement_.table();
  Status status;
  const auto launch = [&] {
    Launch& made = launches->emplace_back();
    if (status.ok()) status = emitter_.EmitSlotDrain(drain, &made);
    made.dependent &= std::exchange(follows, true);
    drain = {0, drain.table + drain.num_sources * sizeof(char*), {}};
  };
  ForSlots(BaseKind::kResult, [&](size_t b) {
    if (drain.num_sources == kMaxSlots) launch();
    drain.sources[drain.num_sources++] = {addresses.resolved[b], program_.bases[b].nbytes};
  });
  launch();
  return status;
}

Status Planner::Make(const CallAddresses& addresses, LaunchPlan* plan) const {
  std::vector<ResolvedNode> nodes = ResolveNodes(program_, addresses.resolved);
  for (ResolvedNode& node : nodes) node.scratch = ScratchOf(addresses);
  std::vector<Group> groups;
  std::vector<std::vector<Launch>> emitted;  // by group
  for (size_t n = 0; n < nodes.size();) {
    size_t covered = 0;
    emitted.emplace_back();
    JAXGRAPH_RETURN_IF_ERROR(
        emitter_.Emit(nodes, n, program_.options.fusion, &emitted.back(), &covered));
    JAXGRAPH_RETURN_IF_ERROR(CheckGroup(program_, n, covered));
    groups.push_back({static_cast<uint32_t>(n), static_cast<uint32_t>(covered)});
    n += covered;
  }

  *plan = LaunchPlan();
  JAXGRAPH_RETURN_IF_ERROR(Fill(addresses, &plan->fill));
  for (const ChunkRange& range : CutChunks(program_, groups, program_.options.chunk_size)) {
    PlannedChunk& chunk = plan->chunks.emplace_back();
    for (size_t g = range.begin; g < range.end; ++g) {
      PlannedGroup& group = plan->index.groups_.emplace_back();
      group.first_node = groups[g].first_node;
      group.node_count = groups[g].node_count;
      group.chunk = static_cast<uint32_t>(plan->chunks.size() - 1);
      group.first_launch = static_cast<uint32_t>(chunk.launches.size());
      group.launch_count = static_cast<uint32_t>(emitted[g].size());
      chunk.node_count += group.node_count;
      group.follows = MayDepend(chunk.launches, program_, program_.nodes[group.first_node]);
      for (size_t i = 0; i < emitted[g].size(); ++i) {
        group.reads_to = std::max(group.reads_to, emitted[g][i].reads_to);
        Place(i > 0 || group.follows, &emitted[g][i]);
        chunk.launches.push_back(std::move(emitted[g][i]));
      }
    }
    if (range.begin < range.end) chunk.first_node = groups[range.begin].first_node;
  }
  std::vector<Launch>& last = plan->chunks.back().launches;
  PlannedGroup& drain = plan->index.drain_;
  drain.chunk = static_cast<uint32_t>(plan->chunks.size() - 1);
  drain.first_launch = static_cast<uint32_t>(last.size());
  drain.follows = !last.empty() && last.back().region == 0;
  JAXGRAPH_RETURN_IF_ERROR(Drain(addresses, drain.follows, &last));
  drain.launch_count = static_cast<uint32_t>(last.size()) - drain.first_launch;
  plan->index.nodes_ = std::move(nodes);
  plan->index.groups_of_base_ = GroupsOfBases(program_, plan->index.groups_);
  return Status::Ok();
}

// The groups of nodes that touch one of the bases; with fusion also the group in front of each,
// whose emission may have looked at the next node and could cover it now.
std::vector<uint32_t> Planner::TouchedGroups(const PlanIndex& index,
                                             const std::vector<uint32_t>& moved_bases) const {
  std::vector<uint32_t> touched;
  for (const uint32_t base : moved_bases) {
    for (const uint32_t g : index.groups_of_base_[base]) {
      touched.push_back(g);
      uint32_t before = g;
      while (program_.options.fusion && before > 0) {
        touched.push_back(--before);
        if (index.groups_[before].launch_count > 0) break;  // else it is of views: look on
      }
    }
  }
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  return touched;
}

Status Planner::Remake(const CallAddresses& addresses, const std::vector<uint32_t>& moved_bases,
                       PlanIndex* index, std::vector<LaunchChange>* changes, bool* same) const {
  *same = false;
  const std::vector<uint32_t> touched = TouchedGroups(*index, moved_bases);
  for (const uint32_t g : touched) {
    const PlannedGroup& group = index->groups_[g];
    for (uint32_t n = 0; n < group.node_count; ++n) {
      ResolvedNode& node = index->nodes_[group.first_node + n];
      ResolveNode(addresses.resolved, &node);
      node.scratch = ScratchOf(addresses);
    }
  }
  std::vector<Launch> fresh;
  for (const uint32_t g : touched) {
    const PlannedGroup& group = index->groups_[g];
    size_t covered = 0;
    fresh.clear();
    JAXGRAPH_RETURN_IF_ERROR(
        emitter_.Emit(index->nodes_, group.first_node, program_.options.fusion, &fresh, &covered));
    if (covered != group.node_count || fresh.size() != group.launch_count) return Status::Ok();
    for (uint32_t i = 0; i < fresh.size(); ++i) {
      // The index does not know that it looks so far.
      if (fresh[i].reads_to > group.reads_to) return Status::Ok();
      Place(i > 0 || group.follows, &fresh[i]);
      changes->push_back({group.chunk, group.first_launch + i, std::move(fresh[i])});
    }
  }
  const PlannedGroup& drain = index->drain_;
  fresh.clear();
  JAXGRAPH_RETURN_IF_ERROR(Drain(addresses, drain.follows, &fresh));
  if (fresh.size() != drain.launch_count) return Status::Ok();
  for (uint32_t i = 0; i < fresh.size(); ++i) {
    changes->push_back({drain.chunk, drain.first_launch + i, std::move(fresh[i])});
  }
  *same = true;
  return Status::Ok();
}

}  // namespace jaxgraph
