// Every kind of node, at random, through the host kernels and the plain reference.
#include "tests/ffi/kernels/random_nodes.h"
#include "tests/ffi/kernels/reference.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

class HostConformance : public ::testing::TestWithParam<Op> {};

TEST_P(HostConformance, AgreesWithReference) {
  for (int seed = 0; seed < 400; ++seed) {
    Rng rng(seed);
    const NodeCase c = RandomNode(rng, GetParam());
    ASSERT_TRUE(SameResult(c, RunHost(c), RunReference(c))) << "seed " << seed;
  }
}

TEST_P(HostConformance, ThreadsChangeNoBit) {
  for (int seed = 0; seed < 60; ++seed) {
    Rng rng(1000 + seed);
    const NodeCase c = RandomNode(rng, GetParam());
    ASSERT_EQ(RunHost(c, 1), RunHost(c, 3)) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, HostConformance,
                         ::testing::Values(Op::kExpr, Op::kRow, Op::kMatmul, Op::kGather,
                                           Op::kSetRows, Op::kCopy, Op::kAttention, Op::kSort),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

}  // namespace
}  // namespace jaxgraph::testing
