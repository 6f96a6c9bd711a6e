#include "ffi/core/recording.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace jaxgraph {

RecordedChunk& RecordedChunk::operator=(RecordedChunk&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = other.device_;
  stats_ = other.stats_;
  graph_ = std::exchange(other.graph_, nullptr);
  exec_ = std::exchange(other.exec_, nullptr);
  nodes_ = std::move(other.nodes_);
  launches_ = std::move(other.launches_);
  return *this;
}

// Legal while an earlier launch still runs.
void RecordedChunk::Destroy() {
  if (exec_ != nullptr) {
    device_->DestroyExec(std::exchange(exec_, nullptr));
    stats_->AddLiveExecs(-1);
  }
  if (graph_ != nullptr) device_->DestroyGraph(std::exchange(graph_, nullptr));
  nodes_.clear();
}

Status RecordedChunk::Run(Stream stream) {
  if (exec_ == nullptr) return Status::Ok();
  JAXGRAPH_RETURN_IF_ERROR(device_->LaunchGraph(exec_, stream));
  stats_->Add(Counter::kChunkLaunches);
  return Status::Ok();
}

Status Recorder::Replace(RecordedChunk* chunk, size_t begin, size_t end,
                         std::vector<Launch> fresh) {
  const std::vector<Launch>& present = chunk->launches_;
  const bool patchable =
      chunk->captured() && fresh.size() == end - begin &&
      std::equal(fresh.begin(), fresh.end(), present.begin() + static_cast<ptrdiff_t>(begin),
                 [](const Launch& a, const Launch& b) { return a.SameConfig(b); });
  if (patchable) return PatchAll(chunk, begin, std::move(fresh));

  const auto from = chunk->launches_.erase(chunk->launches_.begin() + static_cast<ptrdiff_t>(begin),
                                           chunk->launches_.begin() + static_cast<ptrdiff_t>(end));
  chunk->launches_.insert(from, std::make_move_iterator(fresh.begin()),
                          std::make_move_iterator(fresh.end()));
  return Recapture(chunk);
}

Status Recorder::PatchAll(RecordedChunk* chunk, size_t begin, std::vector<Launch> fresh) {
  for (size_t i = 0; i < fresh.size(); ++i) {
    Launch& present = chunk->launches_[begin + i];
    if (present.params == fresh[i].params) continue;
    JAXGRAPH_RETURN_IF_ERROR(device_->Patch(chunk->exec_, chunk->nodes_[begin + i], fresh[i]));
    stats_->Add(Counter::kPatches);
    present = std::move(fresh[i]);
  }
  return Status::Ok();
}

Status Recorder::Recapture(RecordedChunk* chunk) {
  if (chunk->launches_.empty()) {
    chunk->Destroy();
    return Status::Ok();
  }
  GraphHandle graph = nullptr;
  std::vector<NodeHandle> nodes;
  JAXGRAPH_RETURN_IF_ERROR(Capture(chunk->launches_, &graph, &nodes));
  captured_ = true;

  if (chunk->captured()) {
    const Status updated = device_->Update(chunk->exec_, graph);
    if (updated.ok()) {
      // The executable still answers to the nodes of the graph that it came from.
      device_->DestroyGraph(graph);
      stats_->Add(Counter::kExecUpdates);
      return Status::Ok();
    }
    if (updated.code() != Code::kUpdateRefused) {
      device_->DestroyGraph(graph);
      return updated;
    }
    log_("the update was refused: " + updated.message());
    chunk->Destroy();
  }

  chunk->graph_ = graph;  // owned from here on
  chunk->nodes_ = std::move(nodes);
  JAXGRAPH_RETURN_IF_ERROR(device_->Instantiate(graph, &chunk->exec_));
  stats_->Add(Counter::kInstantiations);
  stats_->AddLiveExecs(1);
  return Status::Ok();
}

Status Recorder::Capture(const std::vector<Launch>& launches, GraphHandle* graph,
                         std::vector<NodeHandle>* nodes) {
  if (*capture_stream_ == nullptr) JAXGRAPH_RETURN_IF_ERROR(device_->CreateStream(capture_stream_));
  JAXGRAPH_RETURN_IF_ERROR(device_->BeginCapture(*capture_stream_));
  Status status;
  for (const Launch& launch : launches) {
    NodeHandle node = nullptr;
    status = device_->CaptureKernel(launch, *capture_stream_, &node);
    if (!status.ok()) break;
    nodes->push_back(node);
  }
  // A capture that was begun is always ended; the first failure is the one to tell of.
  const Status ended = device_->EndCapture(*capture_stream_, graph);
  if (status.ok() && ended.ok()) return Status::Ok();
  if (*graph != nullptr) device_->DestroyGraph(std::exchange(*graph, nullptr));
  return status.ok() ? ended : status;
}

}  // namespace jaxgraph
