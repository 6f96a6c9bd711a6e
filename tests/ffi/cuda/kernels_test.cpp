// Every CUDA kernel against the host's on random nodes; and eager, captured and replayed runs of
// each node against each other, bit by bit.
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/kernels/random_nodes.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

// JAXGRAPH_TEST_CASES sets how many random nodes of each kind are tried.
int NumCases(int fallback) {
  const char* text = std::getenv("JAXGRAPH_TEST_CASES");
  return text != nullptr ? std::atoi(text) : fallback;
}

class CudaKernelsTest : public CudaTest {
 protected:
  // Runs the node eagerly, then captures it and launches the executable twice, each time on fresh
  // copies of the buffers.
  void RunOnCuda(const Emitter& emitter, const NodeCase& c, Buffers* result) {
    std::vector<DeviceBytes> memory;
    std::vector<char*> addresses;
    for (const auto& buffer : c.buffers) {
      memory.emplace_back(buffer.size(), stream());
      addresses.push_back(memory.back().data());
    }
    const std::vector<ResolvedNode> nodes = {Resolve(c.node, addresses)};
    std::vector<Launch> launches, again;
    size_t covered = 0;
    ASSERT_OK(emitter.Emit(nodes, 0, true, &launches, &covered));
    ASSERT_EQ(covered, 1u);
    ASSERT_OK(emitter.Emit(nodes, 0, true, &again, &covered));
    ASSERT_EQ(launches.size(), again.size());
    for (size_t i = 0; i < launches.size(); ++i) {
      ASSERT_TRUE(launches[i].SameConfig(again[i]));
      ASSERT_EQ(launches[i].params, again[i].params);
      ASSERT_EQ(launches[i].params.size(), launches[i].kernel->param_bytes);
    }

    Upload(c, &memory);
    for (const Launch& launch : launches) ASSERT_OK(device_->LaunchKernel(launch, stream_));
    *result = Download(memory);

    Recording recorded;
    ASSERT_OK(Record(launches, &recorded));
    for (int i = 0; i < 2; ++i) {
      Upload(c, &memory);
      ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
      EXPECT_TRUE(Download(memory) == *result) << "replay differs from the eager run";
    }
  }

  void Check(const NodeCase& c, bool compiled = false) {
    Buffers got;
    const Emitter& emitter = compiled ? CudaEmitter() : InterpretingCudaEmitter();
    ASSERT_NO_FATAL_FAILURE(RunOnCuda(emitter, c, &got)) << Describe(c);
    ASSERT_TRUE(SameResult(c, got, RunHost(c)));
  }
  // By the interpreter, and by kernels of their own (which jit_test.cpp tries with random nodes).
  void CheckBoth(const NodeCase& c) {
    ASSERT_NO_FATAL_FAILURE(Check(c, false));
    ASSERT_NO_FATAL_FAILURE(Check(c, true));
  }

  void CheckRandom(Op op, uint64_t seed, int cases) {
    Rng rng(seed);
    for (int i = 0; i < NumCases(cases); ++i) {
      SCOPED_TRACE("case " + std::to_string(i));
      ASSERT_NO_FATAL_FAILURE(Check(RandomNode(rng, op)));
    }
  }

 private:
  static void Upload(const NodeCase& c, std::vector<DeviceBytes>* memory) {
    for (size_t i = 0; i < c.buffers.size(); ++i) (*memory)[i].Upload(c.buffers[i]);
  }
  static Buffers Download(const std::vector<DeviceBytes>& memory) {
    Buffers buffers;
    for (const DeviceBytes& m : memory) buffers.push_back(m.Download());
    return buffers;
  }
};

TEST_F(CudaKernelsTest, Expr) { CheckRandom(Op::kExpr, 1, 1500); }
TEST_F(CudaKernelsTest, Row) { CheckRandom(Op::kRow, 2, 1500); }
TEST_F(CudaKernelsTest, Matmul) { CheckRandom(Op::kMatmul, 3, 800); }
TEST_F(CudaKernelsTest, Gather) { CheckRandom(Op::kGather, 4, 1500); }
TEST_F(CudaKernelsTest, SetRows) { CheckRandom(Op::kSetRows, 5, 1500); }
TEST_F(CudaKernelsTest, Copy) { CheckRandom(Op::kCopy, 6, 1000); }

TEST_F(CudaKernelsTest, Sort) { CheckRandom(Op::kSort, 16, 1500); }

TEST_F(CudaKernelsTest, LongSorts) {
  Rng rng(17);
  for (int i = 0; i < NumCases(40); ++i) {
    const int64_t chunks = UniformInt(rng, 1, 40);
    const int64_t n = UniformInt(rng, 300, kSortMaxLength) * chunks - UniformInt(rng, 0, chunks);
    const int64_t kept = UniformInt(rng, 1, 200);
    ASSERT_NO_FATAL_FAILURE(
        Check(MakeSort(rng, RandomDType(rng), 1, n, chunks, kept, RandomLayout(rng))));
  }
}

TEST_F(CudaKernelsTest, LongMerges) {
  Rng rng(20);
  for (int i = 0; i < NumCases(25); ++i) {
    const int64_t merged = UniformInt(rng, 2, kSortMaxMerged), chunks = UniformInt(rng, 1, 6);
    const int64_t n = UniformInt(rng, 300, 2000) * merged * chunks + UniformInt(rng, 0, 7);
    const int64_t kept = Chance(rng, 0.5) ? 0 : UniformInt(rng, 1, n / chunks);
    ASSERT_NO_FATAL_FAILURE(Check(MakeSort(rng, RandomDType(rng), UniformInt(rng, 1, 2), n, chunks,
                                           kept, RandomLayout(rng), merged)));
  }
}

// The 50 largest of 128256 logits: of each piece, then of those.
TEST_F(CudaKernelsTest, TopOfAVocabulary) {
  Rng rng(18);
  for (DType t : {DType::kF32, DType::kBF16, DType::kS64}) {
    for (int64_t rows : {1, 8}) {
      ASSERT_NO_FATAL_FAILURE(Check(MakeSort(rng, t, rows, 128256, 32, 50, Layout::kDense)));
      ASSERT_NO_FATAL_FAILURE(Check(MakeSort(rng, t, rows, 32 * 50, 1, 50, Layout::kDense)));
    }
  }
}

TEST_F(CudaKernelsTest, LongRows) {
  Rng rng(7);
  for (int i = 0; i < NumCases(30); ++i) {
    const std::vector<int64_t> shape = {UniformInt(rng, 1, 3), UniformInt(rng, 4000, 50000)};
    ASSERT_NO_FATAL_FAILURE(Check(ExprGenerator(rng, Op::kRow, shape, RandomLayout(rng)).Make()));
  }
}

// --- products whose tensors are aligned as those of a model are
// ------------------------------------

// Moves the tensors to the start of their buffers, which are aligned, and fills them anew.
void Align(Rng& rng, NodeCase* c) {
  for (TensorRef& t : c->node.srcs) {
    t.offset = 0;
    FillRandom(rng, c, t, -1, 1);
  }
  c->node.outs[0].offset = 0;
}

struct Sizes {
  int64_t n, k;
};
constexpr Sizes kSizes[] = {{64, 64},  {576, 576}, {1536, 576}, {200, 136},
                            {8, 2048}, {1024, 64}, {64, 1024},  {2056, 520},
                            {128, 8},  {16, 40},   {136, 4096}, {24, 16}};

TEST_F(CudaKernelsTest, AlignedProducts) {
  Rng rng(8);
  for (DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int64_t m : {1, 2, 3, 4, 5, 8, 9, 16, 40}) {
      for (const Sizes& s : kSizes) {
        for (bool k_contiguous : {false, true}) {
          if (NumCases(1000) < 1000 && !Chance(rng, 0.05)) continue;
          const int64_t b1 = m == 3 ? 3 : 1, b0 = m == 2 ? 2 : 1;
          const DType out = Chance(rng, 0.7) ? t : DType::kF32;
          NodeCase c = MakeMatmul(rng, t, t, out, b0, b1, m, s.n, s.k, Layout::kDense);
          if (k_contiguous) TransposeWeights(&c);
          Align(rng, &c);
          ASSERT_NO_FATAL_FAILURE(Check(c));
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, AlignedProductsWithChosenMatrices) {
  Rng rng(19);
  for (DType t : {DType::kBF16, DType::kF32}) {
    for (int64_t m : {1, 3, 8, 40}) {
      for (const Sizes& s : kSizes) {
        for (bool k_contiguous : {false, true}) {
          if (NumCases(1000) < 1000 && !Chance(rng, 0.05)) continue;
          NodeCase c = MakeMatmul(rng, t, t, t, 1, 2, m, s.n, s.k, Layout::kDense);
          ChooseMatrices(rng, &c, 3, Layout::kDense);
          if (k_contiguous) TransposeWeights(&c);
          const TensorRef index = c.node.srcs.back();
          c.node.srcs.pop_back();  // it keeps its numbers
          Align(rng, &c);
          c.node.srcs.push_back(index);
          ASSERT_NO_FATAL_FAILURE(Check(c));
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, AttentionProductsOverACache) {
  // q [1, KH, G, hd] against the cache [S, KH, hd]: keys along k, values along n.
  Rng rng(9);
  for (DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (int64_t group : {1, 3, 4, 8}) {
      const int64_t heads = 3, length = 1000, hd = 64;
      NodeCase qk = MakeMatmul(rng, t, t, DType::kF32, 1, heads, group, length, hd, Layout::kDense);
      qk.node.srcs[1].strides = {0, hd, 1, heads * hd};
      Align(rng, &qk);
      ASSERT_NO_FATAL_FAILURE(Check(qk));
      NodeCase pv = MakeMatmul(rng, t, t, t, 1, heads, group, hd, length, Layout::kDense);
      pv.node.srcs[1].strides = {0, hd, heads * hd, 1};
      Align(rng, &pv);
      ASSERT_NO_FATAL_FAILURE(Check(pv));
    }
  }
}

TEST_F(CudaKernelsTest, BatchOfRowsAgainstOneMatrix) {
  Rng rng(10);
  for (bool k_contiguous : {false, true}) {
    NodeCase c =
        MakeMatmul(rng, DType::kBF16, DType::kBF16, DType::kBF16, 2, 3, 1, 72, 80, Layout::kDense);
    if (k_contiguous) TransposeWeights(&c);
    c.node.srcs[1].strides[0] = c.node.srcs[1].strides[1] = 0;
    Align(rng, &c);
    ASSERT_NO_FATAL_FAILURE(Check(c));
  }
}

TEST_F(CudaKernelsTest, WeightsOnTheLeft) {
  Rng rng(11);
  for (DType t : {DType::kBF16, DType::kF32}) {
    for (int64_t n : {1, 2, 7}) {
      NodeCase c = MakeMatmul(rng, t, t, t, 1, 1, 576, n, 200, Layout::kDense);
      Align(rng, &c);
      ASSERT_NO_FATAL_FAILURE(Check(c));
    }
  }
}

TEST_F(CudaKernelsTest, WithoutClustersTheProductsAreTheSameNumbers) {
  Rng rng(12);
  NodeCase c =
      MakeMatmul(rng, DType::kBF16, DType::kBF16, DType::kF32, 1, 1, 1, 64, 2048, Layout::kDense);
  Align(rng, &c);
  DeviceBytes a(c.buffers[0].size(), stream()), b(c.buffers[1].size(), stream()),
      out(c.buffers[2].size(), stream());
  a.Upload(c.buffers[0]);
  b.Upload(c.buffers[1]);
  out.Upload(c.buffers[2]);
  std::vector<Launch> launches;
  size_t covered = 0;
  ASSERT_OK(
      CudaEmitter(kMinComputeCapability)
          .Emit({Resolve(c.node, {a.data(), b.data(), out.data()})}, 0, true, &launches, &covered));
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_EQ(launches[0].cluster, 1u);
  ASSERT_OK(device_->LaunchKernel(launches[0], stream_));
  ASSERT_TRUE(SameResult(c, {a.Download(), b.Download(), out.Download()}, RunHost(c)));
}

// --- values that random ones never are
// -------------------------------------------------------------

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void FillFrom(NodeCase* c, const TensorRef& t, const std::vector<double>& values) {
  size_t i = 0;
  ForEachIndex(t, [&](const int64_t* index) {
    Write(c->buffers, t, index, {values[i++ % values.size()], 0});
  });
}

// A node over `t` with the program load, op, store.
NodeCase OneOp(Rng& rng, Op op, DType t, const std::vector<int64_t>& shape, ExprInstr instr,
               DType result) {
  NodeCase c;
  c.node.op = op;
  const bool row = op == Op::kRow;
  ExprProgram p;
  p.rank = static_cast<uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), p.shape);
  p.num_srcs = p.num_outs = 1;
  std::vector<int64_t> out_shape = shape;
  const uint8_t value = row ? 32 : 1;
  instr.dst = value;
  p.instrs[0] = {ExprOp::kLoad, t, 0, 0, 0, 0, 0};
  p.instrs[1] = instr;
  p.instrs[2] = {ExprOp::kStore, result, 0, value, 0, 0, 0};
  p.num_instrs = 3;
  if (row) {
    p.num_stages = 2;
    p.stages[0] = {0, 0, 0, 2};
    p.stages[1] = {2, 3, 3, 3};
    out_shape.back() = 1;
  } else {
    p.num_stages = 1;
    p.stages[0] = {0, 0, 0, 3};
  }
  c.node.params = EncodeExpr(p);
  c.node.srcs = {MakeTensor(rng, &c, t, shape, Layout::kDense)};
  c.node.outs = {MakeTensor(rng, &c, result, out_shape, Layout::kDense)};
  c.tolerance = {0};
  return c;
}

TEST_F(CudaKernelsTest, ConversionsSaturateAndDropNan) {
  Rng rng(13);
  const std::vector<double> values = {kNan,  kInf, -kInf, 0.0,  -0.0,  0.5,  -0.5,  1.99,
                                      -1.99, 127,  128,   -129, 255,   256,  32768, 65536,
                                      3e9,   -3e9, 5e9,   1e19, -1e19, 2e19, 9e18,  1e-40};
  for (DType from : FloatTypes()) {
    for (int to = 0; to < kNumDTypes; ++to) {
      const DType result = static_cast<DType>(to);
      NodeCase c =
          OneOp(rng, Op::kExpr, from, {24},
                {ExprOp::kConvert, result, 0, 0, 0, 0, static_cast<uint16_t>(from)}, result);
      FillFrom(&c, c.node.srcs[0], values);
      ASSERT_NO_FATAL_FAILURE(CheckBoth(c));
    }
  }
}

TEST_F(CudaKernelsTest, ExtremaOfSpecialValues) {
  Rng rng(14);
  const std::vector<std::vector<double>> rows = {{1, 3, 3, 2},           {kNan, 5, kNan},
                                                 {5, kNan, 9, kNan, 1},  {-kInf, -kInf},
                                                 {kInf, kInf, 1, -kInf}, {0.0, 0.0, 0.0}};
  for (DType t : FloatTypes()) {
    for (const auto& values : rows) {
      for (int64_t length : {1, 5, 33, 700, 5000}) {
        for (ExprOp op : {ExprOp::kReduceArgmax, ExprOp::kReduceArgmin, ExprOp::kReduceMax,
                          ExprOp::kReduceMin}) {
          const bool index = op >= ExprOp::kReduceArgmax;
          const DType result = index ? DType::kS32 : t;
          NodeCase c = OneOp(rng, Op::kRow, t, {2, length},
                             {op, t, 0, 0, 0, 0, static_cast<uint16_t>(DType::kS32)}, result);
          FillFrom(&c, c.node.srcs[0], values);
          ASSERT_NO_FATAL_FAILURE(CheckBoth(c));
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, ExclusiveOrOfRows) {
  Rng rng(21);
  std::vector<DType> types = IntTypes();
  types.push_back(DType::kPred);
  for (DType t : types) {
    for (int64_t length : {1, 5, 33, 700, 5000}) {
      NodeCase c = OneOp(rng, Op::kRow, t, {3, length}, {ExprOp::kReduceXor, t, 0, 0, 0, 0, 0}, t);
      FillKeys(rng, &c, c.node.srcs[0]);
      ASSERT_NO_FATAL_FAILURE(CheckBoth(c));
    }
  }
}

// --- slots
// -----------------------------------------------------------------------------------------

// Into slots and out of them again, to where the table says.
TEST_F(CudaKernelsTest, SlotsOfAllSizesAndAlignmentsAreFilledAndDrained) {
  Rng rng(15);
  constexpr size_t kRoom = 1 << 16;
  for (int round = 0; round < 12; ++round) {
    const uint64_t count = round < 2 ? kMaxSlots : UniformInt(rng, 0, kMaxSlots);
    std::vector<char> from(kMaxSlots * kRoom), want(from.size(), kPoison);
    for (char& byte : from) byte = static_cast<char>(rng());
    DeviceBytes src(from.size(), stream()), dst(want.size(), stream());
    DeviceBytes slots(from.size(), stream()), table(sizeof(char*) * (kMaxSlots + 1), stream());
    src.Upload(from);
    dst.Upload(want);
    table.Upload(std::vector<char>(sizeof(char*) * (kMaxSlots + 1), kPoison));
    SlotFill fill;
    SlotDrain drain;
    fill.table = table.data() + sizeof(char*);
    drain.table = fill.table;
    fill.num_copies = fill.num_addresses = drain.num_sources = count;
    for (uint64_t i = 0; i < count; ++i) {
      const size_t at = i * kRoom + UniformInt(rng, 0, 20), to = i * kRoom + UniformInt(rng, 0, 20);
      const uint64_t bytes = Chance(rng, 0.5) ? UniformInt(rng, 0, 16) : UniformInt(rng, 0, 60000);
      char* const slot = slots.data() + i * kRoom + UniformInt(rng, 0, 20);
      fill.copies[i] = {slot, src.data() + at, bytes};
      fill.addresses[i] = dst.data() + to;
      drain.sources[i] = {slot, bytes};
      std::copy_n(from.begin() + at, bytes, want.begin() + to);
    }
    Launch filling, draining;
    ASSERT_OK(CudaEmitter().EmitSlotFill(fill, &filling));
    ASSERT_OK(CudaEmitter().EmitSlotDrain(drain, &draining));
    EXPECT_FALSE(filling.dependent);  // it may stand in front of an executable
    EXPECT_EQ(filling.node_count + draining.node_count, 0u);
    ASSERT_OK(device_->LaunchKernel(filling, stream_));
    ASSERT_OK(device_->LaunchKernel(draining, stream_));
    EXPECT_TRUE(dst.Download() == want);
    EXPECT_EQ(table.Download().front(), kPoison);
  }
}

}  // namespace
}  // namespace jaxgraph::testing
