// Which nodes a streaming kernel covers. Emission asks no device, so these run anywhere.
#include <functional>

#include "ffi/kernels/cuda/cuda_emitter.h"
#include "ffi/kernels/cuda/stream.h"
#include "tests/ffi/cuda/small_nodes.h"

namespace jaxgraph::testing {
namespace {

// The numbers of nodes that each launch of the run covers.
std::vector<size_t> Covered(const GroupCase& c, const std::vector<ResolvedNode>& nodes,
                            bool fusion = true, std::vector<Launch>* launches = nullptr) {
  std::vector<Launch> made;
  if (launches == nullptr) launches = &made;
  std::vector<size_t> all;
  for (size_t n = 0; n < c.nodes.size();) {
    size_t covered = 0;
    const Status status = CudaEmitter(90).Emit(nodes, n, fusion, launches, &covered);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_GT(covered, 0u);
    if (covered == 0) return all;
    EXPECT_EQ(launches->back().first_node, n);
    EXPECT_EQ(launches->back().node_count, covered);
    all.push_back(covered);
    n += covered;
  }
  return all;
}
std::vector<size_t> Covered(const GroupCase& c, bool fusion = true,
                            std::vector<Launch>* launches = nullptr) {
  Buffers buffers = c.buffers;
  return Covered(c, ResolveAll(c, Addresses(buffers)), fusion, launches);
}
std::vector<size_t> Covered(const GroupShape& shape, bool fusion = true) {
  Rng rng(1);
  return Covered(MakeGroup(rng, shape), fusion);
}

using Counts = std::vector<size_t>;

// Addresses at which nothing is read or written, so far apart that an output which is moved onto
// something shorter meets nothing else.
std::vector<char*> FarApart(const GroupCase& c) {
  std::vector<char*> bases;
  for (size_t b = 0; b < c.buffers.size(); ++b) {
    bases.push_back(reinterpret_cast<char*>(static_cast<uintptr_t>(b + 1) << 24));
    EXPECT_LT(2 * c.buffers[b].size(), size_t{1} << 24);
  }
  return bases;
}

GroupShape Mlp() {
  GroupShape s;
  s.k = 64;
  s.columns = {96, 96};
  s.norm = s.residual = s.activation = true;
  return s;
}

class StreamGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // A build for older devices alone has no streaming kernels.
    Rng rng(1);
    std::vector<Launch> launches;
    Covered(MakeGroup(rng, GroupShape()), false, &launches);
    if (std::string(launches[0].kernel->name).find("stream") == std::string::npos) {
      GTEST_SKIP() << "no kernels for compute capability 9.0 in this build";
    }
  }
};

TEST_F(StreamGroupTest, EachKernelHasItsRowsAndColumns) {
  const auto kernel = [](int64_t m, const std::vector<int64_t>& columns, bool along_k,
                         bool activation = false) {
    GroupShape s;
    s.m = m;
    s.columns = columns;
    s.along_k = along_k;
    s.activation = activation;
    Rng rng(1);
    std::vector<Launch> launches;
    Covered(MakeGroup(rng, s), true, &launches);
    EXPECT_EQ(launches.size(), 1u);
    return std::string(launches[0].kernel->name);
  };
  EXPECT_EQ(kernel(1, {16384}, true), "stream_vector");
  EXPECT_EQ(kernel(1, {16000, 384}, true), "stream_vector");
  EXPECT_EQ(kernel(1, {16383}, true), "stream_along_k");
  EXPECT_EQ(kernel(1, {16384, 16384}, true, true), "stream_along_k");
  EXPECT_EQ(kernel(2, {16384}, true), "stream_rows_along_k");
  EXPECT_EQ(kernel(8, {96}, false), "stream_rows_along_n");
  EXPECT_EQ(kernel(9, {96}, false), "stream_wide_along_n");
  EXPECT_EQ(kernel(1, {16384}, false), "stream_along_n");
}

TEST_F(StreamGroupTest, NormProductsAndActivationAreOne) {
  for (const bool along_k : {true, false}) {
    GroupShape s = Mlp();
    s.along_k = along_k;
    EXPECT_EQ(Covered(s), Counts{4});
    s.columns = {64, 32, 32};
    s.activation = false;
    EXPECT_EQ(Covered(s), Counts{4});
    s.norm = false;
    EXPECT_EQ(Covered(s), Counts{3});
    s.columns = {8, 16, 24, 32, 40};
    EXPECT_EQ(Covered(s), (Counts{4, 1}));
  }
}

TEST_F(StreamGroupTest, EverySpellingOfTheNorm) {
  for (int bits = 0; bits < 128; ++bits) {
    SCOPED_TRACE(bits);
    GroupShape s = Mlp();
    s.residual = bits & 1;
    s.norm_weight = bits & 2;
    s.rounds_first = bits & 4;
    s.divides = bits & 8;
    s.squares = bits & 16;
    s.turned = bits & 32;
    s.silu_rounds = bits & 64;
    s.dtype = s.out = bits % 3 == 0 ? DType::kF16 : DType::kBF16;
    ASSERT_EQ(Covered(s), Counts{4});
  }
}

TEST_F(StreamGroupTest, WithoutFusionEveryNodeIsAlone) {
  EXPECT_EQ(Covered(Mlp(), false), (Counts{1, 1, 1, 1}));
}

TEST_F(StreamGroupTest, BordersOfRegionsAndBranches) {
  Rng rng(2);
  GroupCase c = MakeGroup(rng, Mlp());
  c.nodes[2].branch = 1;
  c.nodes[3].region = 1;
  EXPECT_EQ(Covered(c), (Counts{2, 1, 1}));
  c.nodes[0].region = 3;
  EXPECT_EQ(Covered(c), (Counts{1, 1, 1, 1}));
}

TEST_F(StreamGroupTest, OtherRowsOrLayoutsEndTheGroup) {
  Rng rng(3);
  const GroupCase c = MakeGroup(rng, Mlp());
  GroupCase other = c;
  other.nodes[2].srcs[1].strides = {1, 1, 96, 1};  // along n
  EXPECT_EQ(Covered(other), (Counts{2, 1, 1}));
  other = c;
  other.nodes[2].srcs[0] = AddDense(&other, DType::kBF16, {1, 1, 1, 64});
  EXPECT_EQ(Covered(other), (Counts{2, 1, 1}));
  other = c;
  other.nodes[1].srcs[0] = AddDense(&other, DType::kBF16, {1, 1, 1, 64});
  EXPECT_EQ(Covered(other), (Counts{1, 1, 1, 1}));
  other = c;
  std::swap(other.nodes[3].srcs[0], other.nodes[3].srcs[1]);  // up is the first product: still one
  EXPECT_EQ(Covered(other), Counts{4});
  other = c;
  other.nodes[3].srcs[0] = other.nodes[3].srcs[1];
  EXPECT_EQ(Covered(other), (Counts{3, 1}));
}

TEST_F(StreamGroupTest, NoOutputMayOverlapWhatElseTheGroupTouches) {
  Rng rng(4);
  const GroupCase c = MakeGroup(rng, Mlp());
  const Node& norm = c.nodes[0];
  struct Move {
    int node;  // whose last output is moved
    const TensorRef* onto;
    Counts covered;
  };
  const Move moves[] = {
      {0, &norm.srcs[0], {1, 3}},           // the norm onto its row
      {1, &norm.srcs[1], {1, 3}},           // a product onto what the norm adds, or ...
      {1, &norm.srcs[2], {1, 3}},           // ... onto its weight
      {2, &norm.outs[0], {2, 1, 1}},        // the second product onto the sum
      {2, &c.nodes[1].srcs[1], {2, 1, 1}},  // onto the other's weights
      {3, &norm.srcs[0], {3, 1}},           // the activation onto the row
      {3, &c.nodes[2].srcs[1], {3, 1}},     // onto weights
      {3, &c.nodes[1].outs[0], {3, 1}},     // onto its own source
  };
  const std::vector<char*> far = FarApart(c);
  for (const Move& move : moves) {
    SCOPED_TRACE(&move - moves);
    GroupCase moved = c;
    std::vector<ResolvedNode> nodes = ResolveAll(moved, far);
    char* onto = far[move.onto->base];
    const char* from = nodes[move.node].outs.back();
    nodes[move.node].outs.back() = onto + 16;  // not even the same bytes
    for (ResolvedNode& node : nodes) {
      for (const char*& src : node.srcs) {
        if (src == from) src = onto + 16;
      }
    }
    EXPECT_EQ(Covered(moved, nodes), move.covered);
  }
}

TEST_F(StreamGroupTest, OnlyConstantWeightsAreFetchedEarly) {
  Rng rng(5);
  const GroupCase c = MakeGroup(rng, Mlp());
  Buffers buffers = c.buffers;
  std::vector<ResolvedNode> nodes = ResolveAll(c, Addresses(buffers));
  const auto early = [&] {
    std::vector<Launch> launches;
    EXPECT_EQ(Covered(c, nodes, true, &launches), Counts{4});
    EXPECT_TRUE(launches[0].dependent);
    StreamParams p;
    EXPECT_EQ(launches[0].params.size(), sizeof p);
    std::memcpy(&p, launches[0].params.data(), sizeof p);
    return p.fetches_early != 0;
  };
  EXPECT_TRUE(early());
  nodes[2].constant_srcs = 0;
  EXPECT_FALSE(early());
  nodes[2].constant_srcs = 1;  // the row
  EXPECT_FALSE(early());
}

// What the kernel could not read, or not compute, goes to the general kernels.
TEST_F(StreamGroupTest, WhatDoesNotFit) {
  Rng rng(6);
  const auto name_of = [&](const std::function<void(GroupCase*)>& change, GroupShape s) {
    GroupCase c = MakeGroup(rng, s);
    change(&c);
    std::vector<Launch> launches;
    Covered(c, true, &launches);
    return std::string(launches.back().kernel->name).substr(0, 6);
  };
  const auto nothing = [](GroupCase*) {};
  EXPECT_EQ(name_of(nothing, GroupShape()), "stream");
  EXPECT_EQ(name_of([](GroupCase* c) { c->nodes[0].srcs[0].offset = 2; }, GroupShape()), "matmul");
  EXPECT_EQ(name_of([](GroupCase* c) { c->nodes[0].srcs[1].offset = 8; }, GroupShape()), "matmul");
  GroupShape odd;
  odd.k = 60;
  EXPECT_EQ(name_of(nothing, odd), "matmul");
  odd = GroupShape();
  odd.along_k = false;
  odd.columns = {60};
  EXPECT_EQ(name_of(nothing, odd), "matmul");
  odd = GroupShape();
  odd.m = 65;
  odd.columns = {72};
  EXPECT_EQ(name_of(nothing, odd), "matmul");
  odd.m = 64;
  odd.k = 40000;
  EXPECT_EQ(name_of(nothing, odd), "stream");
}

TEST_F(StreamGroupTest, ColumnsOrRowsOfAMatrixThatLieFarApart) {
  for (const bool along_k : {true, false}) {
    for (const int64_t pitch : {int64_t{1} << 30, (int64_t{1} << 30) - 8}) {
      Rng rng(11);
      GroupShape s;
      s.m = 4;
      s.along_k = along_k;
      GroupCase c = MakeGroup(rng, s);
      c.nodes[0].srcs[1].strides[along_k ? 3 : 2] = pitch;
      std::vector<ResolvedNode> nodes = ResolveAll(c, FarApart(c));
      nodes[0].outs[0] = reinterpret_cast<char*>(uintptr_t{1} << 50);  // behind all of the matrix
      std::vector<Launch> launches;
      Covered(c, nodes, true, &launches);
      const std::string kind = pitch < int64_t{1} << 30 ? "rows" : "wide";
      EXPECT_EQ(launches[0].kernel->name, "stream_" + kind + (along_k ? "_along_k" : "_along_n"));
    }
  }
}

TEST_F(StreamGroupTest, RowsOfGigabytes) {
  for (const bool along_k : {true, false}) {
    for (const int64_t k : {int64_t{1} << 28, (int64_t{1} << 28) + 8, int64_t{1} << 30}) {
      Rng rng(12);
      GroupShape s;
      s.m = 4;
      s.along_k = along_k;
      GroupCase c = MakeGroup(rng, s);
      TensorRef &rows = c.nodes[0].srcs[0], &matrix = c.nodes[0].srcs[1];
      rows.shape[3] = matrix.shape[2] = k;
      rows.strides[2] = k;
      if (along_k) matrix.strides[3] = k;
      std::vector<ResolvedNode> nodes = ResolveAll(c, FarApart(c));
      nodes[0].srcs[1] = reinterpret_cast<const char*>(uintptr_t{1} << 45);
      nodes[0].outs[0] = reinterpret_cast<char*>(uintptr_t{1} << 50);
      std::vector<Launch> launches;
      Covered(c, nodes, true, &launches);
      const bool streams = std::string(launches[0].kernel->name).find("stream") == 0;
      EXPECT_EQ(streams, k <= int64_t{1} << 28) << k;
    }
  }
}

GroupShape Head() {
  GroupShape s;
  s.out = DType::kF32;
  s.columns = {96};
  s.norm = s.residual = s.argmax = true;
  return s;
}

TEST_F(StreamGroupTest, AnArgmaxReadsWhatTheProductsWarpsLeave) {
  for (const bool along_k : {true, false}) {
    for (const int64_t columns : {64, 16384}) {
      for (const int64_t m : {1, 2, 8}) {
        GroupShape s = Head();
        s.m = m;
        s.columns = {columns};
        s.along_k = along_k;
        Rng rng(8);
        std::vector<Launch> launches;
        EXPECT_EQ(Covered(MakeGroup(rng, s), true, &launches), Counts{3});
        ASSERT_EQ(launches.size(), 2u);
        EXPECT_STREQ(launches[1].kernel->name, "stream_argmax");
        EXPECT_TRUE(launches[1].dependent);
        StreamParams product;
        StreamArgmaxParams argmax;
        ASSERT_EQ(launches[0].params.size(), sizeof product);
        ASSERT_EQ(launches[1].params.size(), sizeof argmax);
        std::memcpy(&product, launches[0].params.data(), sizeof product);
        std::memcpy(&argmax, launches[1].params.data(), sizeof argmax);
        EXPECT_EQ(argmax.candidates, product.candidates);
        EXPECT_EQ(argmax.places, product.places);
        EXPECT_EQ(argmax.rows, m);
        EXPECT_GT(argmax.places, 0);
        EXPECT_LE(m * argmax.places * sizeof(StreamCandidate), kScratchBytes);
      }
    }
  }
}

// Of eight rows of 4096, their sums, the parts of their squares and candidates find room.
TEST_F(StreamGroupTest, AnArgmaxBehindANormThatTheProductBeforeBegins) {
  for (const bool along_k : {true, false}) {
    GroupShape s = Head();
    s.m = 8;
    s.k = 4096;
    s.columns = {9000};
    s.before = 64;
    s.along_k = along_k;
    s.stores_sum = false;
    Rng rng(12);
    EXPECT_EQ(Covered(MakeGroup(rng, s)), Counts{4});
  }
}

TEST_F(StreamGroupTest, WhichArgmaxIsTaken) {
  EXPECT_EQ(Covered(Head(), false), (Counts{1, 1, 1}));
  GroupShape s = Head();
  s.m = 9;  // another kernel's
  EXPECT_EQ(Covered(s), (Counts{1, 1, 1}));
  s = Head();
  s.columns = {96, 96};
  EXPECT_EQ(Covered(s), (Counts{3, 1}));

  Rng rng(9);
  s = Head();
  s.m = 2;
  const GroupCase c = MakeGroup(rng, s);
  EXPECT_EQ(Covered(c), Counts{3});
  const auto changed = [&](const std::function<void(GroupCase*)>& change) {
    GroupCase other = c;
    change(&other);
    return Covered(other);
  };
  const Counts apart = {2, 1};
  EXPECT_EQ(changed([](GroupCase* o) { o->nodes[2].region = 1; }), apart);
  EXPECT_EQ(changed([](GroupCase* o) {
              for (Node& node : o->nodes) node.region = 1;
            }),
            apart);
  EXPECT_EQ(changed([](GroupCase* o) {
              o->nodes[2].params = ArgmaxProgram({2, 96}, DType::kF32, ExprOp::kReduceArgmin);
            }),
            apart);
  EXPECT_EQ(changed([](GroupCase* o) {  // of other logits
              o->nodes[2].srcs[0].base = AddDense(o, DType::kF32, {2, 96}).base;
            }),
            apart);
  EXPECT_EQ(changed([](GroupCase* o) {  // of a part of them
              o->nodes[2].params = ArgmaxProgram({2, 95}, DType::kF32);
              o->nodes[2].srcs[0].shape = o->nodes[2].outs[0].shape = {2, 95};
            }),
            apart);
  EXPECT_EQ(changed([](GroupCase* o) {  // of the first row, twice
              o->nodes[2].srcs[0].strides = {0, 1};
            }),
            apart);
  EXPECT_EQ(changed([](GroupCase* o) {  // with a place of 64 bits
              o->nodes[2].params =
                  ArgmaxProgram({2, 96}, DType::kF32, ExprOp::kReduceArgmax, DType::kS64);
              o->nodes[2].outs[0].dtype = DType::kS64;
              o->buffers[o->nodes[2].outs[0].base].resize(16);
            }),
            apart);
  Buffers buffers = c.buffers;
  std::vector<ResolvedNode> nodes = ResolveAll(c, Addresses(buffers));
  for (ResolvedNode& node : nodes) node.scratch = nullptr;
  EXPECT_EQ(Covered(c, nodes), apart);
}

TEST_F(StreamGroupTest, NoLaunchAsksForMoreSharedMemoryThanThereIs) {
  constexpr uint32_t kMost = 227 * 1024, kStatic = 10 * 1024;
  Rng rng(7);
  for (int64_t m = 1; m <= 64; m += m < 16 ? 1 : 8) {
    for (int64_t k = 8; k < 20000; k += k < 600 ? 8 : 600) {
      for (const bool along_k : {true, false}) {
        GroupShape s;
        s.m = m;
        s.k = k;
        s.columns = {16, 16};
        s.along_k = along_k;
        s.norm = s.residual = s.activation = true;
        GroupCase c = MakeGroup(rng, s);
        std::vector<Launch> launches;
        Covered(c, true, &launches);
        for (const Launch& launch : launches) ASSERT_LE(launch.shared_bytes + kStatic, kMost);
      }
    }
  }
}

TEST_F(StreamGroupTest, ANormOfManyElementsIsAKernelOfItsOwn) {
  GroupShape s = Mlp();
  s.m = 8;
  s.k = 520;
  EXPECT_EQ(Covered(s), (Counts{1, 3}));
  s.k = 512;
  EXPECT_EQ(Covered(s), Counts{4});
  s.m = 1;
  s.k = 8200;
  EXPECT_EQ(Covered(s), (Counts{1, 3}));
  s.k = 8192;
  EXPECT_EQ(Covered(s), Counts{4});
}

TEST_F(StreamGroupTest, ANormOfManyRowsIsAKernelOfItsOwn) {
  GroupShape s = Mlp();
  s.m = 8;
  EXPECT_EQ(Covered(s), Counts{4});
  s.m = 9;
  EXPECT_EQ(Covered(s), (Counts{1, 3}));
}

// A product, and the norm of its sum with something else in front of others.
GroupShape Behind() {
  GroupShape s = Mlp();
  s.m = 4;
  s.before = 160;
  return s;
}

StreamParams ParamsOf(const Launch& launch) {
  StreamParams p;
  EXPECT_EQ(launch.params.size(), sizeof p);
  std::memcpy(&p, launch.params.data(), sizeof p);
  return p;
}

TEST_F(StreamGroupTest, ANormBeginsInTheLaunchOfTheProductBefore) {
  for (const bool along_k : {true, false}) {
    GroupShape s = Behind();
    s.along_k = along_k;
    for (const int64_t m : {2, 8}) {
      s.m = m;
      EXPECT_EQ(Covered(s), Counts{5}) << m << " rows";
    }
    s.k = 4096;  // more than a kernel norms for itself
    s.product_first = true;
    EXPECT_EQ(Covered(s), Counts{5});
    s.m = 1;
    EXPECT_EQ(Covered(s), (Counts{1, 4}));
    s.m = 9;
    EXPECT_EQ(Covered(s), (Counts{1, 1, 3}));
  }
  GroupShape s = Behind();
  s.columns = {64, 32, 32};
  s.activation = false;
  EXPECT_EQ(Covered(s), Counts{5});
  s.out = DType::kF32;  // of all products: none can be added to a residual in bf16
  EXPECT_EQ(Covered(s, false), (Counts{1, 1, 1, 1, 1}));
}

TEST_F(StreamGroupTest, WhatTheProductBeforeLeaves) {
  for (const bool stores_sum : {true, false}) {
    GroupShape s = Behind();
    s.stores_sum = stores_sum;
    Rng rng(8);
    const GroupCase c = MakeGroup(rng, s);
    Buffers buffers = c.buffers;
    std::vector<ResolvedNode> nodes = ResolveAll(c, Addresses(buffers));
    std::vector<Launch> launches;
    ASSERT_EQ(Covered(c, nodes, true, &launches), Counts{5});
    ASSERT_EQ(launches.size(), 2u);
    const StreamParams before = ParamsOf(launches[0]), behind = ParamsOf(launches[1]);
    const char* scratch = buffers[c.scratch].data();
    EXPECT_EQ(before.residual, nodes[1].srcs[0]);
    EXPECT_EQ(reinterpret_cast<const char*>(before.squares_out), scratch);
    EXPECT_EQ(before.squares_out, behind.squares);
    EXPECT_EQ(before.residual_sum, behind.row);
    if (stores_sum) {
      EXPECT_EQ(before.residual_sum, nodes[1].outs[0]);
    } else {
      EXPECT_GE(before.residual_sum, scratch + behind.num_parts * 8 * 4);
      EXPECT_LE(before.residual_sum + 4 * 2 * s.k, scratch + kScratchBytes);
    }
    EXPECT_EQ(behind.added, nullptr);
    EXPECT_EQ(behind.sum, nullptr);
    EXPECT_FALSE(behind.fetches_early) << "the norm's weight is not constant";
    nodes[1].constant_srcs = 4;
    launches.clear();
    ASSERT_EQ(Covered(c, nodes, true, &launches), Counts{5});
    EXPECT_TRUE(ParamsOf(launches[1]).fetches_early);
  }
}

TEST_F(StreamGroupTest, ANormThatBeginsInItsOwnLaunch) {
  Rng rng(9);
  const GroupCase c = MakeGroup(rng, Behind());
  ASSERT_EQ(Covered(c), Counts{5});
  GroupCase other = c;
  other.scratch = -1;
  EXPECT_EQ(Covered(other), (Counts{1, 4}));
  other = c;
  for (Node& node : other.nodes) node.region = 1;  // its branches would share the scratch memory
  EXPECT_EQ(Covered(other), (Counts{1, 4}));
  other = c;
  other.nodes[0].branch = 1;
  EXPECT_EQ(Covered(other), (Counts{1, 4}));
  other = c;
  other.nodes[1].srcs[1] = AddDense(&other, DType::kBF16, {4, 64});  // the norm of something else
  EXPECT_EQ(Covered(other), (Counts{1, 4}));
  const std::vector<char*> far = FarApart(c);
  std::vector<ResolvedNode> nodes = ResolveAll(c, far);
  char* const onto = far[c.nodes[0].srcs[0].base] + 16;  // the sum onto the first rows
  nodes[1].outs[0] = onto;
  EXPECT_EQ(Covered(c, nodes), (Counts{1, 4}));
}

TEST_F(StreamGroupTest, HeadsAreTurnedAndCachedWithTheirProducts) {
  Rng rng(10);
  GroupShape s;
  s.m = 4;
  s.along_k = false;
  LayerShape layer;
  layer.batch = 4;
  s.columns = {64 * layer.heads, 64 * layer.kv_heads, 64 * layer.kv_heads};
  for (const bool positions_first : {true, false}) {
    layer.positions_first = positions_first;
    GroupCase c = MakeHeads(rng, s, layer);
    EXPECT_EQ(Covered(c), Counts{7});
    std::swap(c.nodes[3], c.nodes[4]);
    std::swap(c.nodes[5], c.nodes[6]);
    EXPECT_EQ(Covered(c), Counts{7});
    std::swap(c.nodes[4], c.nodes[5]);
    EXPECT_EQ(Covered(c), Counts{7});
    GroupCase other = c;
    other.nodes.pop_back();
    EXPECT_EQ(Covered(other)[0], 3u);
    other = c;
    other.nodes[5].branch = 1;
    EXPECT_EQ(Covered(other)[0], 3u);
    // The keys' rows are what was not turned.
    other = MakeHeads(rng, s, layer);
    other.nodes[5].srcs[1].base = other.nodes[1].outs[0].base;
    EXPECT_EQ(Covered(other)[0], 3u);
    // A cache where the values are.
    Buffers buffers = c.buffers;
    std::vector<ResolvedNode> nodes = ResolveAll(c, Addresses(buffers));
    for (ResolvedNode& node : nodes) {
      if (node.node->op == Op::kSetRows) node.outs[0] = buffers[c.nodes[2].outs[0].base].data();
    }
    EXPECT_EQ(Covered(c, nodes)[0], 3u);
  }
  EXPECT_EQ(Covered(MakeHeads(rng, s, layer), false)[0], 1u);
  LayerShape of_rows = layer;
  of_rows.position_a_row = true;
  of_rows.positions_first = false;
  EXPECT_EQ(Covered(MakeHeads(rng, s, of_rows))[0], 3u);
  LayerShape wide = layer;
  wide.width = 128;
  wide.heads = 2;
  wide.kv_heads = 1;
  EXPECT_EQ(Covered(MakeHeads(rng, s, wide))[0], 3u);
  s.along_k = true;
  EXPECT_EQ(Covered(MakeHeads(rng, s, layer))[0], 3u);
}

}  // namespace
}  // namespace jaxgraph::testing
