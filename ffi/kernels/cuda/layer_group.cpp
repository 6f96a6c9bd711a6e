#include "ffi/kernels/cuda/layer_group.h"

#include <algorithm>
#include <utility>

#include "ffi/kernels/cuda/layer.h"
#include "ffi/kernels/cuda/layer_reader.h"
#include "ffi/kernels/cuda/memory_range.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

// Layers that stand one after the other.
class Layers {
 public:
  Layers(const std::vector<ResolvedNode>& nodes, size_t first) : nodes_(nodes) {
    for (;;) {
      Layer layer;
      const Layer* const before = layers_.empty() ? nullptr : &layers_.back();
      if (!ReadLayer(nodes, before == nullptr ? first : before->end, before, &layer)) return;
      if (!ChooseSplit(&layer)) return;
      for (const size_t n : layer.nodes) {
        for (const MemoryRange& range : WrittenBy(nodes[n])) writes_.push_back({n, range});
      }
      if (!Undisturbed(layer)) return;
      layers_.push_back(std::move(layer));
    }
  }

  // How many of them can be taken: none of their other results is read behind them.
  size_t CountTakeable() const {
    size_t count = layers_.size();
    while (count > 0 && !NothingElseIsRead(count)) --count;
    return count;
  }
  const Layer& operator[](size_t i) const { return layers_[i]; }

 private:
  static bool ChooseSplit(Layer* layer) {
    for (const int clusters : {kMaxLayerClusters, 2, 1}) {
      layer->mlp.clusters = clusters;
      if (FitsLayerMlp(layer->mlp)) return FitsLayerAttention(layer->attention);
    }
    return false;
  }

  // The kernels keep what the nodes pass on to one another to themselves, so it must be what the
  // nodes would read, too: it is written before, and nothing in between writes there.
  bool Undisturbed(const Layer& layer) const {
    const auto from = [&](size_t n) {
      return std::partition_point(writes_.begin(), writes_.end(),
                                  [&](const Write& write) { return write.node < n; });
    };
    return std::all_of(layer.uses.begin(), layer.uses.end(), [&](const Use& use) {
      if (use.writer != kOutside && use.writer >= use.reader) return false;
      const auto begin = use.writer == kOutside ? writes_.begin() : from(use.writer + 1);
      return std::none_of(begin, from(use.reader),
                          [&](const Write& write) { return Overlap(write.range, use.range); });
    });
  }

  // What the first `count` layers do not store, although their nodes would, is in the arena and
  // written anew before anybody reads it; what they do store, behind them, is still there then.
  bool NothingElseIsRead(size_t count) const {
    const Layer& last = layers_[count - 1];
    const int64_t bytes = 2 * int64_t{last.mlp.in.size};
    const MemoryRange row = {last.row, last.row + bytes}, out = {last.out, last.out + bytes};
    std::vector<MemoryRange> stale;
    for (size_t i = 0; i < count; ++i) {
      for (const size_t n : layers_[i].nodes) {
        if (nodes_[n].node->op == Op::kSetRows) continue;
        const std::vector<MemoryRange> writes = WrittenBy(nodes_[n]);
        for (size_t o = 0; o < writes.size(); ++o) {
          if (n > last.last_norm && Overlap(writes[o], row)) return false;
          const bool stored =
              (n == last.last_norm && writes[o].begin == row.begin) || n == last.last_product;
          if (!stored && nodes_[n].node->outs[o].base != 0) return false;
          stale.push_back(writes[o]);
        }
      }
    }
    Remove(row, &stale);
    Remove(out, &stale);
    for (size_t n = last.end; n < nodes_.size() && !stale.empty(); ++n) {
      const Node& node = *nodes_[n].node;
      if (node.op == Op::kView) continue;
      for (size_t s = 0; s < node.srcs.size(); ++s) {
        if (OverlapAny(RangeOf(node.srcs[s], nodes_[n].srcs[s]), stale)) return false;
      }
      if (node.op == Op::kSetRows) continue;
      for (size_t o = 0; o < node.outs.size(); ++o) {
        if (IsDense(node.outs[o], node.outs[o].num_elements())) {
          Remove(RangeOf(node.outs[o], nodes_[n].outs[o]), &stale);
        }
      }
    }
    return true;
  }

  static void Remove(const MemoryRange& range, std::vector<MemoryRange>* from) {
    std::vector<MemoryRange> left;
    for (const MemoryRange& r : *from) {
      if (!Overlap(r, range)) {
        left.push_back(r);
        continue;
      }
      if (r.begin < range.begin) left.push_back({r.begin, range.begin});
      if (range.end < r.end) left.push_back({range.end, r.end});
    }
    *from = std::move(left);
  }

  struct Write {
    size_t node;
    MemoryRange range;
  };

  const std::vector<ResolvedNode>& nodes_;
  std::vector<Layer> layers_;
  std::vector<Write> writes_;  // of the layers and of the one that is looked at, in their order
};

// Scratch memory, in bytes: rows and parts that an attention kernel leaves to the MLP's, and those
// that the MLP's leaves to the next layer.
constexpr int64_t kRowBytes = 2 * kMaxLayerRow;
constexpr int64_t kPartsBytes = 4 * int64_t{kMaxLayerParts} * kMaxLayerRow;
static_assert(2 * (kRowBytes + kPartsBytes) <= int64_t{kScratchBytes});

}  // namespace

size_t EmitLayers(const std::vector<ResolvedNode>& nodes, size_t first, Launches* launches) {
  char* const scratch = nodes[first].scratch;
  if (nodes[first].node->op != Op::kRow || scratch == nullptr) return 0;
  const Layers layers(nodes, first);
  const size_t count = layers.CountTakeable();
  if (count == 0) return 0;

  char* const attention_row = scratch;
  char* const mlp_row = scratch + kRowBytes;
  float* const attention_parts = reinterpret_cast<float*>(scratch + 2 * kRowBytes);
  float* const mlp_parts = reinterpret_cast<float*>(scratch + 2 * kRowBytes + kPartsBytes);
  const DType dtype = layers[0].dtype;
  for (size_t i = 0; i < count; ++i) {
    LayerAttentionParams attention = layers[i].attention;
    if (i > 0) {
      attention.in.row = mlp_row;
      attention.in.parts = mlp_parts;
      attention.in.num_parts = layers[i - 1].mlp.clusters;
    }
    const bool adds = i > 0 || attention.in.added != nullptr;
    if (adds) attention.in.sum = attention_row;
    attention.parts = attention_parts;
    LaunchLayerAttention(attention, dtype, launches);
    LayerMlpParams mlp = layers[i].mlp;
    mlp.in.row = adds ? attention_row : attention.in.row;
    mlp.in.parts = attention_parts;
    mlp.in.num_parts = attention.kv_heads;
    mlp.in.sum = mlp_row;
    mlp.parts = mlp_parts;
    LaunchLayerMlp(mlp, dtype, launches);
  }
  const Layer& last = layers[count - 1];
  LayerEndParams end = {};
  end.parts = mlp_parts;
  end.row = mlp_row;
  end.out = const_cast<char*>(last.out);
  end.sum = const_cast<char*>(last.row);
  end.size = last.mlp.in.size;
  end.num_parts = last.mlp.clusters;
  LaunchLayerEnd(end, dtype, launches);
  return last.end - first;
}

}  // namespace jaxgraph
