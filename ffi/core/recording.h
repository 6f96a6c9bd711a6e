// Recording: the captured chunks of one variant, and the Recorder that brings them up to date by
// the cheapest of the three depths: patch, re-capture and update, instantiate.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ffi/core/branches.h"
#include "ffi/core/launch_plan.h"
#include "ffi/core/statistics.h"
#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"

namespace jaxgraph {

// One chunk: the executable, and the graph that it was instantiated from, whose node handles
// patches use. Owns both.
class RecordedChunk {
 public:
  RecordedChunk(GraphDevice* device, FunctionStats* stats) : device_(device), stats_(stats) {}
  RecordedChunk(RecordedChunk&& other) noexcept { *this = std::move(other); }
  RecordedChunk& operator=(RecordedChunk&& other) noexcept;
  ~RecordedChunk() { Destroy(); }

  bool captured() const { return exec_ != nullptr; }
  GraphHandle graph() const { return graph_; }
  const std::vector<Launch>& launches() const { return launches_; }
  // Launches the executable; a chunk without launches (views alone) has none.
  Status Run(Stream stream);

 private:
  friend class Recorder;
  void Destroy();

  GraphDevice* device_ = nullptr;
  FunctionStats* stats_ = nullptr;
  GraphHandle graph_ = nullptr;
  ExecHandle exec_ = nullptr;
  int64_t exec_nodes_ = 0;         // in the executable
  std::vector<NodeHandle> nodes_;  // of each launch
  std::vector<Launch> launches_;   // what the executable does, if `captured` and `settled_`
  bool settled_ = true;            // false while it is being changed, and if that was cut short
};

struct Recording {
  std::vector<RecordedChunk> chunks;
  PlanIndex index;     // of the plan that the chunks were made of
  uint64_t nodes = 0;  // launches in all chunks: what the executables' memory grows with
  // Every chunk does what the variant's present addresses ask for. False from before the first
  // change until after the last: a recording that was left half changed is never replayed.
  bool current = false;

  uint64_t Executables() const {  // a chunk of views alone has none
    uint64_t count = 0;
    for (const RecordedChunk& chunk : chunks) count += chunk.captured();
    return count;
  }
  void Clear() { *this = Recording(); }
};

class Recorder {
 public:
  // `capture_stream` is created when first needed; the caller keeps it. `log` tells what was
  // instantiated anew and why.
  Recorder(GraphDevice* device, FunctionStats* stats, Stream* capture_stream,
           SideStreams* side_streams, UpdateDepth depth, std::function<void(std::string why)> log)
      : device_(device),
        stats_(stats),
        capture_stream_(capture_stream),
        side_streams_(side_streams),
        depth_(depth),
        log_(std::move(log)) {}

  // Makes the chunk do these launches. After a failure it is good for nothing but destruction.
  Status Rebuild(RecordedChunk* chunk, std::vector<Launch> launches);
  // The same where only these launches of it are others. Takes the fresh launches.
  Status Change(RecordedChunk* chunk, LaunchChange* begin, LaunchChange* end);

  bool captured() const { return captured_; }  // did anything need a capture?

 private:
  Status Recapture(RecordedChunk* chunk);
  Status Capture(const std::vector<Launch>& launches, GraphHandle* graph,
                 std::vector<NodeHandle>* nodes);
  Status Instantiate(RecordedChunk* chunk);
  Status UpdateInPlace(RecordedChunk* chunk, GraphHandle graph);

  GraphDevice* device_;
  FunctionStats* stats_;
  Stream* capture_stream_;
  SideStreams* side_streams_;
  const UpdateDepth depth_;
  std::function<void(std::string why)> log_;
  bool captured_ = false;
};

}  // namespace jaxgraph
