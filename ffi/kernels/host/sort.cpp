// SORT: the first elements of each piece of each row, in order.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "ffi/core/sort_key.h"
#include "ffi/kernels/host/ops.h"
#include "ffi/kernels/host/parallel.h"

namespace jaxgraph {
namespace {

struct SortedOut {
  char* out;
  const char* src;                               // null: positions
  int64_t out_row, out_step, src_row, src_step;  // bytes
  uint64_t item;
};

struct SortKernelParams {
  const char* keys;
  int64_t keys_row, keys_step;  // bytes
  int64_t rows, n, chunks, kept;
  SortedOut outs[8];
  uint32_t num_outs;
  DType dtype;
  SortOrder order;
  uint8_t reserved[2];
};
static_assert(std::has_unique_object_representations_v<SortKernelParams>, "equal bytes");

struct Entry {
  uint64_t key;
  int64_t at;
  bool operator<(const Entry& o) const { return key != o.key ? key < o.key : at < o.at; }
};

void Store(const SortKernelParams& p, int64_t row, int64_t place, int64_t at) {
  for (uint32_t i = 0; i < p.num_outs; ++i) {
    const SortedOut& o = p.outs[i];
    char* to = o.out + row * o.out_row + place * o.out_step;
    if (o.src == nullptr) {
      const int32_t position = static_cast<int32_t>(at);
      std::memcpy(to, &position, sizeof position);
    } else {
      std::memcpy(to, o.src + row * o.src_row + at * o.src_step, o.item);
    }
  }
}

void SortPiece(const SortKernelParams& p, int64_t row, int64_t chunk) {
  std::array<Entry, kSortMaxLength> entries;
  const uint32_t size = static_cast<uint32_t>(SizeOf(p.dtype));
  const int64_t begin = SortPieceBegin(chunk, p.n, p.chunks);
  const int64_t length = SortPieceBegin(chunk + 1, p.n, p.chunks) - begin;
  for (int64_t i = 0; i < length; ++i) {
    uint64_t bits = 0;  // little endian
    std::memcpy(&bits, p.keys + row * p.keys_row + (begin + i) * p.keys_step, size);
    entries[i] = {SortKey(p.order, p.dtype, size, bits), begin + i};
  }
  std::partial_sort(entries.begin(), entries.begin() + p.kept, entries.begin() + length);
  for (int64_t j = 0; j < p.kept; ++j) Store(p, row, chunk * p.kept + j, entries[j].at);
}

void RunSort(const void* params, ParallelFor& pool) {
  const SortKernelParams& p = *static_cast<const SortKernelParams*>(params);
  constexpr int64_t kCostOfAnElement = 100;  // some comparisons, most of them mispredicted
  ParallelRanges(pool, p.rows * p.chunks, 1, p.rows * p.n * kCostOfAnElement,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) SortPiece(p, i / p.chunks, i % p.chunks);
                 });
}

const KernelInfo kSort = {"host_sort", sizeof(SortKernelParams), RunSort};

int64_t Bytes(const TensorRef& t, int d) {
  return t.strides[d] * static_cast<int64_t>(SizeOf(t.dtype));
}

}  // namespace

Status EmitSort(const ResolvedNode& resolved, Launch* launch) {
  const Node& node = *resolved.node;
  SortParams params;
  std::memcpy(static_cast<void*>(&params), node.params.data(), sizeof params);
  const TensorRef& keys = node.srcs[0];
  SortKernelParams p{};
  p.keys = resolved.srcs[0];
  p.keys_row = Bytes(keys, 0);
  p.keys_step = Bytes(keys, 1);
  p.rows = keys.shape[0];
  p.n = keys.shape[1];
  p.chunks = params.chunks;
  p.kept = node.outs[0].shape[1] / p.chunks;
  p.num_outs = static_cast<uint32_t>(node.outs.size());
  p.dtype = keys.dtype;
  p.order = params.order;
  for (size_t i = 0; i < node.outs.size(); ++i) {
    SortedOut& o = p.outs[i];
    o.out = resolved.outs[i];
    o.out_row = Bytes(node.outs[i], 0);
    o.out_step = Bytes(node.outs[i], 1);
    if (params.source[i] == kSortPositions) continue;
    const TensorRef& src = node.srcs[params.source[i]];
    o.src = resolved.srcs[params.source[i]];
    o.src_row = Bytes(src, 0);
    o.src_step = Bytes(src, 1);
    o.item = SizeOf(src.dtype);
  }
  launch->kernel = &kSort;
  launch->set_params(p);
  return Status::Ok();
}

}  // namespace jaxgraph
