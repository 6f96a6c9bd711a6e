// Streaming products of 2 to 8 rows on tensor cores, for which they are as much work as one. A
// block makes the columns of a tile from its cluster's share of k; its warps share that, a stage at
// a time, each through its own ring in shared memory. The rows stay in L2: a lane fetches the
// elements that it multiplies into registers, a stage ahead, and norms them there. k may come in
// any order, so a lane's are eight that lie together. The warps' sums meet in shared memory; of a
// cluster each block finishes some rows, and the others send it theirs; both in order. The ring
// runs on from one tile to the next; a cluster makes one.
#include <algorithm>

#include "ffi/kernels/cuda/stream_candidate.cuh"
#include "ffi/kernels/cuda/stream_device.cuh"
#include "ffi/kernels/cuda/stream_launchers.h"
#include "ffi/kernels/cuda/stream_stage.cuh"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

// What the rows add to a stage's shape.
template <bool kAlongK, bool kPair>
struct RowShape : Shape<kAlongK, kPair> {
  using Base = Shape<kAlongK, kPair>;
  static constexpr int kWords = Base::kDepth / 8;  // of a stage's rows, that a lane holds
  // Floats from a row of sums to the next: what a warp writes at once falls into different banks.
  static constexpr int kPitch = Base::kWidth + 4;
  static constexpr int kQuads = Base::kWidth / 4;  // of a row of sums: a thread's
  static constexpr bool kIsHead = !kPair && Base::kColumns == kStreamedHead;  // a tile's row
};
__host__ __device__ constexpr int NormBytes(int depth) {
  return 2 * depth;
}  // of a stage's part of the norm's weight

#if __CUDA_ARCH__ >= 900
// Where a piece of a line lies: the lines that a warp reads at once fall into different banks.
template <bool kAlongK, typename S>
struct Place {
  static __device__ __forceinline__ uint32_t Of(int line, int piece) {
    constexpr int kSpan = S::kDepth / 4;  // lines of one lane's k
    const int turn = kAlongK ? (line & 1) * 4 : (line & 1) | (line / kSpan % 4) << 1;
    return line * kLineBytes + ((piece ^ turn) << 4);
  }
};

// Norms of several rows into shared memory. Each row has warps of its own, a power of two of them.
// Each is stored by one block.
template <typename T>
__device__ __forceinline__ void BringNorms(const StreamParams& p, char* rows, uint32_t barrier,
                                           float (*by_warp)[kStreamWarps]) {
  constexpr int kAtOnce = 4;
  const int pitch = p.row_pitch, eights = p.k / 8;
  const char* weight = rows + p.m * pitch;
  if (threadIdx.x == 0 && p.weight != nullptr) {
    Expect(barrier, 16 * eights);
    BulkCopy(SharedAddress(weight), p.weight, 16 * eights, barrier);
  }
  static_assert(kMaxFewRows <= kStreamWarps);
  const int warps = kStreamWarps >> (32 - __clz(p.m - 1));
  const int m = threadIdx.x / kWarp / warps, step = warps * kWarp, thread = threadIdx.x % step;
  const bool stores = blockIdx.x == gridDim.x - 1 - m % gridDim.x;
  if (m < p.m) {
    float squares = 0;
    for (int first = thread; first < eights; first += kAtOnce * step) {
      Eight x[kAtOnce], added[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = 16 * (first + j * step);
        if (at >= 16 * eights) break;
        x[j] = LoadEight(p.row + m * p.row_m + at);
        if (p.added != nullptr) added[j] = LoadEight(p.added + m * p.added_m + at);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = 16 * (first + j * step);
        if (at >= 16 * eights) break;
        if (p.added != nullptr) x[j] = Sum<T>(x[j], added[j]);
        StoreEight(rows + m * pitch + at, x[j]);
        if (p.sum != nullptr && stores) StoreEight(p.sum + m * p.sum_m + at, x[j]);
        squares = AddSquares<T>(squares, x[j]);
      }
    }
    squares = SumOfWarp(squares);
    if (threadIdx.x % kWarp == 0) by_warp[m][threadIdx.x / kWarp % warps] = squares;
  }
  if (p.weight != nullptr) WaitForBytes(barrier, 0);
  __syncthreads();
  if (m < p.m) {
    const float scale = NormScale(p, by_warp[m], warps);
#pragma unroll 4
    for (int i = thread; i < eights; i += step) {
      char* place = rows + m * pitch + 16 * i;
      Eight w = {};
      if (p.weight != nullptr) w = LoadEight(weight + 16 * i);
      const Eight x = Scaled<T>(p, LoadEight(place), w, scale);
      StoreEight(place, x);
      if (stores) StoreEight(p.norm + m * p.norm_m + 16 * i, x);
    }
  }
}

// What a lane holds of a stage's rows: of row lane / 4, a fourth of every 32 or 16 k.
template <typename S>
struct Held {
  uint32_t words[S::kWords];
};
// Bytes from the first k of a stage to the lane's.
template <typename S>
__device__ __forceinline__ int HeldAt(int group) {
  constexpr int kBytes = S::kWords >= 4 ? 16 : 8;
  return (group * 4 + static_cast<int>(threadIdx.x % 4)) * kBytes;
}
template <typename S>
__device__ __forceinline__ void Fetch(const char* row, int k, int end, Held<S>* held) {
  if constexpr (S::kWords == 2) {
    const int at = 2 * k + HeldAt<S>(0);
    uint2 v = {};
    if (row != nullptr && at < 2 * end) v = *reinterpret_cast<const uint2*>(row + at);
    held->words[0] = v.x;
    held->words[1] = v.y;
  } else {
#pragma unroll
    for (int g = 0; g < S::kWords / 4; ++g) {
      const int at = 2 * k + HeldAt<S>(g);
      uint4 v = {};
      if (row != nullptr && at < 2 * end) v = *reinterpret_cast<const uint4*>(row + at);
      held->words[4 * g] = v.x;
      held->words[4 * g + 1] = v.y;
      held->words[4 * g + 2] = v.z;
      held->words[4 * g + 3] = v.w;
    }
  }
}

// Norms what a lane holds; `weights` of the stage's k.
template <typename T, typename S>
__device__ __forceinline__ void Norm(const StreamParams& p, const char* weights, float scale,
                                     Held<S>* held) {
  const int bytes = S::kWords >= 4 ? 16 : 8;
#pragma unroll
  for (int g = 0; g < (S::kWords + 3) / 4; ++g) {
    uint32_t w[4] = {};
    if (p.weight != nullptr) {
      const char* from = weights + HeldAt<S>(g);
      if (bytes == 16) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        w[0] = v.x, w[1] = v.y;
      }
    }
#pragma unroll
    for (int j = 0; j < bytes / 4; ++j) {
      uint32_t& x = held->words[4 * g + j];
      x = ScaledPair<T>(p, x, w[j], scale);
    }
  }
}

template <typename S>
__device__ __forceinline__ void StoreHeld(char* row, int k, int end, const Held<S>& held) {
  if constexpr (S::kWords == 2) {
    const int at = 2 * k + HeldAt<S>(0);
    if (at < 2 * end) *reinterpret_cast<uint2*>(row + at) = {held.words[0], held.words[1]};
  } else {
#pragma unroll
    for (int g = 0; g < S::kWords / 4; ++g) {
      const int at = 2 * k + HeldAt<S>(g);
      if (at < 2 * end) {
        *reinterpret_cast<uint4*>(row + at) = {held.words[4 * g], held.words[4 * g + 1],
                                               held.words[4 * g + 2], held.words[4 * g + 3]};
      }
    }
  }
}

// sum += the stage (as columns by k) * rows.
template <typename T, bool kAlongK, typename S>
__device__ __forceinline__ void MultiplyStage(const char* stage, const Held<S>& x,
                                              float (&sum)[S::kSides][S::kColumns / kStep][4]) {
  using P = Place<kAlongK, S>;
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4;
  if constexpr (kAlongK) {
#pragma unroll
    for (int g = 0; g < S::kDepth / 32; ++g) {
#pragma unroll
      for (int i = 0; i < S::kSides * S::kColumns / kStep; ++i) {
        const int side = i / (S::kColumns / kStep), c = i % (S::kColumns / kStep);
        const int line = side * S::kSideLines + c * kStep + high;
        const uint4 a = *reinterpret_cast<const uint4*>(stage + P::Of(line, 4 * g + low));
        const uint4 b = *reinterpret_cast<const uint4*>(stage + P::Of(line + 8, 4 * g + low));
        const uint32_t* words = x.words + 4 * g;
        MultiplyAdd<T>(sum[side][c], a.x, b.x, a.y, b.y, words[0], words[1]);
        MultiplyAdd<T>(sum[side][c], a.z, b.z, a.w, b.w, words[2], words[3]);
      }
    }
  } else {
    constexpr int kSpan = S::kDepth / 4;
    const int q = lane % 8, half = lane / 16;
#pragma unroll
    for (int step = 0; step < S::kDepth / kStep; ++step) {
      const int line = kSpan * (q / 2) + 4 * step + 2 * half + q % 2;
#pragma unroll
      for (int side = 0; side < S::kSides; ++side) {
#pragma unroll
        for (int c = 0; c < S::kColumns / kStep; ++c) {
          uint32_t w[4];
          LoadMatrix<false>(
              SharedAddress(stage) + P::Of(side * S::kSideLines + line, 2 * c + lane / 8 % 2), w);
          MultiplyAdd<T>(sum[side][c], w[0], w[1], w[2], w[3], x.words[2 * step],
                         x.words[2 * step + 1]);
        }
      }
    }
  }
}

// The scale of the norm of the lane's row, of the parts of its squares: every warp sums them alike.
__device__ __forceinline__ float ScaleOfParts(const StreamParams& p) {
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4;
  float total = 0;
#pragma unroll 8
  for (int i = low; i < p.num_parts; i += 4) total += p.squares[i * kMaxFewRows + high];
  total += __shfl_xor_sync(kAllLanes, total, 1);
  total += __shfl_xor_sync(kAllLanes, total, 2);
  return ScaleOf(p, total);
}

// ---- the way out: a thread has four neighbouring columns of a row ----

__device__ __forceinline__ void AddFour(const float* from, int pitch, int count,
                                        float (&total)[4]) {
#pragma unroll
  for (int j = 0; j < kStreamWarps; ++j) {
    if (j >= count) break;
    const float4 v = *reinterpret_cast<const float4*>(from + j * pitch);
    total[0] += v.x;
    total[1] += v.y;
    total[2] += v.z;
    total[3] += v.w;
  }
}

// Stores the first `count` of four elements of 16 bits: all at once, if they lie so.
__device__ __forceinline__ void StoreFour(char* to, const uint16_t (&v)[4], int count) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = {v[0] | uint32_t{v[1]} << 16, v[2] | uint32_t{v[3]} << 16};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) *reinterpret_cast<uint16_t*>(to + 2 * i) = v[i];
  }
}

// What four columns meet on their way out; asked for before the sums meet.
struct WayOut {
  uint2 residual;
  float4 cos, sin;
  int position;
};
template <typename S>
__device__ __forceinline__ void FetchWayOut(const StreamParams& p, const Tile& tile, int m, int q,
                                            WayOut* out) {
  if (p.residual != nullptr) {
    const int n = tile.column + 4 * q;
    if (n < p.product[0].n) {
      out->residual = *reinterpret_cast<const uint2*>(p.residual + m * p.residual_m + 2 * n);
    }
  }
  if constexpr (S::kIsHead) {
    if (p.heads.cos != nullptr) {
      const int at = 4 * q % (kStreamedHead / 2);
      out->cos = *reinterpret_cast<const float4*>(p.heads.cos + at);
      out->sin = *reinterpret_cast<const float4*>(p.heads.sin + at);
    }
    if (p.heads.position != nullptr) out->position = *p.heads.position;
  }
}

// Turns four columns of a head, stores what came of it, and in a cache. By whole warps.
template <typename T, typename S>
__device__ __forceinline__ void StoreHead(const StreamParams& p, const Tile& tile, bool mine, int m,
                                          int q, const WayOut& out, uint16_t (&items)[4]) {
  const StreamedHeads& h = p.heads;
  const int i = tile.first;
  if (h.turned[i] != nullptr) {
    const bool low = q < S::kQuads / 2;
    const float cos[4] = {out.cos.x, out.cos.y, out.cos.z, out.cos.w};
    const float sin[4] = {out.sin.x, out.sin.y, out.sin.z, out.sin.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = T::ToFloat(items[j]);
      const float other = __shfl_xor_sync(kAllLanes, x, S::kQuads / 2);
      const float a = __fmul_rn(x, cos[j]), b = __fmul_rn(other, sin[j]);
      items[j] = T::FromFloat(low ? __fsub_rn(a, b) : __fadd_rn(a, b));
    }
    if (mine) {
      const int64_t at = int64_t{m} * p.product[i].n + tile.column + 4 * q;
      StoreFour(h.turned[i] + 2 * at, items, 4);
    }
  }
  if (h.cached[i] != nullptr && mine) {
    const int at = max(min(out.position, h.num_positions - 1), 0);
    if (h.drops && at != out.position) return;
    StoreFour(h.cached[i] + m * h.cache_m + tile.column / kStreamedHead * h.cache_head +
                  at * h.cache_position + 8 * q,
              items, 4);
  }
}

// Stores four columns of a row of the tile, those that there are. By whole warps, of which not all
// need have columns that are theirs.
// With an argmax (kBest) they are seen by `best`.
template <typename T, typename S, bool kBest>
__device__ __forceinline__ void StoreColumns(const StreamParams& p, const Tile& tile, int t,
                                             bool mine, int m, int q, const float (&total)[4],
                                             const WayOut& out, StreamCandidate* best) {
  const int side = S::kSides == 1 ? 0 : q / (S::kQuads / 2);
  const int n = tile.column + 4 * q - side * S::kColumns;
  const StreamedProduct& product = p.product[tile.first + side];
  const int count = mine ? product.n - n : 0;
  uint16_t items[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) items[i] = T::FromFloat(total[i]);
  if (product.out_dtype == T::kDType) {
    StoreFour(product.out + m * product.out_m + 2 * n, items, count);
  } else {
    const int64_t item = product.out_dtype == DType::kF32 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) {
        StoreFloat(product.out + m * product.out_m + (n + i) * item, product.out_dtype, total[i]);
      }
    }
  }
  if constexpr (kBest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) See(RoundTo(product.out_dtype, total[i]), n + i, best);
    }
    return;
  }
  if constexpr (S::kSides == 2) {
    uint16_t activated[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float gate = T::ToFloat(items[i]);
      activated[i] = Activated<T>(p, gate, __shfl_down_sync(kAllLanes, gate, S::kQuads / 2));
    }
    if (side == 0) StoreFour(p.activated + m * p.activated_m + 2 * n, activated, count);
    return;
  }
  if (p.residual != nullptr) {
    const uint32_t pairs[2] = {out.residual.x, out.residual.y};
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t residual = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
      items[i] = T::FromFloat(T::ToFloat(residual) + T::ToFloat(items[i]));
      const float v = i < count ? T::ToFloat(items[i]) : 0.0f;
      squares = __fadd_rn(squares, __fmul_rn(v, v));
    }
    StoreFour(p.residual_sum + m * p.residual_sum_m + 2 * n, items, count);
#pragma unroll
    for (int o = S::kQuads / 2; o > 0; o /= 2) squares += __shfl_xor_sync(kAllLanes, squares, o);
    if (mine && q == 0) p.squares_out[t * kMaxFewRows + m] = squares;
  }
  if constexpr (S::kIsHead) StoreHead<T, S>(p, tile, mine, m, q, out, items);
}
#endif

// Registers for three blocks a multiprocessor, so that the next launch's find a place. kBest: an
// argmax follows.
template <typename T, bool kAlongK, bool kPair, bool kBest>
__global__ void __launch_bounds__(kStreamThreads, 3)
    StreamRowsKernel(const __grid_constant__ StreamParams p) {
#if __CUDA_ARCH__ >= 900
  using S = RowShape<kAlongK, kPair>;
  constexpr int kTiles = S::kColumns / kStep;
  static_assert(kMaxFewRows * S::kQuads <= kStreamThreads);
  extern __shared__ __align__(128) char shared[];
  __shared__ float squares[kMaxFewRows][kStreamWarps];
  __shared__ __align__(8) uint64_t row_barrier, sum_barrier;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, high = lane / 4;
  const int warp_ring = p.stages * kStageBytes;
  char* ring = shared + warp * warp_ring;
  char* behind = shared + kStreamWarps * warp_ring;
  char* norms = behind + warp * p.stages * NormBytes(S::kDepth);
  behind += kStreamWarps * p.stages * NormBytes(S::kDepth);
  const BlockPlace place = PlaceOfBlock(p);
  // The warps' sums take their rings' place where no more tiles come through them.
  const bool single = p.pieces <= place.clusters;
  float* by_warp = single ? reinterpret_cast<float*>(shared) : reinterpret_cast<float*>(behind);
  const int warp_pitch = single ? warp_ring / 4 : p.m * S::kPitch;
  if (!single) behind += kStreamWarps * p.m * S::kPitch * 4;
  // Row m is finished by block m, modulo the cluster's size, which the others send their sums.
  const int most = (p.m + p.splits - 1) >> place.shift;  // rows of a block
  float* by_block = reinterpret_cast<float*>(behind);
  char* rows = behind + (p.splits - 1) * most * S::kWidth * 4;

  Supply<kAlongK, kPair, Place<kAlongK, S>> supply(p, place, ring);
  const auto start = [&](int stage) {
    supply.Start(stage, [&](int k) {  // and the norm's weight
      if (p.squares == nullptr || p.weight == nullptr) return;
      const int at = 8 * lane;
      if (at < S::kDepth) {
        CopyAsync(SharedAddress(norms) + stage * NormBytes(S::kDepth) + 2 * at,
                  p.weight + 2 * (k + at), k + at < supply.share().end);
      }
    });
  };
  LetNextStart();
  if (p.splits > 1) {
    if (threadIdx.x == 0) {
      const int own = max((p.m - place.rank + p.splits - 1) >> place.shift, 0);
      ExpectFromCluster(SharedAddress(&sum_barrier),
                        (p.splits - 1) * own * S::kWidth * sizeof(float));
    }
    ArriveInCluster();
  }
  if (!p.fetches_early) WaitForLaunchBefore();
  for (int s = 0; s < p.stages; ++s) start(s);
  const bool norms_here = p.has_norm && p.squares == nullptr;
  if (norms_here) {
    PrefetchNormWeight(p);
    if (threadIdx.x == 0) InitBarriers(SharedAddress(&row_barrier), 1);
    __syncthreads();
  }
  if (p.splits > 1) WaitForCluster();  // all blocks have started
  WaitForLaunchBefore();
  const char* row = high < p.m ? p.row + high * p.row_m : nullptr;
  if (norms_here) {
    BringNorms<T>(p, rows, SharedAddress(&row_barrier), squares);
    __syncthreads();
    if (high < p.m) row = rows + high * p.row_pitch;
  }

  constexpr int kRound = kStreamWarps * S::kDepth;
  const int first = supply.First(), end = supply.share().end;
  const int depth = max(end - first + kRound - 1, 0) / kRound;  // stages of a tile
  Held<S> held, next;  // of this stage and of the one behind it
  if (depth > 0) Fetch<S>(row, first, end, &held);
  if (depth > 0) Fetch<S>(row, first + (depth > 1 ? kRound : 0), end, &next);
  const bool scales = p.squares != nullptr;
  const float scale = scales ? ScaleOfParts(p) : 0;

  // What this thread has of a tile when the sums meet.
  const int m = threadIdx.x / S::kQuads, q = threadIdx.x % S::kQuads;
  const int finisher = m & (p.splits - 1);
  const bool mine = m < p.m && finisher == place.rank;
  StreamCandidate best = NoCandidate();
  int stage = 0;
  for (int t = place.cluster; t < p.pieces; t += place.clusters) {
    const Tile tile = TileOf<S>(p, t);
    const bool more = t + place.clusters < p.pieces;
    float sum[S::kSides][kTiles][4] = {};
    for (int i = 0; i < depth; ++i) {
      WaitForCopies(p.stages - 1);
      __syncwarp();  // the other lanes' copies, too
      if (scales) {
        Norm<T, S>(p, norms + stage * NormBytes(S::kDepth), scale, &held);
        if (t == 0 && high < p.m) {
          StoreHeld<S>(p.norm + high * p.norm_m, first + i * kRound, end, held);
        }
      }
      MultiplyStage<T, kAlongK, S>(ring + stage * kStageBytes, held, sum);
      __syncwarp();  // all lanes have read the stage
      start(stage);
      if (++stage == p.stages) stage = 0;
      held = next;
      int ahead = i + 2;
      if (ahead >= depth && more) ahead = depth > 1 ? ahead - depth : 0;  // the next tile's
      if (ahead < depth) Fetch<S>(row, first + ahead * kRound, end, &next);
    }
    WayOut out;
    if (mine) FetchWayOut<S>(p, tile, m, q, &out);
    // A lane holds columns lane / 4 and 8 more, of rows 2 * (lane % 4) and the next.
#pragma unroll
    for (int i = 0; i < S::kSides * kTiles * 4; ++i) {
      const int side = i / (kTiles * 4), c = i / 4 % kTiles, e = i % 4;
      const int to = 2 * (lane % 4) + e % 2;
      const int n = side * S::kColumns + kStep * c + high + e / 2 * 8;
      if (to < p.m) by_warp[warp * warp_pitch + to * S::kPitch + n] = sum[side][c][e];
    }
    __syncthreads();
    float total[4] = {};
    if (m < p.m) AddFour(by_warp + m * S::kPitch + 4 * q, warp_pitch, kStreamWarps, total);
    const auto sent = [&](int from) {
      return by_block + (from * most + (m >> place.shift)) * S::kWidth + 4 * q;
    };
    if (m < p.m && !mine) {
      const int from = place.rank - (place.rank > finisher);
      Send(InBlock(finisher, SharedAddress(sent(from))),
           float4{total[0], total[1], total[2], total[3]},
           InBlock(finisher, SharedAddress(&sum_barrier)));
    }
    if (__any_sync(kAllLanes, mine)) {
      if (p.splits > 1) {
        WaitForClusterBytes(SharedAddress(&sum_barrier));  // all of the sums
        if (mine) AddFour(sent(0), most * S::kWidth, p.splits - 1, total);
      }
      StoreColumns<T, S, kBest>(p, tile, t, mine, m, q, total, out, &best);
    }
    if (more) __syncthreads();  // the sums are read: the next tile's may come
  }
  if constexpr (kBest) {
    best = BestOfWarp<S::kQuads>(best);
    if (mine && q == 0) p.candidates[m * p.places + place.cluster] = best;
  }
#endif
}

template <typename T, bool kAlongK, bool kPair, bool kBest>
struct RowsKernel {
  static inline const KernelInfo kInfo = {
      kAlongK ? "stream_rows_along_k" : "stream_rows_along_n", sizeof(StreamParams), nullptr,
      reinterpret_cast<const void*>(&StreamRowsKernel<T, kAlongK, kPair, kBest>)};
};

StagePlan PlanRows(bool along_k, const StreamTuning& tuning, StreamParams* params) {
  StreamParams& p = *params;
  const bool pair = p.activated != nullptr;
  const StageSize stage = StageSizeOf(along_k, pair);
  const int width = (pair ? 2 : 1) * stage.columns;
  StagePlan plan = PlanStages(along_k, tuning, &p);
  const bool single = p.pieces <= plan.clusters;
  // An odd multiple of 16 bytes: the rows fall into different banks.
  p.row_pitch = static_cast<int32_t>(CeilDiv(2 * p.k, 128) * 128 + 16);
  int32_t beside = 0;
  if (p.has_norm && p.squares == nullptr) beside += (p.m + (p.weight != nullptr)) * p.row_pitch;
  if (!single) beside += kStreamWarps * p.m * (width + 4) * static_cast<int32_t>(sizeof(float));
  const auto owned = static_cast<int32_t>(CeilDiv(p.m, p.splits));
  beside += (p.splits - 1) * owned * width * static_cast<int32_t>(sizeof(float));
  const int32_t one_stage = kStreamWarps * (kStageBytes + NormBytes(stage.depth));
  const int64_t fitting = (kMaxStreamShared - beside) / one_stage;
  // At least so many that they also hold the warps' sums.
  const int64_t least = CeilDiv(p.m * (width + 4) * sizeof(float), kStageBytes);
  p.stages = static_cast<int32_t>(std::max<int64_t>(
      std::min<int64_t>({plan.stages, tuning.stages, fitting, int64_t{kMaxStages}}), least));
  plan.shared_bytes = p.stages * one_stage + beside;
  return plan;
}

}  // namespace

int32_t RowsTiles(const StreamParams& params, bool along_k) {
  StreamParams cut = params;
  return CutColumns(StageSizeOf(along_k, params.activated != nullptr).columns, &cut);
}

bool FitsStreamRows(StreamParams params, bool along_k, const StreamTuning& tuning) {
  const bool heads = params.heads.cos != nullptr || params.heads.position != nullptr;
  return params.m > 1 && params.m <= kMaxFewRows && !(heads && along_k) &&
         PlanRows(along_k, tuning, &params).shared_bytes <= kMaxStreamShared;
}

int32_t LaunchStreamRows(StreamParams params, DType dtype, bool along_k, const StreamTuning& tuning,
                         Launches* launches) {
  const StagePlan plan = PlanRows(along_k, tuning, &params);
  params.places = plan.clusters;
  LaunchStages<RowsKernel>(plan, params, dtype, along_k, launches);
  return params.places;
}

}  // namespace jaxgraph
