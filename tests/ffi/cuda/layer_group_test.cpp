// Which nodes the kernels of layers cover. Emission asks no device, so these run anywhere.
#include <functional>

#include "ffi/kernels/cuda/cuda_emitter.h"
#include "ffi/kernels/cuda/layer.h"
#include "tests/ffi/cuda/layer_case.h"

namespace jaxgraph::testing {
namespace {

// How many nodes the layers' kernels take at the first node.
size_t Taken(const std::vector<ResolvedNode>& nodes, size_t first = 0,
             std::vector<Launch>* launches = nullptr, bool fusion = true) {
  std::vector<Launch> made;
  if (launches == nullptr) launches = &made;
  size_t covered = 0;
  const Status status = CudaEmitter(90).Emit(nodes, first, fusion, launches, &covered);
  EXPECT_TRUE(status.ok()) << status.message();
  const std::string name = launches->empty() ? "" : launches->front().kernel->name;
  return name.substr(0, 5) == "layer" ? covered : 0;
}
size_t Taken(const LayerCase& c) {
  Buffers buffers = c.buffers;
  return Taken(ResolveLayers(c, Addresses(buffers)));
}

// The case with a result lying elsewhere, and what is read of it, too.
LayerCase Moved(LayerCase c, const TensorRef& was, const TensorRef& to) {
  const int64_t bytes = was.num_elements() * static_cast<int64_t>(SizeOf(was.dtype));
  for (Node& node : c.nodes) {
    for (auto* tensors : {&node.outs, &node.srcs}) {
      for (TensorRef& t : *tensors) {
        const int64_t from = t.offset - was.offset;
        if (t.base != was.base || from < 0 || from >= bytes) continue;
        t.base = to.base;
        t.offset = to.offset + from;
      }
    }
  }
  return c;
}

class LayerGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Rng rng(1);
    const LayerCase c = MakeLayers(rng, {});
    Buffers buffers = c.buffers;
    std::vector<Launch> launches;
    size_t covered = 0;
    EXPECT_TRUE(CudaEmitter(90)
                    .Emit(ResolveLayers(c, Addresses(buffers)), kQuery, true, &launches, &covered)
                    .ok());
    if (std::string(launches[0].kernel->name).find("stream") == std::string::npos) {
      GTEST_SKIP() << "no kernels for compute capability 9.0 in this build";
    }
  }
};

StepShape Layers(int64_t n) {
  StepShape s;
  s.layers = n;
  return s;
}

TEST_F(LayerGroupTest, LayersOfModels) {
  Rng rng(2);
  for (const bool positions_first : {false, true}) {
    for (const bool residual : {false, true}) {
      for (const DType t : {DType::kBF16, DType::kF16}) {
        for (int64_t layers : {1, 3}) {
          StepShape s = Layers(layers);
          s.positions_first = positions_first;
          s.residual = residual;
          s.dtype = t;
          EXPECT_EQ(Taken(MakeLayers(rng, s)), layers * kNodesOfLayer);
          s.kv_heads = 1;
          EXPECT_EQ(Taken(MakeLayers(rng, s)), layers * kNodesOfLayer);
          s.heads = 1;
          EXPECT_EQ(Taken(MakeLayers(rng, s)), layers * kNodesOfLayer);
        }
      }
    }
  }
}

TEST_F(LayerGroupTest, TwoLaunchesALayerAndOneBehind) {
  Rng rng(3);
  const LayerCase c = MakeLayers(rng, Layers(3));
  Buffers buffers = c.buffers;
  std::vector<Launch> launches;
  ASSERT_EQ(Taken(ResolveLayers(c, Addresses(buffers)), 0, &launches), 3 * kNodesOfLayer);
  ASSERT_EQ(launches.size(), 7u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_STREQ(launches[i].kernel->name, i % 2 == 0 ? "layer_attention" : "layer_mlp");
    EXPECT_EQ(launches[i].node_count, 3 * kNodesOfLayer);
  }
  EXPECT_STREQ(launches[6].kernel->name, "layer_end");
}

TEST_F(LayerGroupTest, EverySpelling) {
  Rng rng(4);
  for (int bits = 0; bits < 32; ++bits) {
    SCOPED_TRACE(bits);
    StepShape s = Layers(2);
    s.spelling.norm_weight = true;
    s.spelling.rounds_first = bits & 1;
    s.spelling.divides = bits & 2;
    s.spelling.squares = bits & 4;
    s.spelling.turned = bits & 8;
    s.spelling.silu_rounds = bits & 16;
    EXPECT_EQ(Taken(MakeLayers(rng, s)), 2 * kNodesOfLayer);
  }
  StepShape s = Layers(2);
  s.spelling.norm_weight = false;
  EXPECT_EQ(Taken(MakeLayers(rng, s)), 2 * kNodesOfLayer);
}

// Rows of which each is normed by itself, although the products read all of them as one.
TEST_F(LayerGroupTest, NormsOfSeveralRows) {
  Rng rng(13);
  const LayerCase c = MakeLayers(rng, {});
  ASSERT_EQ(Taken(c), kNodesOfLayer);
  for (const LayerNode which : {kNorm, kMlpNorm}) {
    LayerCase split = c;
    Node& node = split.nodes[which];
    GroupShape spelling;
    spelling.m = 2;
    spelling.k = c.row.shape[0] / 2;
    spelling.residual = which == kMlpNorm;
    node.params = NormProgram(spelling);
    for (auto* tensors : {&node.srcs, &node.outs}) {
      for (TensorRef& t : *tensors) {
        t.rank = 2;
        t.shape = {spelling.m, spelling.k};
        t.strides = {spelling.k, 1};
      }
    }
    ExprProgram program;
    ASSERT_TRUE(DecodeExpr(node, &program).ok());
    EXPECT_EQ(Taken(split), 0u) << which;
  }
}

TEST_F(LayerGroupTest, NothingWithoutFusionOrScratch) {
  Rng rng(5);
  const LayerCase c = MakeLayers(rng, Layers(2));
  Buffers buffers = c.buffers;
  std::vector<ResolvedNode> nodes = ResolveLayers(c, Addresses(buffers));
  EXPECT_EQ(Taken(nodes, 0, nullptr, false), 0u);
  for (ResolvedNode& node : nodes) node.scratch = nullptr;
  EXPECT_EQ(Taken(nodes), 0u);
}

// A change of one layer's nodes leaves the layers before it.
TEST_F(LayerGroupTest, WhatEndsTheLayers) {
  Rng rng(6);
  const LayerCase c = MakeLayers(rng, Layers(3));
  Buffers buffers = c.buffers;
  const std::vector<ResolvedNode> nodes = ResolveLayers(c, Addresses(buffers));
  ASSERT_EQ(Taken(nodes), 3 * kNodesOfLayer);
  using Change = std::function<void(Node*, ResolvedNode*)>;
  const auto taken = [&](size_t layer, LayerNode which, const Change& change) {
    const size_t n = layer * kNodesOfLayer + which;
    Node node = c.nodes[n];
    std::vector<ResolvedNode> changed = nodes;
    changed[n].node = &node;
    change(&node, &changed[n]);
    return Taken(changed) / kNodesOfLayer;
  };
  const Change region = [](Node* node, ResolvedNode*) { node->region = 1; };
  const Change changing = [](Node*, ResolvedNode* at) { at->constant_srcs = 0; };
  for (size_t layer = 0; layer < 3; ++layer) {
    for (size_t which = 0; which < kNodesOfLayer; ++which) {
      SCOPED_TRACE(which);
      const auto node = static_cast<LayerNode>(which);
      EXPECT_EQ(taken(layer, node, region), layer);
      // Reads something else than the node before it wrote.
      const std::vector<TensorRef>& srcs = c.nodes[layer * kNodesOfLayer + which].srcs;
      for (size_t s = 0; s < srcs.size(); ++s) {
        if (srcs[s].base != 0) continue;
        if (which == kRotatedQuery || which == kRotatedKey) {
          if (s % 2 == 1) continue;  // an angle
        }
        if (which == kSetKeys || which == kSetValues) {
          if (s == 2) continue;  // the index
        }
        const Change elsewhere = [s](Node*, ResolvedNode* at) { at->srcs[s] += 1 << 20; };
        EXPECT_EQ(taken(layer, node, elsewhere), layer) << "source " << s;
      }
    }
    for (const LayerNode node :
         {kNorm, kQuery, kKey, kValue, kOutput, kMlpNorm, kGate, kUp, kDown, kAttend}) {
      EXPECT_EQ(taken(layer, node, changing), layer) << node;
    }
    const Change along_n = [](Node* node, ResolvedNode*) {
      node->srcs[1].strides[2] = node->srcs[1].shape[3];
      node->srcs[1].strides[3] = 1;
    };
    for (const LayerNode node : {kQuery, kKey, kValue, kOutput, kGate, kUp, kDown}) {
      EXPECT_EQ(taken(layer, node, along_n), layer) << node;
    }
    const Change other_index = [](Node*, ResolvedNode* at) { at->srcs[2] += 4; };
    EXPECT_EQ(taken(layer, kSetKeys, other_index), layer);
    const Change other_angle = [](Node*, ResolvedNode* at) { at->srcs[1] += 4; };
    EXPECT_EQ(taken(layer, kRotatedKey, other_angle), layer);
    // One of a table of matrices.
    LayerCase experts = c;
    const TensorRef chosen = AddDense(&experts, DType::kS32, {1, 1});
    const Change indexed = [&](Node* node, ResolvedNode* at) {
      node->srcs.push_back(chosen);
      node->srcs[1].shape[0] = 2;
      node->srcs[1].strides[0] = node->srcs[1].shape[2] * node->srcs[1].shape[3];
      at->srcs.push_back(experts.buffers.back().data());
    };
    for (const LayerNode node : {kQuery, kKey, kValue, kOutput, kGate, kUp, kDown}) {
      EXPECT_EQ(taken(layer, node, indexed), layer) << node;
    }
    LayerCase sinks = c;
    const TensorRef sink = AddDense(&sinks, DType::kF32, {1, 2, 3, 1});
    const Change with_a_sink = [&](Node* node, ResolvedNode* at) {
      node->params[offsetof(AttentionParams, sink_source)] = static_cast<char>(node->srcs.size());
      node->srcs.push_back(sink);
      at->srcs.push_back(sinks.buffers.back().data());
    };
    EXPECT_EQ(taken(layer, kAttend, with_a_sink), layer);
    const Change half_a_row = [](Node* node, ResolvedNode*) { node->srcs[1].shape[4] /= 2; };
    EXPECT_EQ(taken(layer, kSetValues, half_a_row), layer);
    const Change drops = [](Node* node, ResolvedNode*) {
      node->params[0] = static_cast<char>(IndexMode::kFillOrDrop);
    };
    EXPECT_EQ(taken(layer, kSetValues, drops), layer);
  }
}

// Results that are not stored may not be read by anybody else, nor be written by others meanwhile.
TEST_F(LayerGroupTest, WhatIsNotStored) {
  Rng rng(7);
  const LayerCase c = MakeLayers(rng, Layers(3));
  for (size_t layer = 0; layer < 3; ++layer) {
    for (size_t which = 0; which < kNodesOfLayer; ++which) {
      if (which == kSetKeys || which == kSetValues) continue;
      SCOPED_TRACE(std::to_string(layer) + ", node " + std::to_string(which));
      const size_t n = layer * kNodesOfLayer + which;
      for (const TensorRef& t : c.nodes[n].outs) {
        const bool kept = layer == 2 && t.offset == (which == kMlpNorm ? c.last_row : c.out).offset;
        // The norm behind the layers reads it: only layers behind this one, or none, are taken.
        LayerCase read = c;
        TensorRef seen = t;
        seen.rank = 1;
        seen.shape[0] = 4;
        seen.strides[0] = 1;
        Node copy;
        copy.op = Op::kCopy;
        copy.srcs = {seen};
        copy.outs = {AddDense(&read, t.dtype, {4})};
        read.nodes.push_back(copy);
        // The row so far and the product of a layer may be left behind it, if it is the last.
        const bool leaves =
            (which == kMlpNorm && t.offset == c.nodes[n].outs[0].offset) || which == kDown;
        const size_t most = kept ? 3 : leaves ? layer + 1 : layer;
        EXPECT_EQ(Taken(read), most * kNodesOfLayer);
        // A result of the step: somebody outside reads it.
        if (!kept && !leaves) {
          LayerCase result = c;
          TensorRef outside = t;
          outside.base = static_cast<uint32_t>(result.buffers.size());
          result.buffers.push_back(result.buffers[0]);
          EXPECT_EQ(Taken(Moved(result, t, outside)), layer * kNodesOfLayer);
        }
      }
    }
  }
  // Written anew before it is read: it was not needed.
  LayerCase again = c;
  const TensorRef gate = c.nodes[kGate].outs[0];
  Node copy;
  copy.op = Op::kCopy;
  TensorRef flat = AddDense(&again, gate.dtype, {gate.num_elements()});
  copy.srcs = {flat};
  flat.base = 0;
  flat.offset = gate.offset;
  copy.outs = {flat};
  again.nodes.push_back(copy);
  std::swap(copy.srcs[0], copy.outs[0]);
  again.nodes.push_back(copy);
  EXPECT_EQ(Taken(again), 3 * kNodesOfLayer);
  again.nodes[again.nodes.size() - 2].outs[0].shape[0] -= 1;
  again.nodes[again.nodes.size() - 2].srcs[0].shape[0] -= 1;
  EXPECT_EQ(Taken(again), 0u);
}

TEST_F(LayerGroupTest, WhatIsWrittenInBetween) {
  Rng rng(8);
  const LayerCase c = MakeLayers(rng, Layers(2));
  const auto taken = [&](size_t writer, const TensorRef& onto) {
    // The writer's last output now lies over the tensor's first bytes.
    return Taken(Moved(c, c.nodes[writer].outs.back(), onto)) / kNodesOfLayer;
  };
  ASSERT_EQ(Taken(c), 2 * kNodesOfLayer);
  EXPECT_EQ(taken(kValue, c.nodes[kQuery].outs[0]), 0u);     // before it is turned
  EXPECT_EQ(taken(kAttend, c.nodes[kNorm].outs[0]), 2u);     // which is not needed any more
  EXPECT_EQ(taken(kGate, c.nodes[kMlpNorm].outs[1]), 0u);    // before the up product
  EXPECT_EQ(taken(kQuery, c.cos), 0u);                       // before the rotation
  EXPECT_EQ(taken(kNodesOfLayer - 1, c.cos), 1u);            // for the next layer
  EXPECT_EQ(taken(kOutput, c.nodes[kSetKeys].srcs[2]), 0u);  // the next layer's index
  for (const LayerNode node : {kGate, kUp, kActivation}) {   // what would be left behind
    EXPECT_EQ(taken(kNodesOfLayer + node, c.last_row), 1u) << node;
  }
}

// The nodes before the attention may stand in any order in which each reads what it should.
TEST_F(LayerGroupTest, OrderOfProjections) {
  Rng rng(12);
  const LayerCase c = MakeLayers(rng, Layers(2));
  const auto taken = [&](LayerNode a, LayerNode b) {
    LayerCase swapped = c;
    std::swap(swapped.nodes[kNodesOfLayer + a], swapped.nodes[kNodesOfLayer + b]);
    return Taken(swapped) / kNodesOfLayer;
  };
  EXPECT_EQ(taken(kQuery, kKey), 2u);
  EXPECT_EQ(taken(kValue, kRotatedQuery), 2u);
  EXPECT_EQ(taken(kSetKeys, kSetValues), 2u);
  EXPECT_EQ(taken(kKey, kRotatedKey), 1u);
  EXPECT_EQ(taken(kRotatedKey, kSetKeys), 1u);
  EXPECT_EQ(taken(kValue, kSetValues), 1u);
}

// An angle for each head, where there are as many heads as angles.
TEST_F(LayerGroupTest, AnglesOfHeads) {
  Rng rng(11);
  StepShape s;
  s.kv_heads = 8;
  s.heads = 1;
  LayerCase c = MakeLayers(rng, s);
  ASSERT_EQ(Taken(c), kNodesOfLayer);
  for (const size_t n : {kRotatedQuery, kRotatedKey}) {
    for (const size_t angle : {1, 3}) c.nodes[n].srcs[angle].strides = {1, 0};
  }
  EXPECT_EQ(Taken(c), 0u);
}

TEST_F(LayerGroupTest, WhatDoesNotFit) {
  Rng rng(9);
  const auto taken = [&](const std::function<void(StepShape*)>& change) {
    StepShape s;
    change(&s);
    return Taken(MakeLayers(rng, s));
  };
  EXPECT_EQ(taken([](StepShape*) {}), kNodesOfLayer);
  EXPECT_EQ(taken([](StepShape* s) { s->size = 72; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->size = kMaxLayerRow + 32; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->hidden = 136; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->width = 128; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->heads = kMaxLayerHeads + 1; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->kv_heads = kMaxLayerParts + 1; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->rows = kMaxLayerPositions + 1; }), 0u);
  EXPECT_EQ(taken([](StepShape* s) { s->hidden = 1 << 15; }), 0u);
}

TEST_F(LayerGroupTest, NoLaunchAsksForMoreSharedMemoryThanThereIs) {
  Rng rng(10);
  int fitting = 0;
  for (int i = 0; i < 60; ++i) {
    StepShape s;
    s.size = 32 * UniformInt(rng, 1, 32);
    s.kv_heads = UniformInt(rng, 1, 8);
    s.heads = UniformInt(rng, 1, 8);
    s.width = 8 * UniformInt(rng, 1, 8);
    s.hidden = 32 * UniformInt(rng, 1, 80);
    s.rows = UniformInt(rng, 41, 200);
    const LayerCase c = MakeLayers(rng, s);
    Buffers buffers = c.buffers;
    std::vector<Launch> launches;
    if (Taken(ResolveLayers(c, Addresses(buffers)), 0, &launches) == 0) continue;
    ++fitting;
    for (const Launch& launch : launches) ASSERT_LE(launch.shared_bytes, uint32_t{kMaxLayerShared});
  }
  EXPECT_GT(fitting, 10);
}

}  // namespace
}  // namespace jaxgraph::testing
