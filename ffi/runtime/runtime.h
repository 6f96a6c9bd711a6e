// Runtime: the process's executors, one a device, made when a device is first used.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/executor.h"
#include "ffi/core/status.h"
#include "ffi/core/trace.h"
#include "ffi/device/graph_device.h"
#include "ffi/runtime/export.h"

namespace jaxgraph {

enum class Platform { kHost = 0, kCuda = 1 };

// Everything of one device. Lives until the process ends.
struct DeviceRuntime {
  std::unique_ptr<GraphDevice> device;
  const Emitter* emitter = nullptr;
  std::unique_ptr<Executor> executor;
};

struct DeviceExecution {
  const GraphDevice* device = nullptr;
  Execution execution;
};

struct DeviceVariant {
  const GraphDevice* device = nullptr;
  VariantDescription variant;
};

class JAXGRAPH_EXPORT Runtime {
 public:
  static Runtime& Get();

  // The device's runtime, made on first use. Never invalidated.
  Status ForDevice(Platform platform, int ordinal, DeviceRuntime** device);

  // Over all devices; function_id 0 means all functions. See Executor.
  Counters Stats(uint64_t function_id);
  std::vector<Event> Events(uint64_t function_id, uint64_t after);
  std::vector<DeviceExecution> Executions(uint64_t function_id);
  std::vector<DeviceVariant> Variants(uint64_t function_id);
  // One trace at a time in the process: false, if there is one. `dropped`: spans that were too
  // many.
  bool BeginTrace();
  std::vector<TraceSpan> EndTrace(uint64_t* dropped);
  // See Executor.
  Status WriteGraphs(uint64_t function_id, const std::string& folder,
                     std::vector<std::string>* files);
  void Clear(uint64_t function_id);
  void ResetStats(uint64_t function_id);
  Status Reserve(Platform platform, int ordinal, uint64_t bytes);
  Status Preview(Platform platform, int ordinal, const Program& program,
                 VariantDescription* description);

 private:
  std::vector<DeviceRuntime*> Devices();

  std::mutex mutex_;  // guards the map, not what its values point to
  std::map<std::pair<Platform, int>, std::unique_ptr<DeviceRuntime>> devices_;
};

// Number of the newest event in the process's executors; 0: none yet. Takes no lock.
JAXGRAPH_EXPORT uint64_t LastEvent();

// What this library was built with.
struct BuildInfo {
  bool cuda = false;     // CUDA kernels are compiled in
  int cuda_runtime = 0;  // CUDART_VERSION, e.g. 13000
  std::string cuda_architectures;
  std::string compiler;
};
JAXGRAPH_EXPORT BuildInfo GetBuildInfo();

// Where the library that compiles CUDA kernels at run time (NVRTC) is looked for first. Counts
// until it is first needed.
JAXGRAPH_EXPORT void SetCompilerFolders(std::vector<std::string> folders);
// Whether kernels are compiled at run time, what has been so far, or why not: one line.
JAXGRAPH_EXPORT std::string DescribeCompiler();

}  // namespace jaxgraph
