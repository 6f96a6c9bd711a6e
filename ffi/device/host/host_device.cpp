#include "ffi/device/host/host_device.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>

#include "ffi/device/host/serial_for.h"

namespace jaxgraph {
namespace {

constexpr size_t kArenaAlignment = 256;
struct FreeArena {
  void operator()(void* base) const { ::operator delete(base, std::align_val_t{kArenaAlignment}); }
};

Status Dead(const char* what) {
  return Status(Code::kInternal, std::string(what) + " is not alive");
}

// What an update must not change. Grid, block and shared memory are parameters, as on CUDA.
bool SameKind(const Launch& a, const Launch& b) {
  return a.kernel == b.kernel && a.cluster == b.cluster && a.dependent == b.dependent;
}

void Run(const Launch& launch, ParallelFor& pool) {
  launch.kernel->host_function(launch.params.data(), pool);
}

Status CheckLaunch(const Launch& launch) {
  if (launch.kernel == nullptr || launch.kernel->host_function == nullptr) {
    return Status(Code::kUnsupported, "a launch without a host kernel");
  }
  if (launch.params.size() != launch.kernel->param_bytes) {
    return Status(Code::kInternal, std::string("wrong parameter size for ") + launch.kernel->name);
  }
  return Status::Ok();
}

}  // namespace

// What a capture recorded.
struct HostDevice::Graph {
  std::vector<Launch> launches;            // in the order of capture, which the edges allow
  std::vector<std::vector<size_t>> edges;  // of each node, the nodes it waits for, ascending
  std::vector<uintptr_t> ids;              // of each node, ascending
};

struct HostDevice::Exec {
  std::shared_ptr<const Graph> source;  // whose node handles patches use
  std::vector<Launch> launches;
};

struct HostDevice::HostStream {
  std::shared_ptr<Graph> graph;  // null: not capturing
  bool origin = false;           // of the capture
  std::vector<size_t> tail;      // what the next node waits for
  bool dirty = false;            // forked to, and has work that nobody joined yet
  Stream pool = nullptr;         // whose threads it uses: of the stream it was forked from
};

HostDevice::HostDevice(int ordinal) : ordinal_(ordinal) {}

HostDevice::~HostDevice() {
  for (void* base : arenas_) FreeArena()(base);
}

// Odd, so that no handle can be mistaken for a pointer to a ParallelFor.
uintptr_t HostDevice::NextId() {
  next_id_ += 2;
  return next_id_;
}

Status HostDevice::EnterDevice(int* previous) {
  *previous = ordinal_;
  return Status::Ok();
}

void HostDevice::LeaveDevice(int) {}

ParallelFor& HostDevice::PoolOf(Stream stream) const {
  static SerialFor serial;
  const bool own = reinterpret_cast<uintptr_t>(stream) % 2 != 0;
  if (stream == nullptr || own) return serial;
  return *static_cast<ParallelFor*>(stream);
}

HostDevice::HostStream* HostDevice::FindStream(Stream stream) {
  const auto it = streams_.find(stream);
  return it == streams_.end() ? nullptr : it->second.get();
}

Status HostDevice::CapturingStream(Stream stream, HostStream** found) {
  *found = FindStream(stream);
  if (*found == nullptr) return Dead("stream");
  if ((*found)->graph == nullptr) return Status(Code::kInternal, "stream is not capturing");
  return Status::Ok();
}

Status HostDevice::LaunchKernel(const Launch& launch, Stream stream) {
  JAXGRAPH_RETURN_IF_ERROR(CheckLaunch(launch));
  {
    std::lock_guard lock(mutex_);
    HostStream* own = FindStream(stream);
    if (own != nullptr && own->graph != nullptr) {
      NodeHandle node;
      Record(launch, own, &node);
      return Status::Ok();
    }
    if (own != nullptr) stream = own->pool;
  }
  Run(launch, PoolOf(stream));
  return Status::Ok();
}

Status HostDevice::IsCapturing(Stream stream, bool* capturing) {
  std::lock_guard lock(mutex_);
  const HostStream* own = FindStream(stream);
  *capturing = own != nullptr && own->graph != nullptr;
  return Status::Ok();
}

Status HostDevice::CreateStream(Stream* stream) {
  std::lock_guard lock(mutex_);
  const Stream made = reinterpret_cast<void*>(NextId());
  streams_.emplace(made, std::make_unique<HostStream>());
  *stream = made;
  return Status::Ok();
}

void HostDevice::DestroyStream(Stream stream) {
  std::lock_guard lock(mutex_);
  if (streams_.erase(stream) == 0) ++misuses_;
}

Status HostDevice::BeginCapture(Stream stream) {
  std::lock_guard lock(mutex_);
  HostStream* own = FindStream(stream);
  if (own == nullptr) return Dead("stream");
  if (own->graph != nullptr) return Status(Code::kInternal, "stream is capturing already");
  own->graph = std::make_shared<Graph>();
  own->origin = true;
  return Status::Ok();
}

void HostDevice::Record(const Launch& launch, HostStream* stream, NodeHandle* node) {
  Graph& graph = *stream->graph;
  const size_t index = graph.launches.size();
  graph.launches.push_back(launch);
  graph.edges.push_back(stream->tail);
  graph.ids.push_back(NextId());
  stream->tail = {index};
  stream->dirty = !stream->origin;
  *node = reinterpret_cast<void*>(graph.ids.back());
}

Status HostDevice::CaptureKernel(const Launch& launch, Stream stream, NodeHandle* node) {
  JAXGRAPH_RETURN_IF_ERROR(CheckLaunch(launch));
  std::lock_guard lock(mutex_);
  HostStream* own = nullptr;
  JAXGRAPH_RETURN_IF_ERROR(CapturingStream(stream, &own));
  Record(launch, own, node);
  return Status::Ok();
}

// Outside of captures everything runs at once, which is an order that fork and join allow.
Status HostDevice::Fork(Stream from, Stream to) {
  std::lock_guard lock(mutex_);
  HostStream* side = FindStream(to);
  if (side == nullptr) return Dead("stream");
  HostStream* source = FindStream(from);
  if (source == nullptr || source->graph == nullptr) {
    if (side->graph != nullptr) return Status(Code::kInternal, "stream is capturing");
    side->pool = source == nullptr ? from : source->pool;
    return Status::Ok();
  }
  if (side->graph != nullptr && side->graph != source->graph) {
    return Status(Code::kInternal, "stream belongs to another capture");
  }
  side->graph = source->graph;
  side->tail = source->tail;
  return Status::Ok();
}

Status HostDevice::Join(Stream from, Stream to) {
  std::lock_guard lock(mutex_);
  HostStream* side = FindStream(from);
  if (side == nullptr) return Dead("stream");
  if (side->graph == nullptr) return Status::Ok();
  HostStream* target = nullptr;
  JAXGRAPH_RETURN_IF_ERROR(CapturingStream(to, &target));
  if (side->graph != target->graph) {
    return Status(Code::kInternal, "streams belong to two captures");
  }
  std::vector<size_t> both;
  std::set_union(side->tail.begin(), side->tail.end(), target->tail.begin(), target->tail.end(),
                 std::back_inserter(both));
  target->tail = std::move(both);
  side->dirty = false;
  return Status::Ok();
}

Status HostDevice::EndCapture(Stream stream, GraphHandle* graph) {
  *graph = nullptr;
  std::lock_guard lock(mutex_);
  HostStream* own = nullptr;
  JAXGRAPH_RETURN_IF_ERROR(CapturingStream(stream, &own));
  if (!own->origin) return Status(Code::kInternal, "the capture began on another stream");
  const std::shared_ptr<Graph> captured = own->graph;
  bool unjoined = false;
  for (auto& [handle, other] : streams_) {
    if (other->graph != captured) continue;
    unjoined |= other->dirty;
    *other = HostStream();
  }
  if (unjoined) return Status(Code::kDeviceError, "capture ended with a fork that nobody joined");
  const GraphHandle made = reinterpret_cast<void*>(NextId());
  graphs_.emplace(made, captured);
  *graph = made;
  return Status::Ok();
}

Status HostDevice::Instantiate(GraphHandle graph, ExecHandle* exec) {
  *exec = nullptr;
  std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  if (it == graphs_.end()) return Dead("graph");
  auto made = std::make_shared<Exec>();
  made->source = it->second;
  made->launches = it->second->launches;
  const ExecHandle handle = reinterpret_cast<void*>(NextId());
  execs_.emplace(handle, std::move(made));
  *exec = handle;
  return Status::Ok();
}

std::shared_ptr<HostDevice::Exec> HostDevice::FindExec(ExecHandle exec) {
  const auto it = execs_.find(exec);
  return it == execs_.end() ? nullptr : it->second;
}

Status HostDevice::Update(ExecHandle exec, GraphHandle graph) {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<Exec> target = FindExec(exec);
  if (target == nullptr) return Dead("executable");
  const auto it = graphs_.find(graph);
  if (it == graphs_.end()) return Dead("graph");
  const Graph& fresh = *it->second;
  bool same =
      fresh.launches.size() == target->launches.size() && fresh.edges == target->source->edges;
  for (size_t i = 0; same && i < fresh.launches.size(); ++i) {
    same = SameKind(fresh.launches[i], target->launches[i]);
  }
  if (!same) return Status(Code::kUpdateRefused, "the graph has other nodes or edges");
  target->launches = fresh.launches;
  return Status::Ok();
}

Status HostDevice::Patch(ExecHandle exec, NodeHandle node, const Launch& launch) {
  JAXGRAPH_RETURN_IF_ERROR(CheckLaunch(launch));
  std::lock_guard lock(mutex_);
  const std::shared_ptr<Exec> target = FindExec(exec);
  if (target == nullptr) return Dead("executable");
  const std::vector<uintptr_t>& ids = target->source->ids;
  const uintptr_t id = reinterpret_cast<uintptr_t>(node);
  const auto at = std::lower_bound(ids.begin(), ids.end(), id);
  if (at == ids.end() || *at != id) {
    return Status(Code::kInternal, "node is not of the graph behind the executable");
  }
  Launch& present = target->launches[at - ids.begin()];
  if (!present.SameConfig(launch)) {
    return Status(Code::kInternal, "a patch changes more than parameters");
  }
  present = launch;
  return Status::Ok();
}

namespace {

// A random one of the orders that the edges allow.
std::vector<size_t> LegalOrder(const std::vector<std::vector<size_t>>& edges, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<size_t> order;
  std::vector<bool> done(edges.size());
  std::vector<size_t> ready;
  while (order.size() < edges.size()) {
    ready.clear();
    for (size_t n = 0; n < edges.size(); ++n) {
      const auto is_done = [&](size_t before) { return done[before]; };
      if (!done[n] && std::all_of(edges[n].begin(), edges[n].end(), is_done)) ready.push_back(n);
    }
    const size_t next = ready[random() % ready.size()];
    done[next] = true;
    order.push_back(next);
  }
  return order;
}

}  // namespace

// The executable is held while it runs, so that destroying it meanwhile is legal, as on CUDA.
Status HostDevice::LaunchGraph(ExecHandle exec, Stream stream) {
  std::shared_ptr<Exec> target;
  {
    std::lock_guard lock(mutex_);
    target = FindExec(exec);
  }
  if (target == nullptr) return Dead("executable");
  ParallelFor& pool = PoolOf(stream);
  if (const uint64_t seed = shuffle_) {
    for (size_t n : LegalOrder(target->source->edges, seed)) Run(target->launches[n], pool);
    return Status::Ok();
  }
  for (const Launch& launch : target->launches) Run(launch, pool);
  return Status::Ok();
}

void HostDevice::DestroyGraph(GraphHandle graph) {
  std::lock_guard lock(mutex_);
  if (graphs_.erase(graph) == 0) ++misuses_;
}

void HostDevice::DestroyExec(ExecHandle exec) {
  std::lock_guard lock(mutex_);
  if (execs_.erase(exec) == 0) ++misuses_;
}

// Growing moves. The old memory goes at once: nothing is in flight on the host, and what was
// recorded with its addresses is never launched again.
Status HostDevice::ArenaReserve(Stream, uint64_t bytes, void** base, uint64_t* capacity,
                                bool* moved) {
  *moved = false;
  if (*base != nullptr && *capacity >= bytes) return Status::Ok();
  if (bytes > UINT64_MAX - kArenaAlignment) {
    return Status(Code::kOutOfMemory, "an arena of " + std::to_string(bytes) + " bytes");
  }
  const uint64_t wanted =
      std::max<uint64_t>((bytes + kArenaAlignment - 1) / kArenaAlignment, 1) * kArenaAlignment;
  std::unique_ptr<void, FreeArena> fresh(
      ::operator new(wanted, std::align_val_t{kArenaAlignment}, std::nothrow));
  if (fresh == nullptr) {
    return Status(Code::kOutOfMemory, "an arena of " + std::to_string(wanted) + " bytes");
  }
  std::lock_guard lock(mutex_);
  if (*base != nullptr && arenas_.count(*base) == 0) return Dead("arena");
  arenas_.insert(fresh.get());  // may throw: then the old memory is still there
  if (*base != nullptr) {
    arenas_.erase(*base);
    FreeArena()(*base);
  }
  *base = fresh.release();
  *capacity = wanted;
  *moved = true;
  return Status::Ok();
}

void HostDevice::ArenaRelease(Stream, void* base) {
  std::lock_guard lock(mutex_);
  if (arenas_.erase(base) == 0) {
    ++misuses_;
    return;
  }
  FreeArena()(base);
}

Status HostDevice::WriteDot(GraphHandle handle, const std::string& path) {
  std::shared_ptr<const Graph> graph;
  {
    std::lock_guard lock(mutex_);
    const auto found = graphs_.find(handle);
    if (found == graphs_.end()) return Dead("the graph");
    graph = found->second;
  }
  std::ofstream file(path);
  file << "digraph {\n  node [shape=box];\n";
  for (size_t n = 0; n < graph->launches.size(); ++n) {
    const Launch& launch = graph->launches[n];
    file << "  n" << n << " [label=\"" << launch.kernel->name;
    if (launch.node_count > 0) file << "\\nnode " << launch.first_node;
    if (launch.node_count > 1) file << " to " << launch.first_node + launch.node_count - 1;
    file << "\"];\n";
    for (const size_t before : graph->edges[n]) file << "  n" << before << " -> n" << n << ";\n";
  }
  file << "}\n";
  file.close();
  if (file) return Status::Ok();
  return Status(Code::kInvalidArgument, "cannot write " + path);
}

HandleCounts HostDevice::live_handles() const {
  std::lock_guard lock(mutex_);
  HandleCounts counts;
  counts.graphs = static_cast<int64_t>(graphs_.size());
  counts.execs = static_cast<int64_t>(execs_.size());
  counts.arenas = static_cast<int64_t>(arenas_.size());
  counts.streams = static_cast<int64_t>(streams_.size());
  return counts;
}

}  // namespace jaxgraph
