// Times the products of one batch-1 decode step of Llama-shaped models in one CUDA graph: both
// layouts of weights, with and without dependent launch, for several tunings. Attention is left
// out: what counts here is how fast the weights come.
//
//   cmake --build build -t stream_products && build/stream_products [models] [rows] [settings]
//
// `settings` is "tune", which tries many for each product by itself, or some to time whole steps
// with: blocks/stages/cluster of all products, or of the five kinds with colons between them,
// commas between settings. With a "v", "t" or "w" behind "tune" or a setting, stream_vector,
// stream_tiles or stream_wide takes the products, those that it can take: the others are left out.
// With no letter each product has the kernel that the library chooses for it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/check.h"
#include "benchmarks/graph_timer.h"
#include "ffi/device/cuda/cuda_device.h"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream.h"

namespace jaxgraph {
namespace {

struct Model {
  const char* name;
  int layers, width, heads, kv_heads, head_dim, ffn, vocab;
};
constexpr Model kModels[] = {{"135m", 30, 576, 9, 3, 64, 1536, 49152},
                             {"1b", 16, 2048, 32, 8, 64, 8192, 128256},
                             {"8b", 32, 4096, 32, 8, 128, 14336, 128256}};

constexpr int kKinds = 5;  // QKV, output, gate and up, down, head
struct Setting {
  std::optional<StreamKernel> kernel;  // none: the library's choice
  int blocks, stages, cluster;
};
using Settings = std::array<Setting, kKinds>;

// The letter that `text` begins with, if it stands for a kernel.
std::optional<StreamKernel> KernelOf(const char* text) {
  switch (*text) {
    case 'v':
      return StreamKernel::kVector;
    case 't':
      return StreamKernel::kTiles;
    case 'r':
      return StreamKernel::kRows;
    case 'w':
      return StreamKernel::kWide;
    default:
      return {};
  }
}

class Step {
 public:
  Step(const Model& model, int rows, bool along_k) : model_(model), rows_(rows), along_k_(along_k) {
    const int64_t d = model.width, q = model.heads * model.head_dim;
    const int64_t kv = model.kv_heads * model.head_dim;
    const int64_t layer = d * (q + 2 * kv) + q * d + 3 * d * model.ffn;
    weight_bytes_ = 2 * (model.layers * layer + d * model.vocab);
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&weights_), weight_bytes_));
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&activations_), kActivationBytes));
    // Random bits of bf16 numbers between 2^-7 and 2^-3, of both signs.
    std::vector<uint16_t> noise(1 << 20);
    uint32_t state = 1;
    for (uint16_t& n : noise) {
      state = state * 1664525u + 1013904223u;
      n = static_cast<uint16_t>(((state >> 16) & 0x81ff) + 0x3c00);
    }
    Fill(weights_, weight_bytes_, noise);
    Fill(activations_, kActivationBytes, noise);
  }
  ~Step() {
    cudaFree(weights_);
    cudaFree(activations_);
  }

  int64_t weight_bytes() const { return weight_bytes_; }

  // All products, in order; `which` >= 0: that one of each layer alone (4: the head). With the
  // settings of the five kinds of products, or the defaults.
  std::vector<Launch> Launches(const Settings* settings, int which = -1) {
    std::vector<Launch> launches;
    next_weight_ = weights_;
    const int d = model_.width, q = model_.heads * model_.head_dim;
    const int kv = model_.kv_heads * model_.head_dim;
    char* x = At(0);
    char* y = At(1);
    for (int l = 0; l < model_.layers; ++l) {
      Add(&launches, which, 0, x, d, {q, kv, kv}, true, l > 0, false, settings);
      Add(&launches, which, 1, At(8), q, {d}, false, false, false, settings);
      Add(&launches, which, 2, y, d, {model_.ffn, model_.ffn}, true, true, true, settings);
      Add(&launches, which, 3, At(10), model_.ffn, {d}, false, false, false, settings);
    }
    Add(&launches, which, 4, x, d, {model_.vocab}, true, true, false, settings);
    return launches;
  }

 private:
  static constexpr int64_t kSlot = 8 << 20, kActivationBytes = 16 * kSlot;

  char* At(int slot) const { return activations_ + slot * kSlot; }

  static void Fill(char* to, int64_t bytes, const std::vector<uint16_t>& noise) {
    const int64_t size = 2 * static_cast<int64_t>(noise.size());
    for (int64_t at = 0; at < bytes; at += size) {
      CHECK_CUDA(
          cudaMemcpy(to + at, noise.data(), std::min(size, bytes - at), cudaMemcpyHostToDevice));
    }
  }

  StreamKernel KernelFor(const StreamParams& p, int kind, const Settings* settings) const {
    const StreamKernel chosen = DefaultTuning(p, along_k_).kernel;
    return settings == nullptr ? chosen : (*settings)[kind].kernel.value_or(chosen);
  }

  void Add(std::vector<Launch>* launches, int which, int kind, const char* row, int k,
           const std::vector<int>& columns, bool norm, bool added, bool pair,
           const Settings* settings) {
    StreamParams p = {};
    p.m = rows_;
    p.k = k;
    p.num_products = static_cast<int32_t>(columns.size());
    for (size_t i = 0; i < columns.size(); ++i) {
      const int n = columns[i];
      p.product[i] = {next_weight_,
                      At(4 + static_cast<int>(i)),
                      2 * int64_t{along_k_ ? k : n},
                      2 * int64_t{n},
                      n,
                      0,
                      DType::kBF16,
                      {}};
      next_weight_ += 2 * int64_t{n} * k;
    }
    if (which >= 0 && which != kind) return;
    p.row = row;
    p.row_m = p.added_m = p.sum_m = p.norm_m = 2 * int64_t{k};
    // Rows whose squares the launch before leaves; else long ones have a kernel of their own.
    const bool chain =
        rows_ > 1 && rows_ <= 8 && KernelFor(p, kind, settings) == StreamKernel::kRows;
    if (chain && (kind == 1 || kind == 3)) {
      p.residual = At(2);
      p.residual_sum = At(11);
      p.residual_m = p.residual_sum_m = 2 * int64_t{columns[0]};
      p.squares_out = reinterpret_cast<float*>(At(13));
    }
    const bool follows = chain && norm && added;
    if (follows) {
      p.row = At(11);
      p.squares = reinterpret_cast<float*>(At(13));
      p.num_parts = model_.width / (along_k_ ? 32 : 64);
      added = false;
    }
    norm &= follows || NormFits(rows_, k);
    p.has_norm = norm;
    p.added = norm && added ? At(2) : nullptr;
    p.weight = norm ? At(3) : nullptr;
    p.sum = norm && added ? At(11) : nullptr;
    p.norm = norm ? At(12) : nullptr;
    p.length = BitsOf(static_cast<float>(k));
    p.eps = BitsOf(1e-5f);
    p.divides = p.rounds_first = p.silu_rounds = p.fetches_early = 1;
    p.activated = pair ? At(9) : nullptr;
    p.activated_m = 2 * int64_t{columns[0]};
    StreamTuning tuning = DefaultTuning(p, along_k_);
    if (settings != nullptr) {
      const Setting& s = (*settings)[kind];
      tuning = {s.kernel.value_or(tuning.kernel), s.blocks, s.stages, s.cluster};
    }
    if (!FitsStream(p, along_k_, tuning)) return;  // other kernels take it
    LaunchStream(p, DType::kBF16, along_k_, tuning, launches);
  }

  const Model model_;
  const int rows_;
  const bool along_k_;
  int64_t weight_bytes_ = 0;
  char* weights_ = nullptr;
  char* activations_ = nullptr;
  char* next_weight_ = nullptr;
};

// Median microseconds of one replay.
double TimeGraph(std::vector<Launch> launches, bool dependent, int replays = 10, int rounds = 7) {
  const std::unique_ptr<GraphDevice> device = MakeCudaDevice(0);
  for (Launch& launch : launches) launch.dependent &= dependent;
  launches.front().dependent = false;
  return GraphTimer(*device, launches).Median(rounds, replays);
}

// The best tunings of each product by itself.
void Tune(Step* step, std::optional<StreamKernel> kernel) {
  static const char* const kNames[] = {"qkv", "output", "gate/up", "down", "head"};
  struct Tried {
    double us;
    Setting setting;
    Launch launch;
  };
  for (int which = 0; which < kKinds; ++which) {
    const std::vector<Launch> now = step->Launches(nullptr, which);
    if (now.empty()) continue;
    const double count = static_cast<double>(now.size());
    std::printf("    %-8s %6.2f %6.2f us;", kNames[which], TimeGraph(now, false) / count,
                TimeGraph(now, true) / count);
    std::vector<Tried> all;
    for (const int blocks : {132, 264, 396}) {
      for (const int stages : {2, 3, 4, 5, 6}) {
        for (const int cluster : {1, 2, 4, 8}) {
          const Setting setting = {kernel, blocks, stages, cluster};
          Settings settings;
          settings.fill(setting);
          const std::vector<Launch> one = step->Launches(&settings, which);
          if (one.empty()) continue;
          const bool known = std::any_of(all.begin(), all.end(), [&](const Tried& t) {
            return t.launch.SameConfig(one.back());
          });
          if (known) continue;
          all.push_back({TimeGraph(one, true, 3, 5) / count, setting, one.back()});
        }
      }
    }
    std::sort(all.begin(), all.end(), [](const Tried& a, const Tried& b) { return a.us < b.us; });
    for (size_t i = 0; i < all.size(); ++i) {
      if (i > 5) break;
      const auto& [us, setting, launch] = all[i];
      std::printf("  %.2f (%d/%d/%d: %u of %u, %u KB)", us, setting.blocks, setting.stages,
                  setting.cluster, launch.grid[0], launch.cluster, launch.shared_bytes / 1024);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

// Reads "132/3/4" or five of that, and what separates it from the next.
bool ReadSettings(const char** text, Settings* settings) {
  for (int kind = 0; kind < kKinds; ++kind) {
    Setting& s = (*settings)[kind];
    int length = 0;
    if (std::sscanf(*text, "%d/%d/%d%n", &s.blocks, &s.stages, &s.cluster, &length) != 3) {
      return false;
    }
    *text += length;
    s.kernel = KernelOf(*text);
    *text += s.kernel.has_value();
    if (kind == 0 && **text != ':') settings->fill(s);
    if (**text != ':') break;
    ++*text;
  }
  *text += **text == ',';
  return true;
}

void Run(const Model& model, int rows, const std::string& settings) {
  for (const bool along_k : {true, false}) {
    Step step(model, rows, along_k);
    std::printf("%s, %d row%s, [%s], %.0f MB\n", model.name, rows, rows == 1 ? "" : "s",
                along_k ? "out, in" : "in, out", step.weight_bytes() / 1e6);
    const std::vector<Launch> all = step.Launches(nullptr);
    const double plain = TimeGraph(all, false), dependent = TimeGraph(all, true);
    std::printf("  %8.1f us, dependent launches %8.1f us  %5.2f TB/s\n", plain, dependent,
                step.weight_bytes() / dependent / 1e6);
    std::fflush(stdout);
    if (settings.rfind("tune", 0) == 0) Tune(&step, KernelOf(settings.c_str() + 4));
    Settings read;
    const char* next = settings.c_str();
    for (const char* now = next; ReadSettings(&next, &read); now = next) {
      const std::vector<Launch> tuned = step.Launches(&read);
      std::printf("  %8.1f us, dependent launches %8.1f us  %.*s\n", TimeGraph(tuned, false),
                  TimeGraph(tuned, true), static_cast<int>(next - now), now);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace jaxgraph

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "135m,1b,8b";
  const int rows = argc > 2 ? std::atoi(argv[2]) : 1;
  const std::string settings = argc > 3 ? argv[3] : "";
  for (const jaxgraph::Model& model : jaxgraph::kModels) {
    if (wanted.find(model.name) == std::string::npos) continue;
    jaxgraph::Run(model, rows, settings);
  }
}
