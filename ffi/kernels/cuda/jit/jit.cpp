#include "ffi/kernels/cuda/jit/jit.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "ffi/kernels/cuda/jit/kernel_cache.h"
#include "ffi/kernels/cuda/jit/node_source.h"
#include "ffi/kernels/cuda/jit/nvrtc.h"

namespace jaxgraph {
namespace {

constexpr char kSwitch[] = "JAXGRAPH_DISABLE_JIT";

enum class Switch { kOn, kOff, kNoBoolean };

// As options.py reads switches. Nobody can be told of a word that is no boolean but by Describe, so
// it changes nothing.
Switch ReadSwitch() {
  const char* text = std::getenv(kSwitch);
  if (text == nullptr) return Switch::kOn;
  std::string word;
  for (const char* c = text; *c != '\0'; ++c) {
    if (std::isspace(static_cast<unsigned char>(*c)) == 0) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
    }
  }
  const auto is_one_of = [&word](std::initializer_list<const char*> words) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  if (is_one_of({"1", "true", "yes", "on"})) return Switch::kOff;
  return is_one_of({"0", "false", "no", "off", ""}) ? Switch::kOn : Switch::kNoBoolean;
}

Switch TheSwitch() {
  static const Switch position = ReadSwitch();
  return position;
}

// Expressions that no source could be made for.
std::atomic<uint64_t> left_to_the_interpreter{0};

size_t ParamBytes(const std::vector<ResolvedNode>& nodes, size_t first, size_t count) {
  size_t addresses = 0;
  for (size_t n = first; n < first + count; ++n) {
    addresses += nodes[n].srcs.size() + nodes[n].outs.size();
  }
  return addresses * sizeof(char*);
}

}  // namespace

bool Jit::Available() {
  static const bool available = TheSwitch() != Switch::kOff && Nvrtc::Get() != nullptr;
  return available;
}

std::string Jit::Describe() {
  if (TheSwitch() == Switch::kOff) return std::string("off: ") + kSwitch + " is set";
  if (!Available()) return "off: " + Nvrtc::Description();
  const JitCounts counts = KernelCache::Get().counts();
  std::string line = "NVRTC " + Nvrtc::Description() + "; " + std::to_string(counts.kernels) +
                     " kernels in " + std::to_string(counts.calls) + " calls, " +
                     std::to_string(static_cast<int64_t>(counts.seconds * 1e3)) + " ms";
  if (left_to_the_interpreter > 0) {
    line += "; " + std::to_string(left_to_the_interpreter) + " left to the interpreter";
  }
  if (TheSwitch() == Switch::kNoBoolean) line += std::string("; ") + kSwitch + " is no boolean";
  if (counts.failed > 0) {
    line += "; " + std::to_string(counts.failed) + " failed, the last: " + counts.last_error;
  }
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

size_t Jit::Emit(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                 const std::function<std::vector<size_t>()>& upcoming, Launches* launches) {
  const NodeGroup group = fusion ? FindGroup(nodes, first) : NodeGroup();
  if (group.count > 1 && EmitGroup(nodes, first, group, fusion, upcoming, launches)) {
    return group.count;
  }
  const NodeGroup alone;
  return IsExpression(*nodes[first].node) &&
         EmitGroup(nodes, first, alone, fusion, upcoming, launches);
}

bool Jit::EmitGroup(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
                    bool fusion, const std::function<std::vector<size_t>()>& upcoming,
                    Launches* launches) {
  const std::string key = KeyOf(nodes, first, group, clusters_);
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    Decide(nodes, first, group, fusion, upcoming());
    found = plans_.find(key);
  }
  const Plan plan = found->second;
  lock.unlock();
  if (plan.kernel == nullptr) return false;
  Launch launch;
  launch.kernel = plan.kernel;
  launch.grid[0] = plan.grid;
  launch.block[0] = plan.block;
  launch.cluster = plan.cluster;
  const auto append = [&launch](const auto& addresses) {
    launch.params.append(reinterpret_cast<const char*>(addresses.data()),
                         addresses.size() * sizeof addresses[0]);
  };
  for (size_t n = first; n < first + group.count; ++n) {
    append(nodes[n].srcs);
    append(nodes[n].outs);
  }
  launches->push_back(std::move(launch));
  return true;
}

// Makes a plan for `group` at nodes[first], and for everything else among `upcoming` that has none
// yet.
void Jit::Decide(const std::vector<ResolvedNode>& nodes, size_t first, const NodeGroup& group,
                 bool fusion, const std::vector<size_t>& upcoming) {
  struct New {
    Plan* plan;
    size_t param_bytes;
    KernelSource source;
  };
  std::vector<New> all;
  size_t next = first;  // node that no group before covers
  for (const size_t n : upcoming) {
    if (n < next) continue;
    const NodeGroup run = n == first ? group : fusion ? FindGroup(nodes, n) : NodeGroup();
    next = n + run.count;
    if (run.count == 1 && !IsExpression(*nodes[n].node)) continue;
    const auto [at, is_new] = plans_.try_emplace(KeyOf(nodes, n, run, clusters_));
    if (!is_new) continue;
    New fresh = {&at->second, ParamBytes(nodes, n, run.count), {}};
    if (SourceOf(nodes, n, run, clusters_, &fresh.source)) {
      all.push_back(std::move(fresh));
    } else if (run.count == 1) {
      ++left_to_the_interpreter;
    }
  }
  std::vector<const KernelSource*> sources;
  std::vector<size_t> param_bytes;
  for (const New& fresh : all) {
    sources.push_back(&fresh.source);
    param_bytes.push_back(fresh.param_bytes);
  }
  std::vector<const KernelInfo*> kernels;
  KernelCache::Get().Find(sources, param_bytes, architecture_, &kernels);
  for (size_t i = 0; i < all.size(); ++i) {
    const KernelSource& source = all[i].source;
    *all[i].plan = {kernels[i], source.grid, source.block, source.cluster};
  }
}

}  // namespace jaxgraph
