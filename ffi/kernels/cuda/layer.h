// A layer of a small model's decode step in two kernels of clusters (Hopper). One row is so little
// work that a step of many kernels waits for launches more than for memory; so each kernel takes as
// much as can be done without all blocks meeting. layer_group.cpp finds such layers.
//
//   attention  norm, query, key and value products, rotation, the cache's new row, attention, and
//              a share of the output product for each KV head; one cluster a KV head
//   mlp        norm, gate and up products, activation, and a share of the down product for each
//              cluster
//
// The shares ("parts") are added, in order, by the kernel that comes next.
#pragma once

#include <cstdint>

#include "ffi/kernels/cuda/attention_form.h"
#include "ffi/kernels/cuda/launchers.h"

namespace jaxgraph {

constexpr int kLayerCluster = 16;         // blocks, all told to make room for one another
constexpr int kMaxLayerParts = 8;         // that a row is the sum of
constexpr int kMaxLayerClusters = 4;      // of the MLP, which leaves a part each
constexpr int kMaxLayerRow = 1024;        // elements
constexpr int kMaxLayerHeads = 8;         // queries of a KV head
constexpr int kMaxLayerWidth = 64;        // elements of a head
constexpr int kMaxLayerPositions = 2048;  // of the cache: all of it is on its way before the wait
// Of a block, so that two launches' blocks find room on a multiprocessor.
constexpr int kMaxLayerShared = 112 * 1024;

// s = row (+ added, or + the sum of the parts, rounded); norm = rms_norm(s) (* weight).
struct LayerRow {
  const char* row;
  const char* added;   // null: none
  const float* parts;  // [num_parts], kMaxLayerRow apart
  const char* weight;  // null: none; no node writes it
  char* sum;           // where s is stored; null: nowhere
  uint32_t mean, eps;  // bits of floats: what the sum of squares is multiplied by, what is added
  int32_t size, num_parts;
  uint8_t rounds_first, reserved[7];
};

// [out, in], `pitch` bytes from one row to the next; no node writes it.
struct LayerMatrix {
  const char* weights;
  int64_t pitch;
};

struct LayerAttentionParams {
  LayerRow in;
  LayerMatrix query, key, value, output;
  char *keys, *values;                               // the cache
  int64_t key_head, key_row, value_head, value_row;  // in bytes
  const char* index;                                 // of the row that is written, S32
  const char* position;                              // S32; no node writes it; null: none
  const float *cos, *sin;                            // of half a head
  float* parts;                                      // [kv_heads], kMaxLayerRow apart
  ScoreForm form;                                    // a simple one
  int32_t kv_heads, heads, width, rows;              // heads: of a KV head; rows: of the cache
  uint8_t drops;    // an index outside writes nothing; else it is clamped
  uint8_t bounded;  // the position is a bound, too: see AttentionParams
  uint8_t reserved[6];
};

struct LayerMlpParams {
  LayerRow in;
  LayerMatrix gate, up, down;
  float* parts;  // [clusters], kMaxLayerRow apart
  int32_t hidden, clusters;
  uint8_t silu_rounds, reserved[7];
};

// Behind the last layer: out = the sum of the parts, rounded; sum = row.
struct LayerEndParams {
  const float* parts;
  const char* row;
  char *out, *sum;
  int32_t size, num_parts;
};

// Whether the sizes are ones that the kernels can take. Rows, weights and caches start at multiples
// of 16 bytes and so do their rows.
bool FitsLayerAttention(const LayerAttentionParams& params);
bool FitsLayerMlp(const LayerMlpParams& params);
void LaunchLayerAttention(const LayerAttentionParams& params, DType dtype, Launches* launches);
void LaunchLayerMlp(const LayerMlpParams& params, DType dtype, Launches* launches);
void LaunchLayerEnd(const LayerEndParams& params, DType dtype, Launches* launches);

}  // namespace jaxgraph
