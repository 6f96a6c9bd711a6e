// FaultInjecting: a GraphDevice for tests that hands every call to another one, except those that
// it was told to fail. A failed call does nothing, but a capture is ended all the same, so handles
// stay balanced.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "ffi/device/graph_device.h"

namespace jaxgraph {

enum class DeviceCall : uint8_t {
  kEnterDevice,
  kLaunchKernel,
  kIsCapturing,
  kCreateStream,
  kBeginCapture,
  kCaptureKernel,
  kFork,
  kJoin,
  kEndCapture,
  kInstantiate,
  kUpdate,
  kPatch,
  kLaunchGraph,
  kArenaReserve,
  kFreeMemory,
};
constexpr size_t kNumDeviceCalls = static_cast<size_t>(DeviceCall::kFreeMemory) + 1;
const char* NameOf(DeviceCall call);

class FaultInjecting final : public GraphDevice {
 public:
  explicit FaultInjecting(GraphDevice* inner) : inner_(inner) {}

  // Fails `times` calls of this kind with `code`, after letting `skip` of them pass. The faults of
  // different kinds are independent; a second order for the same kind replaces the first.
  void Fail(DeviceCall call, uint64_t skip, uint64_t times = 1, Code code = Code::kDeviceError);
  void Heal();                            // forgets all orders
  uint64_t calls(DeviceCall call) const;  // of this kind so far, failed ones included
  uint64_t failures() const;              // calls failed so far

  std::string_view name() const override { return inner_->name(); }
  int ordinal() const override { return inner_->ordinal(); }
  bool streams_are_transient() const override { return inner_->streams_are_transient(); }
  Status EnterDevice(int* previous) override;
  void LeaveDevice(int previous) override { inner_->LeaveDevice(previous); }
  Status LaunchKernel(const Launch& launch, Stream stream) override;
  Status IsCapturing(Stream stream, bool* capturing) override;
  Status CreateStream(Stream* stream) override;
  void DestroyStream(Stream stream) override { inner_->DestroyStream(stream); }
  Status BeginCapture(Stream stream) override;
  Status CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) override;
  Status Fork(Stream from, Stream to) override;
  Status Join(Stream from, Stream to) override;
  Status EndCapture(Stream stream, GraphHandle* graph) override;
  Status Instantiate(GraphHandle graph, ExecHandle* exec) override;
  Status Update(ExecHandle exec, GraphHandle graph) override;
  Status Patch(ExecHandle exec, NodeHandle node, const Launch& launch) override;
  Status LaunchGraph(ExecHandle exec, Stream stream) override;
  void DestroyGraph(GraphHandle graph) override { inner_->DestroyGraph(graph); }
  void DestroyExec(ExecHandle exec) override { inner_->DestroyExec(exec); }
  Status ArenaReserve(Stream stream, uint64_t bytes, void** base, uint64_t* capacity,
                      bool* moved) override;
  void ArenaRelease(Stream stream, void* base) override { inner_->ArenaRelease(stream, base); }
  Status FreeMemory(uint64_t* bytes) override;
  Status MakeMark(Stream stream, Mark* mark) override { return inner_->MakeMark(stream, mark); }
  Status MillisecondsBetween(Mark from, Mark to, float* ms) override {
    return inner_->MillisecondsBetween(from, to, ms);
  }
  void DestroyMark(Mark mark) override { inner_->DestroyMark(mark); }
  bool profiled() const override { return inner_->profiled(); }
  void BeginRange(const std::string& name) override { inner_->BeginRange(name); }
  void EndRange() override { inner_->EndRange(); }
  Status WriteDot(GraphHandle graph, const std::string& path) override {
    return inner_->WriteDot(graph, path);
  }
  HandleCounts live_handles() const override { return inner_->live_handles(); }

 private:
  struct Order {
    uint64_t skip = 0;
    uint64_t times = 0;
    Code code = Code::kDeviceError;
  };
  Status Count(DeviceCall call);  // counts the call, and says whether it is to fail

  GraphDevice* inner_;
  mutable std::mutex mutex_;
  std::array<Order, kNumDeviceCalls> orders_{};
  std::array<uint64_t, kNumDeviceCalls> calls_{};
  uint64_t failures_ = 0;
};

}  // namespace jaxgraph
