#include "ffi/kernels/cuda/layer_reader.h"

#include <array>
#include <optional>
#include <utility>

#include "ffi/core/attention.h"
#include "ffi/kernels/cuda/attention.h"
#include "ffi/kernels/cuda/heads.h"
#include "ffi/kernels/cuda/known_forms.h"
#include "ffi/kernels/cuda/launch_params.h"
#include "ffi/kernels/cuda/matmul.h"
#include "ffi/kernels/cuda/strided_space.h"

namespace jaxgraph {
namespace {

// Reads one layer, node by node.
class LayerReader {
 public:
  LayerReader(const std::vector<ResolvedNode>& nodes, size_t first, Layer* layer)
      : nodes_(nodes), next_(first), layer_(*layer) {}

  bool Read(const Layer* before) {
    return ProductFollows() && ReadFirstNorm(before) && ReadProjections() && ReadAttention() &&
           ReadOutput() && ReadMlp();
  }

 private:
  const Node& node(size_t n) const { return *nodes_[n].node; }

  size_t SkipViews(size_t n) const {
    while (n < nodes_.size() && node(n).op == Op::kView) ++n;
    return n;
  }
  // The next node that is no view, if it is an `op`.
  std::optional<size_t> Take(Op op) {
    next_ = SkipViews(next_);
    if (next_ == nodes_.size() || node(next_).op != op || node(next_).region != 0) return {};
    layer_.nodes.push_back(next_);
    layer_.end = next_ + 1;
    return next_++;
  }
  void Uses(size_t writer, size_t reader, const char* begin, int64_t bytes) {
    layer_.uses.push_back({writer, reader, {begin, begin + bytes}});
  }

  // Behind a layer's first node stands a product, and its weights lie along k. That is soon told;
  // what a ROW computes is not, and a streaming kernel will ask again.
  bool ProductFollows() const {
    const size_t n = SkipViews(SkipViews(next_) + 1);
    MatmulParams p;
    return n < nodes_.size() && node(n).op == Op::kMatmul && PrepareProduct(nodes_[n], &p).ok() &&
           p.b_k == 2;
  }

  // A ROW that is an RMS norm of one row; its part of the parameters.
  bool TakeNorm(RmsNormForm* form, LayerRow* in, size_t* n) {
    const std::optional<size_t> taken = Take(Op::kRow);
    if (!taken) return false;
    *n = *taken;
    const ResolvedNode& at = nodes_[*n];
    // Neither need rows be decoded that are too long, or more than one.
    const int64_t size = at.node->outs[0].num_elements();
    if (size > kMaxLayerRow) return false;
    for (const TensorRef& out : at.node->outs) {
      if (!IsDense(out, size)) return false;
    }
    ExprProgram program;
    if (!DecodeExpr(*at.node, &program).ok() || !MatchRmsNorm(program, form) ||
        program.shape[program.rank - 1] != size) {
      return false;
    }
    for (const int source : {form->x, form->added, form->weight}) {
      if (source < 0) continue;
      if (!IsDense(at.node->srcs[source], size) || !IsAligned(at.srcs[source], 16)) return false;
    }
    if (form->weight >= 0) {
      if (!at.is_constant(form->weight)) return false;
      in->weight = at.srcs[form->weight];
    }
    in->mean = BitsOf(form->divides ? 1 / form->length : form->length);
    in->eps = BitsOf(form->eps);
    in->size = static_cast<int32_t>(size);
    in->rounds_first = form->rounds_first;
    return true;
  }

  // Of a norm that adds two rows: are they these two?
  bool Adds(size_t n, const RmsNormForm& form, const char* row, size_t row_writer,
            const char* product, size_t product_writer, int64_t bytes) {
    if (form.added < 0 || form.sum_out < 0) return false;
    const char *x = nodes_[n].srcs[form.x], *y = nodes_[n].srcs[form.added];
    if (!(x == row && y == product) && !(x == product && y == row)) return false;
    Uses(row_writer, n, row, bytes);
    Uses(product_writer, n, product, bytes);
    return true;
  }

  bool ReadFirstNorm(const Layer* before) {
    RmsNormForm form;
    LayerRow& in = layer_.attention.in;
    if (!TakeNorm(&form, &in, &norm_)) return false;
    layer_.dtype = form.dtype;
    row_bytes_ = 2 * in.size;
    const ResolvedNode& at = nodes_[norm_];
    normed_ = at.outs[form.norm_out];
    if (before != nullptr) {
      if (before->dtype != form.dtype || before->attention.in.size != in.size ||
          !Adds(norm_, form, before->row, before->last_norm, before->out, before->last_product,
                row_bytes_)) {
        return false;
      }
    } else {
      in.row = at.srcs[form.x];
      Uses(kOutside, norm_, in.row, row_bytes_);
      if (form.added >= 0) {
        if (form.sum_out < 0) return false;
        in.added = at.srcs[form.added];
        Uses(kOutside, norm_, in.added, row_bytes_);
      }
    }
    row_writer_ = form.added >= 0 ? norm_ : kOutside;
    row_ = form.added >= 0 ? at.outs[form.sum_out] : at.srcs[form.x];
    return true;
  }

  // A MATMUL of one row, all in one dtype, with constant weights [out, in], which no index chooses.
  bool ReadProduct(size_t n, MatmulParams* p) const {
    if (!PrepareProduct(nodes_[n], p).ok()) return false;
    const DType t = layer_.dtype;
    const int weights = p->b == nodes_[n].srcs[1] ? 1 : 0;
    return p->index == nullptr && p->a_dtype == t && p->b_dtype == t && p->out_dtype == t &&
           p->batch[0] == 1 && p->batch[1] == 1 && p->m == 1 && p->n >= 1 && p->k >= 1 &&
           (p->a_k == 2 || p->k == 1) && p->b_k == 2 && (p->out_n == 2 || p->n == 1) &&
           nodes_[n].is_constant(weights) && IsAligned(p->b, 16) && p->b_n % 16 == 0;
  }
  static LayerMatrix MatrixOf(const MatmulParams& p) { return {p.b, p.b_n}; }

  struct Product {
    size_t node;
    MatmulParams p;
  };
  struct Rotation {
    size_t node;
    RotaryForm form;
  };

  // The nodes between the norm and the attention, in any order: which is which is known behind.
  bool ReadProjections() {
    for (;;) {
      if (const auto n = Take(Op::kMatmul)) {
        Product& product = products_.emplace_back(Product{*n, {}});
        if (!ReadProduct(*n, &product.p) || product.p.a != normed_ ||
            product.p.k != layer_.attention.in.size) {
          return false;
        }
        Uses(norm_, *n, normed_, row_bytes_);
      } else if (const auto n = Take(Op::kExpr)) {
        Rotation& rotation = rotations_.emplace_back(Rotation{*n, {}});
        ExprProgram program;
        if (!DecodeExpr(node(*n), &program).ok() || !MatchRotary(program, &rotation.form) ||
            rotation.form.dtype != layer_.dtype) {
          return false;
        }
      } else if (const auto n = Take(Op::kSetRows)) {
        writes_.push_back(*n);
      } else {
        return products_.size() == 3 && rotations_.size() == 2 && writes_.size() == 2;
      }
    }
  }

  // The product that writes `heads` heads to `address`.
  const Product* ProductAt(const char* address, int64_t heads) const {
    for (const Product& product : products_) {
      if (product.p.out == address && product.p.n == heads * width_) return &product;
    }
    return nullptr;
  }

  // The product that a rotation turns into heads at `address`, which `reader` reads.
  const Product* RotatedTo(const char* address, int64_t heads, size_t reader) {
    const int64_t half = width_ / 2;
    LayerAttentionParams& p = layer_.attention;
    for (const Rotation& rotation : rotations_) {
      const ResolvedNode& at = nodes_[rotation.node];
      const RotaryForm& f = rotation.form;
      if (at.outs[f.low_out] != address || at.outs[f.high_out] != address + 2 * half) continue;
      const Product* product = ProductAt(at.srcs[f.low], heads);
      if (product == nullptr || at.srcs[f.high] != at.srcs[f.low] + 2 * half) return nullptr;
      const Node& n = *at.node;
      for (const TensorRef* t :
           {&n.srcs[f.low], &n.srcs[f.high], &n.outs[f.low_out], &n.outs[f.high_out]}) {
        if (!IsHeads(*t, heads, half, width_)) return nullptr;
      }
      const std::array<const char*, 2> angles = {at.srcs[f.cos], at.srcs[f.sin]};
      if (!IsOneForHeads(n.srcs[f.cos], half) || !IsOneForHeads(n.srcs[f.sin], half)) {
        return nullptr;
      }
      const auto cos = reinterpret_cast<const float*>(angles[0]);
      const auto sin = reinterpret_cast<const float*>(angles[1]);
      if (p.cos != nullptr && (p.cos != cos || p.sin != sin)) return nullptr;
      p.cos = cos;
      p.sin = sin;
      for (const char* angle : angles) Uses(kOutside, rotation.node, angle, 4 * half);
      Uses(product->node, rotation.node, at.srcs[f.low], 2 * heads * width_);
      Uses(rotation.node, reader, address, 2 * heads * width_);
      return product;
    }
    return nullptr;
  }

  // Does the SET_ROWS write one row of all heads, [head][element] from `address` on?
  bool WritesOneRow(size_t n, int64_t head_stride) const {
    const Node& set = node(n);
    const IndexParams params = IndexParamsOf(set);
    const TensorRef &whole = set.outs[0], &rows = set.srcs[1];
    if (params.num_components != 1 || rows.shape[0] != 1) return false;
    for (int d = 0; d < whole.rank; ++d) {
      const int64_t extent = rows.shape[d + 1];
      if (d == params.dim[0]) {
        if (extent != 1) return false;
        continue;
      }
      if (extent != whole.shape[d]) return false;
      if (extent == 1) continue;
      const bool element = whole.strides[d] == 1 && extent == width_;
      const bool head = 2 * whole.strides[d] == head_stride && extent == layer_.attention.kv_heads;
      if (!element && !head) return false;
      if (rows.strides[d + 1] != (element ? 1 : width_)) return false;
    }
    return true;
  }
  // The one that writes into the cache at `address`.
  std::optional<size_t> WriterOf(const char* address) const {
    for (const size_t n : writes_)
      if (nodes_[n].outs[0] == address) return n;
    return {};
  }

  bool ReadAttention() {
    const auto taken = Take(Op::kAttention);
    if (!taken) return false;
    const size_t n = *taken;
    Attention attention;
    AttentionNode prepared = {};
    if (!DecodeAttention(node(n), &attention).ok() || attention.has_sink() ||
        !PrepareAttention(nodes_[n], attention, &prepared).ok()) {
      return false;
    }
    const AttentionArgs& args = prepared.args;
    const DType t = layer_.dtype;
    if (!args.form.simple() || args.q_dtype != t || args.k_dtype != t || args.v_dtype != t ||
        args.out_dtype != t || args.b0 != 1 || args.d != args.e || !FitsStreamKernel(args)) {
      return false;
    }
    LayerAttentionParams& p = layer_.attention;
    width_ = args.d;
    p.kv_heads = args.b1;
    p.heads = args.g;
    p.width = args.d;
    p.rows = args.s;
    p.form = args.form;
    const auto apart = [](int64_t stride, int64_t count, int64_t bytes) {
      return count == 1 || stride == bytes;
    };
    const int64_t head = 2 * int64_t{width_}, of_kv = head * p.heads;
    for (const int64_t (*strides)[4] : {&args.q_strides, &args.out_strides}) {
      if (!apart((*strides)[1], p.kv_heads, of_kv) || !apart((*strides)[2], p.heads, head) ||
          (*strides)[3] != 2) {
        return false;
      }
    }
    p.key_head = args.k_strides[1];
    p.key_row = args.k_strides[3];
    p.value_head = args.v_strides[1];
    p.value_row = args.v_strides[2];
    if (args.position != nullptr) {
      if (args.form.position_dtype != DType::kS32) return false;
      for (const int64_t stride : args.position_strides)
        if (stride != 0) return false;
      p.position = args.position;
      p.bounded = BoundIsPosition(args);
    }
    // The position and the cache are read before the wait, and the row that this step writes is
    // put in behind it.
    const EarlyCache early = FindEarlyCache(nodes_, n, attention, args.form.position);
    if (!early.cache || early.keys.index == nullptr || early.keys.index != early.values.index ||
        early.keys.index_dtype != DType::kS32 || early.values.index_dtype != DType::kS32) {
      return false;
    }
    p.index = early.keys.index;

    const std::optional<size_t> keys = WriterOf(args.k), values = WriterOf(args.v);
    if (!keys || !values || *keys == *values || !WritesOneRow(*keys, p.key_head) ||
        !WritesOneRow(*values, p.value_head)) {
      return false;
    }
    const auto drops = [&](size_t set) {
      return IndexParamsOf(node(set)).mode == IndexMode::kFillOrDrop;
    };
    if (drops(*keys) != drops(*values)) return false;
    p.drops = drops(*keys);
    p.keys = nodes_[*keys].outs[0];
    p.values = nodes_[*values].outs[0];
    for (const size_t set : {*keys, *values}) {
      Uses(kOutside, set, p.index, 4);
    }

    const int64_t all_heads = int64_t{p.heads} * p.kv_heads;
    const Product* const query = RotatedTo(args.q, all_heads, n);
    const Product* const key = RotatedTo(nodes_[*keys].srcs[1], p.kv_heads, *keys);
    const Product* const value = ProductAt(nodes_[*values].srcs[1], p.kv_heads);
    if (query == nullptr || key == nullptr || value == nullptr || query == key || query == value ||
        key == value) {
      return false;
    }
    Uses(value->node, *values, value->p.out, 2 * p.kv_heads * int64_t{width_});
    p.query = MatrixOf(query->p);
    p.key = MatrixOf(key->p);
    p.value = MatrixOf(value->p);
    attention_ = n;
    attended_ = args.out;
    return true;
  }

  bool ReadOutput() {
    const auto n = Take(Op::kMatmul);
    MatmulParams product;
    LayerAttentionParams& p = layer_.attention;
    const int64_t k = int64_t{p.kv_heads} * p.heads * width_;
    if (!n || !ReadProduct(*n, &product) || product.a != attended_ || product.k != k ||
        product.n != p.in.size) {
      return false;
    }
    Uses(attention_, *n, attended_, 2 * k);
    p.output = MatrixOf(product);
    RmsNormForm form;
    if (!TakeNorm(&form, &layer_.mlp.in, &norm_) || form.dtype != layer_.dtype ||
        layer_.mlp.in.size != p.in.size ||
        !Adds(norm_, form, row_, row_writer_, product.out, *n, row_bytes_)) {
      return false;
    }
    normed_ = nodes_[norm_].outs[form.norm_out];
    layer_.last_norm = norm_;
    layer_.row = nodes_[norm_].outs[form.sum_out];
    return true;
  }

  bool ReadMlp() {
    LayerMlpParams& p = layer_.mlp;
    Product sides[2];
    for (Product& side : sides) {
      const auto n = Take(Op::kMatmul);
      if (!n || !ReadProduct(*n, &side.p) || side.p.a != normed_ || side.p.k != p.in.size) {
        return false;
      }
      side.node = *n;
      Uses(norm_, *n, normed_, row_bytes_);
    }
    const int32_t hidden = sides[0].p.n;
    const auto activation = Take(Op::kExpr);
    ExprProgram program;
    SiluProductForm form;
    if (!activation || sides[1].p.n != hidden || !DecodeExpr(node(*activation), &program).ok() ||
        !MatchSiluProduct(program, &form) || form.dtype != layer_.dtype || form.gate == form.up) {
      return false;
    }
    const ResolvedNode& at = nodes_[*activation];
    for (const int source : {form.gate, form.up}) {
      if (!IsDense(at.node->srcs[source], hidden)) return false;
    }
    if (!IsDense(at.node->outs[0], hidden)) return false;
    if (at.srcs[form.gate] == sides[1].p.out) std::swap(sides[0], sides[1]);
    if (at.srcs[form.gate] != sides[0].p.out || at.srcs[form.up] != sides[1].p.out) return false;
    for (const Product& side : sides) {
      Uses(side.node, *activation, side.p.out, 2 * int64_t{hidden});
    }
    const auto down = Take(Op::kMatmul);
    MatmulParams product;
    if (!down || !ReadProduct(*down, &product) || product.a != at.outs[0] || product.k != hidden ||
        product.n != p.in.size) {
      return false;
    }
    Uses(*activation, *down, product.a, 2 * int64_t{hidden});
    p.gate = MatrixOf(sides[0].p);
    p.up = MatrixOf(sides[1].p);
    p.down = MatrixOf(product);
    p.hidden = hidden;
    p.silu_rounds = form.rounds;
    layer_.last_product = *down;
    layer_.out = product.out;
    return true;
  }

  const std::vector<ResolvedNode>& nodes_;
  size_t next_;
  Layer& layer_;

  int64_t row_bytes_ = 0, width_ = 0;
  size_t norm_ = 0, row_writer_ = kOutside, attention_ = 0;
  const char *normed_ = nullptr, *row_ = nullptr, *attended_ = nullptr;
  std::vector<Product> products_;
  std::vector<Rotation> rotations_;
  std::vector<size_t> writes_;
};

}  // namespace

bool ReadLayer(const std::vector<ResolvedNode>& nodes, size_t first, const Layer* before,
               Layer* layer) {
  return LayerReader(nodes, first, layer).Read(before);
}

}  // namespace jaxgraph
