// MATMUL: out[b0,b1,m,n] = sum over k of lhs[b0,b1,m,k] * rhs[b0,b1,k,n].
//
// The right operand is the weights. With few rows on the left (decode) the weights are streamed
// once where they lie, whichever of their dimensions is contiguous; with more rows, or other
// strides, panels of columns are packed as floats and meet all rows.
#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "ffi/kernels/host/float_convert.h"
#include "ffi/kernels/host/loops.h"
#include "ffi/kernels/host/operand.h"
#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/parallel.h"
#include "ffi/kernels/host/slice_index.h"

namespace jaxgraph {
namespace {

struct MatmulParams {
  Operand out, lhs, rhs;
  const char* index;         // or null; of integers of `index_dtype`
  int64_t index_strides[2];  // bytes
  int64_t b0, b1, m, n, k, matrices;
  DType index_dtype;
  uint8_t reserved[7];

  char* Rhs(int64_t i, int64_t j, int64_t row, int64_t column) const {
    if (index == nullptr) return rhs.At(i, j, row, column);
    const int64_t at = ReadIndex(index_dtype, index + i * index_strides[0] + j * index_strides[1]);
    return rhs.At(std::clamp<int64_t>(at, 0, matrices - 1), 0, row, column);
  }
};
static_assert(std::has_unique_object_representations_v<MatmulParams>, "equal nodes, equal bytes");

// A thread's scratch memory, kept from call to call. Several, because the calling thread holds the
// widened left operand, and sums of parts, while it works on its share.
enum Scratch { kLeft, kParts, kWork, kNumScratch };
float* ScratchFloats(Scratch which, int64_t n) {
  thread_local std::unique_ptr<float[]> memory[kNumScratch];
  thread_local int64_t capacity[kNumScratch] = {};
  if (capacity[which] < n) {
    memory[which].reset(new float[n]);
    capacity[which] = n;
  }
  return memory[which].get();
}

void StoreRounded(DType t, float value, char* dst) {
  if (t == DType::kF32) {
    std::memcpy(dst, &value, sizeof value);
  } else {
    const uint16_t bits = t == DType::kBF16 ? ToBF16(value).bits : ToF16(value).bits;
    std::memcpy(dst, &bits, sizeof bits);
  }
}

// About what `rows` rows against all weights take, in the steps of ParallelRanges.
int64_t CostOf(const MatmulParams& p, int64_t rows) {
  return p.b0 * p.b1 * p.n * p.k * (4 + rows) / 8;
}

// ---- f16, bf16, f32: accumulation in float ----

// Writes sums[i][j] (rows of `stride`), rounded, to out[b0, b1, row + i, column + j].
void StoreSums(const MatmulParams& p, int64_t b0, int64_t b1, int64_t row, int64_t rows,
               int64_t column, int64_t cols, const float* sums, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    char* dst = p.out.At(b0, b1, row + i, column);
    const float* line = sums + i * stride;
    if (p.out.dtype == DType::kF32 && p.out.strides[3] == 1) {
      std::memcpy(dst, line, cols * sizeof(float));
      continue;
    }
    const int64_t step = p.out.strides[3] * static_cast<int64_t>(SizeOf(p.out.dtype));
    for (int64_t j = 0; j < cols; ++j) StoreRounded(p.out.dtype, line[j], dst + j * step);
  }
}

enum class Path { kRows, kDots, kPanels };

Path PathOf(const MatmulParams& p) {
  if (p.m > kMaxMatmulRows) return Path::kPanels;
  if (p.rhs.strides[2] == 1 || p.k == 1) return Path::kDots;
  return p.rhs.strides[3] == 1 || p.n == 1 ? Path::kRows : Path::kPanels;
}

// The left operand's rows [row, row + rows) of every batch as floats, rows of length k.
struct LeftRows {
  const float* data;
  int64_t batch_stride0, batch_stride1, row_stride;

  const float* At(int64_t b0, int64_t b1) const {
    return data + b0 * batch_stride0 + b1 * batch_stride1;
  }
};

LeftRows WidenLeft(const MatmulParams& p, int64_t row, int64_t rows) {
  const int64_t* s = p.lhs.strides;
  const bool dense = s[3] == 1 && (s[2] == p.k || rows == 1);
  if (p.lhs.dtype == DType::kF32 && dense) {
    return {reinterpret_cast<const float*>(p.lhs.At(0, 0, row, 0)), s[0], s[1], p.k};
  }
  float* data = ScratchFloats(kLeft, p.b0 * p.b1 * rows * p.k);
  float* next = data;
  for (int64_t i0 = 0; i0 < p.b0; ++i0)
    for (int64_t i1 = 0; i1 < p.b1; ++i1)
      for (int64_t i = 0; i < rows; ++i, next += p.k)
        Loops().matmul.widen(p.lhs.dtype, p.lhs.At(i0, i1, row + i, 0), s[3], p.k, next);
  return {data, p.b1 * rows * p.k, rows * p.k, p.k};
}

// Columns [begin, end) of one batch, weights read where they lie.
void StreamColumns(const MatmulParams& p, Path path, const float* a, int64_t b0, int64_t b1,
                   int64_t begin, int64_t end) {
  const MatmulLoops& loops = Loops().matmul;
  const auto run = path == Path::kDots ? loops.dots : loops.rows;
  const int64_t row_stride = p.rhs.strides[path == Path::kDots ? 3 : 2];
  const char* w = p.Rhs(b0, b1, 0, begin);
  const int64_t n = end - begin;
  const int m = static_cast<int>(p.m);
  if (p.out.dtype == DType::kF32 && p.out.strides[3] == 1) {
    float* out = reinterpret_cast<float*>(p.out.At(b0, b1, 0, begin));
    run(p.rhs.dtype, w, row_stride, a, p.k, m, p.k, n, out, p.out.strides[2]);
    return;
  }
  float* sums = ScratchFloats(kWork, m * n);
  run(p.rhs.dtype, w, row_stride, a, p.k, m, p.k, n, sums, n);
  StoreSums(p, b0, b1, 0, m, begin, n, sums, n);
}

// A narrow matrix of rows is cut along k, so that every part of it is one contiguous stream; parts
// of rows would be too short for the memory's prefetchers. The number of parts is part of the order
// of summation, so it is always the same.
constexpr int64_t kDepthParts = 8;

bool CutsAlongDepth(const MatmulParams& p) {
  constexpr int64_t kNarrow = 4096;
  return p.b0 * p.b1 == 1 && p.n <= kNarrow && p.k >= 32 * kDepthParts;
}

void StreamDepths(const MatmulParams& p, const float* a, ParallelFor& pool) {
  const int64_t size = p.m * p.n;
  float* parts = ScratchFloats(kParts, kDepthParts * size);
  ParallelRanges(pool, kDepthParts, 1, CostOf(p, p.m), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t k0 = p.k * part / kDepthParts, k1 = p.k * (part + 1) / kDepthParts;
      Loops().matmul.rows(p.rhs.dtype, p.Rhs(0, 0, k0, 0), p.rhs.strides[2], a + k0, p.k,
                          static_cast<int>(p.m), k1 - k0, p.n, parts + part * size, p.n);
    }
  });
  for (int64_t part = 1; part < kDepthParts; ++part)
    for (int64_t i = 0; i < size; ++i) parts[i] += parts[part * size + i];
  StoreSums(p, 0, 0, 0, p.m, 0, p.n, parts, p.n);
}

constexpr int64_t kPanelDepth = 256;  // of k at a time: a packed panel stays in the cache

// Rows [k0, k0 + depth) of the columns [column, column + cols), widened, padded to `width` columns.
void PackPanel(const MatmulParams& p, int64_t b0, int64_t b1, int64_t k0, int64_t depth,
               int64_t column, int64_t cols, int64_t width, float* panel) {
  const MatmulLoops& loops = Loops().matmul;
  if (cols < width) std::memset(panel, 0, depth * width * sizeof(float));
  if (p.rhs.strides[2] == 1) {  // read along k
    float line[kPanelDepth];
    for (int64_t j = 0; j < cols; ++j) {
      loops.widen(p.rhs.dtype, p.Rhs(b0, b1, k0, column + j), 1, depth, line);
      for (int64_t i = 0; i < depth; ++i) panel[i * width + j] = line[i];
    }
    return;
  }
  for (int64_t i = 0; i < depth; ++i)
    loops.widen(p.rhs.dtype, p.Rhs(b0, b1, k0 + i, column), p.rhs.strides[3], cols,
                panel + i * width);
}

void PanelColumns(const MatmulParams& p, const float* a, int64_t row, int64_t rows, int64_t b0,
                  int64_t b1, int64_t begin, int64_t end) {
  const MatmulLoops& loops = Loops().matmul;
  const int64_t width = loops.panel_width;
  float* panel = ScratchFloats(kWork, kPanelDepth * width + rows * width);
  float* sums = panel + kPanelDepth * width;
  for (int64_t column = begin; column < end; column += width) {
    const int64_t cols = std::min(width, end - column);
    for (int64_t k0 = 0; k0 < p.k; k0 += kPanelDepth) {
      const int64_t depth = std::min(kPanelDepth, p.k - k0);
      PackPanel(p, b0, b1, k0, depth, column, cols, width, panel);
      loops.panel(panel, a + k0, p.k, rows, depth, k0 > 0, sums);
    }
    StoreSums(p, b0, b1, row, rows, column, cols, sums, width);
  }
}

// Calls fn(b0, b1, begin, end) for column ranges of every batch, on several threads. Ranges begin
// at multiples of `grain`.
template <typename Fn>
void ForColumns(const MatmulParams& p, ParallelFor& pool, int64_t rows, int64_t grain,
                const Fn& fn) {
  const int64_t grains = (p.n + grain - 1) / grain;
  ParallelRanges(pool, p.b0 * p.b1 * grains, 1, CostOf(p, rows), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t batch = begin / grains;
      const int64_t stop = std::min(end, (batch + 1) * grains);
      fn(batch / p.b1, batch % p.b1, (begin - batch * grains) * grain,
         std::min(p.n, (stop - batch * grains) * grain));
      begin = stop;
    }
  });
}

void RunFloat(const MatmulParams& p, ParallelFor& pool) {
  const Path path = PathOf(p);
  if (path != Path::kPanels) {
    const LeftRows left = WidenLeft(p, 0, p.m);
    if (path == Path::kRows && CutsAlongDepth(p)) return StreamDepths(p, left.At(0, 0), pool);
    constexpr int64_t kGrain = 64;
    ForColumns(p, pool, p.m, kGrain, [&](int64_t b0, int64_t b1, int64_t begin, int64_t end) {
      StreamColumns(p, path, left.At(b0, b1), b0, b1, begin, end);
    });
    return;
  }
  constexpr int64_t kRowBlock = 512;  // rows that share one pass over the weights
  for (int64_t row = 0; row < p.m; row += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, p.m - row);
    const LeftRows left = WidenLeft(p, row, rows);
    ForColumns(p, pool, rows, Loops().matmul.panel_width,
               [&](int64_t b0, int64_t b1, int64_t begin, int64_t end) {
                 PanelColumns(p, left.At(b0, b1), row, rows, b0, b1, begin, end);
               });
  }
}

// ---- f64, alone or with narrower types: accumulation in double ----

void DoubleColumns(const MatmulParams& p, int64_t b0, int64_t b1, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 64;
  double w[kBlock];
  std::unique_ptr<double[]> sums(new double[p.m * kBlock]);
  for (int64_t column = begin; column < end; column += kBlock) {
    const int64_t cols = std::min(kBlock, end - column);
    std::fill_n(sums.get(), p.m * kBlock, 0.0);
    for (int64_t i = 0; i < p.k; ++i) {
      for (int64_t j = 0; j < cols; ++j)
        w[j] = ReadFloat<double>(p.rhs.dtype, p.Rhs(b0, b1, i, column + j));
      for (int64_t m = 0; m < p.m; ++m) {
        const double x = ReadFloat<double>(p.lhs.dtype, p.lhs.At(b0, b1, m, i));
        double* sum = &sums[m * kBlock];
        for (int64_t j = 0; j < cols; ++j) sum[j] += x * w[j];
      }
    }
    for (int64_t m = 0; m < p.m; ++m) {
      for (int64_t j = 0; j < cols; ++j) {
        const double sum = sums[m * kBlock + j];
        char* dst = p.out.At(b0, b1, m, column + j);
        if (p.out.dtype == DType::kF64) {
          std::memcpy(dst, &sum, sizeof sum);
        } else {
          StoreRounded(p.out.dtype, static_cast<float>(sum), dst);
        }
      }
    }
  }
}

void Run(const void* params, ParallelFor& pool) {
  const MatmulParams& p = *static_cast<const MatmulParams*>(params);
  const bool in_double =
      p.lhs.dtype == DType::kF64 || p.rhs.dtype == DType::kF64 || p.out.dtype == DType::kF64;
  if (p.k > 0 && !in_double) return RunFloat(p, pool);
  ForColumns(p, pool, p.m, 64, [&](int64_t b0, int64_t b1, int64_t begin, int64_t end) {
    DoubleColumns(p, b0, b1, begin, end);
  });
}

const KernelInfo kMatmul = {"host_matmul", sizeof(MatmulParams), Run};

}  // namespace

Status EmitMatmul(const ResolvedNode& resolved, Launch* launch) {
  const Node& node = *resolved.node;
  const TensorRef &out = node.outs[0], &lhs = node.srcs[0], &rhs = node.srcs[1];
  for (const TensorRef* t : {&out, &lhs, &rhs}) {
    if (!IsFloat(t->dtype)) {
      return Status(Code::kUnsupported,
                    std::string("the host multiplies no matrices of ") + NameOf(t->dtype));
    }
  }
  MatmulParams p{};
  p.out = OperandOf(out, resolved.outs[0]);
  p.lhs = OperandOf(lhs, resolved.srcs[0]);
  p.rhs = OperandOf(rhs, resolved.srcs[1]);
  p.b0 = out.shape[0];
  p.b1 = out.shape[1];
  p.m = out.shape[2];
  p.n = out.shape[3];
  p.k = lhs.shape[3];
  if (node.srcs.size() == 3) {
    const TensorRef& index = node.srcs[2];
    p.index = resolved.srcs[2];
    p.index_dtype = index.dtype;
    p.matrices = rhs.shape[0];
    for (int d = 0; d < 2; ++d) {
      p.index_strides[d] = index.strides[d] * static_cast<int64_t>(SizeOf(index.dtype));
    }
  }
  launch->kernel = &kMatmul;
  launch->set_params(p);
  return Status::Ok();
}

}  // namespace jaxgraph
