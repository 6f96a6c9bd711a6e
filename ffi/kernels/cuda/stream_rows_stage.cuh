// How stages come to the tensor cores in stream_rows.cu: a warp's ring of weights, and beside each
// stage its part of the rows and of the norm's weight. They are asked for together, so that none
// waits for another. k may come in any order: a lane multiplies four or eight elements of a row
// that lie together, and reads the weights to match.
#pragma once

#include "ffi/kernels/cuda/stream_stage.cuh"

namespace jaxgraph {

// What the rows add to a stage's shape.
template <bool kAlongK, bool kPair>
struct RowShape : Shape<kAlongK, kPair> {
  using Base = Shape<kAlongK, kPair>;
  static constexpr bool kIsAlongK = kAlongK;
  static constexpr int kWords = Base::kDepth / 8;    // of a stage's rows, that a lane holds
  static constexpr int kEighths = Base::kDepth / 8;  // of a row, in a stage
  // Floats from a row of sums to the next: what a warp writes at once falls into different banks.
  static constexpr int kPitch = Base::kWidth + 4;
  static constexpr int kQuads = Base::kWidth / 4;  // of a row of sums: a thread's
  static constexpr bool kIsHead = !kPair && Base::kColumns == kStreamedHead;  // a tile's row
};
// Beside a stage: eight rows of its k, then the norm's weight.
__host__ __device__ constexpr int RowBytes(int depth) { return kMaxFewRows * 2 * depth; }
__host__ __device__ constexpr int BesideBytes(int depth) { return RowBytes(depth) + 2 * depth; }

#if __CUDA_ARCH__ >= 900

// ---- places in a stage: what a warp reads at once falls into different banks ----

// Along n: neighbouring lines whose k are one lane's.
template <typename S>
constexpr int kSpan = S::kDepth / 4;

// Of a thread's first copy; those of every fourth line behind it lie at (this ^ TurnOf(line)) +
// line * kLineBytes.
template <typename S>
__device__ __forceinline__ uint32_t CopyPlace() {
  const int lane = threadIdx.x % kWarp, line = lane / 8, piece = lane % 8;
  return line * kLineBytes + ((piece ^ line % 2 * (S::kIsAlongK ? 4 : 1)) << 4);
}
template <typename S>
__device__ __forceinline__ constexpr uint32_t TurnOf(int line) {
  return S::kIsAlongK ? 0 : line / kSpan<S> % 4 << 5;
}
// What a lane reads first: a piece of a column along k, or a line for all lanes.
template <typename S>
__device__ __forceinline__ uint32_t ReadPlace() {
  const int lane = threadIdx.x % kWarp, high = lane / 4, low = lane % 4, q = lane % 8;
  if (S::kIsAlongK) return high * kLineBytes + ((low ^ high % 2 * 4) << 4);
  const int line = kSpan<S> * (q / 2) + lane / 16 * 2 + q % 2;
  return line * kLineBytes + ((lane / 8 % 2 ^ (q % 2 | q / 2 << 1)) << 4);
}

// ---- what comes ----

// A warp's stages, in the order in which they arrive.
template <typename S>
class RowSupply {
 public:
  static constexpr int kRound = kStreamWarps * S::kDepth;  // k from one of them to the next

  // `beside`: where the rows and the norm's weight go. Rows that are normed here come otherwise.
  __device__ RowSupply(const StreamParams& p, const BlockPlace& place, char* ring, char* beside)
      : p_(p),
        share_(ShareOf<S::kIsAlongK>(p, place)),
        policy_(ReadOncePolicy()),
        clusters_(place.clusters),
        to_(SharedAddress(ring) + CopyPlace<S>()),
        beside_(SharedAddress(beside)),
        tile_(First() < share_.end ? place.cluster : p.pieces) {  // k may be too short for it
    StartTile();
  }

  __device__ __forceinline__ int First() const {  // of k
    return share_.begin + static_cast<int>(threadIdx.x / kWarp) * S::kDepth;
  }
  __device__ __forceinline__ int end() const { return share_.end; }
  __device__ __forceinline__ int Depth() const {  // stages of a tile
    return max(share_.end - First() + kRound - 1, 0) / kRound;
  }

  // Starts the copies of the next stage, if there is one, but for its rows; commits them either
  // way.
  __device__ __forceinline__ void StartWithoutRows(int stage) { Start<false>(stage); }
  // Starts those of the first stages' rows, each committed by itself.
  __device__ __forceinline__ void StartFirstRows(const BlockPlace& place) const {
    int tile = place.cluster, k = First();
    for (int stage = 0; stage < p_.stages; ++stage) {
      if (tile < p_.pieces && k < share_.end) StartRows(stage, k);
      CommitCopies();
      k += kRound;
      if (k >= share_.end) {
        tile += clusters_;
        k = First();
      }
    }
  }
  // All of the next stage, if there is one; committed either way.
  __device__ __forceinline__ void Start(int stage) { Start<true>(stage); }

 private:
  static constexpr int kMatrices = S::kSides;

  template <bool kRows>
  __device__ __forceinline__ void Start(int stage) {
    if (tile_ < p_.pieces) {
      const int line = threadIdx.x % kWarp / 8, piece = threadIdx.x % 8;
      const uint32_t to = to_ + stage * kStageBytes;
      const int k_left = share_.end - at_;
#pragma unroll
      for (int side = 0; side < kMatrices; ++side) {
#pragma unroll
        for (int j = 0; j < S::kSideLines; j += 4) {
          const bool inside = S::kIsAlongK ? line + j < left_[side] && 8 * piece < k_left
                                           : line + j < k_left && 8 * piece < left_[side];
          CopyAsync((to ^ TurnOf<S>(j)) + (side * S::kSideLines + j) * kLineBytes,
                    from_[side] + int64_t{pitch_[side]} * j, inside, policy_);
        }
      }
      if (kRows) StartRows(stage, at_);
      StartWeight(stage);
      at_ += kRound;
      if (at_ < share_.end) {
#pragma unroll
        for (int side = 0; side < kMatrices; ++side) {
          from_[side] += (S::kIsAlongK ? 2 : int64_t{pitch_[side]}) * kRound;
        }
      } else {
        tile_ += clusters_;
        StartTile();
      }
    }
    CommitCopies();
  }

  __device__ __forceinline__ void StartTile() {
    if (tile_ >= p_.pieces) return;
    const Tile tile = TileOf<S>(p_, tile_);
    const int line = threadIdx.x % kWarp / 8, piece = threadIdx.x % 8;
    at_ = First();
#pragma unroll
    for (int side = 0; side < kMatrices; ++side) {
      const StreamedProduct& product = p_.product[tile.first + side];
      const int along = (S::kIsAlongK ? at_ : tile.column) + 8 * piece;  // lines
      const int across = (S::kIsAlongK ? tile.column : at_) + line;
      pitch_[side] = static_cast<int32_t>(product.pitch);
      left_[side] = product.n - tile.column;
      from_[side] = product.weights + across * product.pitch + 2 * along;
    }
  }

  // Eighths of the rows that there are; those of others hold anything.
  __device__ __forceinline__ void StartRows(int stage, int k) const {
    if (p_.has_norm && p_.squares == nullptr) return;
#pragma unroll
    for (int j = 0; j < kMaxFewRows * S::kEighths; j += kWarp) {
      const int i = j + static_cast<int>(threadIdx.x % kWarp);
      const int m = i / S::kEighths, eighth = i % S::kEighths;
      // By fours of eighths, so that neighbouring lanes read neighbouring ones.
      const int to = S::kEighths == 2 ? i : eighth / 4 * 32 + m * 4 + eighth % 4;
      if (m < p_.m) {
        CopyAsyncNear(beside_ + stage * BesideBytes(S::kDepth) + 16 * to,
                      p_.row + m * p_.row_m + 2 * (k + 8 * eighth), k + 8 * eighth < share_.end);
      }
    }
  }
  __device__ __forceinline__ void StartWeight(int stage) const {
    const int eighth = threadIdx.x % kWarp;
    if (p_.squares == nullptr || p_.weight == nullptr || eighth >= S::kEighths) return;
    CopyAsyncNear(beside_ + stage * BesideBytes(S::kDepth) + RowBytes(S::kDepth) + 16 * eighth,
                  p_.weight + 2 * (at_ + 8 * eighth), at_ + 8 * eighth < share_.end);
  }

  const StreamParams& p_;
  const Share share_;
  const uint64_t policy_;
  const int clusters_;
  const uint32_t to_, beside_;   // to_: this thread's part of the first stage
  int tile_, at_ = 0;            // of the next stage: its tile, and its first k
  const char* from_[kMatrices];  // what this thread copies first of it
  int32_t pitch_[kMatrices];
  int left_[kMatrices];  // columns from the tile's first to the matrix's end
};

// ---- what is multiplied ----

__device__ __forceinline__ uint4 LoadShared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// What a lane holds of a stage's rows: of row lane / 4, a fourth of every 32 or 16 k.
template <typename S>
struct Held {
  static constexpr int kBytes = S::kWords >= 4 ? 16 : 8;  // that lie together
  uint32_t words[S::kWords];
};
// From where a lane's first bytes lie, to where those of the next 32 k are `pitch` bytes behind.
template <typename S>
__device__ __forceinline__ void Load(uint32_t from, int pitch, Held<S>* held) {
  if constexpr (S::kWords == 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(held->words[0]), "=r"(held->words[1])
                 : "r"(from)
                 : "memory");
  } else {
#pragma unroll
    for (int g = 0; g < S::kWords / 4; ++g) {
      const uint4 v = LoadShared(from + g * pitch);
      held->words[4 * g] = v.x;
      held->words[4 * g + 1] = v.y;
      held->words[4 * g + 2] = v.z;
      held->words[4 * g + 3] = v.w;
    }
  }
}
// Stores what there is of it in a row in memory; `k`: where the stage begins.
template <typename S>
__device__ __forceinline__ void Store(const Held<S>& held, char* row, int k, int end) {
  const int at = 2 * k + static_cast<int>(threadIdx.x % 4) * Held<S>::kBytes;
  if constexpr (S::kWords == 2) {
    if (at < 2 * end) *reinterpret_cast<uint2*>(row + at) = {held.words[0], held.words[1]};
  } else {
#pragma unroll
    for (int g = 0; g < S::kWords / 4; ++g) {
      if (at + 64 * g < 2 * end) {
        *reinterpret_cast<uint4*>(row + at + 64 * g) = {
            held.words[4 * g], held.words[4 * g + 1], held.words[4 * g + 2], held.words[4 * g + 3]};
      }
    }
  }
}

// Norms it. The lane's part of the norm's weight lies at `weight` in shared memory.
template <typename T, typename S>
__device__ __forceinline__ void Norm(const StreamParams& p, uint32_t weight, float scale,
                                     Held<S>* held) {
  Held<S> w = {};
  if (p.weight != nullptr) Load<S>(weight, 64, &w);
#pragma unroll
  for (int j = 0; j < S::kWords; ++j) {
    held->words[j] = ScaledPair<T>(p, held->words[j], w.words[j], scale);
  }
}

// sum += the stage (as columns by k) * rows; from what the lane reads first.
template <typename T, typename S>
__device__ __forceinline__ void MultiplyStage(uint32_t from, const Held<S>& x,
                                              float (&sum)[S::kSides][S::kColumns / kStep][4]) {
  constexpr int kTiles = S::kColumns / kStep;
  if constexpr (S::kIsAlongK) {
#pragma unroll
    for (int g = 0; g < S::kDepth / 32; ++g) {
#pragma unroll
      for (int i = 0; i < S::kSides * kTiles; ++i) {
        const int line = i / kTiles * S::kSideLines + i % kTiles * kStep;
        const uint32_t at = (from ^ g << 6) + line * kLineBytes;
        const uint4 a = LoadShared(at), b = LoadShared(at + 8 * kLineBytes);
        const uint32_t* words = x.words + 4 * g;
        float (&to)[4] = sum[i / kTiles][i % kTiles];
        MultiplyAdd<T>(to, a.x, b.x, a.y, b.y, words[0], words[1]);
        MultiplyAdd<T>(to, a.z, b.z, a.w, b.w, words[2], words[3]);
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < S::kDepth / kStep; ++step) {
#pragma unroll
      for (int i = 0; i < S::kSides * kTiles; ++i) {
        const int line = i / kTiles * S::kSideLines + 4 * step;
        uint32_t w[4];
        LoadMatrix<false>((from ^ i % kTiles << 5) + line * kLineBytes, w);
        MultiplyAdd<T>(sum[i / kTiles][i % kTiles], w[0], w[1], w[2], w[3], x.words[2 * step],
                       x.words[2 * step + 1]);
      }
    }
  }
}
#endif

}  // namespace jaxgraph
