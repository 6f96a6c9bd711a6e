// SORT from scratch: a block a piece of a row. The piece is sorted whole in shared memory, by a
// bitonic network: what comes first is known only then, and at 4096 elements the network takes some
// microseconds.
#include <algorithm>
#include <cstring>

#include "ffi/kernels/cuda/dependent.cuh"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/sort.cuh"

namespace jaxgraph {
namespace {

constexpr uint32_t kSortMaxThreads = 1024;

// One element of the network: its key, and its place in the piece, which makes all keys different.
// What fills the room up comes last. Narrow keys hold both in one word.
template <bool kWide>
struct Network;

template <>
struct Network<false> {
  uint64_t* words;
  static constexpr uint32_t kBytes = 8;
  __device__ Network(char* shared, uint32_t) : words(reinterpret_cast<uint64_t*>(shared)) {}
  __device__ void Set(uint32_t i, uint64_t key) { words[i] = key << 16 | i; }
  __device__ void Clear(uint32_t i) { words[i] = ~uint64_t{0}; }
  __device__ uint32_t PlaceOf(uint32_t i) const { return words[i] & 0xffff; }
  __device__ void Exchange(uint32_t low, uint32_t high, bool ascending) {
    const uint64_t a = words[low], b = words[high];
    if ((a > b) == ascending) {
      words[low] = b;
      words[high] = a;
    }
  }
};

template <>
struct Network<true> {
  uint64_t* keys;
  uint16_t* places;
  static constexpr uint32_t kBytes = 10;
  __device__ Network(char* shared, uint32_t room)
      : keys(reinterpret_cast<uint64_t*>(shared)),
        places(reinterpret_cast<uint16_t*>(keys + room)) {}
  __device__ void Set(uint32_t i, uint64_t key) {
    keys[i] = key;
    places[i] = static_cast<uint16_t>(i);
  }
  __device__ void Clear(uint32_t i) { Set(i, ~uint64_t{0}); }  // behind its equals by its place
  __device__ uint32_t PlaceOf(uint32_t i) const { return places[i]; }
  __device__ void Exchange(uint32_t low, uint32_t high, bool ascending) {
    const uint64_t a = keys[low], b = keys[high];
    const uint16_t at_a = places[low], at_b = places[high];
    if ((a != b ? a > b : at_a > at_b) == ascending) {
      keys[low] = b;
      keys[high] = a;
      places[low] = at_b;
      places[high] = at_a;
    }
  }
};

template <bool kWide>
__global__ void __launch_bounds__(kSortMaxThreads)
    SortKernel(const __grid_constant__ SortKernelParams p) {
  extern __shared__ __align__(16) char shared[];
  BeginLaunch();
  Network<kWide> network(shared, p.room);
  const int64_t row = blockIdx.x, chunk = blockIdx.y;
  const int64_t begin = SortPieceBegin(chunk, p.n, p.chunks);
  const uint32_t length = static_cast<uint32_t>(SortPieceBegin(chunk + 1, p.n, p.chunks) - begin);
  const uint32_t size = DeviceSizeOf(p.dtype);
  const char* keys = p.keys + row * p.keys_row + begin * p.keys_step;
  for (uint32_t i = threadIdx.x; i < p.room; i += blockDim.x) {
    if (i < length) {
      network.Set(i, SortKey(p.order, p.dtype, size, LoadBits(keys + i * p.keys_step, size)));
    } else {
      network.Clear(i);
    }
  }
  __syncthreads();
  for (uint32_t run = 2; run <= p.room; run *= 2) {
    for (uint32_t apart = run / 2; apart > 0; apart /= 2) {
      for (uint32_t pair = threadIdx.x; pair < p.room / 2; pair += blockDim.x) {
        const uint32_t low = 2 * pair - (pair & (apart - 1));
        network.Exchange(low, low + apart, (low & run) == 0);
      }
      __syncthreads();
    }
  }
  const uint32_t kept = p.kept == 0 ? length : p.kept;
  for (uint32_t j = threadIdx.x; j < kept; j += blockDim.x) {
    StoreSorted(p, row, chunk, j, begin + network.PlaceOf(j));
  }
}

template <bool kWide>
const KernelInfo kSort = {kWide ? "sort_wide" : "sort", sizeof(SortKernelParams), nullptr,
                          reinterpret_cast<const void*>(&SortKernel<kWide>)};

int64_t Bytes(const TensorRef& t, int d) {
  return t.strides[d] * static_cast<int64_t>(SizeOf(t.dtype));
}

}  // namespace

Status EmitSort(const ResolvedNode& resolved, Launches* launches) {
  const Node& node = *resolved.node;
  SortParams params;
  std::memcpy(static_cast<void*>(&params), node.params.data(), sizeof params);
  const TensorRef& keys = node.srcs[0];
  const int64_t rows = keys.shape[0], n = keys.shape[1];
  if (rows == 0) return Status::Ok();
  const int64_t most_rows = params.merged == 0 ? INT32_MAX : 65535;
  if (rows > most_rows || params.chunks > 65535) {
    return Status(Code::kUnsupported, "sorting more rows or pieces than a grid has blocks");
  }
  SortKernelParams p{};
  p.keys = resolved.srcs[0];
  p.keys_row = Bytes(keys, 0);
  p.keys_step = Bytes(keys, 1);
  p.n = n;
  p.chunks = params.chunks;
  const int64_t kept = node.outs[0].shape[1];
  p.kept = kept == n ? 0 : static_cast<uint32_t>(kept / params.chunks);
  p.room = 2;
  while (p.room * int64_t{p.chunks} < n) p.room *= 2;
  p.dtype = keys.dtype;
  p.order = params.order;
  p.num_outs = static_cast<uint8_t>(node.outs.size());
  for (size_t i = 0; i < node.outs.size(); ++i) {
    SortedOut& o = p.outs[i];
    o.out = resolved.outs[i];
    o.out_row = Bytes(node.outs[i], 0);
    o.out_step = Bytes(node.outs[i], 1);
    p.item[i] = static_cast<uint8_t>(SizeOf(node.outs[i].dtype));
    if (params.source[i] == kSortPositions) continue;
    const TensorRef& src = node.srcs[params.source[i]];
    o.src = resolved.srcs[params.source[i]];
    o.src_row = Bytes(src, 0);
    o.src_step = Bytes(src, 1);
  }
  p.merged = params.merged;
  if (p.merged != 0) {
    LaunchMerge(p, rows, launches);
    return Status::Ok();
  }
  const bool wide = SizeOf(keys.dtype) == 8;
  Launch launch;
  launch.kernel = wide ? &kSort<true> : &kSort<false>;
  launch.grid[0] = static_cast<uint32_t>(rows);
  launch.grid[1] = params.chunks;
  launch.block[0] = std::clamp(p.room / 2, 32u, kSortMaxThreads);
  launch.shared_bytes = p.room * (wide ? Network<true>::kBytes : Network<false>::kBytes);
  SetParams(p, &launch);
  launches->push_back(std::move(launch));
  return Status::Ok();
}

}  // namespace jaxgraph
