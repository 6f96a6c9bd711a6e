// Random programs with many small operands and results, which move, rest, come back and are empty
// in turns, so that they go into slots and out of them in every kind of run: each value arrives
// where the call asks for it, once, and nowhere else.
#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <random>
#include <string>

#include "ffi/device/host/serial_for.h"
#include "tests/ffi/core/allocations.h"
#include "tests/ffi/core/step.h"

namespace jaxgraph {
namespace {

constexpr float kPoison = -12345;  // in buffers that no call gives any more, and around the others
constexpr int kGuard = 4;          // floats before and behind a buffer

// The grid says how much there is to do, as on CUDA: other slots are another configuration.
class SizedEmitter final : public Emitter {
 public:
  explicit SizedEmitter(ByAlignment by_alignment) : inner_(by_alignment) {}
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    return inner_.Emit(nodes, first, fusion, launches, covered);
  }
  Status EmitSlotFill(const SlotFill& fill, Launch* launch) const override {
    EXPECT_LE(std::max(fill.num_copies, fill.num_addresses), kMaxSlots);
    return inner_.EmitSlotFill(fill, launch);
  }
  Status EmitSlotDrain(const SlotDrain& drain, Launch* launch) const override {
    EXPECT_LE(drain.num_sources, kMaxSlots);
    launch->grid[1] = static_cast<uint32_t>(std::max<uint64_t>(drain.num_sources, 1));
    return inner_.EmitSlotDrain(drain, launch);
  }
  bool Capturable(const Node& node) const override { return inner_.Capturable(node); }

 private:
  const TestEmitter inner_;
};

// Floats with poison around them.
class Guarded {
 public:
  explicit Guarded(int floats, int shift = 0)
      : memory_(static_cast<size_t>(floats + 2 * kGuard + 32), kPoison), floats_(floats) {
    const uintptr_t past = reinterpret_cast<uintptr_t>(memory_.data() + kGuard) % 64 / 4;
    first_ = kGuard + (16 - static_cast<int>(past)) % 16 + shift;
  }
  float* data() { return memory_.data() + first_; }
  char* address() { return reinterpret_cast<char*>(data()); }
  int floats() const { return floats_; }
  void Poison() { std::fill(memory_.begin(), memory_.end(), kPoison); }
  bool IsPoisonAround() const {
    return CountPoison(0, first_) && CountPoison(first_ + floats_, Size());
  }
  bool IsPoison() const { return CountPoison(0, Size()); }

 private:
  int Size() const { return static_cast<int>(memory_.size()); }
  bool CountPoison(int from, int to) const {
    return std::all_of(memory_.begin() + from, memory_.begin() + to,
                       [](float f) { return f == kPoison; });
  }
  std::vector<float> memory_;
  int floats_;
  int first_;
};

// How a base behaves for some calls.
enum class Habit { kRests, kMoves, kFlips, kSeldom };

struct BaseState {
  int floats = 0;
  int alias = -1;  // a result: of this operand
  Habit habit = Habit::kRests;
  std::unique_ptr<Guarded> now, spare;
};

// One program, and what a caller has.
class Game {
 public:
  explicit Game(uint32_t seed) : random_(seed) {
    const bool many = Odds(0.3);
    const int operands = Int(1, many ? 40 : 6), results = Int(1, many ? 40 : 6);
    Program p;
    p.function_id = 7;
    p.key.fill(static_cast<uint8_t>(seed % 2));
    p.options.chunk_size = std::array{0u, 1u, 2u, 3u, 7u}[Int(0, 4)];
    p.options.fusion = Odds(0.4);
    p.options.concurrency = Odds(0.7);
    p.options.update_depth = static_cast<UpdateDepth>(Odds(0.6) ? 0 : Int(1, 2));
    p.options.warmup_calls = static_cast<uint32_t>(Int(1, 3));
    p.options.max_variants = static_cast<uint32_t>(Int(1, 3));
    p.options.max_failures = 1 << 20;
    p.options.rewarm_on_address_change = Odds(0.1);
    if (Odds(0.1)) p.options.max_executables = static_cast<uint32_t>(Int(1, 4));
    p.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena")};
    for (int i = 0; i < operands + results; ++i) {
      const bool result = i >= operands;
      BaseState& base = bases_.emplace_back();
      base.floats = i == 0 ? kMost : std::array{0, 1, 3, 8, 65, kMost}[Int(result ? 0 : 1, 5)];
      p.bases.push_back(MakeBase(result ? BaseKind::kResult : BaseKind::kOperand,
                                 static_cast<uint32_t>(result ? i - operands : i), 0, "base"));
      if (Odds(0.5)) p.bases.back().hint = BaseHint::kWanders;
    }
    for (int r = operands; r < operands + results; ++r) {
      const int operand = Int(0, operands - 1);
      if (!Odds(0.2) || p.bases[1 + operand].written) continue;
      bases_[r].alias = operand;
      bases_[r].floats = bases_[operand].floats;
      p.bases[1 + r].alias = operand;
      p.bases[1 + operand].written = true;
    }
    for (size_t b = 0; b < bases_.size(); ++b) {
      p.bases[1 + b].nbytes = static_cast<uint64_t>(bases_[b].floats) * sizeof(float);
    }
    // Too large for a slot; what is behind its first floats nobody touches.
    if (Odds(0.1) && bases_.back().alias < 0) p.bases.back().nbytes = kBigBytes;
    num_operands_ = operands;
    AddNodes(&p);
    program_ = Seal(std::move(p));
    for (BaseState& base : bases_) {
      if (base.alias >= 0) continue;
      base.now = Fresh(base.floats);
      base.spare = Fresh(base.floats);
      for (int i = 0; i < base.floats; ++i) base.now->data()[i] = static_cast<float>(Int(-8, 8));
    }
  }

  // `fails_at`: which of the call's allocations fails; 0: none. True if the call did what it
  // should; else it was refused, and the caller starts the step again.
  bool Call(Executor* executor, uint64_t fails_at = 0, bool may_fail = false) {
    bool done = false;
    TryCall(executor, fails_at, may_fail, &done);
    return done;
  }
  void TryCall(Executor* executor, uint64_t fails_at, bool may_fail, bool* done) {
    if (Odds(0.03)) NewHabits();
    for (BaseState& base : bases_) Behave(&base);
    std::vector<char*> operands, results;
    for (size_t b = 0; b < bases_.size(); ++b) {
      Guarded* buffer = BufferOf(b);
      (static_cast<int>(b) < num_operands_ ? operands : results).push_back(buffer->address());
    }
    for (size_t b = static_cast<size_t>(num_operands_); b < bases_.size(); ++b) {
      if (bases_[b].alias < 0) bases_[b].now->Poison();
    }
    const std::vector<std::vector<float>> expected = Expected();
    std::vector<std::vector<float>> before;
    for (int o = 0; o < num_operands_; ++o) {
      before.emplace_back(bases_[o].now->data(), bases_[o].now->data() + bases_[o].floats);
    }
    Status status;
    failing_allocation = fails_at;
    try {
      status = executor->Execute(program_, operands, results, nullptr);
    } catch (const std::bad_alloc&) {
      status = Status(Code::kOutOfMemory, "thrown");
    }
    failing_allocation = 0;
    *done = status.ok();
    ASSERT_TRUE(*done || may_fail) << status.message();
    for (int o = 0; !*done && o < num_operands_; ++o) {
      std::copy(before[o].begin(), before[o].end(), bases_[o].now->data());
    }
    for (size_t b = 0; b < bases_.size(); ++b) {
      Guarded* buffer = BufferOf(b);
      ASSERT_TRUE(buffer->IsPoisonAround()) << b;
      if (!*done) continue;
      for (int i = 0; i < bases_[b].floats; ++i) {
        ASSERT_EQ(buffer->data()[i], expected[b][i]) << "base " << b + 1 << ", element " << i;
      }
      ASSERT_TRUE(bases_[b].spare == nullptr || bases_[b].spare->IsPoison()) << b;
    }
    for (const auto& buffer : given_up_) ASSERT_TRUE(buffer->IsPoison());
  }

 private:
  static constexpr int kMost = 100;

  struct Step {
    int out, a, b;  // values: bases by number, then intermediates
    float k;
    int floats;
  };

  bool Odds(double odds) { return std::uniform_real_distribution<>(0, 1)(random_) < odds; }
  int Int(int least, int most) { return std::uniform_int_distribution<>(least, most)(random_); }

  std::unique_ptr<Guarded> Fresh(int floats) {
    return std::make_unique<Guarded>(floats, Odds(0.2) ? Int(1, 15) : 0);
  }
  Guarded* BufferOf(size_t b) {
    return (bases_[b].alias >= 0 ? bases_[static_cast<size_t>(bases_[b].alias)] : bases_[b])
        .now.get();
  }

  // Every result is written from operands and intermediates, donated operands in place, and some
  // are read again; here and there branches part.
  void AddNodes(Program* p) {
    std::vector<int> order;
    for (size_t b = static_cast<size_t>(num_operands_); b < bases_.size(); ++b) {
      order.push_back(static_cast<int>(b));
    }
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<int> readable;  // values of kMost floats
    for (int o = 0; o < num_operands_; ++o) {
      if (bases_[o].floats == kMost && !p->bases[1 + o].written) readable.push_back(o);
    }
    uint32_t regions = 0;
    const auto ref = [&](int value, int floats) {
      const bool base = value < static_cast<int>(bases_.size());
      const int slice = base ? 0 : value - static_cast<int>(bases_.size());
      return Dense(DType::kF32, base ? static_cast<uint32_t>(1 + value) : 0, slice * 512, {floats});
    };
    const auto add = [&](const Step& s, uint32_t region, uint32_t branch) {
      steps_.push_back(s);
      Node node = Axpy(ref(s.out, s.floats), ref(s.a, s.floats), s.k, ref(s.b, s.floats));
      node.region = region;
      node.branch = branch;
      p->nodes.push_back(std::move(node));
    };
    const auto intermediate = [&] { return static_cast<int>(bases_.size()) + num_slices_++; };
    // A first value that is there in any case.
    const int first = intermediate();
    add({first, 0, 0, 0.5f, kMost}, 0, 0);  // operand 0, before anybody writes it
    readable.push_back(first);
    for (size_t at = 0; at < order.size();) {
      const bool part = Odds(0.2) && at + 2 <= order.size();
      const uint32_t region = part ? ++regions : 0;
      const size_t count = part ? std::min<size_t>(order.size() - at, Int(2, 4)) : 1;
      std::vector<int> made;
      for (size_t branch = 0; branch < count; ++branch, ++at) {
        const int r = order[at];
        const int floats = bases_[r].floats;
        int from = Pick(readable);
        if (Odds(0.5)) {
          const int t = intermediate();
          add({t, from, Pick(readable), 1, kMost}, region, static_cast<uint32_t>(branch));
          made.push_back(from = t);
        }
        const int a = bases_[r].alias >= 0 ? bases_[r].alias : Pick(readable);
        add({r, a, from, 0.5f, floats}, region, static_cast<uint32_t>(branch));
        if (floats == kMost) made.push_back(r);
      }
      readable.insert(readable.end(), made.begin(), made.end());
      if (Odds(0.2)) p->nodes.push_back(MakeNode(Op::kView, {ref(first, 4)}, {ref(first, 4)}));
    }
    const int readers = Odds(0.6) ? Int(0, 60) : 0;
    for (int i = 0; i < readers; ++i) {
      add({intermediate(), Pick(readable), Pick(readable), 1, kMost}, 0, 0);
    }
    p->arena_bytes = static_cast<uint64_t>(num_slices_) * 512;
  }
  int Pick(const std::vector<int>& from) { return from[Int(0, static_cast<int>(from.size()) - 1)]; }

  std::vector<std::vector<float>> Expected() {
    std::vector<std::vector<float>> values;
    for (size_t b = 0; b < bases_.size(); ++b) {
      Guarded* buffer = BufferOf(b);
      values.emplace_back(buffer->data(), buffer->data() + bases_[b].floats);
    }
    values.resize(values.size() + num_slices_, std::vector<float>(kMost));
    for (const Step& s : steps_) {
      for (int i = 0; i < s.floats; ++i) values[s.out][i] = values[s.a][i] * s.k + values[s.b][i];
    }
    for (size_t b = 0; b < bases_.size(); ++b) {
      if (bases_[b].alias >= 0) values[static_cast<size_t>(bases_[b].alias)] = values[b];
    }
    return values;
  }

  void NewHabits() {
    for (BaseState& base : bases_) base.habit = static_cast<Habit>(Odds(0.5) ? 0 : Int(0, 3));
  }
  void Behave(BaseState* base) {
    if (base->alias >= 0) return;
    const bool moves = base->habit == Habit::kMoves || base->habit == Habit::kFlips ||
                       (base->habit == Habit::kSeldom && Odds(0.1));
    if (!moves) return;
    std::unique_ptr<Guarded> next =
        base->habit == Habit::kFlips ? std::move(base->spare) : Fresh(base->floats);
    std::copy_n(base->now->data(), base->floats, next->data());
    base->now->Poison();
    if (base->habit == Habit::kFlips) {
      base->spare = std::move(base->now);
    } else {
      given_up_.push_back(std::move(base->now));
      if (given_up_.size() > 40) given_up_.pop_front();
    }
    base->now = std::move(next);
  }

  std::mt19937 random_;
  std::vector<BaseState> bases_;  // without the arena
  int num_operands_ = 0;
  int num_slices_ = 0;
  std::vector<Step> steps_;
  std::shared_ptr<const Program> program_;
  std::deque<std::unique_ptr<Guarded>> given_up_;
};

// JAXGRAPH_TEST_CASES sets how many random games are played.
int NumGames(int otherwise) {
  const char* text = std::getenv("JAXGRAPH_TEST_CASES");
  return text != nullptr ? std::atoi(text) : otherwise;
}

// Two programs on one executor, that take turns.
class Games {
 public:
  explicit Games(uint32_t seed)
      : random_(seed),
        emitter_(static_cast<ByAlignment>(random_() % 4)),
        executor_(std::make_unique<Executor>(&device_, &emitter_, [this] { return now_ += 1e-3; })),
        games_{Game(random_()), Game(random_())} {}

  // Nothing may be left of the executor.
  void Close() {
    executor_.reset();
    const HandleCounts live = host_.live_handles();
    EXPECT_EQ(live.graphs + live.execs + live.arenas + live.streams, 0);
    EXPECT_EQ(host_.misuses(), 0);
  }

  // One call of a program, with what may come between two. True if it was not refused.
  bool Call(uint64_t fails_at = 0, bool may_fail = false) {
    if (Once(40)) present_ = 1 - present_;
    if (Once(200)) executor_->Clear(7);
    if (Once(100)) (void)executor_->Reserve(Extent() + 1);  // moves the arena
    host_.Shuffle(Once(3) ? random_() : 0);
    const bool done = games_[present_].Call(executor_.get(), fails_at, may_fail);
    for (const VariantDescription& variant : executor_->Variants(7)) {
      for (const BaseDescription& base : variant.bases) {
        drained_ += done && base.place == Place::kSlot && base.kind == BaseKind::kResult;
      }
    }
    return done;
  }

  // One in so many times.
  bool Once(uint32_t in) { return random_() % in == 0; }
  uint32_t Any(uint32_t below) { return random_() % below; }
  FaultInjecting& device() { return device_; }
  uint64_t drained() const { return drained_; }  // results in slots, of all calls

 private:
  uint64_t Extent() const {
    const std::vector<ArenaExtent> arenas = executor_->Arenas();
    return arenas.empty() ? 0 : arenas[0].capacity;
  }

  std::mt19937 random_;
  HostDevice host_;
  FaultInjecting device_{&host_};
  const SizedEmitter emitter_;
  double now_ = 0;
  std::unique_ptr<Executor> executor_;
  Game games_[2];
  int present_ = 0;
  uint64_t drained_ = 0;
};

TEST(ExecutorSlots, EveryValueArrivesWhereTheCallAsksForIt) {
  constexpr DeviceCall kSurvived[] = {
      DeviceCall::kIsCapturing,  DeviceCall::kBeginCapture, DeviceCall::kCaptureKernel,
      DeviceCall::kEndCapture,   DeviceCall::kInstantiate,  DeviceCall::kUpdate,
      DeviceCall::kPatch,        DeviceCall::kLaunchGraph,  DeviceCall::kFork,
      DeviceCall::kCreateStream, DeviceCall::kFreeMemory};
  uint64_t drained = 0, failures = 0;
  for (int seed = 0; seed < NumGames(60); ++seed) {
    Games games(static_cast<uint32_t>(seed));
    for (int call = 0; call < 600; ++call) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", call " + std::to_string(call));
      if (seed % 2 == 0 && games.Once(12)) {
        games.device().Fail(kSurvived[games.Any(std::size(kSurvived))], games.Any(6),
                            1 + games.Any(2));
      }
      games.Call();
      if (HasFatalFailure()) return;
    }
    drained += games.drained();
    failures += games.device().failures();
    games.Close();
  }
  EXPECT_GT(drained, 0u);
  EXPECT_GT(failures, 0u);
}

// A call that ends in an error, or in an exception, has moved bases, changed places and half
// changed a recording; the calls behind it find nothing of that.
TEST(ExecutorSlots, CallsThatAreRefusedLeaveNothingStale) {
  constexpr DeviceCall kFatal[] = {DeviceCall::kArenaReserve, DeviceCall::kJoin,
                                   DeviceCall::kLaunchKernel, DeviceCall::kLaunchKernel};
  uint64_t drained = 0, refused = 0;
  for (int seed = 0; seed < NumGames(60); ++seed) {
    Games games(1000 + static_cast<uint32_t>(seed));
    for (int call = 0; call < 600; ++call) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", call " + std::to_string(call));
      uint64_t fails_at = 0;
      if (games.Once(12)) fails_at = 1 + games.Any(250);
      if (games.Once(24)) games.device().Fail(kFatal[games.Any(std::size(kFatal))], games.Any(4));
      refused += !games.Call(fails_at, /*may_fail=*/true);
      if (HasFatalFailure()) return;
    }
    drained += games.drained();
    games.Close();
  }
  EXPECT_GT(drained, 0u);
  EXPECT_GT(refused, 0u);
}

// --- calls in flight ---------------------------------------------------------------------------

struct Deferred {
  const KernelInfo* kernel;
  std::string params;
};
std::deque<Deferred>* queue = nullptr;  // of the stream that is called

const KernelInfo* originals[8] = {};

// Puts the launch into the queue, with the parameters that it has now.
template <int I>
void Defer(const void* params, ParallelFor&) {
  queue->push_back({originals[I], {static_cast<const char*>(params), originals[I]->param_bytes}});
}

// As on a GPU: a launch returns at once, and runs later, in the order of its stream.
class DeferringEmitter final : public Emitter {
 public:
  Status Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
              std::vector<Launch>* launches, size_t* covered) const override {
    JAXGRAPH_RETURN_IF_ERROR(inner_.Emit(nodes, first, fusion, launches, covered));
    return Deferring(&launches->back());
  }
  Status EmitSlotFill(const SlotFill& fill, Launch* launch) const override {
    JAXGRAPH_RETURN_IF_ERROR(inner_.EmitSlotFill(fill, launch));
    return Deferring(launch);
  }
  Status EmitSlotDrain(const SlotDrain& drain, Launch* launch) const override {
    JAXGRAPH_RETURN_IF_ERROR(inner_.EmitSlotDrain(drain, launch));
    return Deferring(launch);
  }
  bool Capturable(const Node& node) const override { return inner_.Capturable(node); }

 private:
  static Status Deferring(Launch* launch) {
    static KernelInfo twins[] = {{"0", 0, Defer<0>}, {"1", 0, Defer<1>}, {"2", 0, Defer<2>},
                                 {"3", 0, Defer<3>}, {"4", 0, Defer<4>}, {"5", 0, Defer<5>},
                                 {"6", 0, Defer<6>}, {"7", 0, Defer<7>}};
    for (size_t i = 0; i < std::size(twins); ++i) {
      if (originals[i] == nullptr) originals[i] = launch->kernel;
      if (originals[i] != launch->kernel) continue;
      twins[i].param_bytes = launch->kernel->param_bytes;
      launch->kernel = &twins[i];
      return Status::Ok();
    }
    return Status(Code::kInternal, "more kernels than twins");
  }
  const TestEmitter inner_;
};

// Calls on two streams, whose launches run later, in any order that streams allow. y_i = x_i * i +
// x_i, for more results than one launch drains, all of which move in some calls and rest in others.
TEST(ExecutorSlots, CallsInFlightKeepTheirAddresses) {
  class Asynchronous final : public HostDevice {
   public:
    bool streams_are_transient() const override { return false; }
  };
  constexpr uint32_t kCount = kMaxSlots + 3;
  Program program;
  program.function_id = 7;
  program.options.fusion = false;
  program.options.chunk_size = 5;
  program.bases = {MakeBase(BaseKind::kArena, 0, 0, "arena")};
  for (BaseKind kind : {BaseKind::kOperand, BaseKind::kResult}) {
    for (uint32_t i = 0; i < kCount; ++i)
      program.bases.push_back(MakeBase(kind, i, kSlice, "base"));
  }
  for (uint32_t i = 0; i < kCount; ++i) {
    const TensorRef x = Dense(DType::kF32, 1 + i, 0, {kWidth});
    const TensorRef y = Dense(DType::kF32, 1 + kCount + i, 0, {kWidth});
    program.nodes.push_back(Axpy(y, x, static_cast<float>(i), x));
  }
  const auto sealed = Seal(program);
  Asynchronous device;
  const DeferringEmitter emitter;
  Executor executor(&device, &emitter);
  Stream streams[2];
  for (Stream& stream : streams) ASSERT_TRUE(device.CreateStream(&stream).ok());

  std::mt19937 random(3);
  using Buffers = std::array<Values, kCount>;
  std::deque<Buffers> xs, ys;  // of the calls in flight
  std::deque<Deferred> queues[2];
  SerialFor pool;
  uint64_t most = 0;
  for (int call = 0; call < 4000; ++call) {
    xs.emplace_back();
    ys.emplace_back();
    std::vector<char*> operands, results;
    for (uint32_t i = 0; i < kCount; ++i) {
      xs.back()[i].fill(static_cast<float>(call % 1000 + static_cast<int>(i)));
      ys.back()[i].fill(kPoison);
      operands.push_back(reinterpret_cast<char*>(&xs.back()[i]));
      results.push_back(reinterpret_cast<char*>(&ys.back()[(i + call / 50) % kCount]));
    }
    const size_t at = random() % 2;
    queue = &queues[at];
    ASSERT_TRUE(executor.Execute(sealed, operands, results, streams[at]).ok());
    ASSERT_EQ(ys.back()[0][0], kPoison) << "nothing has run yet";
    // For some hundred calls each is waited for, so that buffers come back and bases rest.
    if (call / 400 % 2 == 0 && random() % 8 != 0) continue;
    most = std::max<uint64_t>(most, ys.size());
    while (!queues[0].empty() || !queues[1].empty()) {
      std::deque<Deferred>& next = queues[queues[0].empty()   ? 1
                                          : queues[1].empty() ? 0
                                                              : random() % 2];
      next.front().kernel->host_function(next.front().params.data(), pool);
      next.pop_front();
    }
    for (size_t c = 0; c < ys.size(); ++c) {
      const int number = call + 1 - static_cast<int>(ys.size() - c);
      for (uint32_t i = 0; i < kCount; ++i) {
        const float x = static_cast<float>(number % 1000 + static_cast<int>(i));
        ASSERT_EQ(ys[c][(i + number / 50) % kCount][kWidth - 1], x * static_cast<float>(i) + x)
            << "call " << number << ", result " << i;
      }
    }
    xs.clear();
    ys.clear();
  }
  EXPECT_GT(most, 8u);
  const Counters c = executor.Stats(7);
  EXPECT_EQ(c.failures, 0u);
  EXPECT_EQ(c.eager, 2u);  // one a stream
  EXPECT_GT(c.replays, 3900u);
  EXPECT_TRUE(Logged(executor, "placement", "copied out at the graph's end"));
  EXPECT_TRUE(Logged(executor, "placement", "came to rest"));
  for (Stream stream : streams) device.DestroyStream(stream);
}

}  // namespace
}  // namespace jaxgraph
