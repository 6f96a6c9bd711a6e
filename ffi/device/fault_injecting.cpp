#include "ffi/device/fault_injecting.h"

#include <string>

namespace jaxgraph {

const char* NameOf(DeviceCall call) {
  constexpr const char* names[kNumDeviceCalls] = {
      "EnterDevice",   "LaunchKernel", "IsCapturing", "CreateStream", "BeginCapture",
      "CaptureKernel", "Fork",         "Join",        "EndCapture",   "Instantiate",
      "Update",        "Patch",        "LaunchGraph", "ArenaReserve", "FreeMemory"};
  return names[static_cast<size_t>(call)];
}

void FaultInjecting::Fail(DeviceCall call, uint64_t skip, uint64_t times, Code code) {
  std::lock_guard lock(mutex_);
  orders_[static_cast<size_t>(call)] = {skip, times, code};
}

void FaultInjecting::Heal() {
  std::lock_guard lock(mutex_);
  orders_ = {};
}

uint64_t FaultInjecting::calls(DeviceCall call) const {
  std::lock_guard lock(mutex_);
  return calls_[static_cast<size_t>(call)];
}

uint64_t FaultInjecting::failures() const {
  std::lock_guard lock(mutex_);
  return failures_;
}

Status FaultInjecting::Count(DeviceCall call) {
  std::lock_guard lock(mutex_);
  ++calls_[static_cast<size_t>(call)];
  Order& order = orders_[static_cast<size_t>(call)];
  if (order.times == 0) return Status::Ok();
  if (order.skip > 0) {
    --order.skip;
    return Status::Ok();
  }
  --order.times;
  ++failures_;
  return Status(order.code, std::string("injected fault in ") + NameOf(call));
}

Status FaultInjecting::EnterDevice(int* previous) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kEnterDevice));
  return inner_->EnterDevice(previous);
}

Status FaultInjecting::LaunchKernel(const Launch& launch, Stream stream) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kLaunchKernel));
  return inner_->LaunchKernel(launch, stream);
}

Status FaultInjecting::IsCapturing(Stream stream, bool* capturing) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kIsCapturing));
  return inner_->IsCapturing(stream, capturing);
}

Status FaultInjecting::CreateStream(Stream* stream) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kCreateStream));
  return inner_->CreateStream(stream);
}

Status FaultInjecting::BeginCapture(Stream stream) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kBeginCapture));
  return inner_->BeginCapture(stream);
}

Status FaultInjecting::CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kCaptureKernel));
  return inner_->CaptureKernel(launch, stream, node);
}

Status FaultInjecting::Fork(Stream from, Stream to) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kFork));
  return inner_->Fork(from, to);
}

Status FaultInjecting::Join(Stream from, Stream to) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kJoin));
  return inner_->Join(from, to);
}

Status FaultInjecting::EndCapture(Stream stream, GraphHandle* graph) {
  const Status fault = Count(DeviceCall::kEndCapture);
  const Status ended = inner_->EndCapture(stream, graph);
  if (fault.ok()) return ended;
  if (*graph != nullptr) inner_->DestroyGraph(*graph);
  *graph = nullptr;
  return fault;
}

Status FaultInjecting::Instantiate(GraphHandle graph, ExecHandle* exec) {
  *exec = nullptr;
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kInstantiate));
  return inner_->Instantiate(graph, exec);
}

Status FaultInjecting::Update(ExecHandle exec, GraphHandle graph) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kUpdate));
  return inner_->Update(exec, graph);
}

Status FaultInjecting::Patch(ExecHandle exec, NodeHandle node, const Launch& launch) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kPatch));
  return inner_->Patch(exec, node, launch);
}

Status FaultInjecting::LaunchGraph(ExecHandle exec, Stream stream) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kLaunchGraph));
  return inner_->LaunchGraph(exec, stream);
}

Status FaultInjecting::ArenaReserve(Stream stream, uint64_t bytes, void** base, uint64_t* capacity,
                                    bool* moved) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kArenaReserve));
  return inner_->ArenaReserve(stream, bytes, base, capacity, moved);
}

Status FaultInjecting::FreeMemory(uint64_t* bytes) {
  JAXGRAPH_RETURN_IF_ERROR(Count(DeviceCall::kFreeMemory));
  return inner_->FreeMemory(bytes);
}

}  // namespace jaxgraph
