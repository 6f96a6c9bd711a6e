// The CUDA C++ of one EXPR or ROW node: its program with shapes and strides written out, and no
// address in it. Pure: equal requests give equal text.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/kernels/cuda/expr_params.h"

namespace jaxgraph {

// Of an EXPR in a group: its output `out` is stored a second time, as rows of a SET_ROWS. The first
// element is byte `offset` of the rows, which lie without gaps; the kernel's function `place` says
// where a byte of them goes, or null where it goes nowhere.
struct FedRows {
  int out = 0;
  int64_t offset = 0;
  std::string place;
};

struct KernelRequest {
  bool row = false;       // ROW, else EXPR
  bool clusters = false;  // blocks may share their memory
  int num_srcs = 0, num_outs = 0;
  const ExprPiece* piece = nullptr;                     // the node's only one; no address is read
  std::array<uint8_t, kExprMaxSrcs> src_alignment{};    // the address is a multiple of this; <= 16
  std::array<uint8_t, kExprMaxOuts> out_alignment{};    //
  std::array<uint16_t, kExprMaxOuts> overlapping = {};  // bit s: source s shares bytes with it
  std::vector<FedRows> fed;                             // EXPR: only where nothing overlaps
};

struct KernelSource {
  // Functions and types are named by this, which no text holds otherwise, so that the name can come
  // from the text.
  static constexpr char kName[] = "$KERNEL";
  std::string text;
  uint32_t grid = 1, block = 1, cluster = 1;
};

// The kernel takes one struct: the addresses of the sources, then those of the outputs. False: the
// program has something in it that only the interpreter runs.
bool GenerateSource(const KernelRequest& request, KernelSource* source);

// The body alone of an EXPR's kernel, which shares a kernel with other nodes: addresses are named
// `operands` + "s0" ..., and `block` is the name of the block's number within this node's blocks.
// Blocks have source->block threads, kExprThreads.
constexpr uint32_t kExprThreads = 128;
bool GenerateExprBody(const KernelRequest& request, const std::string& operands,
                      const std::string& block, KernelSource* source);
// The body of a function that returns element `i` of an output, in the row-major order of the
// EXPR's elements, as it is in memory; and stores nothing. Only where nothing overlaps.
bool GenerateExprValue(const KernelRequest& request, const std::string& operands, int out,
                       std::string* text);

}  // namespace jaxgraph
