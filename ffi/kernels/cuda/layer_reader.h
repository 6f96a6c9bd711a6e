// Reads the nodes of one layer (layer_group.h) as the parameters of its kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/kernels/cuda/layer.h"
#include "ffi/kernels/cuda/memory_range.h"

namespace jaxgraph {

constexpr size_t kOutside = SIZE_MAX;

// What `reader` reads, written by `writer` or before the layers.
struct Use {
  size_t writer, reader;
  MemoryRange range;
};

struct Layer {
  size_t end = 0;  // behind the last node
  LayerAttentionParams attention = {};
  LayerMlpParams mlp = {};
  DType dtype = DType::kBF16;
  size_t last_norm = 0, last_product = 0;     // nodes that write what remains, ...
  const char *row = nullptr, *out = nullptr;  // ... the row so far and the down product
  std::vector<size_t> nodes;                  // without views
  std::vector<Use> uses;
};

// Whether a layer starts at nodes[first]. `before`: the layer in front, whose sum this one's norm
// must add; null: none. What is left open: `clusters`, and where the kernels leave what they pass
// on.
bool ReadLayer(const std::vector<ResolvedNode>& nodes, size_t first, const Layer* before,
               Layer* layer);

}  // namespace jaxgraph
