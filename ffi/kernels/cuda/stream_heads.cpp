#include "ffi/kernels/cuda/stream_heads.h"

#include <optional>

#include "ffi/kernels/cuda/heads.h"
#include "ffi/kernels/cuda/known_forms.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

constexpr size_t kNodes = 4;

class Reader {
 public:
  Reader(DType dtype, const StreamParams& params, StreamedHeads* heads, HeadsFootprint* footprint)
      : dtype_(dtype), params_(params), heads_(*heads), footprint_(*footprint) {}

  bool Read(const ResolvedNode& at) {
    if (at.node->op == Op::kExpr) return ReadRotation(at);
    return at.node->op == Op::kSetRows && ReadSet(at);
  }

 private:
  int64_t HeadsOf(int i) const { return int64_t{params_.m} * params_.product[i].n / kStreamedHead; }

  // The product that `address` is the output of; its heads have no gaps.
  int ProductAt(const char* address) const {
    for (int i = 0; i < params_.num_products; ++i) {
      const StreamedProduct& product = params_.product[i];
      if (product.out != address) continue;
      const bool whole = product.n % kStreamedHead == 0 && product.out_dtype == dtype_ &&
                         (params_.m == 1 || product.out_m == 2 * int64_t{product.n});
      return whole ? i : -1;
    }
    return -1;
  }

  bool ReadRotation(const ResolvedNode& at) {
    constexpr int64_t kHalf = kStreamedHead / 2;
    const Node& node = *at.node;
    ExprProgram program;
    RotaryForm f;
    if (!DecodeExpr(node, &program).ok() || !MatchRotary(program, &f) || f.dtype != dtype_) {
      return false;
    }
    const int i = ProductAt(at.srcs[f.low]);
    if (i < 0 || heads_.turned[i] != nullptr || heads_.cached[i] != nullptr) return false;
    if (at.srcs[f.high] != at.srcs[f.low] + 2 * kHalf ||
        at.outs[f.high_out] != at.outs[f.low_out] + 2 * kHalf) {
      return false;
    }
    for (const TensorRef* t :
         {&node.srcs[f.low], &node.srcs[f.high], &node.outs[f.low_out], &node.outs[f.high_out]}) {
      if (!IsHeads(*t, HeadsOf(i), kHalf, kStreamedHead)) return false;
    }
    const char *cos = at.srcs[f.cos], *sin = at.srcs[f.sin];
    if (!IsOneForHeads(node.srcs[f.cos], kHalf) || !IsOneForHeads(node.srcs[f.sin], kHalf) ||
        !IsAligned(cos, 16) || !IsAligned(sin, 16)) {
      return false;
    }
    if (heads_.cos != nullptr && (reinterpret_cast<const char*>(heads_.cos) != cos ||
                                  reinterpret_cast<const char*>(heads_.sin) != sin)) {
      return false;
    }
    heads_.cos = reinterpret_cast<const float*>(cos);
    heads_.sin = reinterpret_cast<const float*>(sin);
    heads_.turned[i] = at.outs[f.low_out];
    footprint_.reads.push_back(RangeOf(node.srcs[f.cos], cos));
    footprint_.reads.push_back(RangeOf(node.srcs[f.sin], sin));
    // The halves of one head lie between those of the next.
    footprint_.writes.push_back(
        {heads_.turned[i], heads_.turned[i] + 2 * HeadsOf(i) * kStreamedHead});
    return true;
  }

  // The product whose heads, turned if it has been, lie at `address`.
  int HeadsAt(const char* address) const {
    for (int i = 0; i < params_.num_products; ++i) {
      if (heads_.turned[i] != nullptr && heads_.turned[i] == address) return i;
    }
    const int i = ProductAt(address);
    return i >= 0 && heads_.turned[i] == nullptr ? i : -1;
  }

  bool ReadSet(const ResolvedNode& at) {
    const Node& node = *at.node;
    const IndexParams index = IndexParamsOf(node);
    const TensorRef &whole = node.outs[0], &rows = node.srcs[1];
    const int i = HeadsAt(at.srcs[1]);
    if (i < 0 || heads_.cached[i] != nullptr) return false;
    if (index.num_components != 1 || rows.shape[0] != 1 || rows.dtype != dtype_ ||
        whole.dtype != dtype_ || node.srcs[2].dtype != DType::kS32) {
      return false;
    }
    const int64_t num_heads = params_.product[i].n / kStreamedHead;
    StreamedHeads to = heads_;
    to.cache_m = to.cache_head = to.cache_position = 0;
    int64_t count = 1;  // of the rows' elements in the dimensions so far
    for (int d = whole.rank - 1; d >= 0; --d) {
      const int64_t extent = rows.shape[d + 1], stride = 2 * whole.strides[d];
      if (d == index.dim[0]) {
        if (extent != 1) return false;
        to.cache_position = stride;
        to.num_positions = static_cast<int32_t>(whole.shape[d]);
        continue;
      }
      if (extent != whole.shape[d]) return false;
      if (extent == 1) continue;
      if (rows.strides[d + 1] != count) return false;  // the rows have no gaps
      if (count == 1) {
        if (extent != kStreamedHead || stride != 2) return false;
      } else if (count == kStreamedHead && extent == num_heads && num_heads > 1) {
        to.cache_head = stride;
      } else if (count == kStreamedHead * num_heads && extent == params_.m) {
        to.cache_m = stride;
      } else {
        return false;
      }
      count *= extent;
    }
    if (count != int64_t{params_.m} * params_.product[i].n || to.num_positions < 1) return false;
    to.drops = index.mode == IndexMode::kFillOrDrop;
    to.position = reinterpret_cast<const int32_t*>(at.srcs[2]);
    const auto same = [&](auto StreamedHeads::* field) { return to.*field == heads_.*field; };
    if (heads_.position != nullptr &&
        !(same(&StreamedHeads::cache_m) && same(&StreamedHeads::cache_head) &&
          same(&StreamedHeads::cache_position) && same(&StreamedHeads::num_positions) &&
          same(&StreamedHeads::drops) && same(&StreamedHeads::position))) {
      return false;
    }
    to.cached[i] = at.outs[0];
    heads_ = to;
    footprint_.reads.push_back(RangeOf(node.srcs[2], at.srcs[2]));
    footprint_.writes.push_back(RangeOf(whole, at.outs[0]));
    return true;
  }

  const DType dtype_;
  const StreamParams& params_;
  StreamedHeads& heads_;
  HeadsFootprint& footprint_;
};

}  // namespace

size_t TakeHeads(const std::vector<ResolvedNode>& nodes, size_t first, DType dtype,
                 StreamParams* params, HeadsFootprint* footprint) {
  StreamedHeads heads = {};
  HeadsFootprint found;
  Reader reader(dtype, *params, &heads, &found);
  size_t next = first;
  for (size_t read = 0; read < kNodes; ++next) {
    if (next == nodes.size() || nodes[next].node->region != nodes[first].node->region ||
        nodes[next].node->branch != nodes[first].node->branch) {
      return 0;
    }
    if (nodes[next].node->op == Op::kView) continue;
    if (!reader.Read(nodes[next])) return 0;
    ++read;
  }
  if (heads.cos == nullptr || heads.position == nullptr) return 0;
  params->heads = heads;
  *footprint = std::move(found);
  return next - first;
}

}  // namespace jaxgraph
