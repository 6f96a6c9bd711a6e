#include "ffi/core/recording.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

namespace jaxgraph {

namespace {

// A capture that was begun is always ended, whatever happens in between.
class OpenCapture {
 public:
  OpenCapture(GraphDevice* device, Stream stream) : device_(device), stream_(stream) {}
  ~OpenCapture() {
    if (!open_) return;
    GraphHandle graph = nullptr;
    (void)device_->EndCapture(stream_, &graph);
    if (graph != nullptr) device_->DestroyGraph(graph);
  }
  OpenCapture(const OpenCapture&) = delete;
  OpenCapture& operator=(const OpenCapture&) = delete;

  Status Begin() {
    JAXGRAPH_RETURN_IF_ERROR(device_->BeginCapture(stream_));
    open_ = true;
    return Status::Ok();
  }
  Status End(GraphHandle* graph) {
    open_ = false;
    return device_->EndCapture(stream_, graph);
  }

 private:
  GraphDevice* device_;
  Stream stream_;
  bool open_ = false;
};

}  // namespace

RecordedChunk& RecordedChunk::operator=(RecordedChunk&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = other.device_;
  stats_ = other.stats_;
  graph_ = std::exchange(other.graph_, nullptr);
  exec_ = std::exchange(other.exec_, nullptr);
  exec_nodes_ = other.exec_nodes_;
  nodes_ = std::move(other.nodes_);
  launches_ = std::move(other.launches_);
  settled_ = other.settled_;
  return *this;
}

// Legal while an earlier launch still runs.
void RecordedChunk::Destroy() {
  if (exec_ != nullptr) {
    device_->DestroyExec(std::exchange(exec_, nullptr));
    stats_->AddLive(-1, -exec_nodes_);
  }
  if (graph_ != nullptr) device_->DestroyGraph(std::exchange(graph_, nullptr));
  nodes_.clear();
}

Status RecordedChunk::Run(Stream stream) {
  if (exec_ == nullptr) return Status::Ok();
  const Status status = device_->LaunchGraph(exec_, stream);
  if (!status.ok()) stats_->AddFailure(Counter::kFailuresLaunch, status);
  return status;
}

Status Recorder::Rebuild(RecordedChunk* chunk, std::vector<Launch> launches) {
  std::vector<Launch>& present = chunk->launches_;
  if (!chunk->settled_) chunk->Destroy();  // nobody knows what it does
  if (!chunk->captured() || present.size() != launches.size()) {
    chunk->settled_ = false;
    present = std::move(launches);
    return Recapture(chunk);
  }
  std::vector<LaunchChange> changes;
  for (uint32_t i = 0; i < launches.size(); ++i) {
    if (present[i].SameConfig(launches[i]) && present[i].params == launches[i].params) continue;
    changes.push_back({0, i, std::move(launches[i])});
  }
  return Change(chunk, changes.data(), changes.data() + changes.size());
}

Status Recorder::Change(RecordedChunk* chunk, LaunchChange* begin, LaunchChange* end) {
  std::vector<Launch>& present = chunk->launches_;
  const auto is_needed = [&](const LaunchChange& c) {
    return present[c.launch].params != c.fresh.params || !present[c.launch].SameConfig(c.fresh);
  };
  const auto patchable = [&](const LaunchChange& c) {
    return present[c.launch].SameConfig(c.fresh);
  };
  if (std::none_of(begin, end, is_needed)) return Status::Ok();
  const bool patch = depth_ == UpdateDepth::kPatch && std::all_of(begin, end, patchable);
  chunk->settled_ = false;
  for (LaunchChange* change = begin; change != end; ++change) {
    Launch& launch = present[change->launch];
    if (patch) {
      if (launch.params == change->fresh.params) continue;
      const Status patched =
          device_->Patch(chunk->exec_, chunk->nodes_[change->launch], change->fresh);
      if (!patched.ok()) {
        stats_->AddFailure(Counter::kFailuresPatch, patched);
        return patched;
      }
      stats_->Add(Counter::kPatches);
    }
    launch = std::move(change->fresh);
  }
  if (!patch) return Recapture(chunk);
  chunk->settled_ = true;
  return Status::Ok();
}

Status Recorder::Recapture(RecordedChunk* chunk) {
  if (chunk->launches_.empty()) {
    chunk->Destroy();
    chunk->settled_ = true;
    return Status::Ok();
  }
  GraphHandle graph = nullptr;
  std::vector<NodeHandle> nodes;
  const Status status = Capture(chunk->launches_, &graph, &nodes);
  if (!status.ok()) {
    stats_->AddFailure(Counter::kFailuresCapture, status);
    return status;
  }
  captured_ = true;
  const auto destroy = [this](GraphHandle unused) { device_->DestroyGraph(unused); };
  std::unique_ptr<void, decltype(destroy)> owned(graph, destroy);  // if there is an exception, too

  if (chunk->captured() && depth_ == UpdateDepth::kInstantiate) {
    log_("updates are switched off");
    chunk->Destroy();
  } else if (chunk->captured()) {
    const Status updated = UpdateInPlace(chunk, graph);
    if (updated.code() != Code::kUpdateRefused) {
      // The executable still answers to the nodes of the graph that it came from.
      chunk->settled_ = updated.ok();
      return updated;
    }
    log_("the update was refused: " + updated.message());
    chunk->Destroy();
  }

  chunk->graph_ = owned.release();
  chunk->nodes_ = std::move(nodes);
  return Instantiate(chunk);
}

Status Recorder::Instantiate(RecordedChunk* chunk) {
  const PhaseTimer timer(stats_, Counter::kInstantiateNs);
  const Status status = device_->Instantiate(chunk->graph_, &chunk->exec_);
  if (!status.ok()) {
    stats_->AddFailure(Counter::kFailuresInstantiate, status);
    return status;
  }
  stats_->Add(Counter::kInstantiations);
  chunk->exec_nodes_ = static_cast<int64_t>(chunk->launches_.size());
  stats_->AddLive(1, chunk->exec_nodes_);
  chunk->settled_ = true;
  return Status::Ok();
}

Status Recorder::UpdateInPlace(RecordedChunk* chunk, GraphHandle graph) {
  const PhaseTimer timer(stats_, Counter::kUpdateNs);
  const Status status = device_->Update(chunk->exec_, graph);
  if (status.ok()) {
    stats_->Add(Counter::kExecUpdates);
  } else if (status.code() == Code::kUpdateRefused) {
    stats_->Add(Counter::kUpdatesRefused);
  } else {
    stats_->AddFailure(Counter::kFailuresUpdate, status);
  }
  return status;
}

Status Recorder::Capture(const std::vector<Launch>& launches, GraphHandle* graph,
                         std::vector<NodeHandle>* nodes) {
  const PhaseTimer timer(stats_, Counter::kCaptureNs);
  if (*capture_stream_ == nullptr) JAXGRAPH_RETURN_IF_ERROR(device_->CreateStream(capture_stream_));
  OpenCapture capture(device_, *capture_stream_);
  JAXGRAPH_RETURN_IF_ERROR(capture.Begin());
  Branches branches(device_, side_streams_, *capture_stream_);
  const Status status =
      branches.Run(launches, /*must_fork=*/true, [&](const Launch& launch, Stream stream) {
        return device_->CaptureKernel(launch, stream, &nodes->emplace_back());
      });
  // The first failure is the one to tell of.
  const Status ended = capture.End(graph);
  if (status.ok() && ended.ok()) return Status::Ok();
  if (*graph != nullptr) device_->DestroyGraph(std::exchange(*graph, nullptr));
  return status.ok() ? ended : status;
}

}  // namespace jaxgraph
