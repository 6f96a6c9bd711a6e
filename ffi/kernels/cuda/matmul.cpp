// MATMUL: which kernel takes a product.
#include "ffi/kernels/cuda/matmul.h"

#include <algorithm>
#include <utility>

namespace jaxgraph {
namespace {

// From here on the tiled kernel reads b less often than the others.
constexpr int32_t kFewRows = 32;

bool HasOneDType(const MatmulParams& p) {
  return p.a_dtype == p.b_dtype && p.out_dtype != DType::kF64 && p.a_dtype != DType::kF64;
}

bool Aligned16(std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [](int64_t v) { return v % 16 == 0; });
}

int64_t Address(const void* p) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(p)); }

Status Prepare(const ResolvedNode& resolved, MatmulParams* p) {
  const TensorRef& a = resolved.node->srcs[0];
  const TensorRef& b = resolved.node->srcs[1];
  const TensorRef& out = resolved.node->outs[0];
  for (const int64_t size : {out.shape[0] * out.shape[1], out.shape[2], out.shape[3], a.shape[3]}) {
    if (size > INT32_MAX) return Status(Code::kUnsupported, "a product of 2^31 rows or more");
  }
  const auto stride = [](const TensorRef& t, int d) {
    return t.shape[d] == 1 ? 0 : t.strides[d] * static_cast<int64_t>(SizeOf(t.dtype));
  };
  *p = {};
  p->a = resolved.srcs[0];
  p->b = resolved.srcs[1];
  p->out = resolved.outs[0];
  p->a_m = stride(a, 2);
  p->a_k = stride(a, 3);
  p->b_k = stride(b, 2);
  p->b_n = stride(b, 3);
  p->out_m = stride(out, 2);
  p->out_n = stride(out, 3);
  for (int d = 0; d < 2; ++d) {
    p->batch[d] = static_cast<int32_t>(out.shape[d]);
    p->a_batch[d] = stride(a, d);
    p->b_batch[d] = stride(b, d);
    p->out_batch[d] = stride(out, d);
  }
  if (resolved.node->srcs.size() == 3) {
    const TensorRef& index = resolved.node->srcs[2];
    if (b.shape[0] > INT32_MAX) return Status(Code::kUnsupported, "a table of 2^31 matrices");
    p->index = resolved.srcs[2];
    p->index_dtype = index.dtype;
    p->matrices = static_cast<int32_t>(b.shape[0]);
    for (int d = 0; d < 2; ++d) p->index_batch[d] = stride(index, d);
  }
  p->m = static_cast<int32_t>(out.shape[2]);
  p->n = static_cast<int32_t>(out.shape[3]);
  p->k = static_cast<int32_t>(a.shape[3]);
  p->a_dtype = a.dtype;
  p->b_dtype = b.dtype;
  p->out_dtype = out.dtype;
  return Status::Ok();
}

// The transposed product is the same numbers: few rows are what the kernels like, not few columns.
void Transpose(MatmulParams* p) {
  std::swap(p->a, p->b);
  std::swap(p->a_dtype, p->b_dtype);
  std::swap(p->a_batch, p->b_batch);
  std::swap(p->a_m, p->b_n);
  std::swap(p->a_k, p->b_k);
  std::swap(p->out_m, p->out_n);
  std::swap(p->m, p->n);
}

// A batch of single rows against one b is a product of several rows.
void FoldBatchIntoRows(MatmulParams* p) {
  for (int d = 0; d < 2; ++d) {
    if (p->m != 1 || p->batch[d] == 1 || p->b_batch[d] != 0) continue;
    p->m = p->batch[d];
    p->a_m = p->a_batch[d];
    p->out_m = p->out_batch[d];
    p->batch[d] = 1;
    p->a_batch[d] = p->out_batch[d] = 0;
  }
}

}  // namespace

bool FitsColumnKernel(const MatmulParams& p) {
  const int64_t item = static_cast<int64_t>(SizeOf(p.b_dtype));
  return HasOneDType(p) && p.k > 1 && p.a_k == item && p.b_k == item &&
         Aligned16({p.k * item, Address(p.a), Address(p.b), p.a_m, p.b_n, p.a_batch[0],
                    p.a_batch[1], p.b_batch[0], p.b_batch[1]});
}

bool FitsPanelKernel(const MatmulParams& p) {
  const int64_t item = static_cast<int64_t>(SizeOf(p.b_dtype));
  return HasOneDType(p) && p.n > 1 && p.b_n == item &&
         Aligned16({p.n * item, Address(p.b), p.b_k, p.b_batch[0], p.b_batch[1]});
}

Status PrepareProduct(const ResolvedNode& node, MatmulParams* p) {
  JAXGRAPH_RETURN_IF_ERROR(Prepare(node, p));
  if (p->index != nullptr) return Status::Ok();  // b stays b, and each batch has its own
  FoldBatchIntoRows(p);
  if (p->n < p->m && p->n <= kFewRows) {
    Transpose(p);
    FoldBatchIntoRows(p);
  }
  return Status::Ok();
}

Status EmitMatmul(const ResolvedNode& node, bool clusters, Launches* launches) {
  MatmulParams p;
  JAXGRAPH_RETURN_IF_ERROR(PrepareProduct(node, &p));
  if (p.m == 0 || p.n == 0 || p.batch[0] == 0 || p.batch[1] == 0) return Status::Ok();
  if (p.m > kFewRows) {
    LaunchTiled(p, launches);
  } else if (FitsColumnKernel(p)) {
    LaunchColumns(p, launches);
  } else if (FitsPanelKernel(p)) {
    LaunchPanels(p, clusters, launches);
  } else if (p.m > kMaxRowsAtOnce) {
    LaunchTiled(p, launches);
  } else {
    LaunchStrided(p, launches);
  }
  return Status::Ok();
}

}  // namespace jaxgraph
