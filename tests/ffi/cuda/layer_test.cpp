// The kernels of layers against single nodes, the host's kernels and sums in f64; eager, captured
// and replayed runs against each other, bit by bit.
#include "ffi/kernels/cuda/layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/cuda/layer_case.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

class LayerTest : public ClusterTest {
 protected:
  // What the nodes leave in memory, run eagerly; the same when captured and replayed.
  void RunOnCuda(const LayerCase& c, bool fusion, size_t num_launches, Buffers* result) {
    std::vector<DeviceBytes> memory;
    std::vector<char*> addresses;
    for (const auto& buffer : c.buffers) {
      memory.emplace_back(buffer.size(), stream());
      addresses.push_back(memory.back().data());
    }
    const auto upload = [&] {
      for (size_t b = 0; b < c.buffers.size(); ++b) memory[b].Upload(c.buffers[b]);
    };
    const auto download = [&] {
      Buffers all;
      for (const DeviceBytes& m : memory) all.push_back(m.Download());
      return all;
    };
    const std::vector<ResolvedNode> nodes = ResolveLayers(c, addresses);
    std::vector<Launch> launches;
    for (size_t n = 0; n < nodes.size();) {
      size_t covered = 0;
      ASSERT_OK(CudaEmitter().Emit(nodes, n, fusion, &launches, &covered));
      n += covered;
    }
    if (num_launches > 0) {
      ASSERT_EQ(launches.size(), num_launches);
    }
    launches[0].dependent = false;
    upload();
    for (const Launch& launch : launches) ASSERT_OK(device_->LaunchKernel(launch, stream_));
    *result = download();

    Recording recorded;
    ASSERT_OK(Record(launches, &recorded));
    for (int i = 0; i < 3; ++i) {
      upload();
      ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
      EXPECT_TRUE(download() == *result) << "replay " << i << " differs from the eager run";
    }
  }

  // `slack`: how many times more than usual results may differ by.
  void Check(Rng& rng, const StepShape& s, double slack = 1) {
    SCOPED_TRACE(std::to_string(s.layers) + " layers of " + std::to_string(s.size) + ", heads " +
                 std::to_string(s.kv_heads) + " x " + std::to_string(s.heads) + " of " +
                 std::to_string(s.width) + ", hidden " + std::to_string(s.hidden) + ", rows " +
                 std::to_string(s.rows) + ", position " + std::to_string(s.position) + ", row " +
                 std::to_string(s.written) + " " + NameOf(s.dtype));
    const LayerCase c = MakeLayers(rng, s);
    Buffers fused, single;
    ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, 2 * s.layers + 2, &fused));
    ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, false, 0, &single));
    const Buffers host = RunHost(c.nodes, c.buffers);
    // Sums in another order move a few roundings, and what follows from them.
    const double unit = s.dtype == DType::kBF16 ? 1.0 / 256 : 1.0 / 2048;
    std::vector<TensorRef> results = {c.out, c.last_row};
    for (const LayerNodes& l : c.layers) {
      results.push_back(l.keys);
      results.push_back(l.values);
    }
    results.push_back(c.nodes.back().outs[1]);  // the norm of it all
    for (const TensorRef& t : results) {
      const std::vector<double> got = ValuesOf(t, fused);
      EXPECT_LE(Distance(got, ValuesOf(t, single)), 1.25 * slack * unit * s.layers)
          << "against single nodes";
      EXPECT_LE(Distance(got, ValuesOf(t, host)), slack * unit * s.layers) << "against the host";
    }
    const LayerResults exact = LayersInDouble(c, s);
    const double ours = Distance(ValuesOf(c.out, fused), exact.out);
    const double theirs = Distance(ValuesOf(c.out, single), exact.out);
    EXPECT_LE(ours, 1.3 * theirs + unit / 8) << "against f64";
    EXPECT_LE(theirs, 4 * unit * s.layers) << "single nodes against f64";
    // Nothing but the results, the norm behind and scratch memory has changed.
    for (size_t b = 2; b < c.buffers.size(); ++b) {
      const bool result = std::any_of(results.begin(), results.end(),
                                      [&](const TensorRef& t) { return t.base == b; });
      if (!result) {
        EXPECT_TRUE(fused[b] == c.buffers[b]) << "buffer " << b;
      }
    }
  }
};

StepShape Of15m() {
  StepShape s;
  s.size = 288;
  s.kv_heads = 6;
  s.heads = 1;
  s.width = 48;
  s.hidden = 768;
  s.rows = 256;
  s.position = s.written = 200;
  return s;
}
StepShape Of135m() {
  StepShape s;
  s.size = 576;
  s.kv_heads = 3;
  s.heads = 3;
  s.width = 64;
  s.hidden = 1536;
  s.rows = 1024;
  s.position = s.written = 512;
  return s;
}

TEST_F(LayerTest, Models) {
  Rng rng(1);
  for (StepShape s : {Of15m(), Of135m()}) {
    for (const DType t : {DType::kBF16, DType::kF16}) {
      s.dtype = t;
      for (const int64_t layers : {1, 2}) {
        for (const bool other : {false, true}) {
          s.layers = layers;
          s.residual = s.positions_first = other;
          s.spelling.silu_rounds = s.spelling.rounds_first = !other;
          ASSERT_NO_FATAL_FAILURE(Check(rng, s));
        }
      }
    }
  }
}

TEST_F(LayerTest, Positions) {
  Rng rng(2);
  StepShape s = Of135m();
  for (const int64_t position : {0, 1, 15, 16, 255, 256, 1022, 1023}) {
    s.position = s.written = position;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
  // The row that is written is another than the last one seen.
  for (const int64_t written : {-5, 0, 77, 511, 513, 1023, 4000}) {
    s.position = 512;
    s.written = written;
    s.drops = false;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
    s.drops = true;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
  s.drops = false;
  s.written = 1023;
  s.position = 5000;  // beyond the cache: everything is seen
  ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  // The mask counts from elsewhere.
  for (const int64_t first_index : {-7, 7}) {
    for (const int64_t position : {100, 1016, 1030, INT32_MAX}) {
      s.first_index = first_index;
      s.position = position;
      ASSERT_NO_FATAL_FAILURE(Check(rng, s));
    }
  }
}

// Queries that see nothing: of equal scores if those are finite, else not a number.
TEST_F(LayerTest, NothingSeen) {
  Rng rng(9);
  StepShape s = Of135m();
  for (const int64_t rows : {40, 1024, 2000}) {
    s.rows = rows;
    s.written = rows / 2;
    for (const int64_t position : {-1, -1000, INT32_MIN}) {
      s.position = position;
      s.masked = -1e9;
      ASSERT_NO_FATAL_FAILURE(Check(rng, s));
      s.masked = -HUGE_VAL;
      const LayerCase c = MakeLayers(rng, s);
      Buffers fused;
      ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, 4, &fused));
      for (const double v : ValuesOf(c.out, fused)) EXPECT_TRUE(std::isnan(v));
    }
  }
}

TEST_F(LayerTest, RandomSizes) {
  Rng rng(3);
  int fitting = 0;
  for (int i = 0; i < 40; ++i) {
    StepShape s;
    s.layers = UniformInt(rng, 1, 2);
    s.size = 32 * UniformInt(rng, 1, 32);
    s.kv_heads = UniformInt(rng, 1, 8);
    s.heads = UniformInt(rng, 1, 8);
    s.width = 8 * UniformInt(rng, 1, 8);
    s.hidden = 32 * UniformInt(rng, 1, 64);
    s.rows = UniformInt(rng, 1, 2048);
    s.position = s.written = UniformInt(rng, 0, s.rows - 1);
    s.dtype = Chance(rng, 0.5) ? DType::kBF16 : DType::kF16;
    s.positions_first = Chance(rng, 0.5);
    s.residual = Chance(rng, 0.5);
    s.spelling.norm_weight = Chance(rng, 0.8);
    const LayerCase c = MakeLayers(rng, s);
    Buffers buffers = c.buffers;
    std::vector<Launch> launches;
    size_t covered = 0;
    ASSERT_OK(
        CudaEmitter().Emit(ResolveLayers(c, Addresses(buffers)), 0, true, &launches, &covered));
    if (covered < kNodesOfLayer) continue;  // too large for shared memory
    ++fitting;
    ASSERT_NO_FATAL_FAILURE(Check(rng, s));
  }
  EXPECT_GT(fitting, 10);
}

// Messages of one word and of two; fewer chunks of weights than a warp holds, as many, and
// more; positions for half of the warps, and for all of them; one cluster for the MLP, and several.
TEST_F(LayerTest, EveryWayToShare) {
  Rng rng(9);
  StepShape s = Of135m();
  for (const int64_t hidden : {96, 192, 384, 768, 1280}) {
    for (const int64_t size : {64, 576, 608, 1024}) {
      if (size * hidden > 1 << 20) continue;  // too large for shared memory
      s.hidden = hidden;
      s.size = size;
      s.rows = size % 64 == 0 ? 1000 : 1500;
      s.position = s.written = s.rows - 300;
      // Where hidden units are few, one that is rounded otherwise is much of the product.
      ASSERT_NO_FATAL_FAILURE(Check(rng, s, 2));
    }
  }
}

// A weight is the sum of two numbers in the kernel: infinite values must not make NaN of that.
TEST_F(LayerTest, InfiniteValues) {
  Rng rng(4);
  StepShape s = Of135m();
  s.rows = 300;
  s.position = s.written = 299;
  LayerCase c = MakeLayers(rng, s);
  const int64_t at[] = {0, 1, 123, 7};
  Write(c.buffers, c.layers[0].values, at, {HUGE_VAL, 0});
  Buffers fused;
  ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, 4, &fused));
  const Buffers host = RunHost(c.nodes, c.buffers);
  // Three queries have an infinite output, which every element of the product has a share of.
  const std::vector<double> got = ValuesOf(c.out, fused), want = ValuesOf(c.out, host);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(std::isnan(got[i]), std::isnan(want[i])) << i;
  }
  const std::vector<double> row = ValuesOf(c.last_row, fused),
                            row_host = ValuesOf(c.last_row, host);
  for (size_t i = 0; i < row.size(); ++i) {
    EXPECT_TRUE(row[i] == row_host[i] || (std::isnan(row[i]) && std::isnan(row_host[i]))) << i;
  }
}

StepShape Deep(StepShape s, int64_t layers) {
  s.layers = layers;
  return s;
}

// The layers of a case on the device, as steps that differ in the row that comes in alone.
class Steps {
 public:
  Steps(const LayerCase& c, cudaStream_t stream) : case_(c), stream_(stream) {
    for (const auto& buffer : c.buffers) {
      memory_.emplace_back(buffer.size(), stream);
      memory_.back().Upload(buffer);
      addresses_.push_back(memory_.back().data());
    }
  }
  std::vector<Launch> Launches(bool dependent) const {
    const std::vector<ResolvedNode> nodes = ResolveLayers(case_, addresses_);
    std::vector<Launch> launches;
    size_t covered = 0;
    EXPECT_TRUE(CudaEmitter().Emit(nodes, 0, true, &launches, &covered).ok());
    EXPECT_EQ(covered, nodes.size() - 1) << "not all layers were taken";
    launches[0].dependent = false;
    for (Launch& launch : launches) launch.dependent &= dependent;
    return launches;
  }
  void FillScratch(int byte) {
    EXPECT_EQ(cudaMemsetAsync(addresses_[1], byte, kScratchBytes, stream_), cudaSuccess);
  }
  size_t row_bytes() const { return 2 * case_.row.num_elements(); }
  void SetRow(const char* row) {
    EXPECT_EQ(cudaMemcpyAsync(addresses_[case_.row.base] + case_.row.offset, row, row_bytes(),
                              cudaMemcpyDefault, stream_),
              cudaSuccess);
  }
  // The row so far, the down product, and the last layer's cache.
  size_t result_bytes() const { return 2 * row_bytes() + 2 * cache_bytes(); }
  void CopyResults(char* to) const {
    const auto copy = [&](const TensorRef& t, size_t bytes) {
      EXPECT_EQ(
          cudaMemcpyAsync(to, addresses_[t.base] + t.offset, bytes, cudaMemcpyDefault, stream_),
          cudaSuccess);
      to += bytes;
    };
    copy(case_.last_row, row_bytes());
    copy(case_.out, row_bytes());
    copy(case_.layers.back().keys, cache_bytes());
    copy(case_.layers.back().values, cache_bytes());
  }
  std::vector<char> Results() const {
    std::vector<char> results(result_bytes());
    CopyResults(results.data());
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return results;
  }

 private:
  size_t cache_bytes() const { return 2 * case_.layers.back().keys.num_elements(); }

  const LayerCase& case_;
  cudaStream_t stream_;
  std::vector<DeviceBytes> memory_;
  std::vector<char*> addresses_;
};

// Whatever scratch memory holds before a step, and however the launches follow one another.
TEST_F(LayerTest, WhatScratchMemoryHoldsBefore) {
  Rng rng(5);
  for (const StepShape& s : {Deep(Of15m(), 6), Deep(Of135m(), 4)}) {
    SCOPED_TRACE(s.size);
    const LayerCase c = MakeLayers(rng, s), other = MakeLayers(rng, s);
    Steps steps(c, stream());
    const auto row_of = [](const LayerCase& of) {
      return of.buffers[of.row.base].data() + of.row.offset;
    };
    const auto launch_all = [&](bool dependent) {
      for (const Launch& launch : steps.Launches(dependent)) {
        ASSERT_OK(device_->LaunchKernel(launch, stream_));
      }
    };
    launch_all(false);
    const std::vector<char> want = steps.Results();
    Recording together, apart;
    ASSERT_OK(Record(steps.Launches(true), &together));
    ASSERT_OK(Record(steps.Launches(false), &apart));
    const std::function<void()> runs[] = {
        [&] { launch_all(false); }, [&] { launch_all(true); },
        [&] { ASSERT_OK(device_->LaunchGraph(together.exec, stream_)); },
        [&] { ASSERT_OK(device_->LaunchGraph(apart.exec, stream_)); }};
    for (size_t r = 0; r < std::size(runs); ++r) {
      for (const int byte : {0xff, 0x00, 0x3f, 0x7f}) {
        steps.FillScratch(byte);
        runs[r]();
        EXPECT_TRUE(steps.Results() == want) << "run " << r << ", scratch memory of " << byte;
      }
      // Numbers of another step.
      steps.SetRow(row_of(other));
      launch_all(true);
      EXPECT_FALSE(steps.Results() == want);
      steps.SetRow(row_of(c));
      runs[r]();
      EXPECT_TRUE(steps.Results() == want) << "run " << r << " behind another step";
    }
  }
}

// Steps one right behind the other, each with another row.
TEST_F(LayerTest, ManySteps) {
  constexpr int kRows = 5, kSteps = 200;
  Rng rng(6);
  for (const StepShape& s : {Deep(Of15m(), 6), Deep(Of135m(), 8)}) {
    SCOPED_TRACE(s.size);
    const LayerCase c = MakeLayers(rng, s);
    Steps steps(c, stream());
    std::vector<std::vector<char>> want;
    DeviceBytes rows(kRows * steps.row_bytes(), stream());
    DeviceBytes results(kSteps * steps.result_bytes(), stream());
    std::vector<char> all;
    for (int r = 0; r < kRows; ++r) {
      const LayerCase other = MakeLayers(rng, Deep(s, 1));
      const char* const row = other.buffers[other.row.base].data() + other.row.offset;
      all.insert(all.end(), row, row + steps.row_bytes());
    }
    rows.Upload(all);
    for (int r = 0; r < kRows; ++r) {
      steps.SetRow(rows.data() + r * steps.row_bytes());
      for (const Launch& launch : steps.Launches(false)) {
        ASSERT_OK(device_->LaunchKernel(launch, stream_));
      }
      want.push_back(steps.Results());
    }
    EXPECT_FALSE(want[0] == want[1]);
    Recording recorded;
    ASSERT_OK(Record(steps.Launches(true), &recorded));
    const std::vector<Launch> launches = steps.Launches(true);
    for (const bool eager : {false, true}) {
      for (int i = 0; i < kSteps; ++i) {
        steps.SetRow(rows.data() + i % kRows * steps.row_bytes());
        if (eager) {
          for (const Launch& launch : launches) ASSERT_OK(device_->LaunchKernel(launch, stream_));
        } else {
          ASSERT_OK(device_->LaunchGraph(recorded.exec, stream_));
        }
        steps.CopyResults(results.data() + i * steps.result_bytes());
      }
      const std::vector<char> got = results.Download();
      for (int i = 0; i < kSteps; ++i) {
        const char* const result = got.data() + i * steps.result_bytes();
        ASSERT_TRUE(std::equal(result, result + steps.result_bytes(), want[i % kRows].data()))
            << "step " << i << (eager ? ", eager" : ", replayed");
      }
    }
  }
}

// NaNs of every kind come through: in the row that comes in, and in one part of a sum.
TEST_F(LayerTest, NotANumber) {
  Rng rng(7);
  for (const DType t : {DType::kBF16, DType::kF16}) {
    for (const uint16_t bits : {0xffff, 0x7fff, 0x7fc1, 0xffc0, 0x7e00}) {
      if (bits == 0x7e00 && t == DType::kBF16) continue;  // a number
      SCOPED_TRACE(bits);
      StepShape s = Deep(Of135m(), 3);
      s.dtype = t;
      LayerCase c = MakeLayers(rng, s);
      char* const row = c.buffers[c.row.base].data() + c.row.offset;
      for (int64_t i = 0; i < s.size; ++i) std::memcpy(row + 2 * i, &bits, sizeof bits);
      Buffers fused;
      ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, 2 * s.layers + 2, &fused));
      for (const TensorRef& result : {c.out, c.last_row}) {
        for (const double v : ValuesOf(result, fused)) EXPECT_TRUE(std::isnan(v));
      }
    }
  }
  // In one layer's down product alone, of one hidden unit.
  LayerCase c = MakeLayers(rng, Deep(Of135m(), 3));
  char* const down = c.buffers[c.layers[0].down.base].data() + c.layers[0].down.offset;
  for (int64_t n = 0; n < 576; ++n) std::memset(down + 2 * (n * 1536 + 700), 0xff, 2);
  Buffers fused;
  ASSERT_NO_FATAL_FAILURE(RunOnCuda(c, true, 8, &fused));
  for (const double v : ValuesOf(c.out, fused)) EXPECT_TRUE(std::isnan(v));
}

}  // namespace
}  // namespace jaxgraph::testing
