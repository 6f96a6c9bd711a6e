// Groups of small nodes against the nodes one by one, bit by bit: everything in memory, run
// eagerly, captured, replayed, patched, and launched dependently.
#include <memory>
#include <string>
#include <vector>

#include "ffi/kernels/cuda/jit/jit.h"
#include "ffi/kernels/cuda/jit/node_group.h"
#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/cuda/small_nodes.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

bool IsGroup(const Launch& launch) {
  return std::string(launch.kernel->name).rfind("jaxgraph_group_", 0) == 0;
}

class NodeGroupRun : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (device_ != nullptr && !Jit::Available()) GTEST_SKIP() << Jit::Describe();
  }
  void TearDown() override {
    memory_.clear();
    CudaTest::TearDown();
  }

  void Place(const GroupCase& c) {
    memory_.clear();
    for (const auto& buffer : c.buffers) memory_.emplace_back(buffer.size(), stream());
  }
  std::vector<char*> Bases() const {
    std::vector<char*> bases;
    for (const DeviceBytes& m : memory_) bases.push_back(m.data());
    return bases;
  }
  void Upload(const GroupCase& c) {
    for (size_t b = 0; b < memory_.size(); ++b) memory_[b].Upload(c.buffers[b]);
  }
  Buffers Download() const {
    Buffers all;
    for (const DeviceBytes& m : memory_) all.push_back(m.Download());
    return all;
  }

  void Emit(const std::vector<ResolvedNode>& nodes, bool fusion, std::vector<Launch>* launches) {
    for (size_t n = 0; n < nodes.size();) {
      size_t covered = 0;
      ASSERT_OK(CudaEmitter().Emit(nodes, n, fusion, launches, &covered));
      if (!fusion) {
        ASSERT_EQ(covered, 1u);
      }
      n += covered;
    }
    if (!launches->empty()) launches->front().dependent = false;
  }
  void Run(const std::vector<Launch>& launches) {
    for (const Launch& launch : launches) ASSERT_OK(device_->LaunchKernel(launch, stream_));
  }

  // Fused against single nodes, eager against replayed. Returns how many groups there were.
  void Check(const GroupCase& c, size_t* groups) {
    Place(c);
    const std::vector<ResolvedNode> nodes = ResolveAll(c, Bases());
    std::vector<Launch> fused, single;
    ASSERT_NO_FATAL_FAILURE(Emit(nodes, true, &fused));
    ASSERT_NO_FATAL_FAILURE(Emit(nodes, false, &single));
    for (const Launch& launch : single) ASSERT_FALSE(IsGroup(launch));
    for (const Launch& launch : fused) *groups += IsGroup(launch);
    Upload(c);
    ASSERT_NO_FATAL_FAILURE(Run(single));
    const Buffers want = Download();
    Upload(c);
    ASSERT_NO_FATAL_FAILURE(Run(fused));
    EXPECT_TRUE(Download() == want) << "fused and single nodes differ";
    if (fused.empty()) return;

    Recording recorded;
    ASSERT_OK(Record(fused, &recorded));
    for (int i = 0; i < 2; ++i) {
      Upload(c);
      ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
      EXPECT_TRUE(Download() == want) << "replay " << i << " differs";
    }
    // Every base moves: what was recorded is patched.
    const std::vector<DeviceBytes> old = std::move(memory_);
    Place(c);
    std::vector<Launch> moved;
    const std::vector<ResolvedNode> moved_nodes = ResolveAll(c, Bases());
    ASSERT_NO_FATAL_FAILURE(Emit(moved_nodes, true, &moved));
    ASSERT_EQ(moved.size(), fused.size());
    for (size_t i = 0; i < moved.size(); ++i) {
      ASSERT_TRUE(moved[i].SameConfig(fused[i]));
      ASSERT_EQ(moved[i].params.size(), moved[i].kernel->param_bytes);
      ASSERT_OK(device_->Patch(recorded.exec, recorded.nodes[i], moved[i]));
    }
    Upload(c);
    ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
    EXPECT_TRUE(Download() == want) << "the patched replay differs";
  }

  std::vector<DeviceBytes> memory_;
};

TEST_F(NodeGroupRun, CacheUpdates) {
  Rng rng(1);
  for (const DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const IndexMode mode : {IndexMode::kClip, IndexMode::kFillOrDrop}) {
      for (const int64_t batch : {1, 3, 8}) {
        for (const bool position_a_row : {false, true}) {
          // In front of the cache, in it, and behind it; in rows of their own some of each.
          for (const int64_t position : {-7, 0, 5, 31, 32, 1000}) {
            LayerShape s;
            s.dtype = t;
            s.mode = mode;
            s.batch = batch;
            s.heads = 9;
            s.kv_heads = 3;
            s.position_a_row = position_a_row;
            s.position = position;
            SCOPED_TRACE(std::string(NameOf(t)) + " batch " + std::to_string(batch) + " at " +
                         std::to_string(position));
            const GroupCase c = MakeCacheUpdate(rng, s);
            size_t groups = 0;
            ASSERT_NO_FATAL_FAILURE(Check(c, &groups));
            ASSERT_EQ(groups, 1u);
            EXPECT_TRUE(Download() == RunHost(c.nodes, c.buffers)) << "the host's bits differ";
          }
        }
      }
    }
  }
}

// Rows written to one place by several slices: the last one stays.
TEST_F(NodeGroupRun, TheLastSliceWins) {
  Rng rng(2);
  for (const IndexMode mode : {IndexMode::kClip, IndexMode::kFillOrDrop}) {
    for (int i = 0; i < 10; ++i) {
      LayerShape s;
      s.batch = 7;
      s.mode = mode;
      s.position_a_row = true;
      GroupCase c = MakeCacheUpdate(rng, s);
      for (const int src : {2, 3, 4}) {  // the row, the position, and now and then not 0
        const TensorRef& index = c.nodes[2].srcs[src];
        FillRandom(rng, &c, index, src < 4 || Chance(rng, 0.5) ? -1 : 0,
                   src == 2   ? 7
                   : src == 3 ? 2
                              : 0);
      }
      size_t groups = 0;
      ASSERT_NO_FATAL_FAILURE(Check(c, &groups));
      ASSERT_EQ(groups, 1u);
      EXPECT_TRUE(Download() == RunHost(c.nodes, c.buffers)) << "the host's bits differ";
    }
  }
}

// As in the first layer of a step: the position is made fit by an EXPR of the group.
TEST_F(NodeGroupRun, IndicesThatAnExprComputes) {
  Rng rng(6);
  for (const bool position_a_row : {false, true}) {
    for (const int64_t position : {-1, 7, 40}) {
      LayerShape s;
      s.batch = 5;
      s.position_a_row = position_a_row;
      s.position = position;
      s.mode = position_a_row ? IndexMode::kFillOrDrop : IndexMode::kClip;
      GroupCase c = MakeCacheUpdate(rng, s);
      const Node set_v = c.nodes.back();
      c.nodes.pop_back();
      const size_t src = position_a_row ? 3 : 2;
      ComputeIndex(rng, &c, src);
      c.nodes.push_back(set_v);
      c.nodes.back().srcs[src] = c.nodes[3].srcs[src];
      size_t groups = 0;
      ASSERT_NO_FATAL_FAILURE(Check(c, &groups));
      ASSERT_EQ(groups, 1u);
      EXPECT_TRUE(Download() == RunHost(c.nodes, c.buffers)) << "the host's bits differ";
    }
  }
}

TEST_F(NodeGroupRun, RandomNodes) {
  Rng rng(3);
  size_t groups = 0;
  constexpr int kCases = 60;
  for (int i = 0; i < kCases; ++i) {
    SCOPED_TRACE(i);
    ASSERT_NO_FATAL_FAILURE(Check(RandomSmallNodes(rng), &groups));
  }
  EXPECT_GE(groups, static_cast<size_t>(kCases));
}

// An address that another node of the group then writes: the group ends there.
TEST_F(NodeGroupRun, AnAddressThatMovesOntoAnotherEndsTheGroup) {
  Rng rng(4);
  const GroupCase c = MakeCacheUpdate(rng, {});
  Place(c);
  std::vector<ResolvedNode> nodes = ResolveAll(c, Bases());
  std::vector<Launch> launches;
  ASSERT_NO_FATAL_FAILURE(Emit(nodes, true, &launches));
  ASSERT_EQ(launches.size(), 1u);
  nodes[3].srcs[1] = nodes[0].outs[0];  // v's rows are what q becomes
  launches.clear();
  ASSERT_NO_FATAL_FAILURE(Emit(nodes, true, &launches));
  EXPECT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[0].node_count, 3u);
}

// Layer behind layer, each reading what the one before it wrote, in one graph of dependent
// launches.
TEST_F(NodeGroupRun, GroupsWaitForEachOther) {
  Rng rng(5);
  LayerShape s;
  s.heads = s.kv_heads = 300;  // more blocks than multiprocessors
  GroupCase c = MakeCacheUpdate(rng, s);
  const std::vector<Node> layer = c.nodes;
  for (int i = 0; i < 30; ++i) {
    // What q and k became are the next layer's q and k; it has caches of its own.
    std::vector<Node> next = layer;
    for (const int n : {0, 1}) {
      const std::vector<TensorRef> from = c.nodes[c.nodes.size() - 4 + n].outs;
      const TensorRef to = AddDense(&c, s.dtype, {s.heads, s.width});
      next[n].srcs[0] = from[0];
      next[n].srcs[2] = from[1];
      next[n].outs = {Part(to, 0, s.width / 2), Part(to, s.width / 2, s.width / 2)};
    }
    for (const int n : {2, 3}) {
      next[n].srcs[0] = next[n].outs[0] =
          AddDense(&c, s.dtype, {1, s.kv_heads, s.context, s.width});
    }
    next[2].srcs[1].base = next[1].outs[0].base;
    // v's rows are k as the layer before left it.
    next[3].srcs[1].base = next[1].srcs[0].base;
    c.nodes.insert(c.nodes.end(), next.begin(), next.end());
  }
  Place(c);
  const std::vector<ResolvedNode> nodes = ResolveAll(c, Bases());
  std::vector<Launch> fused, single;
  // Layers run one behind the other: in a group of their own each.
  for (size_t n = 0; n < nodes.size(); n += 4) {
    ASSERT_NO_FATAL_FAILURE(Emit({nodes.begin() + n, nodes.begin() + n + 4}, true, &fused));
    ASSERT_NO_FATAL_FAILURE(Emit({nodes.begin() + n, nodes.begin() + n + 4}, false, &single));
  }
  ASSERT_EQ(fused.size(), 31u);
  for (Launch& launch : single) launch.dependent = false;
  Upload(c);
  ASSERT_NO_FATAL_FAILURE(Run(single));
  const Buffers want = Download();
  Recording recorded;
  ASSERT_OK(Record(fused, &recorded));
  for (int i = 0; i < 5; ++i) {
    Upload(c);
    ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
    EXPECT_TRUE(Download() == want) << "replay " << i;
  }
}

}  // namespace
}  // namespace jaxgraph::testing
