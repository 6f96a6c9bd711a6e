// GraphDevice: what the executor asks of a device. One object a physical device (CUDA ordinal, or a
// host device of JAX's CPU client). Implementations: host/, cuda/, and a fault-injecting decorator.
//
// Every call reports failure by Status and leaves no sticky error behind (a CUDA implementation
// clears the runtime's last error), except kContextPoisoned, which nothing clears.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ffi/core/status.h"
#include "ffi/device/launch.h"

namespace jaxgraph {

// Opaque handles; null = none. The device that made one destroys it, exactly once.
using Stream = void*;  // CUDA: cudaStream_t; host: ParallelFor*
using GraphHandle =
    void*;                 // a captured graph: kept as long as its executable, for its node handles
using ExecHandle = void*;  // an instantiated graph
using NodeHandle = void*;  // a node of a captured graph
using Mark = void*;  // a point in the work of a stream, whose time is known once it is reached

// Live handles made by a device: a test asserts that they return to zero.
struct HandleCounts {
  int64_t graphs = 0, execs = 0, arenas = 0, streams = 0, events = 0;
};

class GraphDevice {
 public:
  virtual ~GraphDevice() = default;
  virtual std::string_view name() const = 0;  // "host" or "cuda"
  virtual int ordinal() const = 0;
  // True: a stream is made for one call and says nothing about order between calls (the host's
  // thread pools). Then contexts are pooled instead of belonging to a stream.
  virtual bool streams_are_transient() const { return false; }

  // Makes this device current for the calling thread, returning what to restore.
  virtual Status EnterDevice(int* previous) = 0;
  virtual void LeaveDevice(int previous) = 0;

  // Runs one launch now, in stream order.
  virtual Status LaunchKernel(const Launch& launch, Stream stream) = 0;

  // Is somebody else capturing this stream?
  virtual Status IsCapturing(Stream stream, bool* capturing) = 0;

  // A private, non-blocking stream for captures (and side streams of regions).
  virtual Status CreateStream(Stream* stream) = 0;
  virtual void DestroyStream(Stream stream) = 0;

  // Capture on a stream of CreateStream. CaptureKernel records one launch and names its node.
  // Fork: `to` goes on behind `from`'s present end, and joins its capture if there is one; Join:
  // `to` waits for `from`'s end. Outside of captures `from` or `to` may be the caller's stream.
  // EndCapture ends the capture also after a failure in between (then *graph is null).
  virtual Status BeginCapture(Stream stream) = 0;
  virtual Status CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) = 0;
  virtual Status Fork(Stream from, Stream to) = 0;
  virtual Status Join(Stream from, Stream to) = 0;
  virtual Status EndCapture(Stream stream, GraphHandle* graph) = 0;

  virtual Status Instantiate(GraphHandle graph, ExecHandle* exec) = 0;
  // Takes over the parameters of `graph`. kUpdateRefused: another topology; exec is then unusable
  // for this graph and must be destroyed.
  virtual Status Update(ExecHandle exec, GraphHandle graph) = 0;
  // Sets one kernel node's parameters in the executable. `launch` must have the node's SameConfig.
  virtual Status Patch(ExecHandle exec, NodeHandle node, const Launch& launch) = 0;
  virtual Status LaunchGraph(ExecHandle exec, Stream stream) = 0;
  virtual void DestroyGraph(GraphHandle graph) = 0;
  virtual void DestroyExec(ExecHandle exec) = 0;

  // Arena memory, aligned to 256 bytes. ArenaReserve grows `*base` so that at least `bytes` are
  // usable (keeping what is there is not promised) and reports in *moved whether the address
  // changed. On failure the old arena still works. `stream`: work in flight may still use it.
  virtual Status ArenaReserve(Stream stream, uint64_t bytes, void** base, uint64_t* capacity,
                              bool* moved) = 0;
  virtual void ArenaRelease(Stream stream, void* base) = 0;

  // Device memory that is free now, by which the cost of executables is calibrated.
  virtual Status FreeMemory(uint64_t*) {
    return Status(Code::kUnsupported, "this device does not say how much memory is free");
  }

  // For traces, on devices whose streams run on their own. A mark is reached when all work that the
  // stream was given before it is done; MillisecondsBetween waits for both.
  virtual Status MakeMark(Stream, Mark*) {
    return Status(Code::kUnsupported, "this device has no marks");
  }
  virtual Status MillisecondsBetween(Mark, Mark, float*) {
    return Status(Code::kUnsupported, "this device has no marks");
  }
  virtual void DestroyMark(Mark) {}

  // Named ranges for a profiler that is attached to the process; they nest on a thread.
  virtual bool profiled() const { return false; }
  virtual void BeginRange(const std::string&) {}
  virtual void EndRange() {}

  // Writes a captured graph to a file, in the DOT language.
  virtual Status WriteDot(GraphHandle, const std::string&) {
    return Status(Code::kUnsupported, "this device does not draw its graphs");
  }

  virtual HandleCounts live_handles() const = 0;
};

}  // namespace jaxgraph
