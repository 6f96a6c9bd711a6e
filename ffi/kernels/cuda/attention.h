// ATTENTION: one node in the terms of the kernels, and the kernels' launchers. attention.cpp
// chooses.
#pragma once

#include <cstdint>

#include "ffi/core/attention.h"
#include "ffi/core/dtype.h"
#include "ffi/kernels/cuda/attention_early.h"
#include "ffi/kernels/cuda/attention_form.h"
#include "ffi/kernels/cuda/expr_params.h"
#include "ffi/kernels/cuda/fast_div.h"
#include "ffi/kernels/cuda/launchers.h"
#include "ffi/kernels/cuda/weights_ahead.h"

namespace jaxgraph {

// Registers of the score program in which the kernels pass the raw score and get the masked one.
constexpr uint8_t kRawRegister = 32;
constexpr uint8_t kMaskedRegister = 33;

// Strides in bytes, 0 in dimensions of size 1.
struct AttentionArgs {
  const char *q, *k, *v;
  char* out;
  const char* bound;                                                 // null: there is none
  const char *position, *bias;                                       // of the known form
  const char* sink;                                                  // null: there is none
  int64_t q_strides[4], k_strides[4], v_strides[4], out_strides[4];  // as the node's tensors
  int64_t bound_strides[3], position_strides[3], bias_strides[4], sink_strides[3];
  ScoreForm form;
  int32_t b0, b1, g, d, s, e;
  DType q_dtype, k_dtype, v_dtype, out_dtype, bound_dtype, masked_dtype;
  uint8_t in_double;
  uint8_t wide;  // the program needs registers of 64 bits
  DType sink_dtype;
  uint8_t reserved[7];
};

// A node, prepared. The program is needed where its form is not known.
struct AttentionNode {
  AttentionArgs args;
  ExprParams program;  // its sources have their strides over [b0, b1, g, s]
};

Status PrepareAttention(const ResolvedNode& node, Attention attention, AttentionNode* prepared);

// What a kernel takes: its plan, with the program or, where its form is known, without.
template <typename Plan>
struct KnownParams {
  Plan plan;
};
template <typename Plan>
struct ProgramParams {
  ExprParams program;
  Plan plan;
};

// Bf16 or f16 throughout, rows of 64 or 128 elements, queries at multiples of 16 bytes, a known
// form of scores (compute capability 9.0).
bool FitsDecodeKernel(const AttentionArgs& args);
// Memory that a node brings along for what its launches tell one another.
struct Workspace {
  char* address = nullptr;
  int64_t floats = 0;
};
// Blocks among which a cache is split, and warps of a block. The blocks are a cluster, or meet in a
// workspace.
struct AttentionSplit {
  int32_t blocks, warps;
  bool in_workspace;
};
AttentionSplit SplitForDecode(const AttentionArgs& args, const Workspace& workspace);
void LaunchAttentionDecode(const AttentionArgs& args, const Workspace& workspace,
                           const EarlyCache& early, const AttentionSplit& split,
                           const WeightsAhead& ahead, Launches* launches);
// What `splits` blocks a KV head have left in a workspace, in rows of args.e + kPartRest floats.
constexpr int kPartRest = 4;
void LaunchAttentionCombine(const AttentionArgs& args, const Workspace& workspace, int32_t splits,
                            Launches* launches);
// Can 4 outputs be stored at once?
bool StoresVectors(const AttentionArgs& args);
// Is what bounds the scores that are seen the position that masks them, too?
bool BoundIsPosition(const AttentionArgs& args);

// Keys contiguous along d, values along e, both of one dtype (bf16, f16 or f32), rows at multiples
// of 16 bytes: streamed, split over the blocks of a cluster where `clusters` says so.
bool FitsStreamKernel(const AttentionArgs& args);
void LaunchAttentionStream(const AttentionNode& node, bool clusters, Launches* launches);

// The same for Hopper's tensor cores: bf16 or f16 throughout, d and e multiples of 16.
bool FitsTensorKernel(const AttentionArgs& args);
void LaunchAttentionTensor(const AttentionNode& node, Launches* launches);

// Everything.
void LaunchAttentionStrided(const AttentionNode& node, Launches* launches);

}  // namespace jaxgraph
