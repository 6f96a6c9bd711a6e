// A small "decode step" for the executor's tests: it reads a wandering operand, a steady small one,
// a large one and a donated one, which it changes in a way that shows if a node runs twice.
//
//   t0 = x * 2 + w;  t1 = t0 * 3 + big[:8];  acc = acc * 1 + t1;  t2 = acc * 1 + t0;
//   y = t2 * scale + x
// and, if asked to, t3 = x * 1 + w some times over, which makes x and w bases with many readers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/executor.h"
#include "ffi/core/placement.h"
#include "ffi/device/fault_injecting.h"
#include "ffi/device/host/host_device.h"
#include "tests/ffi/core/sample_program.h"
#include "tests/ffi/core/test_emitter.h"

namespace jaxgraph {

constexpr int kWidth = 8;
constexpr int64_t kSlice = kWidth * sizeof(float);
constexpr uint64_t kBigBytes = kMaxSlotBytes + 4;
using Values = std::array<float, kWidth>;

// Makes it what Decode would give: with an id of its own bytes.
inline std::shared_ptr<const Program> Seal(Program program) {
  program.id = HashBytes(Encode(program));
  return std::make_shared<const Program>(std::move(program));
}

inline Node Axpy(TensorRef out, TensorRef a, float k, TensorRef b) {
  return MakeNode(Op::kExpr, {out}, {a, b},
                  std::string(reinterpret_cast<const char*>(&k), sizeof k));
}

inline Program StepProgram(float scale = 0.5f, int more_readers = 0) {
  Program p;
  p.function = "step";
  p.function_id = 7;
  p.key.fill(1);
  p.arena_bytes = 4 * kSlice;
  p.options.chunk_size = 2;
  p.options.fusion = false;
  p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena"),
             MakeBase(BaseKind::kOperand, 0, kSlice, "x"),
             MakeBase(BaseKind::kOperand, 1, kSlice, "w"),
             MakeBase(BaseKind::kOperand, 2, kBigBytes, "big"),
             MakeBase(BaseKind::kOperand, 3, kSlice, "acc"),
             MakeBase(BaseKind::kResult, 0, kSlice, "result[0]"),
             MakeBase(BaseKind::kResult, 1, kSlice, "result[1]")};
  p.bases[1].hint = BaseHint::kWanders;
  p.bases[4].written = true;
  p.bases[5].alias = 3;
  const auto at = [](uint32_t base, int slice = 0) {
    return Dense(DType::kF32, base, slice * kSlice, {kWidth});
  };
  p.nodes = {Axpy(at(0, 0), at(1), 2, at(2)),    MakeNode(Op::kView, {at(0, 0)}, {at(0, 0)}),
             Axpy(at(0, 1), at(0, 0), 3, at(3)), Axpy(at(5), at(4), 1, at(0, 1)),
             Axpy(at(0, 2), at(5), 1, at(0, 0)), Axpy(at(6), at(0, 2), scale, at(1))};
  for (int i = 0; i < more_readers; ++i) p.nodes.push_back(Axpy(at(0, 3), at(1), 1, at(2)));
  return p;
}

// Adds nodes that read one base alone, into a slice of the arena that nobody reads.
inline void AddReaders(Program* program, uint32_t base, int count) {
  const TensorRef read = Dense(DType::kF32, base, 0, {kWidth});
  const TensorRef unread = Dense(DType::kF32, 0, 3 * kSlice, {kWidth});
  for (int i = 0; i < count; ++i) program->nodes.push_back(Axpy(unread, read, 1, read));
}

// What a caller of the step owns. Every Move leaves NaNs behind, so that a launch with a stale
// address shows in the values.
class StepBuffers {
 public:
  StepBuffers()
      : x_(Fresh(kSlice)),
        spare_x_(Fresh(kSlice)),
        w_(Fresh(kSlice)),
        spare_w_(Fresh(kSlice)),
        big_(Fresh(kBigBytes)),
        acc_(Fresh(kSlice)),
        spare_acc_(Fresh(kSlice)),
        y_(Fresh(kSlice)),
        spare_y_(Fresh(kSlice)) {
    Fill(w_, 10);
    Fill(big_, 20);
    Fill(acc_, 0);
  }

  void MoveX() { Move(&x_, kSlice); }
  // To the buffer it was in before the last flip.
  void FlipX() {
    Fill(x_, std::numeric_limits<float>::quiet_NaN());
    std::swap(x_, spare_x_);
  }
  void MoveW() { Move(&w_, kSlice); }
  // To the buffers they were in before the last flip, with what they hold.
  void FlipW() { Flip(&w_, &spare_w_); }
  void FlipAcc() { Flip(&acc_, &spare_acc_); }
  void FlipY() { Flip(&y_, &spare_y_); }
  void MoveBig() { Move(&big_, kBigBytes); }
  void MoveAcc() { Move(&acc_, kSlice); }
  void MoveY() { Move(&y_, kSlice); }

  std::vector<char*> Operands() const { return {x_, w_, big_, acc_}; }
  std::vector<char*> Results() const { return {acc_, y_}; }

  // Runs one step with a new x and checks every value against the definition.
  void Check(Executor* executor, const std::shared_ptr<const Program>& program, float x,
             float scale = 0.5f, Stream stream = nullptr) {
    Fill(x_, x);
    Fill(y_, std::numeric_limits<float>::quiet_NaN());
    Values acc = Read(acc_);
    Values y;
    for (int i = 0; i < kWidth; ++i) {
      const float xi = x + static_cast<float>(i);
      const float t0 = xi * 2 + Read(w_)[i];
      acc[i] = acc[i] + (t0 * 3 + Read(big_)[i]);
      y[i] = (acc[i] + t0) * scale + xi;
    }
    const Status status = executor->Execute(program, Operands(), Results(), stream);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(Read(acc_), acc);
    ASSERT_EQ(Read(y_), y);
  }

 private:
  char* Fresh(uint64_t bytes) {
    memory_.push_back(std::make_unique<char[]>(bytes + 64));
    char* p = memory_.back().get();
    return p + (64 - reinterpret_cast<uintptr_t>(p) % 64);
  }
  static void Fill(char* at, float first) {
    for (int i = 0; i < kWidth; ++i)
      reinterpret_cast<float*>(at)[i] = first + static_cast<float>(i);
  }
  static Values Read(const char* at) {
    Values v;
    std::memcpy(v.data(), at, sizeof v);
    return v;
  }
  static void Flip(char** buffer, char** spare) {
    std::memcpy(*spare, *buffer, kSlice);
    Fill(*buffer, std::numeric_limits<float>::quiet_NaN());
    std::swap(*buffer, *spare);
  }
  void Move(char** buffer, uint64_t bytes) {
    char* fresh = Fresh(bytes);
    std::memcpy(fresh, *buffer, bytes);
    std::fill_n(reinterpret_cast<float*>(*buffer), bytes / sizeof(float),
                std::numeric_limits<float>::quiet_NaN());
    *buffer = fresh;
  }

  std::vector<std::unique_ptr<char[]>> memory_;
  char *x_, *spare_x_, *w_, *spare_w_, *big_, *acc_, *spare_acc_, *y_, *spare_y_;
};

// A device, whose handles must be balanced in the end, and an executor on it.
struct Machine {
  explicit Machine(ByAlignment by_alignment = ByAlignment::kNothing) : emitter(by_alignment) {
    executor = std::make_unique<Executor>(&device, &emitter);
  }
  ~Machine() {
    executor.reset();
    const HandleCounts live = host.live_handles();
    EXPECT_EQ(live.graphs, 0);
    EXPECT_EQ(live.execs, 0);
    EXPECT_EQ(live.arenas, 0);
    EXPECT_EQ(live.streams, 0);
    EXPECT_EQ(host.misuses(), 0);
  }
  Counters Stats() const { return executor->Stats(7); }

  HostDevice host;
  FaultInjecting device{&host};
  TestEmitter emitter;
  std::unique_ptr<Executor> executor;
};

// Whether one of the events says so.
inline bool Logged(const Executor& executor, const std::string& what, const std::string& why = "") {
  for (const Event& event : executor.Events(0)) {
    if (event.what == what && event.why.find(why) != std::string::npos) return true;
  }
  return false;
}

}  // namespace jaxgraph
