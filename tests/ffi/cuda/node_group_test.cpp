// Which nodes a compiled group covers, and its text. Needs no GPU: NVRTC compiles without one.
#include "ffi/kernels/cuda/jit/node_group.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ffi/kernels/cuda/jit/kernel_cache.h"
#include "ffi/kernels/cuda/jit/node_source.h"
#include "ffi/kernels/cuda/jit/nvrtc.h"
#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/cuda/small_nodes.h"

namespace jaxgraph::testing {
namespace {

using Counts = std::vector<size_t>;

// The numbers of nodes of each group, one behind the other.
Counts Groups(const std::vector<ResolvedNode>& nodes) {
  Counts counts;
  for (size_t n = 0; n < nodes.size(); n += counts.back()) {
    counts.push_back(FindGroup(nodes, n).count);
  }
  return counts;
}

// Nobody looks into the buffers, so they lie far apart: a tensor moved onto another one meets that
// one alone, wherever it ends.
struct Resolved {
  explicit Resolved(const GroupCase& c) : group(c), nodes(ResolveAll(group, Bases())) {}
  std::vector<char*> Bases() const {
    std::vector<char*> bases;
    for (size_t b = 0; b < group.buffers.size(); ++b) bases.push_back(Buffer(b));
    return bases;
  }
  char* Buffer(const TensorRef& t) const { return Buffer(t.base); }
  static char* Buffer(size_t base) { return reinterpret_cast<char*>((base + 1) << 32); }

  GroupCase group;
  std::vector<ResolvedNode> nodes;
};
Counts Groups(const GroupCase& c) { return Groups(Resolved(c).nodes); }

GroupCase CacheUpdate(const LayerShape& s = {}) {
  Rng rng(1);
  return MakeCacheUpdate(rng, s);
}

TEST(NodeGroup, RotaryAndCacheRowsAreOne) {
  LayerShape s;
  for (const int64_t batch : {1, 2, 8}) {
    for (const bool position_a_row : {false, true}) {
      s.batch = batch;
      s.position_a_row = position_a_row;
      EXPECT_EQ(Groups(CacheUpdate(s)), Counts{4});
      Resolved r(CacheUpdate(s));
      const NodeGroup group = FindGroup(r.nodes, 0);
      ASSERT_EQ(group.feeds.size(), 2u);
      for (int o = 0; o < 2; ++o) {
        EXPECT_EQ(group.feeds[o].expr, 1u);
        EXPECT_EQ(group.feeds[o].out, o);
        EXPECT_EQ(group.feeds[o].rows, 2u);
        EXPECT_EQ(group.feeds[o].offset, o * s.width);  // half of it, of two bytes each
      }
    }
  }
}

TEST(NodeGroup, BordersOfRegionsAndBranches) {
  GroupCase c = CacheUpdate();
  c.nodes[2].branch = 1;
  EXPECT_EQ(Groups(c), (Counts{2, 1, 1}));
  c.nodes[3].branch = 1;
  EXPECT_EQ(Groups(c), (Counts{2, 2}));
  c.nodes[3].region = 1;
  EXPECT_EQ(Groups(c), (Counts{2, 1, 1}));
}

TEST(NodeGroup, OtherKindsOfNodeEndIt) {
  for (const Op op : {Op::kView, Op::kRow, Op::kMatmul, Op::kAttention}) {
    GroupCase c = CacheUpdate();
    c.nodes[1].op = op;
    EXPECT_EQ(Groups(c), (Counts{1, 1, 2})) << NameOf(op);
  }
}

TEST(NodeGroup, GathersAndCopiesAreTaken) {
  Rng rng(2);
  GroupCase c;
  for (const Op op : {Op::kCopy, Op::kGather, Op::kExpr}) {
    NodeCase node;
    do {
      node = RandomNode(rng, op);
    } while (NumElements(node.node.outs[0]) == 0);
    Append(node, &c);
  }
  EXPECT_EQ(Groups(c), Counts{3});
  // Eight at most.
  const GroupCase three = c;
  for (int i = 0; i < 2; ++i) {
    for (size_t n = 0; n < 3; ++n) {
      Append({three.nodes[n], i == 0 ? three.buffers : Buffers(three.buffers), {}}, &c);
    }
  }
  EXPECT_EQ(Groups(c), (Counts{8, 1}));
}

TEST(NodeGroup, LargeAndEmptyNodesStandAlone) {
  const auto with_q_of = [](int64_t heads) {
    LayerShape s;
    s.heads = heads;
    return CacheUpdate(s);
  };
  EXPECT_EQ(Groups(with_q_of(2048)), Counts{4});       // 65536 elements
  EXPECT_EQ(Groups(with_q_of(2049)), (Counts{1, 3}));  // and more
  EXPECT_EQ(Groups(with_q_of(0)), (Counts{1, 3}));
  // Too many slices to look at from each other, ...
  LayerShape s;
  s.kv_heads = 1;
  s.width = 16;
  s.context = 300;
  s.position_a_row = true;
  s.batch = 64;
  EXPECT_EQ(Groups(CacheUpdate(s)), Counts{4});
  s.batch = 65;
  EXPECT_EQ(Groups(CacheUpdate(s)), (Counts{2, 1, 1}));
  // ... and slices that could lie half over each other.
  s.batch = 3;
  GroupCase c = CacheUpdate(s);
  for (size_t n : {2, 3}) {
    for (auto* t : {&c.nodes[n].srcs[0], &c.nodes[n].outs[0]}) t->shape[3] = 2 * s.width;
  }
  EXPECT_EQ(Groups(c), (Counts{2, 1, 1}));
}

TEST(NodeGroup, NoNodeTouchesWhatAnotherWrites) {
  const GroupCase c = CacheUpdate();
  const Node &q = c.nodes[0], &k = c.nodes[1], &set_k = c.nodes[2], &set_v = c.nodes[3];
  struct Move {
    int node;
    bool out;  // the node's output, or source, `index` is moved ...
    int index;
    const TensorRef* onto;  // ... to bytes of this
    Counts groups;
  };
  const Move moves[] = {
      {0, true, 1, &k.srcs[0], {1, 3}},       // q onto k's source
      {1, true, 1, &q.srcs[1], {1, 1, 2}},    // k onto the angles that q reads, and k itself
      {1, false, 0, &q.outs[0], {1, 3}},      // k reads what q writes
      {2, false, 2, &q.outs[0], {2, 2}},      // an index that q writes
      {3, false, 2, &k.outs[0], {3, 1}},      // an index that k writes
      {3, false, 1, &set_k.outs[0], {3, 1}},  // v's rows are in k's cache
      {3, false, 1, &q.outs[0], {3, 1}},      // or q, but not all of it
      {0, true, 0, &set_v.srcs[1], {3, 1}},   // v's rows are written by q
      {0, true, 0, &set_k.srcs[1], {1, 3}},   // so are k's, behind q
      {3, false, 2, &set_v.outs[0], {3, 1}},  // an index in the cache that it is for
  };
  for (const Move& move : moves) {
    SCOPED_TRACE(&move - moves);
    Resolved r(c);
    char* const onto = r.Buffer(*move.onto) + move.onto->offset + 4;
    ResolvedNode& node = r.nodes[move.node];
    if (move.out) {
      node.outs[move.index] = onto;
    } else {
      node.srcs[move.index] = onto;
    }
    EXPECT_EQ(Groups(r.nodes), move.groups);
  }
  // Two updates of one array happen in order.
  Resolved r(c);
  r.nodes[3].srcs[0] = r.nodes[3].outs[0] = r.nodes[2].outs[0];
  EXPECT_EQ(Groups(r.nodes), (Counts{3, 1}));
}

// Whose rows are not exactly the outputs of one EXPR reads them from memory.
TEST(NodeGroup, RowsAreAllOfOneExprsOutputs) {
  const auto groups = [](const std::function<void(GroupCase*)>& change) {
    GroupCase c = CacheUpdate();
    change(&c);
    return Groups(c);
  };
  const Counts fed = {4}, not_fed = {2, 2};
  EXPECT_EQ(groups([](GroupCase*) {}), fed);
  EXPECT_EQ(groups([](GroupCase* c) { std::swap(c->nodes[1].outs[0], c->nodes[1].outs[1]); }), fed);
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[1].outs[0].offset = 64; }), not_fed);  // twice
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[1].outs[1].offset = 62; }), not_fed);
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[1].outs[1].offset = 63; }), not_fed);
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[1].outs[1].strides[0] = 32; }), not_fed);
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[1].outs[1].dtype = DType::kF16; }), not_fed);
  EXPECT_EQ(groups([](GroupCase* c) {  // half of the rows is another's
              c->nodes[1].outs[1] = Part(AddDense(c, DType::kBF16, {2, 64}), 0, 32);
            }),
            not_fed);
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[2].srcs[1].strides[2] = 32; }), not_fed);
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[2].srcs[1].shape[2] = 1; }), not_fed);
  EXPECT_EQ(groups([](GroupCase* c) {  // the other order of dimensions
              for (TensorRef& out : c->nodes[1].outs) {
                out.strides = {1, 2};
                out.offset /= 16;
              }
              c->nodes[1].outs[1].offset = 2 * 64;
            }),
            fed);
  // An EXPR in place computes each element where it was, so all stores are kept in order.
  EXPECT_EQ(groups([](GroupCase* c) {
              c->nodes[1].srcs[0] = c->nodes[1].outs[0];
              c->nodes[1].srcs[2] = c->nodes[1].outs[1];
            }),
            not_fed);
  // Two caches take the same rows.
  EXPECT_EQ(groups([](GroupCase* c) { c->nodes[3].srcs[1] = c->nodes[2].srcs[1]; }), fed);
}

// An index is computed again by who needs it, if it is an EXPR's output element by element.
TEST(NodeGroup, IndicesThatAnExprComputes) {
  const auto group = [](const std::function<void(GroupCase*)>& change) {
    Rng rng(5);
    LayerShape s;
    s.batch = 3;
    s.position_a_row = true;
    GroupCase c = MakeCacheUpdate(rng, s);
    c.nodes.pop_back();
    ComputeIndex(rng, &c, 3);
    change(&c);
    Resolved r(c);
    return FindGroup(r.nodes, 0);
  };
  const NodeGroup all = group([](GroupCase*) {});
  EXPECT_EQ(all.count, 4u);
  EXPECT_EQ(all.feeds.size(), 2u);
  ASSERT_EQ(all.indices.size(), 1u);
  EXPECT_EQ(all.indices[0].user, 3u);
  EXPECT_EQ(all.indices[0].src, 3);
  EXPECT_EQ(all.indices[0].expr, 2u);
  const std::vector<std::function<void(GroupCase*)>> not_so = {
      [](GroupCase* c) { c->nodes[3].srcs[3].dtype = DType::kU32; },
      [](GroupCase* c) { c->nodes[3].srcs[3].strides[0] = 1; },  // both outputs
      [](GroupCase* c) { c->nodes[3].srcs[3].offset ^= 2; },
      [](GroupCase* c) { c->nodes[2].outs[0] = c->nodes[2].outs[1]; },            // stored twice
      [](GroupCase* c) { c->nodes[2].srcs[0] = c->nodes[2].outs[0]; },            // in place
      [](GroupCase* c) { c->nodes[1].outs[0].base = c->nodes[2].outs[0].base; },  // by two nodes
      [](GroupCase* c) { c->nodes[2].op = Op::kCopy; },
  };
  for (const auto& change : not_so) {
    const NodeGroup less = group(change);
    EXPECT_LT(less.count, 4u) << &change - not_so.data();
    EXPECT_TRUE(less.indices.empty());
  }
}

bool Source(const std::vector<ResolvedNode>& nodes, size_t first, KernelSource* source) {
  return SourceOf(nodes, first, FindGroup(nodes, first), true, source);
}
std::string Key(const std::vector<ResolvedNode>& nodes) {
  return KeyOf(nodes, 0, FindGroup(nodes, 0), true);
}

TEST(NodeGroup, TheTextHoldsNoAddress) {
  Resolved here(CacheUpdate()), there(CacheUpdate());
  KernelSource a, b;
  ASSERT_TRUE(Source(here.nodes, 0, &a));
  ASSERT_TRUE(Source(there.nodes, 0, &b));
  EXPECT_EQ(a.text, b.text);
  EXPECT_EQ(a.grid, b.grid);
  EXPECT_EQ(Key(here.nodes), Key(there.nodes));
}

// What the text depends on is in the key.
TEST(NodeGroup, OtherTextsHaveOtherKeys) {
  const std::vector<std::function<void(GroupCase*)>> changes = {
      [](GroupCase*) {},
      [](GroupCase* c) { std::swap(c->nodes[1].outs[0].offset, c->nodes[1].outs[1].offset); },
      [](GroupCase* c) { c->nodes.pop_back(); },
      [](GroupCase* c) { c->nodes.erase(c->nodes.begin()); },
      [](GroupCase* c) { c->nodes[2].params[0] = 1; },  // the mode
      [](GroupCase* c) { c->nodes[2].srcs[2].dtype = DType::kU32; },
      [](GroupCase* c) { c->nodes[2].srcs[0].shape[2] = c->nodes[2].outs[0].shape[2] = 30; },
      [](GroupCase* c) { c->nodes[2].outs[0].strides[1] = c->nodes[2].srcs[0].strides[1] = 64; },
      [](GroupCase* c) { c->nodes[3].srcs[1].strides[2] = 0; },
      [](GroupCase* c) { c->nodes[3].srcs[1].offset = 2; },  // an alignment
      [](GroupCase* c) { c->nodes[3].srcs[1] = c->nodes[2].srcs[1]; },
      [](GroupCase* c) {
        Rng rng(1);
        ComputeIndex(rng, c, 2);
        c->nodes[4].srcs[2] = c->nodes[3].outs[0];
      },
      [](GroupCase* c) {
        Rng rng(1);
        ComputeIndex(rng, c, 2);
        c->nodes[4].srcs[2] = c->nodes[3].outs[1];
      },
      [](GroupCase* c) {
        c->nodes[3].op = Op::kCopy;
        c->nodes[3].params.clear();
        c->nodes[3].outs[0] = AddDense(c, DType::kBF16, {1, 1, 2, 1, 64});
        c->nodes[3].srcs = {c->nodes[3].srcs[1]};
      },
  };
  std::map<std::string, std::string> texts, keys;
  for (const auto& change : changes) {
    SCOPED_TRACE(&change - changes.data());
    GroupCase c = CacheUpdate();
    change(&c);
    Resolved r(c);
    KernelSource source;
    ASSERT_TRUE(Source(r.nodes, 0, &source));
    EXPECT_TRUE(texts.emplace(source.text, "").second);
    EXPECT_TRUE(keys.emplace(Key(r.nodes), "").second);
  }
}

class GroupCompiles : public ::testing::TestWithParam<const char*> {};

TEST_P(GroupCompiles, RandomGroups) {
  if (Nvrtc::Get() == nullptr) GTEST_SKIP() << Nvrtc::Description();
  Rng rng(3);
  std::vector<GroupCase> cases;
  for (const bool position_a_row : {false, true}) {
    for (const IndexMode mode : {IndexMode::kClip, IndexMode::kFillOrDrop}) {
      LayerShape s;
      s.batch = 3;
      s.position_a_row = position_a_row;
      s.mode = mode;
      cases.push_back(MakeCacheUpdate(rng, s));
    }
  }
  for (int i = 0; i < 10; ++i) cases.push_back(RandomSmallNodes(rng));
  std::vector<std::string> texts, names;
  for (const GroupCase& c : cases) {
    Resolved r(c);
    for (size_t n = 0; n < r.nodes.size();) {
      const size_t count = FindGroup(r.nodes, n).count;
      KernelSource source;
      if (count > 1 && Source(r.nodes, n, &source)) {
        texts.push_back(source.text);
        names.push_back("kernel_" + std::to_string(names.size()));
      }
      n += count;
    }
  }
  EXPECT_GE(texts.size(), cases.size());
  std::vector<const std::string*> sources;
  for (const std::string& text : texts) sources.push_back(&text);
  std::string image;
  ASSERT_OK(Nvrtc::Get()->Compile(TranslationUnit(sources, names), GetParam(), &image));
  for (const std::string& name : names) EXPECT_NE(image.find(name), std::string::npos) << name;
}

INSTANTIATE_TEST_SUITE_P(Architectures, GroupCompiles, ::testing::Values("sm_90a", "compute_75"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace jaxgraph::testing
