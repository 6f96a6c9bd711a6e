#include "ffi/runtime/runtime.h"

#include <algorithm>
#include <utility>

#include "ffi/device/host/host_device.h"
#include "ffi/kernels/host/host_emitter.h"

#ifdef JAXGRAPH_WITH_CUDA
#include <cuda_runtime_api.h>

#include "ffi/device/cuda/cuda_device.h"
#include "ffi/kernels/cuda/cuda_emitter.h"
#include "ffi/kernels/cuda/jit/jit.h"
#include "ffi/kernels/cuda/jit/nvrtc.h"
#endif

namespace jaxgraph {
namespace {

Status MakeDevice(Platform platform, int ordinal, std::unique_ptr<DeviceRuntime>* out) {
  auto made = std::make_unique<DeviceRuntime>();
  if (platform == Platform::kHost) {
    made->device = std::make_unique<HostDevice>(ordinal);
    made->emitter = &HostEmitter();
  } else {
#ifdef JAXGRAPH_WITH_CUDA
    made->device = MakeCudaDevice(ordinal);
    made->emitter = &CudaEmitter();
#else
    return Status(Code::kUnsupported, "this build of jaxgraph has no CUDA device");
#endif
  }
  made->executor = std::make_unique<Executor>(made->device.get(), made->emitter);
  *out = std::move(made);
  return Status::Ok();
}

}  // namespace

Runtime& Runtime::Get() {
  // Never destroyed: XLA may run or destroy executables after the destructors of statics.
  static Runtime* runtime = new Runtime;
  return *runtime;
}

Status Runtime::ForDevice(Platform platform, int ordinal, DeviceRuntime** device) {
  // Making a device under the lock keeps two first calls from making it twice.
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<DeviceRuntime>& slot = devices_[{platform, ordinal}];
  if (slot == nullptr) JAXGRAPH_RETURN_IF_ERROR(MakeDevice(platform, ordinal, &slot));
  *device = slot.get();
  return Status::Ok();
}

std::vector<DeviceRuntime*> Runtime::Devices() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<DeviceRuntime*> devices;
  for (const auto& entry : devices_) {
    if (entry.second != nullptr) devices.push_back(entry.second.get());
  }
  return devices;
}

Counters Runtime::Stats(uint64_t function_id) {
  Counters sum;
  for (DeviceRuntime* device : Devices()) sum.Add(device->executor->Stats(function_id));
  return sum;
}

std::vector<Event> Runtime::Events(uint64_t function_id, uint64_t after) {
  std::vector<Event> all;
  for (DeviceRuntime* device : Devices()) {
    std::vector<Event> events = device->executor->Events(function_id, after);
    all.insert(all.end(), std::make_move_iterator(events.begin()),
               std::make_move_iterator(events.end()));
  }
  std::sort(all.begin(), all.end(),
            [](const Event& a, const Event& b) { return a.sequence < b.sequence; });
  return all;
}

std::vector<DeviceExecution> Runtime::Executions(uint64_t function_id) {
  std::vector<DeviceExecution> all;
  for (DeviceRuntime* device : Devices()) {
    for (const Execution& execution : device->executor->Executions(function_id)) {
      all.push_back({device->device.get(), execution});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const DeviceExecution& a, const DeviceExecution& b) {
    return a.execution.start_s < b.execution.start_s;
  });
  return all;
}

bool Runtime::BeginTrace() { return Trace::Begin(); }

std::vector<TraceSpan> Runtime::EndTrace(uint64_t* dropped) {
  for (DeviceRuntime* device : Devices()) device->executor->FlushTrace();
  return Trace::End(dropped);
}

Status Runtime::WriteGraphs(uint64_t function_id, const std::string& folder,
                            std::vector<std::string>* files) {
  for (DeviceRuntime* device : Devices()) {
    JAXGRAPH_RETURN_IF_ERROR(device->executor->WriteGraphs(function_id, folder, files));
  }
  return Status::Ok();
}

void Runtime::ResetStats(uint64_t function_id) {
  for (DeviceRuntime* device : Devices()) device->executor->ResetStats(function_id);
}

std::vector<DeviceVariant> Runtime::Variants(uint64_t function_id) {
  std::vector<DeviceVariant> all;
  for (DeviceRuntime* device : Devices()) {
    for (VariantDescription& variant : device->executor->Variants(function_id)) {
      all.push_back({device->device.get(), std::move(variant)});
    }
  }
  return all;
}

void Runtime::Clear(uint64_t function_id) {
  for (DeviceRuntime* device : Devices()) device->executor->Clear(function_id);
}

Status Runtime::Reserve(Platform platform, int ordinal, uint64_t bytes) {
  DeviceRuntime* device = nullptr;
  JAXGRAPH_RETURN_IF_ERROR(ForDevice(platform, ordinal, &device));
  return device->executor->Reserve(bytes);
}

Status Runtime::Preview(Platform platform, int ordinal, const Program& program,
                        VariantDescription* description) {
  DeviceRuntime* device = nullptr;
  JAXGRAPH_RETURN_IF_ERROR(ForDevice(platform, ordinal, &device));
  return device->executor->Preview(program, description);
}

uint64_t LastEvent() { return LastSequence(); }

BuildInfo GetBuildInfo() {
  BuildInfo info;
#ifdef JAXGRAPH_WITH_CUDA
  info.cuda = true;
  info.cuda_runtime = CUDART_VERSION;
  info.cuda_architectures = JAXGRAPH_CUDA_ARCHITECTURES;
#endif
  info.compiler = __VERSION__;
  return info;
}

#ifdef JAXGRAPH_WITH_CUDA
void SetCompilerFolders(std::vector<std::string> folders) { SetNvrtcFolders(std::move(folders)); }
std::string DescribeCompiler() { return Jit::Describe(); }
#else
void SetCompilerFolders(std::vector<std::string>) {}
std::string DescribeCompiler() { return "off: this build has no CUDA device"; }
#endif

}  // namespace jaxgraph
