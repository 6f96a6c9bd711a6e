// Streaming products of many rows on tensor cores. A block makes two panels of 64 columns, of two
// matrices that are paired or side by side in one, from its cluster's share of k. A stage is 64 k
// of both panels, and of the rows, too: they are too many to stay in shared memory, and L2 has
// them. Four warps do nothing but bring stages; four others a panel multiply them, on Hopper with
// instructions of all four, which read both operands from shared memory. Of a cluster, each block
// sums a part of the columns, which the others write into its memory, in order. The ring runs on
// from one tile to the next; a cluster makes one.
#include <algorithm>

#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr int kPanel = kLineBytes / 2;  // columns of a panel, and k of a stage
constexpr int kPanelShift = 6;
static_assert(kPanel == 1 << kPanelShift);
constexpr int kPanels = 2;
constexpr int kPanelBytes = kPanel * kLineBytes;
constexpr int kRowsOfTile = 8;
constexpr int kMultiplying = kPanels * 4 * kWarp;  // threads
constexpr int kBringing = 4 * kWarp;
constexpr int kBlockThreads = kMultiplying + kBringing;
constexpr int kRingAlignment = 1024;  // the pattern that the tensor cores expect repeats there
// Floats from a row of sums to the next: the rows that a warp writes at once fall into different
// banks.
constexpr int kSumPitch = kPanels * kPanel + 4;

__host__ __device__ constexpr int StageBytes(int row_tiles) {
  return kPanels * kPanelBytes + row_tiles * kRowsOfTile * kLineBytes;
}
__host__ __device__ constexpr int SumBytes(int row_tiles) {
  return row_tiles * kRowsOfTile * kSumPitch * static_cast<int>(sizeof(float));
}

#if __CUDA_ARCH__ >= 900
constexpr int kLinesAtOnce = kBringing / 8;  // that the bringing threads copy, 16 bytes each
constexpr int kStep = 16;                    // of k and of columns, in one tensor-core instruction

struct Share {
  int begin, end;
};
__device__ __forceinline__ Share ShareOf(const StreamParams& p, const BlockPlace& place) {
  const int size = (((p.k + kPanel - 1) / kPanel + p.splits - 1) >> place.shift) * kPanel;
  const int begin = min(place.rank * size, p.k);
  return {begin, min(begin + size, p.k)};
}

// The two panels of a tile.
struct Tile {
  const StreamedProduct* product[kPanels];
  int column[kPanels];
};
__device__ __forceinline__ Tile TileOf(const StreamParams& p, int tile) {
  if (p.activated != nullptr) {
    return {{&p.product[0], &p.product[1]}, {tile * kPanel, tile * kPanel}};
  }
  int i = 0;
  while (i + 1 < p.num_products && tile >= p.product[i].end) ++i;
  const int column = (tile - (i > 0 ? p.product[i - 1].end : 0)) * kPanels * kPanel;
  return {{&p.product[i], &p.product[i]}, {column, column + kPanel}};
}

// Brings the block's stages, one after the other; by each of the bringing threads.
template <bool kAlongK, int kRowTiles>
class Supply {
 public:
  __device__ Supply(const StreamParams& p, const BlockPlace& place, const Share& share)
      : p_(p),
        share_(share),
        piece_(threadIdx.x % 8),
        line_(threadIdx.x % kBringing / 8),
        policy_(ReadOncePolicy()),
        clusters_(place.clusters),
        tile_(place.cluster) {
    StartTile();
  }

  // Each starts the copies of this thread's part of the stage.
  __device__ __forceinline__ void StartWeights(uint32_t stage) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const char* from = from_[panel];
#pragma unroll
      for (int j = 0; j < kPanel; j += kLinesAtOnce) {
        const bool inside = kAlongK ? at_ + 8 * piece_ < share_.end && j < lines_[panel]
                                    : at_ + line_ + j < share_.end && lines_[panel] > 0;
        CopyAsync(stage + panel * kPanelBytes + PlaceOf(line_ + j, piece_),
                  inside ? from : p_.product[0].weights, inside, policy_);
        from += pitch_ * kLinesAtOnce;
      }
    }
  }
  __device__ __forceinline__ void StartRows(uint32_t stage) const {
    const int along = at_ + 8 * piece_;
    const char* from = p_.row + line_ * p_.row_m + 2 * along;
#pragma unroll
    for (int j = 0; j < kRowTiles * kRowsOfTile; j += kLinesAtOnce) {
      const bool inside = along < share_.end && line_ + j < p_.m;
      CopyAsync(stage + kPanels * kPanelBytes + PlaceOf(line_ + j, piece_), inside ? from : p_.row,
                inside);
      from += p_.row_m * kLinesAtOnce;
    }
  }
  __device__ __forceinline__ void Next() {
    at_ += kPanel;
    if (at_ < share_.end) {
      from_[0] += kAlongK ? kLineBytes : kPanel * pitch_;
      from_[1] += kAlongK ? kLineBytes : kPanel * pitch_;
    } else {
      tile_ += clusters_;
      StartTile();
    }
  }

 private:
  __device__ __forceinline__ void StartTile() {
    if (tile_ >= p_.pieces) return;
    const Tile tile = TileOf(p_, tile_);
    at_ = share_.begin;
    pitch_ = tile.product[0]->pitch;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const StreamedProduct& product = *tile.product[i];
      const int along = (kAlongK ? at_ : tile.column[i]) + 8 * piece_;
      const int across = (kAlongK ? tile.column[i] : at_) + line_;
      from_[i] = product.weights + across * pitch_ + 2 * along;
      lines_[i] = product.n - (kAlongK ? across : along);
    }
  }

  const StreamParams& p_;
  const Share share_;
  const int piece_, line_;
  const uint64_t policy_;
  const int clusters_;
  int tile_, at_ = 0;
  int64_t pitch_ = 0;
  const char* from_[kPanels];  // what this thread copies next of each panel
  int lines_[kPanels];         // columns from there to the matrix's end
};

// ---- barriers ----

__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once this thread's copies so far are there.
__device__ __forceinline__ void ArriveWithCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void MeetMultiplying() {
  asm volatile("bar.sync 1, %0;" ::"n"(kMultiplying) : "memory");
}

// ---- products ----

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// How a matrix of 64-element lines of 128 bytes, eight to 1 KB, lies in shared memory.
__device__ __forceinline__ uint64_t Describe(uint32_t address) {
  constexpr uint64_t kTurned128 = 1ull << 62, kEightLines = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kUnused = 1ull << 16;
  return kTurned128 | kEightLines | kUnused | ((address & 0x3ffff) >> 4);
}

#define JAXGRAPH_SUM(r) "+f"(d[r][0]), "+f"(d[r][1]), "+f"(d[r][2]), "+f"(d[r][3])
#define JAXGRAPH_WARPGROUP_MULTIPLY(type, rows, list, a, b, turn, ...)                           \
  asm volatile(                                                                                  \
      "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n" rows "k16.f32." type "." type " {" list "}, " a ", " b \
      ", add, 1, 1, " turn ", 0;\n}"                                                             \
      : __VA_ARGS__                                                                              \
      : "l"(weights), "l"(x), "n"(kTurn))
#define JAXGRAPH_WARPGROUP_MULTIPLY_16(type)                                                   \
  JAXGRAPH_WARPGROUP_MULTIPLY(type, "16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", \
                              JAXGRAPH_SUM(0), JAXGRAPH_SUM(1))
#define JAXGRAPH_WARPGROUP_MULTIPLY_32(type)                                                 \
  JAXGRAPH_WARPGROUP_MULTIPLY(type, "32",                                                    \
                              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
                              "%14, %15",                                                    \
                              "%16", "%17", "%18", JAXGRAPH_SUM(0), JAXGRAPH_SUM(1),         \
                              JAXGRAPH_SUM(2), JAXGRAPH_SUM(3))
#define JAXGRAPH_WARPGROUP_MULTIPLY_64(type)                                                   \
  JAXGRAPH_WARPGROUP_MULTIPLY(                                                                 \
      type, "64",                                                                              \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "  \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",                       \
      "%32", "%33", "%34", JAXGRAPH_SUM(0), JAXGRAPH_SUM(1), JAXGRAPH_SUM(2), JAXGRAPH_SUM(3), \
      JAXGRAPH_SUM(4), JAXGRAPH_SUM(5), JAXGRAPH_SUM(6), JAXGRAPH_SUM(7))

// Starts d += 64 columns of weights * rows, over 16 k.
template <typename T, bool kAlongK, int kRowTiles>
__device__ __forceinline__ void StartMultiply(float (&d)[kRowTiles][4], uint64_t weights,
                                              uint64_t x) {
  constexpr int kTurn = kAlongK ? 0 : 1;
  static_assert(kRowTiles == 2 || kRowTiles == 4 || kRowTiles == 8);
  if constexpr (T::kIsBF16) {
    if constexpr (kRowTiles == 2) {
      JAXGRAPH_WARPGROUP_MULTIPLY_16("bf16");
    } else if constexpr (kRowTiles == 4) {
      JAXGRAPH_WARPGROUP_MULTIPLY_32("bf16");
    } else {
      JAXGRAPH_WARPGROUP_MULTIPLY_64("bf16");
    }
  } else {
    if constexpr (kRowTiles == 2) {
      JAXGRAPH_WARPGROUP_MULTIPLY_16("f16");
    } else if constexpr (kRowTiles == 4) {
      JAXGRAPH_WARPGROUP_MULTIPLY_32("f16");
    } else {
      JAXGRAPH_WARPGROUP_MULTIPLY_64("f16");
    }
  }
}
#undef JAXGRAPH_WARPGROUP_MULTIPLY_64
#undef JAXGRAPH_WARPGROUP_MULTIPLY_32
#undef JAXGRAPH_WARPGROUP_MULTIPLY_16
#undef JAXGRAPH_WARPGROUP_MULTIPLY
#undef JAXGRAPH_SUM

// sum += this warp's part of the stage: 16 columns of its panel. Returns before it is there, but
// not before the stage before is.
template <typename T, bool kAlongK, int kRowTiles>
__device__ __forceinline__ void MultiplyStage(uint32_t stage, float (&sum)[kRowTiles][4]) {
  const uint32_t panel = stage + threadIdx.x / (4 * kWarp) * kPanelBytes;
  const uint32_t rows = stage + kPanels * kPanelBytes;
  // The copies were written by other means than these instructions read.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < kPanel / kStep; ++step) {
    const uint32_t at = kAlongK ? 2 * kStep * step : kStep * kLineBytes * step;
    StartMultiply<T, kAlongK, kRowTiles>(sum, Describe(panel + at),
                                         Describe(rows + 2 * kStep * step));
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
template <int kRowTiles>
__device__ __forceinline__ void FinishMultiply(float (&sum)[kRowTiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {  // the sums are there only now
    asm volatile("" : "+f"(sum[r][0]), "+f"(sum[r][1]), "+f"(sum[r][2]), "+f"(sum[r][3])::"memory");
  }
}
#else
// The same with instructions of one warp, for what is like Hopper but does not have those.
template <typename T, bool kAlongK, int kRowTiles>
__device__ __forceinline__ void MultiplyStage(uint32_t stage, float (&sum)[kRowTiles][4]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, c = warp % 4;
  const uint32_t panel = stage + warp / 4 * kPanelBytes, rows = stage + kPanels * kPanelBytes;
#pragma unroll
  for (int step = 0; step < kPanel / kStep; ++step) {
    const int line = kAlongK ? c * kStep + lane % 16 : step * kStep + lane / 16 * 8 + lane % 8;
    const int piece = kAlongK ? 2 * step + lane / 16 : 2 * c + lane / 8 % 2;
    uint32_t w[4];
    LoadMatrix<kAlongK>(panel + PlaceOf(line, piece), w);
#pragma unroll
    for (int r = 0; r < kRowTiles; r += 2) {
      uint32_t x[4];  // of two tiles of rows
      LoadMatrix<true>(
          rows + PlaceOf((r + lane / 16) * kRowsOfTile + lane % 8, 2 * step + lane / 8 % 2), x);
      MultiplyAdd<T>(sum[r], w[0], w[1], w[2], w[3], x[0], x[1]);
      MultiplyAdd<T>(sum[r + 1], w[0], w[1], w[2], w[3], x[2], x[3]);
    }
  }
}
template <int kRowTiles>
__device__ __forceinline__ void FinishMultiply(float (&)[kRowTiles][4]) {}
#endif

// ---- the way out ----

// Stores the first `count` of eight elements of 16 bits: all at once, if they lie so.
__device__ __forceinline__ void StoreSome(char* to, const Eight& x, int count) {
  if (count >= 8 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    StoreEight(to, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < count) *reinterpret_cast<uint16_t*>(to + 2 * j) = x.bits[j];
  }
}

// Stores columns [n, n + 8) of a row of a product, those that there are.
template <typename T>
__device__ __forceinline__ void StoreColumns(const StreamedProduct& to, int m, int n,
                                             const float (&v)[8]) {
  if (to.out_dtype == T::kDType) {
    Eight x;
#pragma unroll
    for (int j = 0; j < 8; ++j) x.bits[j] = T::FromFloat(v[j]);
    StoreSome(to.out + m * to.out_m + 2 * n, x, to.n - n);
    return;
  }
  const int64_t item = to.out_dtype == DType::kF32 ? 4 : 2;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (n + j < to.n) StoreFloat(to.out + m * to.out_m + (n + j) * item, to.out_dtype, v[j]);
  }
}
#endif

template <typename T, bool kAlongK, int kRowTiles>
__global__ void __launch_bounds__(kBlockThreads, 2)
    StreamWideKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char shared[];
  const uint32_t unaligned = SharedAddress(shared);
  char* ring = shared + (kRingAlignment - unaligned % kRingAlignment) % kRingAlignment;
  const uint32_t ring_address = SharedAddress(ring);
  // Of the block; of a cluster, what the blocks have for this one's columns, and the block's own
  // take the ring's place.
  float* sums = reinterpret_cast<float*>(ring + p.stages * StageBytes(kRowTiles));
  float* own = p.splits > 1 ? reinterpret_cast<float*>(ring) : sums;
  const uint32_t full = SharedAddress(sums) + SumBytes(kRowTiles), empty = full + 8 * kMaxStages;
  const uint32_t summed = empty + 8 * kMaxStages;

  const BlockPlace place = PlaceOfBlock(p);
  const Share share = ShareOf(p, place);
  const int depth = (share.end - share.begin + kPanel - 1) / kPanel;  // stages of a tile
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      InitBarrier(full + 8 * s, kBringing);
      InitBarrier(empty + 8 * s, kMultiplying / kWarp);
    }
    if (p.splits > 1) {
      ExpectFromCluster(summed, p.m * kPanels * kPanel * static_cast<int>(sizeof(float)));
    }
  }
  __syncthreads();
  LetNextStart();
  if (p.splits > 1) ArriveInCluster();

  if (threadIdx.x >= kMultiplying) {
    int total = 0;
    for (int t = place.cluster; t < p.pieces; t += place.clusters) total += depth;
    const int at_first = min(p.stages, total);
    Supply<kAlongK, kRowTiles> supply(p, place, share);
    if (!p.fetches_early) WaitForLaunchBefore();
    Supply<kAlongK, kRowTiles> weights = supply;
    for (int i = 0; i < at_first; ++i) {
      weights.StartWeights(ring_address + i * StageBytes(kRowTiles));
      weights.Next();
    }
    WaitForLaunchBefore();
    for (int i = 0; i < at_first; ++i) {
      supply.StartRows(ring_address + i * StageBytes(kRowTiles));
      supply.Next();
      ArriveWithCopies(full + 8 * i);
    }
    int stage = 0;
    uint32_t parity = 0;
    for (int i = at_first; i < total; ++i) {
      WaitForBytes(empty + 8 * stage, parity);
      const uint32_t to = ring_address + stage * StageBytes(kRowTiles);
      supply.StartWeights(to);
      supply.StartRows(to);
      supply.Next();
      ArriveWithCopies(full + 8 * stage);
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (p.splits > 1) WaitForCluster();
    return;
  }

  WaitForLaunchBefore();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int stage = 0;
  uint32_t parity = 0;
  for (int t = place.cluster; t < p.pieces; t += place.clusters) {
    float sum[kRowTiles][4] = {};
    const auto release = [&](int s) {
      if (lane == 0) Arrive(empty + 8 * s);
    };
    int before = -1;
    for (int i = 0; i < depth; ++i) {
      WaitForBytes(full + 8 * stage, parity);
      __syncwarp();
      MultiplyStage<T, kAlongK, kRowTiles>(ring_address + stage * StageBytes(kRowTiles), sum);
      if (before >= 0) release(before);
      before = stage;
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    FinishMultiply(sum);
    if (before >= 0) release(before);
    if (p.splits > 1) MeetMultiplying();  // all have read the ring
    // A lane holds columns lane / 4 and 8 more, of rows 2 * (lane % 4) and the next.
#pragma unroll
    for (int i = 0; i < kRowTiles * 4; ++i) {
      const int r = i / 4, e = i % 4;
      const int m = kRowsOfTile * r + 2 * (lane % 4) + e % 2;
      own[m * kSumPitch + kStep * warp + lane / 4 + e / 2 * 8] = sum[r][e];
    }
    MeetMultiplying();
    const int width = kPanel >> place.shift;  // of each panel's columns, this block's
    if (p.splits > 1) {
      WaitForCluster();  // all blocks have started
      // Each warp sends whole rows, a lane the four columns that are its own.
      const int n = lane * 4, panel = n / kPanel, inside = n % kPanel & (width - 1);
      const int to = n % kPanel >> (kPanelShift - place.shift);
      const uint32_t there = InBlock(to, SharedAddress(sums + panel * width + inside));
      const uint32_t barrier = InBlock(to, summed);
      for (int m = warp; m < p.m; m += kMultiplying / kWarp) {
        const float4 v = *reinterpret_cast<const float4*>(own + m * kSumPitch + n);
        Send(there + (place.rank * p.m + m) * kPanels * width * static_cast<int>(sizeof(float)), v,
             barrier);
      }
      WaitForClusterBytes(summed);
    }
    const Tile tile = TileOf(p, t);
    const auto total = [&](int panel, int m, int n, float (&v)[8]) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = 0;
      for (int s = 0; s < p.splits; ++s) {
        const float* from = p.splits > 1
                                ? sums + (s * p.m + m) * kPanels * width + panel * width + n
                                : own + m * kSumPitch + panel * kPanel + n;
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + j);
          v[j] += four.x;
          v[j + 1] += four.y;
          v[j + 2] += four.z;
          v[j + 3] += four.w;
        }
      }
    };
    const int shift = kPanelShift - 3 - place.shift;  // by eights of columns
    const auto column_of = [&](int i) { return 8 * (i & ((1 << shift) - 1)); };
    if (p.activated == nullptr) {
      for (int i = threadIdx.x; i < (p.m * kPanels) << shift; i += kMultiplying) {
        const int n = column_of(i), panel = (i >> shift) % kPanels, m = (i >> shift) / kPanels;
        float v[8];
        total(panel, m, n, v);
        StoreColumns<T>(*tile.product[panel], m, tile.column[panel] + place.rank * width + n, v);
      }
    } else {
      for (int i = threadIdx.x; i < p.m << shift; i += kMultiplying) {
        const int n = column_of(i), m = i >> shift;
        const int column = tile.column[0] + place.rank * width + n;
        float gate[8], up[8];
        total(0, m, n, gate);
        total(1, m, n, up);
        StoreColumns<T>(p.product[0], m, column, gate);
        StoreColumns<T>(p.product[1], m, column, up);
        Eight x;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x.bits[j] = Activated<T>(p, Rounded<T>(gate[j]), Rounded<T>(up[j]));
        }
        StoreSome(p.activated + m * p.activated_m + 2 * column, x, p.product[0].n - column);
      }
    }
    MeetMultiplying();  // the sums are read: the next tile's may come
  }
#endif
}

template <typename T, bool kAlongK, int kRowTiles>
const KernelInfo kWideKernel = {
    kAlongK ? "stream_wide_along_k" : "stream_wide_along_n", sizeof(StreamParams), nullptr,
    reinterpret_cast<const void*>(&StreamWideKernel<T, kAlongK, kRowTiles>)};

template <typename T, bool kAlongK>
const KernelInfo* KernelFor(int row_tiles) {
  if (row_tiles == 2) return &kWideKernel<T, kAlongK, 2>;
  return row_tiles == 4 ? &kWideKernel<T, kAlongK, 4> : &kWideKernel<T, kAlongK, 8>;
}
template <typename T>
const KernelInfo* KernelFor(bool along_k, int row_tiles) {
  return along_k ? KernelFor<T, true>(row_tiles) : KernelFor<T, false>(row_tiles);
}

int32_t CutTiles(StreamParams* params) {
  return CutColumns((params->activated != nullptr ? 1 : kPanels) * kPanel, params);
}

}  // namespace

bool FitsStreamWide(const StreamParams& params) {
  return params.m <= kMaxStreamRows && !params.has_norm && params.candidates == nullptr;
}

int32_t WideTiles(const StreamParams& params) {
  StreamParams cut = params;
  return CutTiles(&cut);
}

void LaunchStreamWide(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                      Launches* launches) {
  StreamParams& p = params;
  p.pieces = CutTiles(&p);
  const int32_t clusters = ShareAmongBlocks(tuning, kPanel, &p);
  const int row_tiles = p.m <= 16 ? 2 : p.m <= 32 ? 4 : 8;
  const int64_t stages = CeilDiv(CeilDiv(p.k, p.splits), kPanel) * CeilDiv(p.pieces, clusters);
  const int32_t beside = SumBytes(row_tiles) + kRingAlignment + 8 * (2 * kMaxStages + 1);
  const int64_t fitting = (kMaxStreamShared - beside) / StageBytes(row_tiles);
  // At least two, which also hold the block's sums.
  p.stages = static_cast<int32_t>(std::max<int64_t>(
      std::min<int64_t>({stages, tuning.stages, fitting, int64_t{kMaxStages}}), 2));
  Launch launch;
  launch.kernel = dtype == DType::kBF16 ? KernelFor<StreamBF16>(along_k, row_tiles)
                                        : KernelFor<StreamF16>(along_k, row_tiles);
  launch.grid[0] = static_cast<uint32_t>(clusters * p.splits);
  launch.block[0] = kBlockThreads;
  launch.cluster = static_cast<uint32_t>(p.splits);
  launch.shared_bytes = static_cast<uint32_t>(p.stages * StageBytes(row_tiles) + beside);
  launch.dependent = true;
  SetParams(params, &launch);
  launches->push_back(std::move(launch));
}

}  // namespace jaxgraph
