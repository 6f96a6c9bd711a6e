// Fused groups against the nodes one by one, and both against sums in f64; eager, captured and
// replayed runs of each against each other, bit by bit.
#include "ffi/kernels/cuda/stream.h"

#include "ffi/kernels/cuda/strided_space.h"
#include "tests/ffi/cuda/clusters_at_once.h"
#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/cuda/small_nodes.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

class StreamTest : public ClusterTest {
 protected:
  // What the nodes leave in memory, run eagerly; the same when captured and replayed.
  void RunOnCuda(const GroupCase& c, bool fusion, size_t num_launches, Buffers* result) {
    std::vector<DeviceBytes> memory;
    std::vector<char*> addresses;
    for (const auto& buffer : c.buffers) {
      memory.emplace_back(buffer.size(), stream());
      addresses.push_back(memory.back().data());
      memory.back().Upload(buffer);
    }
    const std::vector<ResolvedNode> nodes = ResolveAll(c, addresses);
    std::vector<Launch> launches;
    for (size_t n = 0; n < nodes.size();) {
      size_t covered = 0;
      ASSERT_OK(CudaEmitter().Emit(nodes, n, fusion, &launches, &covered));
      n += covered;
    }
    ASSERT_EQ(launches.size(), num_launches);
    launches[0].dependent = false;
    const auto poison = [&] {
      for (const TensorRef& t : c.outs()) memory[t.base].Upload(c.buffers[t.base]);
      memory[c.scratch].Upload(c.buffers[c.scratch]);
    };
    const auto outputs = [&] {
      Buffers all(c.buffers.size());
      for (const TensorRef& t : c.outs()) all[t.base] = memory[t.base].Download();
      return all;
    };
    for (const Launch& launch : launches) ASSERT_OK(device_->LaunchKernel(launch, stream_));
    *result = outputs();

    Recording recorded;
    ASSERT_OK(Record(launches, &recorded));
    for (int i = 0; i < 3; ++i) {
      poison();
      ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
      EXPECT_TRUE(outputs() == *result) << "replay " << i << " differs from the eager run";
    }
    for (size_t b = 0; b < c.buffers.size(); ++b) {
      if ((*result)[b].empty()) (*result)[b] = c.buffers[b];
    }
  }

  // A product of what is in memory, in f64, against what the kernel made of it: of all columns, or
  // of about 300 elements in columns that lie far apart.
  static double ProductError(const Node& product, const Buffers& buffers, bool all = true) {
    const TensorRef& a = product.srcs[0];
    const TensorRef& b = product.srcs[1];
    const TensorRef& out = product.outs[0];
    const int64_t k = a.shape[3], n = out.shape[3],
                  step = all ? 1 : std::max<int64_t>(out.shape[2] * n / 300, 1);
    double error = 0, size = 0;
    std::vector<double> row(k), sums(n);
    for (int64_t m = 0; m < out.shape[2]; ++m) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t index[] = {0, 0, m, i};
        row[i] = Read(buffers, a, index).f;
      }
      std::fill(sums.begin(), sums.end(), 0);
      const bool along_k = b.strides[2] == 1;
      const auto add = [&](int64_t i, int64_t j) {
        const int64_t index[] = {0, 0, i, j};
        sums[j] += row[i] * Read(buffers, b, index).f;
      };
      if (along_k) {
        for (int64_t j = 0; j < n; j += step) {
          for (int64_t i = 0; i < k; ++i) add(i, j);
        }
      } else {
        for (int64_t i = 0; i < k; ++i) {
          for (int64_t j = 0; j < n; j += step) add(i, j);
        }
      }
      for (int64_t j = 0; j < n; j += step) {
        const int64_t index[] = {0, 0, m, j};
        const double got = Read(buffers, out, index).f;
        error += (got - sums[j]) * (got - sums[j]);
        size += sums[j] * sums[j];
      }
    }
    return std::sqrt(error / size);
  }

  void Check(Rng& rng, const GroupShape& s, bool with_host = true) {
    SCOPED_TRACE("m " + std::to_string(s.m) + " k " + std::to_string(s.k) + " n " +
                 std::to_string(s.columns[0]) + " x " + std::to_string(s.columns.size()) +
                 (s.along_k ? " along k " : " along n ") + NameOf(s.dtype) + " to " +
                 NameOf(s.out) + (s.norm ? " norm" : "") + (s.activation ? " activation" : ""));
    const GroupCase c = MakeGroup(rng, s);
    const bool carries = s.before > 0 && s.m > 1 && s.m <= 8;
    const bool norm_fits = s.norm && (carries || (s.m <= 8 && NormFits(s.m, s.k)));
    Buffers fused, single;
    ASSERT_NO_FATAL_FAILURE(
        RunOnCuda(c, true, 1 + (s.before > 0) + (s.norm && !norm_fits), &fused));
    ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, false, c.nodes.size(), &single));
    // A sum of squares in another order moves the scale by its last bit, and some elements of the
    // norm by theirs; from there on everything is that far away at most.
    const double unit = s.dtype == DType::kBF16 ? 1.0 / 256 : 1.0 / 2048;
    for (const TensorRef& t : c.outs()) {
      EXPECT_LE(Distance(ValuesOf(t, fused), ValuesOf(t, single)), unit / 4)
          << "against single nodes";
    }
    if (with_host) {
      const Buffers host = RunHost(c.nodes, c.buffers);
      for (const TensorRef& t : c.outs()) {
        EXPECT_LE(Distance(ValuesOf(t, fused), ValuesOf(t, host)), unit) << "against the host";
      }
    }
    for (const Node& node : c.nodes) {
      if (node.op != Op::kMatmul) continue;
      // Rounding alone is 0.4 of this on average, and all of it at most: of few columns, anything.
      const double share = node.outs[0].shape[3] < 100 ? 1 : with_host ? 0.5 : 0.7;
      const double rounding = s.out == DType::kF32    ? 2e-6
                              : s.out == DType::kBF16 ? share / 256
                                                      : share / 2048;
      EXPECT_LE(ProductError(node, fused, with_host), rounding) << "against f64";
    }
  }

  // The four products of a layer.
  void CheckLayer(Rng& rng, int64_t width, int64_t q, int64_t kv, int64_t ffn, int64_t m,
                  bool along_k, bool with_host) {
    GroupShape s;
    s.m = m;
    s.along_k = along_k;
    s.k = width;
    s.norm = true;
    s.columns = {q, kv, kv};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, with_host));
    s.residual = true;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, with_host));
    s.columns = {ffn, ffn};
    s.activation = true;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, with_host));
    s = GroupShape();
    s.m = m;
    s.along_k = along_k;
    s.k = q;
    s.columns = {width};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, with_host));
    s.k = ffn;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, with_host));
  }
};

TEST_F(StreamTest, LayersOf15m) {
  Rng rng(1);
  for (const bool along_k : {true, false}) {
    for (const int64_t m : {1, 2, 3, 8, 13, 29, 64}) {
      ASSERT_NO_FATAL_FAILURE(CheckLayer(rng, 288, 288, 288, 768, m, along_k, true));
    }
  }
}

TEST_F(StreamTest, LayersOf135m) {
  Rng rng(2);
  for (const bool along_k : {true, false}) {
    for (const int64_t m : {1, 4, 16, 32}) {
      ASSERT_NO_FATAL_FAILURE(CheckLayer(rng, 576, 576, 192, 1536, m, along_k, true));
    }
  }
}

TEST_F(StreamTest, LayersOf1b) {
  Rng rng(3);
  for (const bool along_k : {true, false}) {
    for (const int64_t m : {1, 4, 8, 17, 64}) {
      ASSERT_NO_FATAL_FAILURE(CheckLayer(rng, 2048, 2048, 512, 8192, m, along_k, m == 1));
    }
  }
}

TEST_F(StreamTest, LayersOf8b) {
  Rng rng(4);
  for (const bool along_k : {true, false}) {
    for (const int64_t m : {1, 16}) {
      ASSERT_NO_FATAL_FAILURE(CheckLayer(rng, 4096, 4096, 1024, 14336, m, along_k, false));
    }
  }
}

TEST_F(StreamTest, HeadsAreFloats) {
  Rng rng(5);
  for (const bool along_k : {true, false}) {
    GroupShape s;
    s.along_k = along_k;
    s.norm = s.residual = true;
    s.out = DType::kF32;
    s.k = 288;
    s.columns = {32000};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
    s.k = 576;
    s.columns = {49152};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
}

// One row and so many columns that warps take whole ones, or slices of them; several matrices.
TEST_F(StreamTest, ManyColumns) {
  Rng rng(11);
  GroupShape s;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    s.dtype = s.out = dtype;
    s.k = 200;
    s.columns = {16384 - 7, 6, 1};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
  for (const int64_t k : {2048, 2056, 4104, 8200}) {
    s.k = k;
    s.norm = k < 8192;
    s.columns = {16384 + 3};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, false));
  }
}

// Short columns without gaps come several in a piece: the bits are those of one at a time, as where
// another matrix of the group has gaps.
TEST_F(StreamTest, ColumnsThatShareAPiece) {
  Rng rng(14);
  for (const int64_t k : {8, 264, 288, 576, 1016, 1024}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      GroupShape s;
      s.dtype = s.out = dtype;
      s.k = k;
      s.norm = true;
      s.columns = {16384 + 1, 6, 1};
      ASSERT_NO_FATAL_FAILURE(Check(rng, s, k < 500));
      const GroupCase dense = MakeGroup(rng, s);
      GroupCase gaps = dense;
      TensorRef& weights = gaps.nodes[2].srcs[1];
      const int64_t n = weights.shape[3], apart = k + 8;
      ASSERT_EQ(n, 6);
      TensorRef moved = AddDense(&gaps, dtype, {n * apart});
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(gaps.buffers[moved.base].data() + 2 * i * apart,
                    dense.buffers[weights.base].data() + weights.offset + 2 * i * k, 2 * k);
      }
      weights.base = moved.base;
      weights.offset = moved.offset;
      weights.strides[3] = apart;
      Buffers together, apart_from_others;
      ASSERT_NO_FATAL_FAILURE(RunOnCuda(dense, true, 1, &together));
      ASSERT_NO_FATAL_FAILURE(RunOnCuda(gaps, true, 1, &apart_from_others));
      for (const TensorRef& t : dense.outs()) {
        EXPECT_TRUE(together[t.base] == apart_from_others[t.base]) << "k " << k;
      }
    }
  }
}

TEST_F(StreamTest, SizesThatDivideByNothing) {
  Rng rng(6);
  for (int i = 0; i < 80; ++i) {
    GroupShape s;
    s.along_k = Chance(rng, 0.5);
    s.dtype = s.out = Chance(rng, 0.5) ? DType::kBF16 : DType::kF16;
    s.m = Pick(rng, std::vector<int64_t>{1, 1, 2, 5, 7, 8, 9, 11, 16, 17, 31, 33, 64});
    s.k = 8 * UniformInt(rng, 1, Chance(rng, 0.3) ? 380 : 60);
    s.norm = Chance(rng, 0.5);
    s.residual = Chance(rng, 0.5);
    s.norm_weight = Chance(rng, 0.7);
    s.rounds_first = Chance(rng, 0.5);
    s.divides = Chance(rng, 0.5);
    s.squares = Chance(rng, 0.5);
    s.turned = Chance(rng, 0.5);
    // Fewer columns than rows would be multiplied the other way round, each product by itself.
    const int64_t step = s.along_k ? 1 : 8;
    s.columns.clear();
    for (int64_t n = UniformInt(rng, 1, 4); n > 0; --n) {
      s.columns.push_back(step * UniformInt(rng, CeilDiv(s.m, step), 400 / step));
    }
    if (s.columns.size() == 2 && Chance(rng, 0.7)) {
      s.columns[1] = s.columns[0];
      s.activation = true;
      s.silu_rounds = Chance(rng, 0.5);
    } else if (Chance(rng, 0.3)) {
      s.out = DType::kF32;
    }
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
}

// A product whose sum with something else is normed: its launch makes the sum and its squares.
TEST_F(StreamTest, NormsOfSumsThatTheLaunchBeforeMakes) {
  Rng rng(12);
  GroupShape s;
  s.norm = s.residual = true;
  for (const int64_t m : {2, 8, 9}) {
    s.m = m;
    s.along_k = m == 2;
    s.before = 8192;
    s.k = 2048;
    s.columns = {2048, 512, 512};
    s.activation = false;
    s.product_first = m % 2 == 0;
    s.stores_sum = true;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, false));
    s.before = 2048;
    s.columns = {8192, 8192};
    s.activation = true;
    s.along_k = m != 8;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, false));
    s.columns = {12000};
    s.activation = s.stores_sum = false;
    s.along_k = m == 8;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s, false));
  }
  for (int i = 0; i < 40; ++i) {
    s = GroupShape();
    s.norm = s.residual = true;
    s.along_k = Chance(rng, 0.5);
    s.dtype = s.out = Chance(rng, 0.5) ? DType::kBF16 : DType::kF16;
    s.m = UniformInt(rng, 2, 8);
    s.before = 8 * UniformInt(rng, 1, 60);
    s.k = 8 * UniformInt(rng, 1, Chance(rng, 0.3) ? 380 : 60);
    s.norm_weight = Chance(rng, 0.7);
    s.rounds_first = Chance(rng, 0.5);
    s.divides = Chance(rng, 0.5);
    s.turned = Chance(rng, 0.5);
    s.product_first = Chance(rng, 0.5);
    s.stores_sum = Chance(rng, 0.7);
    const int64_t step = s.along_k ? 1 : 8;
    s.columns = {step * UniformInt(rng, CeilDiv(s.m, step), 400 / step)};
    if (Chance(rng, 0.5)) {
      s.columns.push_back(s.columns[0]);
      s.activation = true;
    }
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
}

// Squares whose sums are exact in any order, so the norm has the bits of the ROW kernel's, whatever
// the weight: numbers without their leading bit, zeros, infinities.
TEST_F(StreamTest, NormsThatRoundOnlyOnce) {
  Rng rng(15);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool along_k : {true, false}) {
      for (const int64_t m : {1, 2, 7}) {
        for (const bool carries : {true, false}) {
          GroupShape s;
          s.dtype = s.out = dtype;
          s.m = m;
          s.k = carries ? 1024 : 264;
          s.along_k = along_k;
          s.norm = s.residual = true;
          s.before = carries ? 64 : 0;
          s.rounds_first = Chance(rng, 0.7);
          GroupCase c = MakeGroup(rng, s);
          const auto fill = [&](const TensorRef& t, auto bits) {
            auto* items = reinterpret_cast<uint16_t*>(c.buffers[t.base].data());
            std::generate_n(items, c.buffers[t.base].size() / 2, bits);
          };
          // The product, or what is added without one, is zero; the rows are 1/2, 1 or 2.
          const Node& norm = c.nodes[carries ? 1 : 0];
          fill(carries ? c.nodes[0].srcs[0] : norm.srcs[1], [] { return uint16_t{0}; });
          const int one = dtype == DType::kBF16 ? 0x3f80 : 0x3c00;
          const int exponent = dtype == DType::kBF16 ? 0x80 : 0x400;
          fill(norm.srcs[0], [&] {
            const int64_t sign = UniformInt(rng, 0, 1) << 15;
            return static_cast<uint16_t>(sign + one + exponent * UniformInt(rng, -1, 1));
          });
          fill(norm.srcs[2], [&] {
            const auto bits = static_cast<uint16_t>(UniformInt(rng, 0, 0xffff));
            const int most = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
            if ((bits & 0x7fff) > most) return uint16_t{1};  // not a number
            return Chance(rng, 0.3) ? static_cast<uint16_t>(bits & (0x8000 | (exponent - 1)))
                                    : bits;
          });
          Buffers fused, single;
          ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, carries && m > 1 ? 2 : carries + 1, &fused));
          ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, false, c.nodes.size(), &single));
          for (const TensorRef& t : norm.outs) {
            EXPECT_TRUE(fused[t.base] == single[t.base])
                << NameOf(dtype) << " m " << m << (along_k ? " along k" : " along n")
                << (carries ? " carried" : "") << (s.rounds_first ? " rounded first" : "");
          }
        }
      }
    }
  }
}

// Query, key and value products whose heads are turned, and written into caches.
TEST_F(StreamTest, HeadsThatAreTurnedAndCached) {
  Rng rng(13);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t m : {2, 5, 8}) {
      for (int i = 0; i < 6; ++i) {
        GroupShape s;
        s.dtype = s.out = dtype;
        s.m = m;
        s.k = i % 2 == 0 ? 2048 : 264;
        s.along_k = false;
        LayerShape layer;
        layer.batch = m;
        layer.heads = i % 3 == 0 ? 32 : 3;
        layer.kv_heads = i % 3 == 0 ? 8 : 1 + i % 2;
        layer.dtype = dtype;
        layer.positions_first = Chance(rng, 0.5);
        layer.mode = Chance(rng, 0.5) ? IndexMode::kFillOrDrop : IndexMode::kClip;
        layer.position = Pick(rng, std::vector<int64_t>{0, 5, 31, 32, 40, -2});
        s.columns = {64 * layer.heads, 64 * layer.kv_heads, 64 * layer.kv_heads};
        SCOPED_TRACE("m " + std::to_string(m) + " case " + std::to_string(i));
        const GroupCase c = MakeHeads(rng, s, layer);
        Buffers fused, single;
        ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, 1, &fused));
        ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, false, c.nodes.size(), &single));
        for (const TensorRef& t : c.outs()) {
          EXPECT_LE(Distance(ValuesOf(t, fused), ValuesOf(t, single)), 1.0 / 1024);
        }
        // Of the same products, the same bytes.
        Buffers before = c.buffers;
        for (size_t n = 0; n < 3; ++n) {
          const uint32_t out = c.nodes[n].outs[0].base;
          before[out] = fused[out];
        }
        const Buffers after = RunHost({c.nodes.begin() + 3, c.nodes.end()}, before);
        for (size_t n = 3; n < c.nodes.size(); ++n) {
          const uint32_t out = c.nodes[n].outs[0].base;
          EXPECT_TRUE(fused[out] == after[out]) << "node " << n;
        }
      }
    }
  }
}

// Clusters that find no room would run when the others are done: twice the time.
TEST_F(StreamTest, AllClustersRunAtOnce) {
  int multiprocessors = 0;
  ASSERT_CUDA(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device_->ordinal()));
  if (multiprocessors < 132) GTEST_SKIP() << "the settings are for 132 multiprocessors";
  struct Products {
    int32_t k, n, count;
    bool pair;
  };
  const Products all[] = {{576, 960, 3, false},   {576, 576, 1, false},    {576, 1536, 2, true},
                          {1536, 576, 1, false},  {2048, 3072, 3, false},  {2048, 2048, 1, false},
                          {2048, 8192, 2, true},  {8192, 2048, 1, false},  {4096, 6144, 3, false},
                          {4096, 4096, 1, false}, {4096, 14336, 2, true},  {14336, 4096, 1, false},
                          {5120, 5120, 1, false}, {13824, 5120, 1, false}, {3072, 3072, 1, false},
                          {8192, 8192, 1, false}};
  for (const auto& [k, n, count, pair] : all) {
    for (const bool along_k : {true, false}) {
      for (int m = 2; m <= 8; ++m) {
        StreamParams p = {};
        p.m = m;
        p.k = k;
        p.num_products = count;
        for (int i = 0; i < count; ++i) {
          p.product[i].n = pair ? n : n / count;
          p.product[i].out_dtype = DType::kBF16;
        }
        char activated = 0;
        if (pair) p.activated = &activated;
        std::vector<Launch> launches;
        LaunchStream(p, DType::kBF16, along_k, DefaultTuning(p, along_k), &launches);
        const Launch& launch = launches[0];
        if (launch.cluster == 1) continue;
        ASSERT_CUDA(cudaFuncSetAttribute(launch.kernel->cuda_function,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(launch.shared_bytes)));
        int at_once = 0;
        ASSERT_CUDA(ClustersAtOnce(launch, &at_once));
        EXPECT_LE(launch.grid[0] / launch.cluster, static_cast<uint32_t>(at_once))
            << k << " to " << n << (along_k ? " along k, " : " along n, ") << m << " rows";
      }
    }
  }
}

// As many rows as fit, and more: then other kernels take the products.
TEST_F(StreamTest, RowsThatFillSharedMemory) {
  Rng rng(9);
  GroupShape s;
  s.m = 8;
  s.columns = {40};
  for (const int64_t k : {3096, 6184, 8192, 8200, 10008, 20000}) {
    for (const bool along_k : {true, false}) {
      s.k = k;
      s.along_k = along_k;
      ASSERT_NO_FATAL_FAILURE(Check(rng, s));
    }
  }
  s.k = 6184;
  s.columns = {40, 40};
  s.activation = true;
  ASSERT_NO_FATAL_FAILURE(Check(rng, s));
}

// One row of a length at which warps, all warps, and other kernels share it.
TEST_F(StreamTest, OneLongRow) {
  Rng rng(10);
  for (const int64_t k : {2048, 2056, 4096, 4104, 8192, 8200, 16384, 16392}) {
    for (const bool along_k : {true, false}) {
      GroupShape s;
      s.k = k;
      s.along_k = along_k;
      s.norm = s.residual = k <= 8192;
      s.columns = {1096};
      ASSERT_NO_FATAL_FAILURE(Check(rng, s));
      s.columns = {296, 296};
      s.activation = true;
      ASSERT_NO_FATAL_FAILURE(Check(rng, s));
    }
  }
}

// One column times many rows is one row times many columns.
TEST_F(StreamTest, FewerColumnsThanRows) {
  Rng rng(8);
  for (const int64_t n : {1, 3, 8}) {
    GroupShape s;
    s.m = 11;
    s.k = 224;
    s.columns = {n};
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
}

// The same memory as the argmax's node finds it in.
std::vector<int64_t> ArgmaxOf(const GroupCase& c, const Buffers& buffers) {
  const TensorRef& logits = c.nodes.back().srcs[0];
  const int64_t n = logits.shape[logits.rank - 1];
  const std::vector<double> x = ValuesOf(logits, buffers);
  std::vector<int64_t> all;
  for (size_t row = 0; row < x.size(); row += n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i) {
      const double now = x[row + best], next = x[row + i];
      if (!std::isnan(now) && (std::isnan(next) || next > now)) best = i;
    }
    all.push_back(best);
  }
  return all;
}

// Launches of a product and its argmax leave the same in memory as the nodes one by one.
TEST_F(StreamTest, AnArgmaxBehindAProduct) {
  Rng rng(12);
  const auto write = [](GroupCase* c, int64_t column, double value) {
    const TensorRef& weights = c->nodes[c->nodes.size() - 2].srcs[1];
    for (int64_t i = 0; i < weights.shape[2]; ++i) {
      const int64_t at = column * weights.strides[3] + i * weights.strides[2];
      WriteElement(weights.dtype, {value, 0}, c->buffers[weights.base].data() + 2 * at);
    }
  };
  struct Size {
    int64_t m, k, n;
    bool along_k;
  };
  const Size sizes[] = {
      {1, 64, 16384 + 5, true}, {1, 2048, 16384, true}, {1, 2056, 16384 + 3, true},
      {1, 8200, 16384, true},   {1, 64, 40, true},      {1, 1024, 4104, true},
      {1, 64, 40, false},       {1, 1024, 8200, false}, {2, 64, 16384 + 5, true},
      {3, 512, 4099, true},     {8, 64, 9001, true},    {8, 8, 70, true},
      {5, 64, 9000, false},     {8, 512, 4104, false},  {7, 8, 64, false}};
  for (const Size& size : sizes) {
    for (const DType out : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(std::to_string(size.m) + " rows, " + std::to_string(size.k) + " to " +
                   std::to_string(size.n) + (size.along_k ? " along k " : " along n ") +
                   NameOf(out));
      GroupShape s;
      s.m = size.m;
      s.k = size.k;
      s.columns = {size.n};
      s.along_k = size.along_k;
      s.argmax = true;
      s.dtype = out == DType::kF16 ? out : DType::kBF16;
      s.out = out;
      s.norm = Chance(rng, 0.5) && NormFits(s.m, s.k);
      const GroupCase c = MakeGroup(rng, s);
      // As it is; with equal columns, which may all be the largest; with infinities and NaN.
      for (const int kind : {0, 1, 2, 3}) {
        SCOPED_TRACE(kind);
        GroupCase changed = c;
        const int64_t first = UniformInt(rng, 0, size.n / 2),
                      last = UniformInt(rng, first, size.n - 1);
        for (const int64_t column : {first, (first + last) / 2, last}) {
          if (kind == 1) write(&changed, column, 0.5);
          if (kind == 2) write(&changed, column, INFINITY);  // -inf or NaN of some rows
          if (kind == 3 && column != first) write(&changed, column, NAN);
        }
        if (kind == 3) write(&changed, first, INFINITY);
        Buffers got;
        ASSERT_NO_FATAL_FAILURE(RunOnCuda(changed, true, 2, &got));
        const std::vector<int64_t> want = ArgmaxOf(changed, got);
        for (int64_t m = 0; m < size.m; ++m) {
          const int64_t at[] = {m, 0};
          TensorRef out_ref = changed.nodes.back().outs[0];
          EXPECT_EQ(Read(got, out_ref, size.m == 1 ? at + 1 : at).i, want[m]) << "row " << m;
        }
      }
    }
  }
}

// Kernels that start before their predecessors have ended, again and again: each reads what the one
// before it wrote.
TEST_F(StreamTest, AChainOfDependentLaunches) {
  Rng rng(7);
  for (const bool along_k : {true, false}) {
    for (const int64_t m : {1, 6, 24, 64}) {
      GroupShape s;
      s.m = m;
      s.k = m == 1 ? 256 : 1536;
      s.columns = {s.k};
      s.along_k = along_k;
      GroupCase c = MakeGroup(rng, s);
      for (int i = 0; i < 40; ++i) {
        Node next = c.nodes[0];
        next.srcs[0] = c.nodes.back().outs[0];
        TensorRef out = AddDense(&c, s.dtype, {1, 1, m, s.k});
        next.outs = {out};
        c.nodes.push_back(next);
      }
      Buffers got;
      ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, c.nodes.size(), &got));
      for (const Node& node : c.nodes) {
        EXPECT_LE(ProductError(node, got, m == 1), 0.7 / 256) << m << " rows";
      }
    }
  }
}

}  // namespace
}  // namespace jaxgraph::testing
