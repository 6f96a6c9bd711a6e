// What random attention nodes cannot show: bounds change no bit, empty rows, caches with garbage.
#include <gtest/gtest.h>

#include "tests/ffi/kernels/random_attention.h"
#include "tests/ffi/kernels/reference.h"
#include "tests/ffi/kernels/run_host.h"

namespace jaxgraph::testing {
namespace {

AttentionParams& ParamsOf(NodeCase* c) {
  return *reinterpret_cast<AttentionParams*>(c->node.params.data());
}

AttentionSpec Decode(DType t, int64_t s, int64_t position) {
  AttentionSpec spec;
  spec.b0 = 2;
  spec.b1 = 3;
  spec.g = 4;
  spec.d = spec.e = 64;
  spec.s = s;
  spec.q = spec.k = spec.v = spec.out = t;
  spec.raw = t;
  spec.first_position = spec.last_position = position;
  return spec;
}

TEST(HostAttention, EveryPairOfDTypes) {
  Rng rng(1);
  for (DType q : FloatTypes()) {
    for (DType kv : FloatTypes()) {
      for (DType out : FloatTypes()) {
        AttentionSpec spec = Decode(q, 100, 70);
        spec.k = spec.v = kv;
        spec.out = out;
        spec.raw = spec.masked = DType::kF32;
        const NodeCase c = MakeAttention(rng, spec);
        ASSERT_TRUE(SameResult(c, RunHost(c), RunReference(c)));
      }
    }
  }
}

TEST(HostAttention, BoundsChangeNoBit) {
  Rng rng(2);
  for (DType t : {DType::kBF16, DType::kF32, DType::kF64}) {
    for (CacheLayout layout : {CacheLayout::kHeadsFirst, CacheLayout::kHeadsLast,
                               CacheLayout::kTransposed, CacheLayout::kAny}) {
      for (int64_t position : {-1, 0, 62, 63, 64, 511, 512, 1099, 1100}) {
        AttentionSpec spec = Decode(t, 1100, position);
        spec.keys = spec.values = layout;
        spec.per_query = true;
        if (position > 5) spec.first_position = position - 5;
        NodeCase c = MakeAttention(rng, spec);
        const Buffers with = RunHost(c);
        ParamsOf(&c).bound_source = 0xff;
        ASSERT_EQ(with, RunHost(c)) << "position " << position << " " << Describe(c);
      }
    }
  }
}

TEST(HostAttention, WhatLiesBeyondTheBoundIsNotRead) {
  Rng rng(3);
  NodeCase c = MakeAttention(rng, Decode(DType::kF32, 1000, 100));
  const Buffers want = RunHost(c);
  ForEachIndex(c.node.srcs[2], [&](const int64_t* i) {
    if (i[2] >= 200) Write(c.buffers, c.node.srcs[2], i, {NAN, 0});
  });
  const Buffers got = RunHost(c);
  const uint32_t out = c.node.outs[0].base;
  EXPECT_EQ(got[out], want[out]);
}

TEST(HostAttention, ARowThatSeesNothingIsNan) {
  Rng rng(4);
  for (DType t : FloatTypes()) {
    const NodeCase c = MakeAttention(rng, Decode(t, 70, -1));
    const Buffers got = RunHost(c);
    ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
      EXPECT_TRUE(std::isnan(Read(got, c.node.outs[0], i).f));
    });
  }
}

TEST(HostAttention, ANanScoreMakesItsRowNanAndNoOther) {
  Rng rng(5);
  AttentionSpec spec = Decode(DType::kF32, 70, 69);
  NodeCase c = MakeAttention(rng, spec);
  const int64_t at[] = {1, 2, 3, 7};
  Write(c.buffers, c.node.srcs[0], at, {NAN, 0});
  const Buffers got = RunHost(c);
  ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
    const bool row = i[0] == 1 && i[1] == 2 && i[2] == 3;
    EXPECT_EQ(std::isnan(Read(got, c.node.outs[0], i).f), row);
  });
}

TEST(HostAttention, OfNothingIsZero) {
  Rng rng(6);
  AttentionSpec spec = Decode(DType::kBF16, 0, 0);
  spec.causal = false;
  const NodeCase c = MakeAttention(rng, spec);
  EXPECT_TRUE(SameResult(c, RunHost(c), RunReference(c)));
  spec.s = 65;
  spec.d = 0;
  const NodeCase mean = MakeAttention(rng, spec);
  EXPECT_TRUE(SameResult(mean, RunHost(mean), RunReference(mean)));
}

// Of every dtype, above and below all scores; a row that sees nothing gives its weight to the sink.
TEST(HostAttention, ASinkTakesItsPart) {
  Rng rng(8);
  for (DType t : FloatTypes()) {
    for (DType sink : FloatTypes()) {
      for (int64_t position : {-1, 0, 69}) {
        AttentionSpec spec = Decode(t, 70, position);
        spec.sink = true;
        spec.sink_dtype = sink;
        NodeCase c = MakeAttention(rng, spec);
        const int64_t high[] = {0, 1, 2, 0}, low[] = {1, 0, 0, 0};
        Write(c.buffers, c.node.srcs.back(), high, {300, 0});
        Write(c.buffers, c.node.srcs.back(), low, {-300, 0});
        const Buffers got = RunHost(c);
        ASSERT_TRUE(SameResult(c, got, RunReference(c)));
        if (position >= 0) continue;
        ForEachIndex(c.node.outs[0],
                     [&](const int64_t* i) { EXPECT_EQ(Read(got, c.node.outs[0], i).f, 0); });
      }
    }
  }
}

// As with a score that is one: NaN makes its row NaN and no other; -inf weighs nothing.
TEST(HostAttention, ASinkThatIsNoNumber) {
  Rng rng(9);
  AttentionSpec spec = Decode(DType::kF32, 70, 69);
  NodeCase without = MakeAttention(rng, spec);
  NodeCase c = without;
  const TensorRef sink = AddSink(rng, &c, DType::kBF16, Layout::kDense);
  ForEachIndex(
      sink, [&](const int64_t* i) { Write(c.buffers, sink, i, {i[2] == 1 ? NAN : -HUGE_VAL, 0}); });
  const Buffers got = RunHost(c), want = RunHost(without);
  ForEachIndex(c.node.outs[0], [&](const int64_t* i) {
    const double value = Read(got, c.node.outs[0], i).f;
    if (i[2] == 1) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(value, Read(want, c.node.outs[0], i).f);
    }
  });
}

TEST(HostAttention, LongCacheOnThreads) {
  Rng rng(7);
  AttentionSpec spec = Decode(DType::kBF16, 5000, 4321);
  spec.b0 = 1;
  spec.raw = DType::kF32;
  const NodeCase c = MakeAttention(rng, spec);
  const Buffers one = RunHost(c, 1);
  EXPECT_EQ(one, RunHost(c, 4));
  EXPECT_TRUE(SameResult(c, one, RunReference(c)));
}

}  // namespace
}  // namespace jaxgraph::testing
