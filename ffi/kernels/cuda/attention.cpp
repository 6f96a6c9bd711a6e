// ATTENTION: which kernel takes a node.
#include "ffi/kernels/cuda/attention.h"

#include <algorithm>
#include <climits>

#include "ffi/core/attention.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

void ByteStrides(const TensorRef& t, int64_t* strides) {
  for (int d = 0; d < 4; ++d) {
    strides[d] = t.shape[d] == 1 ? 0 : t.strides[d] * static_cast<int64_t>(SizeOf(t.dtype));
  }
}

// The program reads and writes registers of the kernel instead of memory.
void UseRegisters(const Attention& attention, DType computed, ExprProgram* p) {
  for (int i = 0; i < p->num_instrs; ++i) {
    ExprInstr& instr = p->instrs[i];
    if (instr.op == ExprOp::kLoad && instr.aux == attention.params.raw_source) {
      instr = {ExprOp::kConvert,
               instr.dtype,
               instr.dst,
               kRawRegister,
               0,
               0,
               static_cast<uint16_t>(computed)};
    } else if (instr.op == ExprOp::kStore) {
      instr = {ExprOp::kConvert,
               instr.dtype,
               kMaskedRegister,
               instr.a,
               0,
               0,
               static_cast<uint16_t>(instr.dtype)};
    }
  }
}

}  // namespace

Status PrepareAttention(const ResolvedNode& resolved, Attention attention,
                        AttentionNode* prepared) {
  const Node& node = *resolved.node;
  const TensorRef &q = node.srcs[0], &k = node.srcs[1], &v = node.srcs[2], &out = node.outs[0];
  for (const int64_t n :
       {out.shape[0] * out.shape[1], out.shape[2], out.shape[3], q.shape[3], v.shape[2]}) {
    if (n > INT32_MAX / 2) return Status(Code::kUnsupported, "attention of 2^30 rows or more");
  }
  AttentionArgs& args = prepared->args;
  ExprParams& program = prepared->program;
  args.in_double = attention.in_double(node);
  args.masked_dtype = attention.masked();
  args.form = MatchScoreForm(attention);
  UseRegisters(attention, args.in_double ? DType::kF64 : DType::kF32, &attention.program);
  args.wide = PrepareInstructions(attention.program, &program) || args.in_double;
  const auto& sources = attention.scores.srcs;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (i == attention.params.raw_source) continue;
    program.srcs[i] = resolved.srcs[attention.SourceOf(static_cast<int>(i))];
    ByteStrides(sources[i], program.src_strides[i]);
  }
  std::copy_n(attention.program.indices, attention.program.num_indices, program.indices);
  if (args.form.known && args.form.position >= 0) {
    args.position = program.srcs[args.form.position];
    std::copy_n(program.src_strides[args.form.position], 3, args.position_strides);
  }

  if (args.form.known && args.form.bias >= 0) {
    args.bias = program.srcs[args.form.bias];
    std::copy_n(program.src_strides[args.form.bias], 4, args.bias_strides);
  }

  args.q = resolved.srcs[0];
  args.k = resolved.srcs[1];
  args.v = resolved.srcs[2];
  args.out = resolved.outs[0];
  ByteStrides(q, args.q_strides);
  ByteStrides(k, args.k_strides);
  ByteStrides(v, args.v_strides);
  ByteStrides(out, args.out_strides);
  const uint8_t bound = attention.params.bound_source;
  if (bound != 0xff) {
    int64_t strides[4];
    ByteStrides(node.srcs[bound], strides);
    std::copy_n(strides, 3, args.bound_strides);
    args.bound = resolved.srcs[bound];
    args.bound_dtype = node.srcs[bound].dtype;
  }
  if (attention.has_sink()) {
    int64_t strides[4];
    ByteStrides(node.srcs.back(), strides);
    std::copy_n(strides, 3, args.sink_strides);
    args.sink = resolved.srcs.back();
    args.sink_dtype = node.srcs.back().dtype;
  }
  args.b0 = static_cast<int32_t>(out.shape[0]);
  args.b1 = static_cast<int32_t>(out.shape[1]);
  args.g = static_cast<int32_t>(out.shape[2]);
  args.e = static_cast<int32_t>(out.shape[3]);
  args.d = static_cast<int32_t>(q.shape[3]);
  args.s = static_cast<int32_t>(v.shape[2]);
  args.q_dtype = q.dtype;
  args.k_dtype = k.dtype;
  args.v_dtype = v.dtype;
  args.out_dtype = out.dtype;
  return Status::Ok();
}

namespace {

// Rows of `n` elements of 16 bytes each, a multiple of them, contiguous along dimension `along`.
bool RowsOfVectors(const char* address, const int64_t (&strides)[4], int along, int64_t n,
                   int64_t item) {
  if (n * item % 16 != 0 || (n > 1 && strides[along] != item)) return false;
  if (!IsAligned(address, 16)) return false;
  for (int d = 0; d < 4; ++d)
    if (d != along && strides[d] % 16 != 0) return false;
  return true;
}

Workspace WorkspaceOf(const ResolvedNode& resolved) {
  if (resolved.outs.size() < 2) return {};
  return {resolved.outs[1], resolved.node->outs[1].shape[0]};
}

}  // namespace

bool StoresVectors(const AttentionArgs& args) {
  return args.out_dtype == args.k_dtype && args.out_strides[3] == 2 && IsAligned(args.out, 8) &&
         args.out_strides[0] % 8 == 0 && args.out_strides[1] % 8 == 0 &&
         args.out_strides[2] % 8 == 0;
}

bool BoundIsPosition(const AttentionArgs& args) {
  return args.bound != nullptr && args.bound == args.position &&
         args.bound_dtype == args.form.position_dtype &&
         std::equal(args.bound_strides, args.bound_strides + 3, args.position_strides);
}

bool FitsStreamKernel(const AttentionArgs& args) {
  constexpr int64_t kMaxRow = 256;
  const int64_t item = static_cast<int64_t>(SizeOf(args.k_dtype));
  return !args.in_double && args.k_dtype == args.v_dtype && args.d > 0 && args.d <= kMaxRow &&
         args.e <= kMaxRow && RowsOfVectors(args.k, args.k_strides, 2, args.d, item) &&
         RowsOfVectors(args.v, args.v_strides, 3, args.e, item);
}

bool FitsTensorKernel(const AttentionArgs& args) {
  return FitsStreamKernel(args) && args.k_dtype != DType::kF32 && args.q_dtype == args.k_dtype &&
         args.d % 16 == 0 && args.e % 16 == 0;
}

Status EmitAttention(const std::vector<ResolvedNode>& nodes, size_t first, bool clusters,
                     Launches* launches) {
  const ResolvedNode& resolved = nodes[first];
  Attention attention;
  JAXGRAPH_RETURN_IF_ERROR(DecodeAttention(*resolved.node, &attention));
  AttentionNode node = {};
  JAXGRAPH_RETURN_IF_ERROR(PrepareAttention(resolved, attention, &node));
  const AttentionArgs& args = node.args;
  if (args.b0 == 0 || args.b1 == 0 || args.g == 0 || args.e == 0) return Status::Ok();
  const bool streams = args.s > 0 && FitsStreamKernel(args);
  if (streams && clusters && FitsDecodeKernel(args)) {
    const Workspace workspace = WorkspaceOf(resolved);
    uint32_t reads_to = 0;
    const WeightsAhead ahead = FindWeightsAhead(nodes, first, &reads_to);
    const size_t before = launches->size();
    LaunchAttentionDecode(args, workspace,
                          FindEarlyCache(nodes, first, attention, args.form.position),
                          SplitForDecode(args, workspace), ahead, launches);
    (*launches)[before].reads_to = reads_to;
    return Status::Ok();
  }
  if (!args.form.simple()) node.args.form = {};  // the other kernels run the program
  if (!streams) {
    LaunchAttentionStrided(node, launches);
  } else if (clusters && FitsTensorKernel(args)) {
    LaunchAttentionTensor(node, launches);
  } else {
    LaunchAttentionStream(node, clusters, launches);
  }
  return Status::Ok();
}

}  // namespace jaxgraph
