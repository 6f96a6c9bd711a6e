#include "ffi/device/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "ffi/device/cuda/cuda_arena.h"
#include "ffi/device/cuda/cuda_error.h"
#include "ffi/device/cuda/profiler.h"

namespace jaxgraph {
namespace {

cudaStream_t AsStream(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaGraph_t AsGraph(GraphHandle graph) { return static_cast<cudaGraph_t>(graph); }
cudaGraphExec_t AsExec(ExecHandle exec) { return static_cast<cudaGraphExec_t>(exec); }
cudaEvent_t AsEvent(Mark mark) { return static_cast<cudaEvent_t>(mark); }
dim3 AsDim3(const uint32_t (&d)[3]) { return dim3(d[0], d[1], d[2]); }

// While somebody captures on this thread, allocating could invalidate that capture; in relaxed mode
// it may not. The mode is a property of the thread and is put back.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { IgnoreCudaError(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCaptureMode() { IgnoreCudaError(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class OwnedEvent {
 public:
  OwnedEvent() = default;
  ~OwnedEvent() {
    // An event may be destroyed while work still waits for it.
    if (event_ != nullptr) IgnoreCudaError(cudaEventDestroy(event_));
  }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  Status Create() {
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    return Status::Ok();
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Dynamic shared memory beyond this, and clusters beyond that, are granted to a kernel on demand. A
// block has 48 KiB without a grant, and the kernel's static shared memory is part of them.
constexpr uint32_t kPlainSharedBytes = 16 * 1024;
constexpr uint32_t kPortableCluster = 8;

class CudaDevice final : public GraphDevice {
 public:
  CudaDevice(int ordinal, CudaArenaKind arena_kind) : ordinal_(ordinal), arena_kind_(arena_kind) {}

  std::string_view name() const override { return "cuda"; }
  int ordinal() const override { return ordinal_; }

  Status EnterDevice(int* previous) override {
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaGetDevice(previous));
    if (*previous != ordinal_) JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaSetDevice(ordinal_));
    return Status::Ok();
  }

  void LeaveDevice(int previous) override {
    if (previous != ordinal_) IgnoreCudaError(cudaSetDevice(previous));
  }

  Status LaunchKernel(const Launch& launch, Stream stream) override {
    JAXGRAPH_RETURN_IF_ERROR(Prepare(launch));
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = AsDim3(launch.grid);
    config.blockDim = AsDim3(launch.block);
    config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = AsStream(stream);
    config.attrs = attributes;
    if (launch.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = launch.cluster;
      attribute.val.clusterDim.y = 1;
      attribute.val.clusterDim.z = 1;
    }
    if (launch.dependent) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    void* params[] = {const_cast<char*>(launch.params.data())};
    const cudaError_t error = cudaLaunchKernelExC(&config, launch.kernel->cuda_function, params);
    if (error == cudaSuccess) return Status::Ok();
    Status status = CudaStatus(error, "cudaLaunchKernelExC");
    return Status(status.code(), std::string(launch.kernel->name) + ": " + status.message());
  }

  Status IsCapturing(Stream stream, bool* capturing) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamIsCapturing(AsStream(stream), &status));
    *capturing = status != cudaStreamCaptureStatusNone;
    return Status::Ok();
  }

  Status CreateStream(Stream* stream) override {
    cudaStream_t made = nullptr;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    ++streams_;
    *stream = made;
    return Status::Ok();
  }

  void DestroyStream(Stream stream) override {
    IgnoreCudaError(cudaStreamDestroy(AsStream(stream)));
    --streams_;
  }

  // Relaxed: what other threads do (XLA allocates, compiles, loads modules) must not end our
  // capture, nor may our lazily loaded kernels. The stream is private, so nothing can slip in.
  Status BeginCapture(Stream stream) override {
    JAXGRAPH_CUDA_RETURN_IF_ERROR(
        cudaStreamBeginCapture(AsStream(stream), cudaStreamCaptureModeRelaxed));
    return Status::Ok();
  }

  Status CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) override {
    JAXGRAPH_RETURN_IF_ERROR(LaunchKernel(launch, stream));
    // What the next launch would depend on is the node just made. The edge data must be asked for
    // too: a dependent launch has some, and the call refuses to lose it.
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t* ends = nullptr;
    const cudaGraphEdgeData* edges = nullptr;
    size_t num_ends = 0;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamGetCaptureInfo(AsStream(stream), &status, nullptr,
                                                           nullptr, &ends, &edges, &num_ends));
    if (status != cudaStreamCaptureStatusActive || num_ends != 1) {
      return Status(Code::kDeviceError, "the capture was lost after " +
                                            std::string(launch.kernel->name) + " (" +
                                            std::to_string(num_ends) + " ends)");
    }
    *node = ends[0];
    return Status::Ok();
  }

  Status Fork(Stream from, Stream to) override { return WaitFor(from, to); }
  Status Join(Stream from, Stream to) override { return WaitFor(from, to); }

  Status EndCapture(Stream stream, GraphHandle* graph) override {
    *graph = nullptr;
    cudaGraph_t captured = nullptr;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamEndCapture(AsStream(stream), &captured));
    if (captured == nullptr) return Status(Code::kDeviceError, "the capture gave no graph");
    ++graphs_;
    *graph = captured;
    return Status::Ok();
  }

  Status Instantiate(GraphHandle graph, ExecHandle* exec) override {
    RelaxedCaptureMode relaxed;
    cudaGraphExec_t made = nullptr;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&made, AsGraph(graph), 0));
    ++execs_;
    *exec = made;
    return Status::Ok();
  }

  Status Update(ExecHandle exec, GraphHandle graph) override {
    RelaxedCaptureMode relaxed;
    cudaGraphExecUpdateResultInfo info = {};
    const cudaError_t error = cudaGraphExecUpdate(AsExec(exec), AsGraph(graph), &info);
    Status status = CudaStatus(error, "cudaGraphExecUpdate");
    if (status.ok() || status.code() == Code::kContextPoisoned) return status;
    // Some refusals come with another error code than the one made for them.
    if (info.result == cudaGraphExecUpdateSuccess) return status;
    return Status(Code::kUpdateRefused,
                  status.message() + ", reason " + std::to_string(static_cast<int>(info.result)));
  }

  Status Patch(ExecHandle exec, NodeHandle node, const Launch& launch) override {
    void* kernel_params[] = {const_cast<char*>(launch.params.data())};
    cudaKernelNodeParams params = {};
    params.func = const_cast<void*>(launch.kernel->cuda_function);
    params.gridDim = AsDim3(launch.grid);
    params.blockDim = AsDim3(launch.block);
    params.sharedMemBytes = launch.shared_bytes;
    params.kernelParams = kernel_params;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaGraphExecKernelNodeSetParams(
        AsExec(exec), static_cast<cudaGraphNode_t>(node), &params));
    return Status::Ok();
  }

  Status LaunchGraph(ExecHandle exec, Stream stream) override {
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(AsExec(exec), AsStream(stream)));
    return Status::Ok();
  }

  void DestroyGraph(GraphHandle graph) override {
    IgnoreCudaError(cudaGraphDestroy(AsGraph(graph)));
    --graphs_;
  }

  void DestroyExec(ExecHandle exec) override {
    IgnoreCudaError(cudaGraphExecDestroy(AsExec(exec)));
    --execs_;
  }

  Status ArenaReserve(Stream stream, uint64_t bytes, void** base, uint64_t* capacity,
                      bool* moved) override {
    RelaxedCaptureMode relaxed;
    std::unique_ptr<CudaArena> made;
    CudaArena* arena = nullptr;
    if (*base == nullptr) {
      JAXGRAPH_RETURN_IF_ERROR(MakeArena(&made));
      arena = made.get();
    } else {
      std::lock_guard<std::mutex> lock(arenas_mutex_);
      const auto found = arenas_.find(*base);
      if (found == arenas_.end()) return Status(Code::kInternal, "no arena has this base");
      arena = found->second.get();
    }
    // Growing happens outside the lock: one arena's calls are serialised by the executor.
    JAXGRAPH_RETURN_IF_ERROR(arena->Grow(std::max<uint64_t>(bytes, 1), AsStream(stream)));
    *moved = arena->base() != *base;
    if (*moved) {
      std::lock_guard<std::mutex> lock(arenas_mutex_);
      if (made == nullptr) {
        const auto old = arenas_.find(*base);
        made = std::move(old->second);
        arenas_.erase(old);
      }
      arenas_[arena->base()] = std::move(made);
    }
    *base = arena->base();
    *capacity = arena->capacity();
    return Status::Ok();
  }

  void ArenaRelease(Stream stream, void* base) override {
    RelaxedCaptureMode relaxed;
    IgnoreCudaError(cudaStreamSynchronize(AsStream(stream)));
    std::unique_ptr<CudaArena> arena;
    std::lock_guard<std::mutex> lock(arenas_mutex_);
    const auto found = arenas_.find(base);
    if (found == arenas_.end()) return;
    arena = std::move(found->second);
    arenas_.erase(found);
  }

  Status FreeMemory(uint64_t* bytes) override {
    size_t free = 0, total = 0;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
    *bytes = free;
    return Status::Ok();
  }

  Status MakeMark(Stream stream, Mark* mark) override {
    cudaEvent_t event = nullptr;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaEventCreate(&event));
    ++marks_;
    *mark = event;
    Status status = CudaStatus(cudaEventRecord(event, AsStream(stream)), "cudaEventRecord");
    if (!status.ok()) DestroyMark(std::exchange(*mark, nullptr));
    return status;
  }

  Status MillisecondsBetween(Mark from, Mark to, float* ms) override {
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(AsEvent(from)));
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(AsEvent(to)));
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(ms, AsEvent(from), AsEvent(to)));
    return Status::Ok();
  }

  void DestroyMark(Mark mark) override {
    IgnoreCudaError(cudaEventDestroy(AsEvent(mark)));
    --marks_;
  }

  bool profiled() const override { return ProfilerAttached(); }
  void BeginRange(const std::string& name) override { PushProfilerRange(name.c_str()); }
  void EndRange() override { PopProfilerRange(); }

  Status WriteDot(GraphHandle graph, const std::string& path) override {
    JAXGRAPH_CUDA_RETURN_IF_ERROR(
        cudaGraphDebugDotPrint(AsGraph(graph), path.c_str(), cudaGraphDebugDotFlagsVerbose));
    return Status::Ok();
  }

  HandleCounts live_handles() const override {
    HandleCounts counts;
    counts.events = marks_;
    counts.graphs = graphs_;
    counts.execs = execs_;
    counts.streams = streams_;
    std::lock_guard<std::mutex> lock(arenas_mutex_);
    counts.arenas = static_cast<int64_t>(arenas_.size());
    return counts;
  }

 private:
  Status MakeArena(std::unique_ptr<CudaArena>* arena) {
    if (arena_kind_ == CudaArenaKind::kMappedIfPossible) {
      const Status mapped = MakeMappedArena(ordinal_, arena);
      if (mapped.code() != Code::kUnsupported) return mapped;
    }
    *arena = MakeMovingArena();
    return Status::Ok();
  }

  static Status WaitFor(Stream from, Stream to) {
    OwnedEvent event;
    JAXGRAPH_RETURN_IF_ERROR(event.Create());
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaEventRecord(event.get(), AsStream(from)));
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(AsStream(to), event.get(), 0));
    return Status::Ok();
  }

  // Grants a kernel the shared memory and cluster size that it has not been granted before.
  Status Prepare(const Launch& launch) {
    if (launch.shared_bytes <= kPlainSharedBytes && launch.cluster <= kPortableCluster) {
      return Status::Ok();
    }
    const void* function = launch.kernel->cuda_function;
    std::lock_guard<std::mutex> lock(granted_mutex_);
    Grant& grant = granted_[function];
    if (launch.shared_bytes > std::max(grant.shared_bytes, kPlainSharedBytes)) {
      JAXGRAPH_CUDA_RETURN_IF_ERROR(
          cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(launch.shared_bytes)));
      grant.shared_bytes = launch.shared_bytes;
    }
    if (launch.cluster > kPortableCluster && !grant.any_cluster) {
      JAXGRAPH_CUDA_RETURN_IF_ERROR(
          cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      grant.any_cluster = true;
    }
    return Status::Ok();
  }

  struct Grant {
    uint32_t shared_bytes = 0;
    bool any_cluster = false;
  };

  const int ordinal_;
  const CudaArenaKind arena_kind_;
  std::atomic<int64_t> graphs_{0}, execs_{0}, streams_{0}, marks_{0};

  mutable std::mutex arenas_mutex_;
  std::map<void*, std::unique_ptr<CudaArena>> arenas_;  // by base

  std::mutex granted_mutex_;
  std::unordered_map<const void*, Grant> granted_;
};

}  // namespace

std::unique_ptr<GraphDevice> MakeCudaDevice(int ordinal, CudaArenaKind arena_kind) {
  return std::make_unique<CudaDevice>(ordinal, arena_kind);
}

}  // namespace jaxgraph
