// Coverage: for every chunk size, with and without fusion and regions, every node is in exactly one
// launch, in order, and no chunk cuts a group or a region.
#include "ffi/core/launch_plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

const KernelInfo kNothing = {"nothing", 0, [](const void*, ParallelFor&) {}};

// Covers runs of nodes whose lengths the labels give (1 without fusion); one launch a run, or two
// where the length is even, or none for a VIEW.
class RunEmitter final : public Emitter {
 public:
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    const Node& node = *nodes[first].node;
    *covered = fusion ? static_cast<size_t>(std::stoi(node.label)) : 1;
    if (node.op == Op::kView) return Status::Ok();
    Launch launch;
    launch.kernel = &kNothing;
    launch.dependent = true;
    launch.first_node = static_cast<uint32_t>(first);
    launch.node_count = static_cast<uint32_t>(*covered);
    launches->assign(*covered % 2 == 0 ? 2 : 1, launch);
    return Status::Ok();
  }
  Status EmitSlotFill(const SlotFill&, Launch* launch) const override {
    launch->kernel = &kNothing;
    return Status::Ok();
  }
  Status EmitSlotDrain(const SlotDrain&, Launch* launch) const override {
    launch->kernel = &kNothing;
    launch->dependent = true;
    return Status::Ok();
  }
  bool Capturable(const Node&) const override { return true; }
};

// What emitters of programs without slots have in common.
class SlotlessEmitter : public Emitter {
 public:
  Status EmitSlotFill(const SlotFill&, Launch*) const override { return Status::Ok(); }
  Status EmitSlotDrain(const SlotDrain&, Launch*) const override { return Status::Ok(); }
  bool Capturable(const Node&) const override { return true; }

 protected:
  static Launch& Add(std::vector<Launch>* launches, size_t first, size_t count) {
    Launch& launch = launches->emplace_back();
    launch.kernel = &kNothing;
    launch.first_node = static_cast<uint32_t>(first);
    launch.node_count = static_cast<uint32_t>(count);
    return launch;
  }
};

// A program of random runs; runs stay inside regions, as a real emitter's do.
Program RandomProgram(std::mt19937* random, size_t nodes) {
  Program p;
  p.arena_bytes = kSlice;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"), MakeBase(BaseKind::kOperand, 0, 4, "token"),
             MakeBase(BaseKind::kResult, 0, 4, "result")};
  const TensorRef token = Dense(DType::kF32, 1, 0, {1});
  const TensorRef result = Dense(DType::kF32, 2, 0, {1});
  uint32_t region = 0;
  while (p.nodes.size() < nodes) {
    const uint32_t in = (*random)() % 3 == 0 ? ++region : 0;
    const size_t runs = in != 0 ? 1 + (*random)() % 4 : 1;
    for (size_t r = 0; r < runs && p.nodes.size() < nodes; ++r) {
      const size_t length = std::min<size_t>(1 + (*random)() % 4, nodes - p.nodes.size());
      for (size_t i = 0; i < length; ++i) {
        const bool view = length == 1 && (*random)() % 4 == 0;
        Node node = MakeNode(view ? Op::kView : Op::kExpr, {result}, {token});
        node.label = std::to_string(length - i);
        node.region = in;
        node.branch = static_cast<uint32_t>(in != 0 ? r : 0);
        p.nodes.push_back(node);
      }
    }
  }
  return p;
}

// `drains`: launches behind those of the nodes, which cover none.
void CheckCoverage(const Program& program, const LaunchPlan& plan, size_t drains) {
  ASSERT_FALSE(plan.chunks.empty());
  size_t next = 0;  // node that nobody has covered yet
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    const PlannedChunk& chunk = plan.chunks[c];
    ASSERT_EQ(chunk.first_node, chunk.node_count > 0 ? next : 0u);
    size_t at = next;
    for (size_t l = 0; l < chunk.launches.size(); ++l) {
      const Launch& launch = chunk.launches[l];
      const bool behind = c + 1 == plan.chunks.size() && l + drains >= chunk.launches.size();
      ASSERT_EQ(launch.node_count == 0, behind);
      // Dependent launch never reaches over the start of a chunk.
      const bool same_branch = l > 0 && launch.region == chunk.launches[l - 1].region &&
                               launch.branch == chunk.launches[l - 1].branch;
      ASSERT_EQ(launch.dependent, same_branch);
      if (behind) continue;
      if (launch.first_node + launch.node_count == at) continue;  // a second launch of the group
      while (at < launch.first_node) {
        ASSERT_EQ(program.nodes[at].op, Op::kView) << at;
        ++at;
      }
      ASSERT_EQ(launch.first_node, at);
      at += launch.node_count;
    }
    next += chunk.node_count;
    for (; at < next; ++at) ASSERT_EQ(program.nodes[at].op, Op::kView);
    ASSERT_EQ(at, next);

    if (c + 1 == plan.chunks.size()) continue;
    ASSERT_GE(chunk.node_count, std::max(program.options.chunk_size, 1u));
    const uint32_t region = program.nodes[next].region;
    ASSERT_TRUE(region == 0 || program.nodes[next - 1].region != region);
  }
  ASSERT_EQ(next, program.nodes.size());
  ASSERT_TRUE(program.options.chunk_size > 0 || plan.chunks.size() == 1);
}

size_t LegalCuts(const Program& program) {
  size_t cuts = 0;
  for (size_t n = 1; n < program.nodes.size(); ++n) {
    const uint32_t region = program.nodes[n].region;
    cuts += region == 0 || region != program.nodes[n - 1].region;
  }
  return cuts;
}

TEST(LaunchPlan, EveryNodeIsCoveredOnceForEveryChunkSize) {
  std::mt19937 random(3);
  const RunEmitter emitter;
  std::vector<char> memory(4096);
  for (int round = 0; round < 60; ++round) {
    Program program = RandomProgram(&random, random() % 40);
    Placement placement(program);
    for (size_t b : {1, 2}) {  // with a node that touches them, both get a slot
      placement.BeginCall();
      placement.NoteMoved(b, /*recorded=*/false);
    }
    ASSERT_LE(placement.arena_bytes(), memory.size());
    const std::vector<char*> addresses = {nullptr, memory.data(), memory.data() + 4};
    std::vector<char*> resolved;
    placement.Resolve(addresses, memory.data(), &resolved);
    for (bool fusion : {false, true}) {
      for (uint32_t size = 0; size <= program.nodes.size() + 1; ++size) {
        program.options.fusion = fusion;
        program.options.concurrency = round % 2 == 0;
        program.options.chunk_size = size;
        LaunchPlan plan;
        ASSERT_TRUE(Planner(emitter, program, placement).Make({addresses, resolved}, &plan).ok());
        EXPECT_EQ(plan.fill.size(), placement.has_slots() ? 1u : 0u);
        CheckCoverage(program, plan, placement.place(2) == Place::kSlot ? 1 : 0);
        if (HasFatalFailure()) return;
        // Chunks of one node are cut wherever it is allowed.
        if (size == 1 && !fusion) {
          EXPECT_EQ(plan.chunks.size(), 1 + LegalCuts(program));
        }
      }
    }
  }
}

// What a kernel that starts early may read: operands that no node writes, under whatever name.
TEST(LaunchPlan, SourcesThatNobodyWritesAreMarked) {
  class Looking final : public SlotlessEmitter {
   public:
    Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool, std::vector<Launch>*,
                size_t* covered) const override {
      *covered = 1;
      seen.push_back(nodes[first].constant_srcs);
      return Status::Ok();
    }
    mutable std::vector<uint32_t> seen;
  };
  Program p;
  p.arena_bytes = kSlice;
  p.bases = {
      MakeBase(BaseKind::kArena, 0, 0, "arena"),     MakeBase(BaseKind::kOperand, 0, 4, "w"),
      MakeBase(BaseKind::kOperand, 1, 4, "written"), MakeBase(BaseKind::kOperand, 2, 4, "cache"),
      MakeBase(BaseKind::kResult, 0, 4, "new"),      MakeBase(BaseKind::kResult, 1, 4, "y")};
  p.bases[2].written = true;
  p.bases[4].alias = 2;
  std::vector<TensorRef> one_of_each;
  for (uint32_t base = 0; base < 6; ++base) {
    one_of_each.push_back(Dense(DType::kF32, base, 0, {1}));
  }
  p.nodes = {MakeNode(Op::kExpr, {one_of_each[5]}, one_of_each)};
  const Placement placement(p, /*slots=*/false);
  const std::vector<char*> addresses(6);
  const Looking emitter;
  LaunchPlan plan;
  ASSERT_TRUE(Planner(emitter, p, placement).Make({addresses, addresses}, &plan).ok());
  EXPECT_EQ(emitter.seen, std::vector<uint32_t>{1u << 1});  // w alone
}

// Covers a node, a view behind it and the node behind that, if the latter's output is aligned.
class OverViewEmitter final : public SlotlessEmitter {
 public:
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    *covered = 1;
    if (nodes[first].node->op == Op::kView) return Status::Ok();
    if (fusion && first + 2 < nodes.size() && nodes[first + 1].node->op == Op::kView &&
        reinterpret_cast<uintptr_t>(nodes[first + 2].outs[0]) % 64 == 0) {
      *covered = 3;
    }
    Add(launches, first, *covered);
    return Status::Ok();
  }
};

// What a moved base changes may be the group in front of the nodes that touch it, behind views.
TEST(LaunchPlan, AGroupThatCouldCoverMoreNowIsSeenOverViews) {
  const OverViewEmitter emitter;
  Program p;
  p.arena_bytes = kSlice;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"), MakeBase(BaseKind::kOperand, 0, 4, "token"),
             MakeBase(BaseKind::kResult, 0, 4, "result")};
  const TensorRef inside = Dense(DType::kF32, 0, 0, {1});
  const TensorRef result = Dense(DType::kF32, 2, 0, {1});
  p.nodes = {MakeNode(Op::kExpr, {inside}, {inside}), MakeNode(Op::kView, {inside}, {inside}),
             MakeNode(Op::kExpr, {result}, {inside})};
  const Placement placement(p, /*slots=*/false);
  alignas(64) char memory[256];
  std::vector<char*> addresses = {memory, memory + 64, memory + 132};
  LaunchPlan plan;
  const Planner planner(emitter, p, placement);
  ASSERT_TRUE(planner.Make({addresses, addresses}, &plan).ok());
  ASSERT_EQ(plan.chunks[0].launches.size(), 2u);
  std::vector<LaunchChange> changes;
  bool same = false;
  addresses[2] = memory + 136;
  ASSERT_TRUE(planner.Remake({addresses, addresses}, {2}, &plan.index, &changes, &same).ok());
  EXPECT_TRUE(same);
  EXPECT_EQ(changes.size(), 2u);
  addresses[2] = memory + 128;
  ASSERT_TRUE(planner.Remake({addresses, addresses}, {2}, &plan.index, &changes, &same).ok());
  EXPECT_FALSE(same);
}

// A launch with the node's scratch memory as its parameters.
class ScratchEmitter final : public SlotlessEmitter {
 public:
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool,
              std::vector<Launch>* launches, size_t* covered) const override {
    *covered = 1;
    Add(launches, first, 1).set_params(nodes[first].scratch);
    return Status::Ok();
  }
};

TEST(LaunchPlan, ScratchMemoryMovesWithTheArena) {
  const ScratchEmitter emitter;
  Program p;
  p.arena_bytes = kSlice;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena")};
  const TensorRef inside = Dense(DType::kF32, 0, 0, {1});
  p.nodes = {MakeNode(Op::kAttention, {inside}, {inside})};
  const Placement placement(p);
  std::vector<char> first(placement.arena_bytes()), second(placement.arena_bytes());
  std::vector<char*> addresses = {first.data()};
  const Planner planner(emitter, p, placement);
  const auto scratch_of = [](const Launch& launch) {
    char* scratch = nullptr;
    std::memcpy(&scratch, launch.params.data(), sizeof scratch);
    return scratch;
  };
  LaunchPlan plan;
  ASSERT_TRUE(planner.Make({addresses, addresses}, &plan).ok());
  EXPECT_EQ(scratch_of(plan.chunks[0].launches[0]), first.data() + placement.scratch());
  EXPECT_LE(placement.scratch() + kScratchBytes, first.size());
  addresses[0] = second.data();
  std::vector<LaunchChange> changes;
  bool same = false;
  ASSERT_TRUE(planner.Remake({addresses, addresses}, {0}, &plan.index, &changes, &same).ok());
  ASSERT_TRUE(same);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(scratch_of(changes[0].fresh), second.data() + placement.scratch());
}

// The first launch has the address of the last node's source in it, and says so or not.
class LookingAheadEmitter final : public SlotlessEmitter {
 public:
  explicit LookingAheadEmitter(bool says_so) : says_so_(says_so) {}
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool,
              std::vector<Launch>* launches, size_t* covered) const override {
    *covered = 1;
    Launch& launch = Add(launches, first, 1);
    launch.set_params(nodes[first == 0 ? nodes.size() - 1 : first].srcs[0]);
    if (first == 0 && says_so_) launch.reads_to = static_cast<uint32_t>(nodes.size());
    return Status::Ok();
  }

 private:
  const bool says_so_;
};

TEST(LaunchPlan, WhatLooksAheadIsMadeAnewWhereThatMoves) {
  Program p;
  p.arena_bytes = kSlice;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"), MakeBase(BaseKind::kOperand, 0, 4, "w")};
  const TensorRef inside = Dense(DType::kF32, 0, 0, {1}), weights = Dense(DType::kF32, 1, 0, {1});
  p.nodes = {MakeNode(Op::kExpr, {inside}, {inside}), MakeNode(Op::kExpr, {inside}, {inside}),
             MakeNode(Op::kExpr, {inside}, {inside}), MakeNode(Op::kExpr, {inside}, {weights})};
  const Placement placement(p, /*slots=*/false);
  alignas(64) char memory[256];
  for (const bool says_so : {true, false}) {
    const LookingAheadEmitter emitter(says_so);
    const Planner planner(emitter, p, placement);
    std::vector<char*> addresses = {memory, memory + 64};
    LaunchPlan plan;
    ASSERT_TRUE(planner.Make({addresses, addresses}, &plan).ok());
    addresses[1] = memory + 128;
    std::vector<LaunchChange> changes;
    bool same = false;
    ASSERT_TRUE(planner.Remake({addresses, addresses}, {1}, &plan.index, &changes, &same).ok());
    ASSERT_TRUE(same);
    // With fusion the group in front is made anew, too.
    ASSERT_EQ(changes.size(), says_so ? 3u : 2u);
    EXPECT_EQ(changes[0].launch, says_so ? 0u : 2u);
    const char* address = nullptr;
    std::memcpy(&address, changes[0].fresh.params.data(), sizeof address);
    EXPECT_EQ(address, says_so ? memory + 128 : memory);
  }
}

// The first launch has the address of the last node's source in it where that is aligned.
class SometimesLookingAheadEmitter final : public SlotlessEmitter {
 public:
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool,
              std::vector<Launch>* launches, size_t* covered) const override {
    *covered = 1;
    Launch& launch = Add(launches, first, 1);
    const char* const last = nodes.back().srcs[0];
    if (first > 0 || reinterpret_cast<uintptr_t>(last) % 64 != 0) return Status::Ok();
    launch.set_params(last);
    launch.reads_to = static_cast<uint32_t>(nodes.size());
    return Status::Ok();
  }
};

// A plan's index knows how far its launches look; one that would look further is planned anew.
TEST(LaunchPlan, LookingFurtherThanBeforeIsPlannedAnew) {
  Program p;
  p.arena_bytes = kSlice;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"), MakeBase(BaseKind::kOperand, 0, 4, "w")};
  const TensorRef inside = Dense(DType::kF32, 0, 0, {1}), weights = Dense(DType::kF32, 1, 0, {1});
  p.nodes = {MakeNode(Op::kExpr, {inside}, {inside}), MakeNode(Op::kExpr, {inside}, {weights})};
  const Placement placement(p, /*slots=*/false);
  const SometimesLookingAheadEmitter emitter;
  const Planner planner(emitter, p, placement);
  alignas(64) char memory[256];
  for (const bool further : {true, false}) {
    std::vector<char*> addresses = {memory, memory + (further ? 68 : 64)};
    LaunchPlan plan;
    ASSERT_TRUE(planner.Make({addresses, addresses}, &plan).ok());
    addresses[1] = memory + (further ? 128 : 132);
    std::vector<LaunchChange> changes;
    bool same = true;
    ASSERT_TRUE(planner.Remake({addresses, addresses}, {1}, &plan.index, &changes, &same).ok());
    EXPECT_EQ(same, !further);
  }
}

TEST(LaunchPlan, EmissionThatBreaksItsPromiseIsRefused) {
  std::mt19937 random(4);
  const RunEmitter emitter;
  Program program = RandomProgram(&random, 4);
  for (Node& node : program.nodes) node.region = node.branch = 0;
  const Placement placement(program, /*slots=*/false);
  const std::vector<char*> addresses(3);
  const auto plan = [&] {
    LaunchPlan out;
    return Planner(emitter, program, placement).Make({addresses, addresses}, &out).code();
  };
  for (Node& node : program.nodes) node.label = "1";
  EXPECT_EQ(plan(), Code::kOk);
  program.nodes[0].label = "0";
  EXPECT_EQ(plan(), Code::kInternal);
  program.nodes[0].label = "5";  // beyond the end
  EXPECT_EQ(plan(), Code::kInternal);
  program.nodes[0].label = "3";
  program.nodes[2].region = 1;  // across a region's border
  EXPECT_EQ(plan(), Code::kInternal);
}

}  // namespace
}  // namespace jaxgraph
