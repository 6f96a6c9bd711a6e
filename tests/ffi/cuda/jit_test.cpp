// Compiled expressions against the interpreter (the same bits, for EXPR) and the host; in graphs;
// and launched dependently, one behind the other.
#include "ffi/kernels/cuda/jit/jit.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/cuda/decode_nodes.h"
#include "tests/ffi/kernels/random_nodes.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

bool IsCompiled(const Launch& launch) {
  return std::strncmp(launch.kernel->name, "jaxgraph_", 9) == 0;
}

// One node with memory of its own.
struct Placed {
  Placed(const NodeCase& node_case, cudaStream_t stream) : c(node_case) {
    std::vector<char*> addresses;
    for (const auto& buffer : c.buffers) {
      memory.emplace_back(buffer.size(), stream);
      addresses.push_back(memory.back().data());
    }
    node = Resolve(c.node, addresses);
  }
  Placed(const Placed&) = delete;

  void Upload() {
    for (size_t i = 0; i < memory.size(); ++i) memory[i].Upload(c.buffers[i]);
  }
  Buffers Download() const {
    Buffers buffers;
    for (const DeviceBytes& m : memory) buffers.push_back(m.Download());
    return buffers;
  }

  NodeCase c;
  std::vector<DeviceBytes> memory;
  ResolvedNode node;
};
using PlacedNodes = std::vector<std::unique_ptr<Placed>>;

class JitTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (device_ != nullptr && !Jit::Available()) GTEST_SKIP() << Jit::Describe();
  }

  PlacedNodes Place(const std::vector<NodeCase>& cases) {
    PlacedNodes placed;
    for (const NodeCase& c : cases) placed.push_back(std::make_unique<Placed>(c, stream()));
    return placed;
  }
  static std::vector<ResolvedNode> NodesOf(const PlacedNodes& placed) {
    std::vector<ResolvedNode> nodes;
    for (const auto& p : placed) nodes.push_back(p->node);
    return nodes;
  }

  void Emit(const Emitter& emitter, const PlacedNodes& placed,
            std::vector<std::vector<Launch>>* launches) {
    const std::vector<ResolvedNode> nodes = NodesOf(placed);
    for (size_t n = 0; n < nodes.size(); ++n) {
      size_t covered = 0;
      ASSERT_OK(emitter.Emit(nodes, n, false, &launches->emplace_back(), &covered));
    }
  }

  void RunAll(const PlacedNodes& placed, const std::vector<std::vector<Launch>>& launches,
              std::vector<Buffers>* results) {
    for (const auto& p : placed) p->Upload();
    for (const auto& of_node : launches) {
      for (Launch launch : of_node) {
        launch.dependent = false;
        ASSERT_OK(device_->LaunchKernel(launch, stream_));
      }
    }
    for (const auto& p : placed) results->push_back(p->Download());
  }

  // Compiled and interpreted, eager and as one graph of dependent launches.
  void Check(const std::vector<NodeCase>& cases) {
    const PlacedNodes placed = Place(cases);
    std::vector<std::vector<Launch>> compiled, interpreted;
    ASSERT_NO_FATAL_FAILURE(Emit(CudaEmitter(), placed, &compiled));
    ASSERT_NO_FATAL_FAILURE(Emit(InterpretingCudaEmitter(), placed, &interpreted));
    std::vector<Buffers> got, reference, replayed;
    ASSERT_NO_FATAL_FAILURE(RunAll(placed, compiled, &got));
    ASSERT_NO_FATAL_FAILURE(RunAll(placed, interpreted, &reference));
    for (size_t n = 0; n < cases.size(); ++n) {
      SCOPED_TRACE("node " + std::to_string(n));
      if (cases[n].node.op == Op::kExpr) {
        EXPECT_TRUE(got[n] == reference[n]) << "compiled and interpreted: other bits";
      }
      EXPECT_TRUE(SameResult(cases[n], got[n], reference[n])) << "compiled and interpreted differ";
      EXPECT_TRUE(SameResult(cases[n], got[n], RunHost(cases[n]))) << "compiled and host differ";
      for (const Launch& launch : compiled[n]) num_compiled_ += IsCompiled(launch);
      for (const Launch& launch : interpreted[n]) EXPECT_FALSE(IsCompiled(launch));
    }

    std::vector<Launch> all;
    for (const auto& of_node : compiled) all.insert(all.end(), of_node.begin(), of_node.end());
    if (all.empty()) return;
    all[0].dependent = false;
    Recording recorded;
    ASSERT_OK(Record(all, &recorded));
    for (int i = 0; i < 2; ++i) {
      for (const auto& p : placed) p->Upload();
      ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
      for (size_t n = 0; n < cases.size(); ++n) {
        EXPECT_TRUE(placed[n]->Download() == got[n]) << "the replay of node " << n << " differs";
      }
    }
  }

  void CheckRandom(Op op, uint64_t seed, int batches) {
    Rng rng(seed);
    for (int i = 0; i < batches && !HasFailure(); ++i) {
      SCOPED_TRACE("batch " + std::to_string(i));
      std::vector<NodeCase> cases;
      for (int j = 0; j < 25; ++j) cases.push_back(RandomNode(rng, op));
      ASSERT_NO_FATAL_FAILURE(Check(cases));
    }
    EXPECT_GT(num_compiled_, 15 * batches);
  }

  int num_compiled_ = 0;
};

TEST_F(JitTest, RandomExpr) { CheckRandom(Op::kExpr, 21, 12); }
TEST_F(JitTest, RandomRow) { CheckRandom(Op::kRow, 22, 12); }

TEST_F(JitTest, LongRandomRows) {
  Rng rng(23);
  std::vector<NodeCase> cases;
  for (int i = 0; i < 20; ++i) {
    const std::vector<int64_t> shape = {UniformInt(rng, 1, 3), UniformInt(rng, 4000, 50000)};
    cases.push_back(ExprGenerator(rng, Op::kRow, shape, RandomLayout(rng)).Make());
  }
  Check(cases);
}

TEST_F(JitTest, LargeRandomExpr) {
  Rng rng(24);
  std::vector<NodeCase> cases;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {300000}, {7, 50000}, {3, 5, 20000}, {70001}, {512, 512}}) {
    for (Layout layout : {Layout::kDense, Layout::kBroadcast}) {
      cases.push_back(ExprGenerator(rng, Op::kExpr, shape, layout).Make());
      for (TensorRef& t : cases.back().node.srcs) {
        if (layout == Layout::kDense) t.offset = t.offset / 64 * 64;  // aligned, where dense
      }
    }
  }
  Check(cases);
}

TEST_F(JitTest, NodesOfADecodeStep) {
  Rng rng(25);
  std::vector<NodeCase> cases = {Rotary(rng, 9, 64), Rotary(rng, 32, 64), SiluProduct(rng, 1536)};
  for (int64_t width : {64, 576, 2048, 4096, 5000, 20000}) {
    for (int64_t rows : {1, 3}) {
      cases.push_back(RmsNorm(rng, rows, width));
      cases.push_back(RmsNorm(rng, rows, width, true));
      cases.push_back(RmsNorm(rng, rows, width, true, true));
    }
  }
  cases.push_back(Softmax(rng, 32, 1024));
  cases.push_back(Softmax(rng, 3, 30000));
  cases.push_back(Argmax(rng, 49152, kHalf));
  cases.push_back(Argmax(rng, 128256, kSingle));
  Check(cases);
  EXPECT_EQ(num_compiled_, static_cast<int>(cases.size()));
}

TEST_F(JitTest, EqualNodesShareAKernelAndItNeverChanges) {
  Rng rng(26);
  std::vector<NodeCase> cases;
  for (int i = 0; i < 30; ++i) cases.push_back(RmsNorm(rng, 1, 640));
  const PlacedNodes placed = Place(cases);
  std::vector<std::vector<Launch>> launches, again;
  ASSERT_NO_FATAL_FAILURE(Emit(CudaEmitter(), placed, &launches));
  ASSERT_NO_FATAL_FAILURE(Emit(CudaEmitter(), placed, &again));
  for (size_t i = 0; i < cases.size(); ++i) {
    ASSERT_EQ(launches[i].size(), 1u);
    EXPECT_EQ(launches[i][0].kernel, launches[0][0].kernel);
    EXPECT_TRUE(launches[i][0].SameConfig(again[i][0]));
    EXPECT_EQ(launches[i][0].params, again[i][0].params);
    EXPECT_EQ(launches[i][0].params.size(), launches[i][0].kernel->param_bytes);
  }
}

// A chain in which every node reads what the one before wrote: x -> norm -> norm ... A launch that
// did not wait, or an edge lost by an update or a patch, would read too early.
class JitChain : public JitTest {
 protected:
  static constexpr int kNodes = 60;
  static constexpr int64_t kRows = 150, kWidth = 4096;  // more blocks than multiprocessors

  void SetUp() override {
    JitTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    Rng rng(27);
    case_ = RmsNorm(rng, kRows, kWidth);
    const size_t bytes = kRows * kWidth * 2;
    for (int i = 0; i <= kNodes; ++i) links_.emplace_back(bytes, stream());
    weight_ = std::make_unique<DeviceBytes>(kWidth * 2, stream());
    other_ = std::make_unique<DeviceBytes>(bytes, stream());
    first_ = case_.buffers[case_.node.srcs[0].base];
    first_.resize(bytes);
    std::vector<char> weight = case_.buffers[case_.node.srcs[1].base];
    weight.resize(kWidth * 2);
    weight_->Upload(weight);
  }
  void TearDown() override {
    links_.clear();
    weight_.reset();
    other_.reset();
    JitTest::TearDown();
  }

  // Node `odd_one` writes to another buffer, which the one behind it reads.
  void MakeLaunches(const Emitter& emitter, int odd_one, std::vector<Launch>* launches) {
    std::vector<ResolvedNode> nodes;
    const auto link = [&](int i) { return i == odd_one + 1 ? other_->data() : links_[i].data(); };
    for (int i = 0; i < kNodes; ++i) {
      ResolvedNode node;
      node.node = &case_.node;
      node.srcs = {link(i), weight_->data()};
      node.outs = {link(i + 1)};
      nodes.push_back(node);
    }
    size_t covered = 0;
    for (int i = 0; i < kNodes; ++i) {
      ASSERT_OK(emitter.Emit(nodes, i, false, launches, &covered));
    }
    ASSERT_EQ(launches->size(), static_cast<size_t>(kNodes));
    launches->front().dependent = false;
  }

  std::vector<char> Result(ExecHandle exec, const std::vector<Launch>& launches) {
    links_[0].Upload(first_);
    for (int i = 1; i <= kNodes; ++i)
      cudaMemsetAsync(links_[i].data(), 0xff, first_.size(), stream());
    cudaMemsetAsync(other_->data(), 0xff, first_.size(), stream());
    if (exec != nullptr) {
      EXPECT_TRUE(device_->LaunchGraph(exec, stream_).ok());
    } else {
      for (const Launch& launch : launches) {
        EXPECT_TRUE(device_->LaunchKernel(launch, stream_).ok());
      }
    }
    return links_[kNodes].Download();
  }

  void CheckChain(const Emitter& emitter) {
    std::vector<Launch> launches, moved;
    ASSERT_NO_FATAL_FAILURE(MakeLaunches(emitter, -2, &launches));
    ASSERT_NO_FATAL_FAILURE(MakeLaunches(emitter, 7, &moved));
    std::vector<Launch> serial = launches;
    for (Launch& launch : serial) launch.dependent = false;
    const std::vector<char> want = Result(nullptr, serial);
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Result(nullptr, launches) == want) << "eager";

    GraphHandle graph = nullptr, fresh = nullptr;
    ExecHandle exec = nullptr;
    std::vector<NodeHandle> handles, fresh_handles;
    ASSERT_OK(Capture(launches, &graph, &handles));
    ASSERT_OK(device_->Instantiate(graph, &exec));
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Result(exec, {}) == want) << "replayed";
    for (int i = 7; i <= 8; ++i) ASSERT_OK(device_->Patch(exec, handles[i], moved[i]));
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Result(exec, {}) == want) << "patched";
    EXPECT_EQ(static_cast<uint8_t>(links_[8].Download()[0]), 0xff) << "the old buffer was written";
    ASSERT_OK(Capture(launches, &fresh, &fresh_handles));
    ASSERT_OK(device_->Update(exec, fresh));
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(Result(exec, {}) == want) << "updated";
    EXPECT_EQ(static_cast<uint8_t>(other_->Download()[0]), 0xff) << "the update changed nothing";
    device_->DestroyExec(exec);
    device_->DestroyGraph(graph);
    device_->DestroyGraph(fresh);
  }

  NodeCase case_;
  std::vector<DeviceBytes> links_;
  std::unique_ptr<DeviceBytes> weight_, other_;
  std::vector<char> first_;
};

TEST_F(JitChain, CompiledKernelsWaitForEachOther) { CheckChain(CudaEmitter()); }
TEST_F(JitChain, InterpretedKernelsWaitForEachOther) { CheckChain(InterpretingCudaEmitter()); }

}  // namespace
}  // namespace jaxgraph::testing
