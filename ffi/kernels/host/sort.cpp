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
  int64_t rows, n, chunks;
  int64_t kept;  // of a piece; 0: all of it
  SortedOut outs[8];
  uint32_t num_outs;
  DType dtype;
  SortOrder order;
  uint8_t merged, reserved;
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

// Where the piece's first element goes.
int64_t FirstPlace(const SortKernelParams& p, int64_t chunk) {
  return p.kept == 0 ? SortPieceBegin(chunk, p.n, p.chunks) : chunk * p.kept;
}

uint64_t KeyAt(const SortKernelParams& p, int64_t row, int64_t at) {
  const uint32_t size = static_cast<uint32_t>(SizeOf(p.dtype));
  uint64_t bits = 0;  // little endian
  std::memcpy(&bits, p.keys + row * p.keys_row + at * p.keys_step, size);
  return SortKey(p.order, p.dtype, size, bits);
}

void SortPiece(const SortKernelParams& p, int64_t row, int64_t chunk) {
  std::array<Entry, kSortMaxLength> entries;
  const int64_t begin = SortPieceBegin(chunk, p.n, p.chunks);
  const int64_t length = SortPieceBegin(chunk + 1, p.n, p.chunks) - begin;
  const int64_t kept = p.kept == 0 ? length : p.kept, first = FirstPlace(p, chunk);
  for (int64_t i = 0; i < length; ++i) entries[i] = {KeyAt(p, row, begin + i), begin + i};
  std::partial_sort(entries.begin(), entries.begin() + kept, entries.begin() + length);
  for (int64_t j = 0; j < kept; ++j) Store(p, row, first + j, entries[j].at);
}

void MergePieces(const SortKernelParams& p, int64_t row, int64_t chunk) {
  std::array<Entry, kSortMaxMerged> heads;
  std::array<int64_t, kSortMaxMerged> ends;
  const int64_t pieces = p.merged * p.chunks, piece = chunk * p.merged;
  int64_t count = 0, length = 0;
  for (int64_t w = 0; w < p.merged; ++w) {
    const int64_t begin = SortPieceBegin(piece + w, p.n, pieces);
    ends[count] = SortPieceBegin(piece + w + 1, p.n, pieces);
    length += ends[count] - begin;
    heads[count++] = {KeyAt(p, row, begin), begin};
  }
  const int64_t kept = p.kept == 0 ? length : p.kept, first = FirstPlace(p, chunk);
  for (int64_t j = 0; j < kept; ++j) {
    const int64_t w = std::min_element(heads.begin(), heads.begin() + count) - heads.begin();
    Store(p, row, first + j, heads[w].at);
    const int64_t next = heads[w].at + 1;
    if (next < ends[w]) {
      heads[w] = {KeyAt(p, row, next), next};
      continue;
    }
    --count;  // the last piece takes the place of the one that has ended; entries know their order
    heads[w] = heads[count];
    ends[w] = ends[count];
  }
}

void RunSort(const void* params, ParallelFor& pool) {
  const SortKernelParams& p = *static_cast<const SortKernelParams*>(params);
  const auto run = p.merged == 0 ? SortPiece : MergePieces;
  constexpr int64_t kCostOfAnElement = 100;  // some comparisons, most of them mispredicted
  ParallelRanges(pool, p.rows * p.chunks, 1, p.rows * p.n * kCostOfAnElement,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) run(p, i / p.chunks, i % p.chunks);
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
  p.kept = node.outs[0].shape[1] == p.n ? 0 : node.outs[0].shape[1] / p.chunks;
  p.merged = params.merged;
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
