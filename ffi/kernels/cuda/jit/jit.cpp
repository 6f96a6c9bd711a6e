#include "ffi/kernels/cuda/jit/jit.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "ffi/kernels/cuda/jit/kernel_cache.h"
#include "ffi/kernels/cuda/jit/nvrtc.h"
#include "ffi/kernels/cuda/jit/source.h"

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

uint8_t AlignmentOf(const char* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 16;
  return static_cast<uint8_t>(bits & (~bits + 1));
}

struct Range {
  const char *begin, *end;
};
Range RangeOf(const TensorRef& t, const char* address) {
  const int64_t size = static_cast<int64_t>(SizeOf(t.dtype));
  Range range = {address, address + size};
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 0) return {address, address};
    const int64_t reach = (t.shape[d] - 1) * t.strides[d] * size;
    (reach < 0 ? range.begin : range.end) += reach;
  }
  return range;
}

template <typename T>
void Put(const T& value, std::string* key) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}
void Put(const TensorRef& t, std::string* key) {
  Put(t.dtype, key);
  Put(t.rank, key);
  key->append(reinterpret_cast<const char*>(t.shape.data()), t.rank * sizeof t.shape[0]);
  key->append(reinterpret_cast<const char*>(t.strides.data()), t.rank * sizeof t.strides[0]);
}

// Everything of a node but its program: how its addresses are aligned, and whether an output shares
// bytes with a source. Part of the key, for the addresses themselves are not.
KernelRequest RequestOf(const ResolvedNode& resolved, bool clusters) {
  const Node& node = *resolved.node;
  KernelRequest request;
  request.row = node.op == Op::kRow;
  request.clusters = clusters;
  request.num_srcs = static_cast<int>(node.srcs.size());
  request.num_outs = static_cast<int>(node.outs.size());
  std::array<Range, kExprMaxSrcs> srcs;
  for (size_t s = 0; s < node.srcs.size(); ++s) {
    request.src_alignment[s] = AlignmentOf(resolved.srcs[s]);
    srcs[s] = RangeOf(node.srcs[s], resolved.srcs[s]);
  }
  for (size_t o = 0; o < node.outs.size(); ++o) {
    request.out_alignment[o] = AlignmentOf(resolved.outs[o]);
    const Range out = RangeOf(node.outs[o], resolved.outs[o]);
    for (size_t s = 0; s < node.srcs.size(); ++s) {
      const bool shares = out.begin < srcs[s].end && srcs[s].begin < out.end;
      request.overlapping[o] |= static_cast<uint16_t>(shares << s);
    }
  }
  return request;
}

std::string KeyOf(const Node& node, const KernelRequest& request) {
  std::string key;
  key.reserve(1024);
  Put(node.op, &key);
  Put(node.params.size(), &key);
  key += node.params;
  for (int s = 0; s < request.num_srcs; ++s) {
    Put(node.srcs[s], &key);
    Put(request.src_alignment[s], &key);
  }
  for (int o = 0; o < request.num_outs; ++o) {
    Put(node.outs[o], &key);
    Put(request.out_alignment[o], &key);
    Put(request.overlapping[o], &key);
  }
  return key;
}

bool IsExpression(const Node& node) {
  return (node.op == Op::kExpr || node.op == Op::kRow) && node.srcs.size() <= kExprMaxSrcs &&
         node.outs.size() <= kExprMaxOuts;
}

bool SourceOf(const ResolvedNode& node, KernelRequest request, KernelSource* source) {
  bool wide = false;
  std::vector<ExprPiece> pieces;
  if (!PrepareExpr(node, &wide, &pieces).ok() || pieces.size() != 1) return false;
  request.piece = &pieces[0];
  return GenerateSource(request, source);
}

size_t ParamBytes(const Node& node) {
  return (node.srcs.size() + node.outs.size()) * sizeof(char*);
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

bool Jit::Emit(const std::vector<ResolvedNode>& nodes, size_t first,
               const std::function<std::vector<size_t>()>& upcoming, Launches* launches) {
  const ResolvedNode& resolved = nodes[first];
  const Node& node = *resolved.node;
  if (!IsExpression(node)) return false;
  const std::string key = KeyOf(node, RequestOf(resolved, clusters_));
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    Decide(nodes, upcoming());
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
  append(resolved.srcs);
  append(resolved.outs);
  launches->push_back(std::move(launch));
  return true;
}

// Makes a plan for every expression among these nodes that has none yet.
void Jit::Decide(const std::vector<ResolvedNode>& nodes, const std::vector<size_t>& upcoming) {
  struct New {
    Plan* plan;
    size_t param_bytes;
    KernelSource source;
  };
  std::vector<New> all;
  for (const size_t n : upcoming) {
    const Node& node = *nodes[n].node;
    if (!IsExpression(node)) continue;
    const KernelRequest request = RequestOf(nodes[n], clusters_);
    const auto [at, is_new] = plans_.try_emplace(KeyOf(node, request));
    if (!is_new) continue;
    New fresh = {&at->second, ParamBytes(node), {}};
    if (SourceOf(nodes[n], request, &fresh.source)) {
      all.push_back(std::move(fresh));
    } else {
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
