// The text of compiled kernels. Needs no GPU: NVRTC compiles without one.
#include <string>
#include <vector>

#include "ffi/kernels/cuda/jit/kernel_cache.h"
#include "ffi/kernels/cuda/jit/nvrtc.h"
#include "tests/ffi/cuda/cuda_test.h"
#include "tests/ffi/cuda/decode_nodes.h"
#include "tests/ffi/kernels/random_nodes.h"

namespace jaxgraph::testing {
namespace {

bool Generate(const NodeCase& c, const std::vector<char*>& addresses, uint8_t alignment,
              bool clusters, KernelSource* source) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  EXPECT_TRUE(PrepareExpr(Resolve(c.node, addresses), &wide, &pieces).ok());
  if (pieces.size() != 1) return false;
  KernelRequest request;
  request.row = c.node.op == Op::kRow;
  request.clusters = clusters;
  request.num_srcs = static_cast<int>(c.node.srcs.size());
  request.num_outs = static_cast<int>(c.node.outs.size());
  request.piece = &pieces[0];
  request.src_alignment.fill(alignment);
  request.out_alignment.fill(alignment);
  return GenerateSource(request, source);
}

NodeCase RandomExpression(Rng& rng) {
  return RandomNode(rng, Chance(rng, 0.5) ? Op::kExpr : Op::kRow);
}

bool IsEmpty(const NodeCase& c) {
  for (const TensorRef& t : c.node.srcs) {
    if (NumElements(t) == 0) return true;
  }
  for (const TensorRef& t : c.node.outs) {
    if (NumElements(t) == 0) return true;
  }
  return false;
}

TEST(JitSource, EqualNodesGiveEqualTextWhateverTheirAddresses) {
  Rng rng(1);
  int generated = 0;
  for (int i = 0; i < 300; ++i) {
    NodeCase c = RandomExpression(rng);
    NodeCase elsewhere = c;
    KernelSource here, there;
    const bool ok = Generate(c, Addresses(c.buffers), 4, true, &here);
    ASSERT_EQ(Generate(elsewhere, Addresses(elsewhere.buffers), 4, true, &there), ok);
    EXPECT_EQ(here.text, there.text);
    EXPECT_EQ(here.grid, there.grid);
    EXPECT_EQ(here.block, there.block);
    // Only nodes without work, or without rows to reduce, are left to the interpreter.
    EXPECT_TRUE(ok || IsEmpty(c)) << Describe(c);
    generated += ok;
  }
  EXPECT_GT(generated, 250);
}

TEST(JitSource, LongRowsAreSharedWhereBlocksCan) {
  Rng rng(2);
  NodeCase c = Argmax(rng, 128256, DType::kBF16);
  KernelSource with, without;
  ASSERT_TRUE(Generate(c, Addresses(c.buffers), 16, true, &with));
  ASSERT_TRUE(Generate(c, Addresses(c.buffers), 16, false, &without));
  EXPECT_GT(with.cluster, 1u);
  EXPECT_EQ(without.cluster, 1u);
}

class JitCompiles : public ::testing::TestWithParam<const char*> {};

TEST_P(JitCompiles, RandomNodesAndThoseOfADecodeStep) {
  if (Nvrtc::Get() == nullptr) GTEST_SKIP() << Nvrtc::Description();
  Rng rng(3);
  std::vector<NodeCase> cases = {Rotary(rng, 9, 64),        SiluProduct(rng, 1536),
                                 RmsNorm(rng, 1, 576),      RmsNorm(rng, 2, 2048, true),
                                 RmsNorm(rng, 1, 20000),    Softmax(rng, 32, 1024),
                                 Argmax(rng, 49152, kHalf), Argmax(rng, 128256, kSingle)};
  for (int i = 0; i < 16; ++i) cases.push_back(RandomExpression(rng));
  const std::string architecture = GetParam();
  std::vector<std::string> texts, names;
  for (NodeCase& c : cases) {
    KernelSource source;
    const uint8_t alignment = Chance(rng, 0.5) ? 16 : 8;
    const bool clusters = architecture == "sm_90" || architecture == "sm_90a";
    if (!Generate(c, Addresses(c.buffers), alignment, clusters, &source)) continue;
    texts.push_back(source.text);
    names.push_back("kernel_" + std::to_string(names.size()));
  }
  std::vector<const std::string*> sources;
  for (const std::string& text : texts) sources.push_back(&text);
  std::string image;
  ASSERT_OK(Nvrtc::Get()->Compile(TranslationUnit(sources, names), architecture, &image));
  for (const std::string& name : names) EXPECT_NE(image.find(name), std::string::npos) << name;
}

TEST(JitSource, AFailureToCompileSaysWhy) {
  if (Nvrtc::Get() == nullptr) GTEST_SKIP() << Nvrtc::Description();
  std::string image;
  const Status status =
      Nvrtc::Get()->Compile("__global__ void f(no_such_type p) {}", "sm_90", &image);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("no_such_type"), std::string::npos) << status.message();
  EXPECT_FALSE(Nvrtc::Get()->Compile("", "sm_1", &image).ok());
}

INSTANTIATE_TEST_SUITE_P(Architectures, JitCompiles,
                         ::testing::Values("sm_90a", "sm_90", "sm_80", "sm_75", "compute_75"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace jaxgraph::testing
