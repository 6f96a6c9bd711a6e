// The loops of every instruction set that this machine has: special values, accuracy over whole
// ranges, and products against double.
#include <gtest/gtest.h>

#include "ffi/kernels/host/expr_kinds.h"
#include "ffi/kernels/host/loops.h"
#include "tests/ffi/kernels/random_nodes.h"
#include "tests/ffi/kernels/reference.h"

namespace jaxgraph::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class HostLoopsTest : public ::testing::TestWithParam<const HostLoops* (*)()> {
 protected:
  void SetUp() override {
    loops_ = GetParam()();
    if (loops_ == nullptr) GTEST_SKIP() << "not on this processor";
  }

  // One instruction over values of T (as registers hold them), giving R.
  template <typename R, typename T>
  std::vector<R> Compute(ExprOp op, DType t, const std::vector<T>& a, const std::vector<T>& b = {},
                         uint16_t aux = 0) {
    const int n = static_cast<int>(a.size());
    auto strip = [](const std::vector<T>& v) {
      std::vector<T> s = v;
      s.resize(kStripElements);
      return s;
    };
    std::vector<T> x = strip(a), y = strip(b);
    std::vector<R> out(kStripElements);
    const ExprInstr instr{op, t, 0, 1, 2, 3, aux};
    loops_->expr.compute(instr, x.data(), y.data(), y.data(), n, out.data());
    out.resize(n);
    return out;
  }

  const HostLoops* loops_ = nullptr;
};

// Equal, where NaN equals NaN and zeros differ by sign.
template <typename T>
void ExpectSame(const std::vector<T>& got, const std::vector<T>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << i << ": " << got[i];
    } else {
      EXPECT_EQ(got[i], want[i]) << i;
      EXPECT_EQ(std::signbit(got[i]), std::signbit(want[i])) << i;
    }
  }
}

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;

TEST_P(HostLoopsTest, MaxAndMinPropagateNaNAndOrderZeros) {
  const Floats a = {kNaN, 1, -0.0f, 0.0f, kInf, -1}, b = {1, kNaN, 0.0f, -0.0f, 1, -2};
  ExpectSame(Compute<float>(ExprOp::kMax, DType::kF32, a, b), {kNaN, kNaN, 0, 0, kInf, -1});
  ExpectSame(Compute<float>(ExprOp::kMin, DType::kF32, a, b), {kNaN, kNaN, -0.0f, -0.0f, 1, -2});
}

TEST_P(HostLoopsTest, SignsAndRounding) {
  const Floats x = {-0.0f, 0.0f, kNaN, -3, kInf};
  ExpectSame(Compute<float>(ExprOp::kSign, DType::kF32, x), {-0.0f, 0, kNaN, -1, 1});
  ExpectSame(Compute<float>(ExprOp::kNeg, DType::kF32, x), {0, -0.0f, kNaN, 3, -kInf});
  const Floats h = {0.5f, 1.5f, -0.5f, 2.5f, 0.49999997f, 8388609.0f, kInf};
  ExpectSame(Compute<float>(ExprOp::kRoundAway, DType::kF32, h),
             {1, 2, -1, 3, 0, 8388609.0f, kInf});
  ExpectSame(Compute<float>(ExprOp::kRoundEven, DType::kF32, h),
             {0, 2, -0.0f, 2, 0, 8388609.0f, kInf});
  EXPECT_EQ(Compute<int64_t>(ExprOp::kIsFinite, DType::kF32, Floats{1, kInf, kNaN, -kInf}),
            (Ints{1, 0, 0, 0}));
}

TEST_P(HostLoopsTest, FloatRemainderHasTheSignOfTheDividend) {
  ExpectSame(Compute<float>(ExprOp::kRem, DType::kF32, Floats{5, -5, -0.0f, 5, kInf, -7.5f},
                            Floats{0, 3, 3, kInf, 2, -2}),
             {kNaN, -2, -0.0f, 5, kNaN, -1.5f});
}

TEST_P(HostLoopsTest, IntegerDivisionIsDefinedEverywhere) {
  const Ints a = {5, -5, -128, 7, -7}, b = {0, 0, -1, -2, 2};
  EXPECT_EQ(Compute<int64_t>(ExprOp::kDiv, DType::kS8, a, b), (Ints{-1, -1, -128, -3, -3}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kRem, DType::kS8, a, b), (Ints{5, -5, 0, 1, -1}));
  const Ints lowest = {INT64_MIN};
  EXPECT_EQ(Compute<int64_t>(ExprOp::kDiv, DType::kS64, lowest, Ints{-1}), lowest);
  EXPECT_EQ(Compute<int64_t>(ExprOp::kRem, DType::kS64, lowest, Ints{-1}), (Ints{0}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kDiv, DType::kU8, Ints{200, 7}, Ints{0, 2}), (Ints{255, 3}));
  // All bits set is the greatest u64.
  EXPECT_EQ(Compute<int64_t>(ExprOp::kDiv, DType::kU64, Ints{-1}, Ints{2}), (Ints{INT64_MAX}));
}

TEST_P(HostLoopsTest, ShiftsBeyondTheWidth) {
  const Ints by = {1, 8, -1, 100};
  EXPECT_EQ(Compute<int64_t>(ExprOp::kShl, DType::kS8, Ints{65, 1, -1, 3}, by),
            (Ints{-126, 0, 0, 0}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kShrLogical, DType::kS8, Ints{-128, -1, -1, 3}, by),
            (Ints{64, 0, 0, 0}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kShrArithmetic, DType::kS8, Ints{-128, -1, -5, 3}, by),
            (Ints{-64, -1, -1, 0}));
  EXPECT_EQ(
      Compute<int64_t>(ExprOp::kShrArithmetic, DType::kU8, Ints{128, 255, 200}, Ints{1, 8, 9}),
      (Ints{192, 255, 255}));
}

TEST_P(HostLoopsTest, IntegersWrap) {
  EXPECT_EQ(Compute<int64_t>(ExprOp::kAdd, DType::kS8, Ints{127}, Ints{1}), (Ints{-128}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kSub, DType::kU16, Ints{0}, Ints{1}), (Ints{65535}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kMul, DType::kU32, Ints{65536}, Ints{65537}), (Ints{65536}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kAbs, DType::kS8, Ints{-128}), (Ints{-128}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kNot, DType::kU8, Ints{1}), (Ints{254}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kNot, DType::kPred, Ints{1, 0}), (Ints{0, 1}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kPopcnt, DType::kS8, Ints{-1, 5}), (Ints{8, 2}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kClz, DType::kU8, Ints{0, 1, 255}), (Ints{8, 7, 0}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kClz, DType::kS64, Ints{0, 1, -1}), (Ints{64, 63, 0}));
  EXPECT_EQ(Compute<int64_t>(ExprOp::kIntegerPow, DType::kS8, Ints{7, -7}, Ints{}, 3),
            (Ints{87, -87}));
}

TEST_P(HostLoopsTest, ConversionsSaturate) {
  const Floats x = {300, -300, kNaN, 1.9f, -1.9f, kInf};
  auto convert = [&](DType to, const Floats& from) {
    return Compute<int64_t>(ExprOp::kConvert, to, from, {}, static_cast<uint16_t>(DType::kF32));
  };
  EXPECT_EQ(convert(DType::kS8, x), (Ints{127, -128, 0, 1, -1, 127}));
  EXPECT_EQ(convert(DType::kU8, x), (Ints{255, 0, 0, 1, 0, 255}));
  EXPECT_EQ(convert(DType::kS32, {3e10f, -3e10f, kNaN, kInf}),
            (Ints{INT32_MAX, INT32_MIN, 0, INT32_MAX}));
  EXPECT_EQ(convert(DType::kS64, {3e30f, -3e30f, 1e18f}),
            (Ints{INT64_MAX, INT64_MIN, 999999984306749440}));
  EXPECT_EQ(convert(DType::kU64, {3e30f, -1, 1e19f, -1.9f}),
            (Ints{-1, 0, static_cast<int64_t>(9999999980506447872u), 0}));
  EXPECT_EQ(convert(DType::kPred, {0, -0.0f, kNaN, 0.1f}), (Ints{0, 0, 1, 1}));
  // f64 reaches bf16 by way of float, as XLA has it: here two roundings give another value than
  // one.
  const std::vector<double> twice = {1 + std::ldexp(1, -8) + std::ldexp(1, -40)};
  ExpectSame(
      Compute<float>(ExprOp::kConvert, DType::kBF16, twice, {}, static_cast<uint16_t>(DType::kF64)),
      {1.0f});
}

// Every function of f32, over the floats of its domain, to within three units in the last
// place (the C library's erfc needs more than two).
TEST_P(HostLoopsTest, FunctionsAreAccurate) {
  for (int o = static_cast<int>(ExprOp::kExp); o <= static_cast<int>(ExprOp::kErfInv); ++o) {
    const auto op = static_cast<ExprOp>(o);
    double worst = 0;
    float at = 0;
    for (uint32_t step = 0; step < 250; ++step) {
      Floats x;
      for (uint32_t i = 0; i < kStripElements; ++i)
        x.push_back(FloatFromBits((step * kStripElements + i) * 33557u));
      const Floats got = Compute<float>(op, DType::kF32, x);
      for (size_t i = 0; i < x.size(); ++i) {
        const double want = ReferenceUnary(op, x[i]);
        const float rounded = static_cast<float>(want);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(got[i])) << "op " << o << " of " << x[i];
        } else if (std::isinf(rounded) || rounded == 0) {
          ASSERT_EQ(got[i], rounded) << "op " << o << " of " << x[i];
          ASSERT_EQ(std::signbit(got[i]), std::signbit(rounded)) << "op " << o << " of " << x[i];
        } else {
          const double ulp = std::max(std::ldexp(1, std::ilogb(rounded) - 23), std::ldexp(1, -149));
          const double error = std::abs(got[i] - want) / ulp;
          if (error > worst) worst = error, at = x[i];
        }
      }
    }
    EXPECT_LE(worst, 3) << "op " << o << " of " << at;
  }
}

TEST_P(HostLoopsTest, FunctionsOfZeros) {
  const Floats zeros = {-0.0f, 0.0f};
  for (int o = static_cast<int>(ExprOp::kExp); o <= static_cast<int>(ExprOp::kErfInv); ++o) {
    SCOPED_TRACE(o);
    const auto op = static_cast<ExprOp>(o);
    Floats want;
    for (const float x : zeros) want.push_back(static_cast<float>(ReferenceUnary(op, x)));
    ExpectSame(Compute<float>(op, DType::kF32, zeros), want);
  }
}

TEST_P(HostLoopsTest, ReductionsOverAnyLength) {
  for (int n : {1, 2, 3, 15, 16, 17, 255, 511, 512}) {
    Rng rng(n);
    Floats x(n);
    double sum = 0;
    for (float& v : x) sum += v = static_cast<float>(UniformReal(rng, -1, 1));
    auto reduce = [&](ExprOp op) {
      ReduceState state;
      loops_->expr.reduce({op, DType::kF32, 32, 0, 0, 0, 0}, x.data(), n, 1000, &state);
      return state;
    };
    EXPECT_NEAR(reduce(ExprOp::kReduceSum).f, sum, 1e-6 * n);
    EXPECT_EQ(reduce(ExprOp::kReduceMax).f, *std::max_element(x.begin(), x.end()));
    EXPECT_EQ(reduce(ExprOp::kReduceArgmin).index,
              1000 + std::min_element(x.begin(), x.end()) - x.begin());
    x[n / 2] = x[n - 1] = kNaN;
    EXPECT_TRUE(std::isnan(reduce(ExprOp::kReduceMin).f));
    EXPECT_EQ(reduce(ExprOp::kReduceArgmax).index, 1000 + n / 2);
  }
}

TEST_P(HostLoopsTest, ProductsOfEveryTypeAndSize) {
  Rng rng(7);
  const MatmulLoops& loops = loops_->matmul;
  for (DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int m : {1, 2, 3, 4, 5, 7, 8, 16}) {
      for (int64_t k : {1, 7, 16, 64, 129}) {
        for (int64_t n : {1, 5, 16, 33, 70}) {
          NodeCase c = MakeMatmul(rng, DType::kF32, t, DType::kF32, 1, 1, m, n, k, Layout::kDense);
          const float* a = reinterpret_cast<float*>(c.buffers[0].data() + c.node.srcs[0].offset);
          const char* w = c.buffers[1].data() + c.node.srcs[1].offset;
          for (bool transposed : {false, true}) {
            Floats out(m * (n + 2), -7);
            if (transposed) {
              c.node.srcs[1].strides[2] = 1;
              c.node.srcs[1].strides[3] = k;
              loops.dots(t, w, k, a, k, m, k, n, out.data(), n + 2);
            } else {
              loops.rows(t, w, n, a, k, m, k, n, out.data(), n + 2);
            }
            const Buffers want = RunReference(c);
            for (int64_t i = 0; i < m; ++i) {
              for (int64_t j = 0; j < n; ++j) {
                const int64_t at[] = {0, 0, i, j};
                ASSERT_NEAR(out[i * (n + 2) + j], Read(want, c.node.outs[0], at).f, 1e-6 * k)
                    << NameOf(t) << " " << m << "x" << k << "x" << n << " " << transposed;
              }
              ASSERT_EQ(out[i * (n + 2) + n], -7) << "wrote beyond the row";
            }
          }
        }
      }
    }
  }
}

std::string NameOfLoops(const ::testing::TestParamInfo<const HostLoops* (*)()>& info) {
  const char* const names[] = {"Portable", "Avx2", "Avx512"};
  return names[info.index];
}
INSTANTIATE_TEST_SUITE_P(InstructionSets, HostLoopsTest,
                         ::testing::Values(&PortableLoops, &Avx2Loops, &Avx512Loops), NameOfLoops);

}  // namespace
}  // namespace jaxgraph::testing
