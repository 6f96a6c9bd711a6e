// Program: one native split, planned, immutable. It travels as bytes (an attribute of the FFI
// call), never as a process-local handle, because XLA executables outlive the process.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/core/dtype.h"
#include "ffi/core/status.h"

namespace jaxgraph {

constexpr int kMaxRank = 8;

// Kinds of node. The numbers are part of the program format: never renumber.
enum class Op : uint8_t {
  kView = 0,       // srcs [x], outs [view of x]; launches nothing
  kExpr = 1,       // fused elementwise over strided views; params: ExprProgram (expr.h)
  kRow = 2,        // EXPR plus reductions over the last axis; params: ExprProgram (expr.h)
  kMatmul = 3,     // outs [b0,b1,M,N] = srcs [b0,b1,M,K] x [b0,b1,K,N]; no params. f32 accumulation
                   // for f16/bf16/f32, f64 for f64; one rounding to the output's dtype.
                   // With a third source of integers, index [b0,b1], the second is a table of
                   // matrices [E,1,K,N] (experts), E >= 1: batch (i, j) multiplies by
                   // table[clamp(index[i, j], 0, E - 1), 0]
  kGather = 4,     // params: IndexParams; see there
  kSetRows = 5,    // params: IndexParams; see there
  kCopy = 6,       // outs [y] = srcs [x]; same shape and dtype, any strides
  kAttention = 7,  // params: AttentionParams, then an ExprProgram; see AttentionParams
  kSort = 8,       // params: SortParams; see there
};
constexpr int kNumOps = 9;
const char* NameOf(Op op);

// Where a tensor lies and how it is laid out: address = bases[base] + offset.
struct TensorRef {
  DType dtype = DType::kF32;
  uint8_t rank = 0;
  uint32_t base = 0;   // index into Program::bases
  int64_t offset = 0;  // bytes
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};  // elements, 0 where broadcast, may be negative

  int64_t num_elements() const;
};

// How an index beyond the bounds is treated by GATHER and SET_ROWS.
enum class IndexMode : uint8_t {
  kClip = 0,             // the start is clamped so that the whole slice fits (XLA's dynamic slices)
  kFillOrDrop = 1,       // GATHER writes `fill`, SET_ROWS skips the slice, if any part is outside
  kPromiseInBounds = 2,  // the caller promises; kernels still clamp, so that memory stays safe
};

// Params of GATHER and SET_ROWS, in this layout (little endian, 24 bytes).
// GATHER:   outs [n, s0..s(R-1)], srcs [operand of rank R, index_0 [n] .. index_(C-1) [n]]:
//           out[i, j0..] = operand[start(i) + j], where start(i)[dim[c]] = index_c[i], else 0.
// SET_ROWS: outs [dest of rank R], srcs [dest (the same address and layout), updates [n, s0..],
//           index_0 [n] ..]: dest[start(i) + j] = updates[i, j], i ascending; the last one wins.
struct IndexParams {
  IndexMode mode = IndexMode::kClip;
  uint8_t num_components = 0;  // C <= 8
  uint8_t reserved[6] = {};
  uint8_t dim[8] = {};  // dim[c]: the operand's dimension that index_c selects in
  uint64_t fill = 0;    // bit pattern of the fill value in the operand's dtype (low bytes)
};
static_assert(sizeof(IndexParams) == 24);

// Params of ATTENTION start with this (little endian, 8 bytes); the wire format of an ExprProgram
// (expr.h) follows. A few queries against a cache:
//   outs [o: b0, b1, g, e], and maybe [a workspace: n], contiguous f32, in which a kernel may leave
//        anything
//   srcs [q: b0, b1, g, d], [k: b0, b1, d, s], [v: b0, b1, s, e], then the program's own sources,
//        and maybe [a sink: b0, b1, g, 1], floats
//   raw = q . k (sum over d); masked = program(raw); o = sum over s of softmax_s(masked) * v
//   A sink is one more score, which takes its part of the weights and has no value:
//   o = sum over s of exp(masked - m) * v / (exp(sink - m) + sum over s of exp(masked - m))
// all in f32 (f64 for f64), rounded once to o's dtype; any strides. A row whose masked scores are
// all -inf (the sink too, if there is one), or hold a NaN, gives NaN, as the formula does.
// The program is elementwise (one stage, no scalar section, rank 4 over [b0, b1, g, s]) and has one
// output, the masked score (float). Its source number `raw_source` is the raw score, converted to
// the dtype that its LOAD names; source i of the others is srcs[3 + i - (i > raw_source)], which
// has the shape [b0, b1, g, s]. STORE's dtype is the masked score's.
struct AttentionParams {
  uint8_t raw_source = 0;
  // If not 0xff: srcs[bound_source] (an integer tensor of shape [b0, b1, g, s] that does not move
  // along s) bounds what can be seen: scores at s > bound are masked to weight zero whatever their
  // value, so a kernel need not read keys and values there. Where the bound is negative it says
  // nothing. An optimisation that a kernel may ignore: the program masks all the same.
  uint8_t bound_source = 0xff;
  uint8_t sink_source = 0;  // if not 0: the sink is srcs[sink_source], the last one
  uint8_t reserved[5] = {};
};
static_assert(sizeof(AttentionParams) == 8);

enum class SortOrder : uint8_t {
  kAscending = 0,   // as lax.sort: NaN last whatever its sign, 0 and -0 equal, false before true
  kDescending = 1,  // as lax.top_k: NaN, inf, .., 0, -0, .., -inf, -NaN
};

constexpr int64_t kSortMaxLength = 4096;  // of a piece that is not merged
constexpr int kSortMaxMerged = 8;
constexpr uint8_t kSortPositions = 0xff;

// Params of SORT, in this layout (little endian, 16 bytes). Rows are cut into pieces, and the first
// elements of each piece, in order, stand one after the other; equal ones as they stood before.
//   srcs [keys: r, n], any others [r, n]; outs [r, chunks * k] each.
// Piece c of a row holds elements c * n / chunks (rounded down) up to where piece c + 1 begins, at
// least k and at most kSortMaxLength. out[i] holds elements of srcs[source[i]], in its dtype, or,
// for kSortPositions, their positions in the row (S32). Outputs of n elements hold whole pieces,
// whose lengths may differ by one, each where it was.
struct SortParams {
  uint32_t chunks = 1;
  SortOrder order = SortOrder::kAscending;
  // If not 0, from 2 to kSortMaxMerged: the keys of each of merged * chunks pieces are in order
  // already, and `merged` of them next to each other are made one, of any length.
  uint8_t merged = 0;
  uint8_t reserved[2] = {};
  uint8_t source[8] = {};
};
static_assert(sizeof(SortParams) == 16);

// Node flags.
constexpr uint32_t kFlagNotCapturable = 1u << 0;  // host work: the split that holds it runs eagerly

struct Node {
  Op op = Op::kView;
  uint32_t flags = 0;
  uint32_t region = 0;  // 0: none; else the fork-join region that a chunk must not cut
  uint32_t branch = 0;  // branch within the region
  std::string params;   // op-specific bytes
  std::vector<TensorRef> outs;
  std::vector<TensorRef> srcs;
  std::string label;  // for people: "mul@model.py:88"
};

// The params of a GATHER or SET_ROWS, which have the right size.
IndexParams IndexParamsOf(const Node& node);

enum class BaseKind : uint8_t { kArena = 0, kOperand = 1, kResult = 2 };
const char* NameOf(BaseKind kind);  // "arena", "operand", "result"

// What the planner knows of a base's address from call to call; the executor decides (placement).
enum class BaseHint : uint8_t {
  kUnknown = 0,
  kWanders = 1,  // small integer operands (token, position) and results get a new buffer per call
};

// An address that a call supplies. bases[0] is the arena, then operands, then results.
struct Base {
  BaseKind kind = BaseKind::kArena;
  BaseHint hint = BaseHint::kUnknown;
  bool written = false;  // some node writes through this base
  int32_t alias = -1;    // result: the operand (index among operands) whose address it shares
  uint32_t index = 0;    // among operands, or among results
  uint64_t nbytes = 0;   // of the whole buffer
  std::string label;     // "params['layers'][0]['wq']", "result[1]"
};

// How an executable is brought up to date: the cheapest way that may be taken. The dearer ones are
// taken all the same where a cheaper one does not apply.
enum class UpdateDepth : uint8_t {
  kPatch = 0,        // set the parameters of the nodes that changed
  kRecapture = 1,    // capture the chunk again and update its executable in place
  kInstantiate = 2,  // capture the chunk again and make a new executable
};
constexpr int kNumUpdateDepths = 3;

// Settings that travel with the program: what Options said when it was planned.
struct ExecOptions {
  uint32_t chunk_size = 512;  // nodes a chunk; 0: one graph
  uint32_t warmup_calls = 2;  // the capture happens on this identical call
  uint32_t max_variants = 8;  // per key, least recently used first out
  uint32_t max_failures = 2;  // then the variant stays eager until clear()
  bool disabled = false;      // every call runs eagerly
  bool fusion = true;         // emission-level fusion (try_fuse)
  bool concurrency = true;    // fork-join regions run on side streams
  bool rewarm_on_address_change = false;
  UpdateDepth update_depth = UpdateDepth::kPatch;
  uint32_t idle_ms = 10000;      // a variant not called for so long is dropped; 0: never
  uint32_t sweep_ms = 5000;      // how often idle variants are looked for
  uint32_t max_executables = 0;  // of the device, least recently used first out; 0: no bound
  uint64_t memory_budget = 0;    // bytes, of the device's executables by estimate; 0: no bound
};

using Hash128 = std::array<uint8_t, 16>;

struct Program {
  std::string function;      // qualified name of the wrapped function
  uint64_t function_id = 0;  // hash of (qualified name, deterministic ordinal): owner of statistics
  uint32_t split = 0;        // ordinal of this split in the step, for people
  Hash128 key{};             // graph key: identity of the first node
  uint64_t arena_bytes = 0;  // intermediates; slots come behind it
  ExecOptions options;
  std::vector<Base> bases;
  std::vector<Node> nodes;

  Hash128 id{};  // hash of the encoded bytes; set by Decode
};

// Encodes to the wire format; the inverse of Decode.
std::string Encode(const Program& program);

// Decodes and validates: every reference is inside its table, every tensor inside its base, every
// enum known, every ExprProgram well formed. Malformed bytes give kInvalidArgument, never a crash.
Status Decode(std::string_view bytes, Program* program);

// 128-bit hash (MurmurHash3 x64/128 or another of that quality).
Hash128 HashBytes(std::string_view bytes);

}  // namespace jaxgraph
