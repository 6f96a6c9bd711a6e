#include "ffi/kernels/cuda/stream_group.h"

#include <optional>
#include <utility>

#include "ffi/kernels/cuda/known_forms.h"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul.h"
#include "ffi/kernels/cuda/memory_range.h"
#include "ffi/kernels/cuda/stream.h"
#include "ffi/kernels/cuda/stream_heads.h"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

int64_t SizeIn(const TensorRef& t) { return static_cast<int64_t>(SizeOf(t.dtype)); }

// What the nodes of a run touch. The planner keeps these apart; here it is made sure.
class Footprint {
 public:
  // Adds a node, but for the sources that the kernel does not read from memory. False, and nothing
  // is added, if then some output overlapped another operand.
  bool Add(const ResolvedNode& at, uint32_t inner_srcs) {
    std::vector<MemoryRange> reads;
    for (size_t i = 0; i < at.srcs.size(); ++i) {
      if (i < 32 && (inner_srcs >> i & 1) != 0) continue;
      reads.push_back(RangeOf(at.node->srcs[i], at.srcs[i]));
    }
    return Add(WrittenBy(at), reads);
  }
  bool Add(const std::vector<MemoryRange>& writes, const std::vector<MemoryRange>& reads) {
    for (size_t i = 0; i < writes.size(); ++i) {
      const std::vector<MemoryRange> others(writes.begin() + i + 1, writes.end());
      if (OverlapAny(writes[i], others) || OverlapAny(writes[i], reads) ||
          OverlapAny(writes[i], reads_) || OverlapAny(writes[i], writes_)) {
        return false;
      }
    }
    for (const MemoryRange& read : reads) {
      if (OverlapAny(read, writes_)) return false;
    }
    reads_.insert(reads_.end(), reads.begin(), reads.end());
    writes_.insert(writes_.end(), writes.begin(), writes.end());
    return true;
  }

 private:
  std::vector<MemoryRange> reads_, writes_;
};

// ---- the parts of a run ----

// A tensor as rows of a last dimension that is contiguous, with one stride between them.
struct Rows {
  int64_t count, length, stride;  // in bytes
};
std::optional<Rows> AsRows(const TensorRef& t) {
  if (t.rank < 1) return std::nullopt;
  const int last = t.rank - 1;
  if (t.shape[last] != 1 && t.strides[last] != 1) return std::nullopt;
  Rows rows = {1, t.shape[last], 0};
  for (int d = 0; d < last; ++d) {
    if (t.shape[d] == 1) continue;
    if (rows.count != 1) return std::nullopt;
    rows.count = t.shape[d];
    rows.stride = t.strides[d] * SizeIn(t);
  }
  return rows;
}

// A ROW that is an RMS norm, and its part of the parameters.
struct Norm {
  RmsNormForm form;
  StreamParams params;
};
std::optional<Norm> ReadNorm(const ResolvedNode& at) {
  if (at.node->op != Op::kRow) return std::nullopt;
  Norm read = {};
  ExprProgram program;
  RmsNormForm& form = read.form;
  if (!DecodeExpr(*at.node, &program).ok() || !MatchRmsNorm(program, &form)) return std::nullopt;
  const std::optional<Rows> norm = AsRows(at.node->outs[form.norm_out]);
  if (!norm || norm->length % 8 != 0 || norm->count == 0 || norm->length == 0) return std::nullopt;
  StreamParams* const p = &read.params;
  bool fits = true;
  // Of an operand: its address, if the kernel can read it, and the distance of its rows.
  const auto take = [&](const TensorRef& t, auto* address, int64_t* stride) {
    const std::optional<Rows> rows = AsRows(t);
    fits = fits && rows && IsAligned(address, 16) && rows->stride % 16 == 0;
    *stride = rows ? rows->stride : 0;
    return address;
  };
  const auto source = [&](int i, int64_t* stride) -> const char* {
    return i < 0 ? nullptr : take(at.node->srcs[i], at.srcs[i], stride);
  };
  const auto output = [&](int i, int64_t* stride) -> char* {
    return i < 0 ? nullptr : take(at.node->outs[i], at.outs[i], stride);
  };
  p->row = source(form.x, &p->row_m);
  p->added = source(form.added, &p->added_m);
  int64_t weight_m = 0;
  p->weight = source(form.weight, &weight_m);
  p->sum = output(form.sum_out, &p->sum_m);
  p->norm = output(form.norm_out, &p->norm_m);
  p->has_norm = 1;
  p->divides = form.divides;
  p->rounds_first = form.rounds_first;
  p->length = BitsOf(form.length);
  p->eps = BitsOf(form.eps);
  p->m = static_cast<int32_t>(norm->count);
  p->k = static_cast<int32_t>(norm->length);
  if (!fits || weight_m != 0) return std::nullopt;
  return read;
}

// A MATMUL whose weights a streaming kernel reads.
struct Streamed {
  MatmulParams product;
  bool along_k;
  bool constant;  // the weights
};
bool IsStreamed(const ResolvedNode& at, Streamed* s) {
  if (at.node->op != Op::kMatmul) return false;
  MatmulParams& p = s->product;
  if (!PrepareProduct(at, &p).ok() || p.index != nullptr) return false;
  const DType t = p.b_dtype;
  if ((t != DType::kBF16 && t != DType::kF16) || p.a_dtype != t) return false;
  if (p.out_dtype == DType::kF64 || p.batch[0] != 1 || p.batch[1] != 1) return false;
  if (p.m < 1 || p.m > kMaxStreamRows || p.n < 1) return false;
  if (p.k < 8 || p.k % 8 != 0 || p.k > kMaxStreamLength) return false;
  s->along_k = p.b_k == 2;
  const int64_t pitch = s->along_k ? p.b_n : p.b_k;
  if (!s->along_k && (p.b_n != 2 || p.n % 8 != 0)) return false;
  const int64_t item = static_cast<int64_t>(SizeOf(p.out_dtype));
  s->constant = at.is_constant(p.b == at.srcs[1] ? 1 : 0);
  return p.a_k == 2 && (p.out_n == item || p.n == 1) && IsAligned(p.a, 16) && IsAligned(p.b, 16) &&
         p.a_m % 16 == 0 && pitch % 16 == 0;
}

bool SameRows(const MatmulParams& a, const MatmulParams& b) {
  return a.a == b.a && a.a_m == b.a_m && a.m == b.m && a.k == b.k && a.b_dtype == b.b_dtype;
}

void AddProduct(const Streamed& s, StreamParams* p) {
  const MatmulParams& m = s.product;
  p->product[p->num_products++] = {m.b,         m.out, s.along_k ? m.b_n : m.b_k, m.out_m, m.n, 0,
                                   m.out_dtype, {}};
  p->fetches_early = s.constant && (p->num_products == 1 || p->fetches_early);
}

// The bit of the source that is the rows.
uint32_t RowsSource(const ResolvedNode& at, const MatmulParams& p) {
  return p.a == at.srcs[0] ? 1 : 2;
}

// An EXPR that multiplies the silu of one of two products by the other; its part of the parameters.
bool TakesActivation(const ResolvedNode& at, DType dtype, StreamParams* p) {
  ExprProgram program;
  SiluProductForm form;
  if (at.node->op != Op::kExpr || p->num_products != 2) return false;
  if (!DecodeExpr(*at.node, &program).ok() || !MatchSiluProduct(program, &form)) return false;
  StreamedProduct& first = p->product[0];
  StreamedProduct& second = p->product[1];
  if (form.dtype != dtype || form.gate == form.up || at.srcs.size() != 2 || first.n != second.n ||
      first.out_dtype != dtype || second.out_dtype != dtype) {
    return false;
  }
  // All of it in the order of the products, which have no gaps.
  const int64_t row = 2 * int64_t{first.n};
  const int64_t size = int64_t{first.n} * p->m;
  for (const TensorRef* t : {&at.node->srcs[0], &at.node->srcs[1], &at.node->outs[0]}) {
    if (!IsDense(*t, size)) return false;
  }
  if (p->m > 1 && (first.out_m != row || second.out_m != row)) return false;
  const char* gate = at.srcs[form.gate];
  const char* up = at.srcs[form.up];
  if (gate == second.out && up == first.out) {
    std::swap(first, second);
  } else if (gate != first.out || up != second.out) {
    return false;
  }
  p->activated = at.outs[0];
  p->activated_m = row;
  p->silu_rounds = form.rounds;
  return true;
}

// A ROW that is the argmax of the only product's rows.
bool TakesArgmax(const ResolvedNode& at, const StreamParams& p, StreamArgmaxParams* argmax) {
  ExprProgram program;
  ArgmaxForm form;
  if (at.node->op != Op::kRow || at.node->srcs.size() != 1 || p.num_products != 1) return false;
  if (!DecodeExpr(*at.node, &program).ok() || !MatchArgmax(program, &form)) return false;
  const StreamedProduct& product = p.product[0];
  TensorRef places = at.node->outs[0];  // one of a row, which it is broadcast along
  places.shape[places.rank - 1] = 1;
  const std::optional<Rows> from = AsRows(at.node->srcs[0]), to = AsRows(places);
  if (!from || !to || form.dtype != product.out_dtype || at.srcs[0] != product.out) return false;
  if (from->count != p.m || from->length != product.n ||
      (p.m > 1 && from->stride != product.out_m)) {
    return false;
  }
  argmax->out = at.outs[0];
  argmax->pitch = to->stride;
  argmax->rows = p.m;
  return true;
}

// Of scratch memory at most: a row's candidates are the blocks' or their warps'.
int64_t CandidateBytes(int rows, const StreamTuning& tuning) {
  const int of_block = tuning.kernel == StreamKernel::kRows ? 1 : 8;
  return int64_t{rows} * tuning.blocks * of_block * static_cast<int64_t>(sizeof(StreamCandidate));
}

// A run of nodes for one launch, and an argmax's.
struct Group {
  StreamParams params = {};
  Footprint footprint;
  DType dtype = DType::kBF16;
  bool along_k = false;
  size_t end = 0;  // behind its last node
  std::optional<StreamArgmaxParams> argmax;
  int64_t scratch_bytes = 0;  // of scratch memory, that the group before leaves something in

  bool Fits(const StreamParams& p) const { return FitsStream(p, along_k, TuningOf(p)); }
  StreamTuning TuningOf(const StreamParams& p) const { return DefaultTuning(p, along_k); }
};

// May a node be in one kernel with the first?
bool StandsBy(const std::vector<ResolvedNode>& nodes, size_t first, size_t i) {
  return i < nodes.size() && nodes[i].node->region == nodes[first].node->region &&
         nodes[i].node->branch == nodes[first].node->branch;
}

// The products from nodes[first] on, of rows that are in memory, or behind the `norm` in
// `group->params`, and their activation. False: not even one.
bool ReadProducts(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion, Group* group) {
  StreamParams& params = group->params;
  size_t next = first;
  Streamed leader;
  if (!IsStreamed(nodes[next], &leader)) return false;
  const MatmulParams& product = leader.product;
  group->dtype = product.b_dtype;
  group->along_k = leader.along_k;
  if (params.has_norm) {
    const bool reads_norm = product.a == params.norm && product.m == params.m &&
                            product.k == params.k &&
                            (product.m == 1 || product.a_m == params.norm_m);
    if (!reads_norm) return false;
  } else {
    params.row = product.a;
    params.row_m = product.a_m;
    params.m = product.m;
    params.k = product.k;
  }
  // Alone, a product's rows are read from memory by all blocks, so they count as well.
  const auto inner = [&](const ResolvedNode& at, const MatmulParams& p) {
    return params.has_norm ? RowsSource(at, p) : 0;
  };
  AddProduct(leader, &params);
  if (!group->Fits(params) || !group->footprint.Add(nodes[next], inner(nodes[next], product))) {
    return false;
  }
  ++next;

  while (fusion && params.num_products < kMaxStreamed && StandsBy(nodes, first, next)) {
    Streamed other;
    StreamParams with_other = params;
    if (!IsStreamed(nodes[next], &other) || other.along_k != leader.along_k ||
        !SameRows(other.product, product)) {
      break;
    }
    AddProduct(other, &with_other);
    if (!group->Fits(with_other) ||
        !group->footprint.Add(nodes[next], inner(nodes[next], other.product))) {
      break;
    }
    params = with_other;
    ++next;
  }
  if (fusion && StandsBy(nodes, first, next)) {
    StreamParams with_activation = params;
    if (TakesActivation(nodes[next], product.b_dtype, &with_activation) &&
        group->Fits(with_activation) && group->footprint.Add(nodes[next], 3)) {
      params = with_activation;
      ++next;
    }
  }
  // In a region other branches run meanwhile, and have the same scratch memory.
  char* const scratch = nodes[first].scratch;
  StreamArgmaxParams argmax = {};
  if (fusion && StandsBy(nodes, first, next) && nodes[next].node->region == 0 &&
      scratch != nullptr && TakesArgmax(nodes[next], params, &argmax)) {
    StreamParams with_argmax = params;
    with_argmax.candidates = reinterpret_cast<StreamCandidate*>(scratch + group->scratch_bytes);
    const int64_t bytes = CandidateBytes(params.m, group->TuningOf(with_argmax));
    if (group->Fits(with_argmax) && group->scratch_bytes + bytes <= int64_t{kScratchBytes}) {
      params = with_argmax;
      argmax.candidates = params.candidates;
      group->argmax = argmax;
      ++next;
    }
  }
  // Heads are stored by the product's launch, and so would come before an argmax's.
  if (fusion && StandsBy(nodes, first, next) && params.activated == nullptr && !group->argmax) {
    StreamParams with_heads = params;
    HeadsFootprint heads;
    const size_t taken = TakeHeads(nodes, next, group->dtype, &with_heads, &heads);
    if (taken > 0 && group->Fits(with_heads) && group->footprint.Add(heads.writes, heads.reads)) {
      params = with_heads;
      next += taken;
    }
  }
  group->end = next;
  return true;
}

// The group behind one of a single product, where it begins with the norm of that product's sum
// with something else: then the product's launch makes the sum and its squares, too.
std::optional<Group> ReadBehind(const std::vector<ResolvedNode>& nodes, size_t first,
                                Group* group) {
  const size_t at = group->end;
  StreamParams& before = group->params;
  char* const scratch = nodes[first].scratch;
  // Branches of a region run at once, and would share the scratch memory.
  if (scratch == nullptr || nodes[first].node->region != 0 || !StandsBy(nodes, first, at) ||
      !StandsBy(nodes, first, at + 1) || before.num_products != 1 ||
      before.heads.position != nullptr || group->argmax ||
      before.product[0].out_dtype != group->dtype ||
      group->TuningOf(before).kernel != StreamKernel::kRows) {
    return std::nullopt;
  }
  const std::optional<Norm> norm = ReadNorm(nodes[at]);
  if (!norm || norm->form.added < 0 || norm->form.dtype != group->dtype) return std::nullopt;
  const StreamedProduct& product = before.product[0];
  const auto is_product = [&](const char* row, int64_t pitch) {
    return row == product.out && pitch == product.out_m;
  };
  Group behind;
  StreamParams& p = behind.params;
  p = norm->params;
  if (p.m != before.m || p.k != product.n) return std::nullopt;
  const bool product_first = is_product(p.row, p.row_m);
  if (!product_first && !is_product(p.added, p.added_m)) return std::nullopt;
  const int other = product_first ? norm->form.added : norm->form.x;
  StreamParams carrying = before;
  carrying.residual = product_first ? p.added : p.row;
  carrying.residual_m = product_first ? p.added_m : p.row_m;
  carrying.squares_out = reinterpret_cast<float*>(scratch);
  const int32_t parts = RowsTiles(carrying, group->along_k);
  // In scratch memory: parts of squares, then the sum, if no node stores it.
  int64_t& scratch_bytes = behind.scratch_bytes;
  scratch_bytes = parts * kMaxFewRows * int64_t{sizeof(float)};
  std::vector<MemoryRange> writes;
  if (p.sum != nullptr) {
    carrying.residual_sum = p.sum;
    carrying.residual_sum_m = p.sum_m;
    writes.push_back(RangeOf(nodes[at].node->outs[norm->form.sum_out], p.sum));
  } else {
    carrying.residual_sum = scratch + scratch_bytes;  // both multiples of 16
    carrying.residual_sum_m = 2 * int64_t{p.k};
    scratch_bytes += p.m * carrying.residual_sum_m;
  }
  if (scratch_bytes > int64_t{kScratchBytes} || !group->Fits(carrying)) return std::nullopt;
  p.row = carrying.residual_sum;
  p.row_m = carrying.residual_sum_m;
  p.added = nullptr;
  p.sum = nullptr;
  p.squares = carrying.squares_out;
  p.num_parts = parts;
  if (!behind.footprint.Add(nodes[at], 0) || !ReadProducts(nodes, at + 1, true, &behind) ||
      behind.dtype != group->dtype ||
      behind.TuningOf(behind.params).kernel != StreamKernel::kRows) {
    return std::nullopt;
  }
  // The norm's weight comes with the matrices.
  if (norm->form.weight >= 0 && !nodes[at].is_constant(norm->form.weight)) {
    behind.params.fetches_early = 0;
  }
  if (!group->footprint.Add(writes, {RangeOf(nodes[at].node->srcs[other], carrying.residual)})) {
    return std::nullopt;
  }
  before = carrying;
  return behind;
}

void LaunchGroup(const Group& group, Launches* launches) {
  const int32_t places = LaunchStream(group.params, group.dtype, group.along_k,
                                      group.TuningOf(group.params), launches);
  if (!group.argmax) return;
  StreamArgmaxParams argmax = *group.argmax;
  argmax.places = places;
  LaunchStreamArgmax(argmax, launches);
}

}  // namespace

size_t EmitStreamGroup(const std::vector<ResolvedNode>& nodes, size_t first, bool fusion,
                       Launches* launches) {
  Group group;
  size_t next = first;
  if (nodes[first].node->op == Op::kRow) {
    if (!fusion || !StandsBy(nodes, first, first + 1) || nodes[first + 1].node->op != Op::kMatmul) {
      return 0;
    }
    const std::optional<Norm> norm = ReadNorm(nodes[first]);
    if (!norm || !NormFits(norm->params.m, norm->params.k) ||
        !group.footprint.Add(nodes[first], 0)) {
      return 0;
    }
    group.params = norm->params;
    ++next;
  }
  if (!ReadProducts(nodes, next, fusion, &group)) return 0;
  std::optional<Group> behind;
  if (fusion) behind = ReadBehind(nodes, first, &group);
  LaunchGroup(group, launches);
  if (behind) LaunchGroup(*behind, launches);
  return (behind ? behind->end : group.end) - first;
}

}  // namespace jaxgraph
