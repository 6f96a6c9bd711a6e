#include "ffi/kernels/cuda/known_forms.h"

#include <array>
#include <cstring>
#include <vector>

namespace jaxgraph {
namespace {

constexpr int kNone = -1;

// What a program computes: equal computations are one value, so a source that a second stage loads
// again is the value that the first stage loaded.
class Values {
 public:
  struct Value {
    ExprOp op;
    DType dtype;
    uint16_t aux;
    int a, b, c;
    uint64_t imm;
    bool operator==(const Value& o) const {
      return op == o.op && dtype == o.dtype && aux == o.aux && a == o.a && b == o.b && c == o.c &&
             imm == o.imm;
    }
  };
  struct Store {
    int out, value;
  };

  // False for programs that no form has: they load or store once per row, or use an index.
  bool Build(const ExprProgram& program) {
    registers_.fill(kNone);
    for (int s = 0; s < program.num_stages; ++s) {
      const ExprStage& stage = program.stages[s];
      for (int i = stage.scalar_begin; i < stage.scalar_end; ++i) {
        const ExprOp op = program.instrs[i].op;
        if (op == ExprOp::kLoad || op == ExprOp::kStore) return false;
        if (!Add(program, program.instrs[i])) return false;
      }
      for (int i = stage.elem_begin; i < stage.elem_end; ++i) {
        if (!Add(program, program.instrs[i])) return false;
      }
    }
    return true;
  }

  const std::vector<Store>& stores() const { return stores_; }
  const Value& operator[](int v) const { return values_[v]; }

  bool Is(int v, ExprOp op, DType dtype) const {
    return v != kNone && values_[v].op == op && values_[v].dtype == dtype;
  }
  // The source that `v` loads.
  int Source(int v, DType dtype) const {
    return Is(v, ExprOp::kLoad, dtype) ? values_[v].aux : kNone;
  }
  // What `v` is the conversion of; `v` itself where both dtypes are the same.
  int ConvertedFrom(int v, DType from, DType to) const {
    if (from == to) return v;
    if (!Is(v, ExprOp::kConvert, to) || values_[v].aux != static_cast<uint16_t>(from)) return kNone;
    return values_[v].a;
  }
  bool Constant(int v, float* value) const {
    if (!Is(v, ExprOp::kConst, DType::kF32)) return false;
    const uint32_t bits = static_cast<uint32_t>(values_[v].imm);
    std::memcpy(value, &bits, sizeof bits);
    return true;
  }
  // Calls match(a, b) for both orders of a commutative op's operands until it agrees.
  template <typename F>
  bool EitherWay(int v, ExprOp op, DType dtype, F match) const {
    if (!Is(v, op, dtype)) return false;
    return match(values_[v].a, values_[v].b) || match(values_[v].b, values_[v].a);
  }

 private:
  bool Add(const ExprProgram& program, const ExprInstr& in) {
    if (in.op == ExprOp::kIndex) return false;
    if (in.op == ExprOp::kStore) {
      stores_.push_back({in.aux, registers_[in.a]});
      return true;
    }
    const int n = NumOperands(in.op);
    const bool uses_aux = in.op == ExprOp::kLoad || in.op == ExprOp::kConvert ||
                          in.op == ExprOp::kBitcast || in.op == ExprOp::kIntegerPow ||
                          in.op >= ExprOp::kReduceArgmax;
    Value value = {in.op,
                   in.dtype,
                   uses_aux ? in.aux : uint16_t{0},
                   n > 0 ? registers_[in.a] : kNone,
                   n > 1 ? registers_[in.b] : kNone,
                   n > 2 ? registers_[in.c] : kNone,
                   in.op == ExprOp::kConst ? program.imms[in.aux] : 0};
    size_t v = 0;
    while (v < values_.size() && !(values_[v] == value)) ++v;
    if (v == values_.size()) values_.push_back(value);
    registers_[in.dst] = static_cast<int>(v);
    return true;
  }

  std::array<int, kExprNumElementRegs + kExprNumScalarRegs> registers_{};
  std::vector<Value> values_;
  std::vector<Store> stores_;
};

// scale = 1 / sqrt((sum of wide * wide) / length + eps). Gives `wide`.
int MatchScale(const Values& values, int scale, RmsNormForm* form) {
  constexpr DType f32 = DType::kF32;
  if (!values.Is(scale, ExprOp::kRsqrt, f32)) return kNone;
  int mean = kNone;
  const bool sum = values.EitherWay(values[scale].a, ExprOp::kAdd, f32, [&](int a, int b) {
    mean = a;
    return values.Constant(b, &form->eps);
  });
  if (!sum) return kNone;
  int total = kNone;
  if (values.Is(mean, ExprOp::kDiv, f32)) {
    form->divides = true;
    total = values[mean].a;
    if (!values.Constant(values[mean].b, &form->length)) return kNone;
  } else {
    form->divides = false;
    const bool product = values.EitherWay(mean, ExprOp::kMul, f32, [&](int a, int b) {
      total = a;
      return values.Constant(b, &form->length);
    });
    if (!product) return kNone;
  }
  if (!values.Is(total, ExprOp::kReduceSum, f32)) return kNone;
  const int square = values[total].a;
  if (values.Is(square, ExprOp::kMul, f32) && values[square].a == values[square].b) {
    return values[square].a;
  }
  return values.Is(square, ExprOp::kIntegerPow, f32) && values[square].aux == 2 ? values[square].a
                                                                                : kNone;
}

// h = wide * scale.
bool MatchScaled(const Values& values, int h, int* wide, RmsNormForm* form) {
  return values.EitherWay(h, ExprOp::kMul, DType::kF32, [&](int a, int scale) {
    *wide = MatchScale(values, scale, form);
    return *wide != kNone && *wide == a;
  });
}

bool MatchNormValue(const Values& values, int norm, int* wide, RmsNormForm* form) {
  constexpr DType f32 = DType::kF32;
  const DType t = form->dtype;
  // Rounded, then weighted: two roundings.
  const bool weighted = values.EitherWay(norm, ExprOp::kMul, t, [&](int a, int weight) {
    const int h = values.ConvertedFrom(a, f32, t);
    form->weight = values.Source(weight, t);
    return h != kNone && form->weight != kNone && MatchScaled(values, h, wide, form);
  });
  if (weighted) {
    form->rounds_first = true;
    return true;
  }
  form->weight = kNone;
  const int h = values.ConvertedFrom(norm, f32, t);
  if (h == kNone) return false;
  if (MatchScaled(values, h, wide, form)) return true;
  return values.EitherWay(h, ExprOp::kMul, f32, [&](int a, int b) {
    const int weight = values.ConvertedFrom(b, t, f32);
    form->weight = weight == kNone ? kNone : values.Source(weight, t);
    return form->weight != kNone && MatchScaled(values, a, wide, form);
  });
}

bool MatchSum(const Values& values, int sum, RmsNormForm* form) {
  form->x = values.Source(sum, form->dtype);
  if (form->x != kNone) return true;
  if (!values.Is(sum, ExprOp::kAdd, form->dtype)) return false;
  form->x = values.Source(values[sum].a, form->dtype);
  form->added = values.Source(values[sum].b, form->dtype);
  return form->x != kNone && form->added != kNone;
}

}  // namespace

bool MatchRmsNorm(const ExprProgram& program, RmsNormForm* form) {
  Values values;
  if (!values.Build(program) || program.num_outs > 2) return false;
  if (values.stores().size() != program.num_outs) return false;
  for (const Values::Store& store : values.stores()) {
    if (store.value == kNone) return false;
    *form = {};
    form->dtype = values[store.value].dtype;
    if (form->dtype != DType::kBF16 && form->dtype != DType::kF16) return false;
    int wide = kNone;
    if (!MatchNormValue(values, store.value, &wide, form)) continue;
    const int sum = values.ConvertedFrom(wide, form->dtype, DType::kF32);
    if (sum == kNone || !MatchSum(values, sum, form)) return false;
    form->norm_out = store.out;
    for (const Values::Store& other : values.stores()) {
      if (other.out == store.out) continue;
      if (other.value != sum) return false;
      form->sum_out = other.out;
    }
    return true;
  }
  return false;
}

bool MatchSiluProduct(const ExprProgram& program, SiluProductForm* form) {
  Values values;
  if (!values.Build(program) || values.stores().size() != 1 || program.num_outs != 1) return false;
  const int stored = values.stores()[0].value;
  if (stored == kNone) return false;
  const DType t = values[stored].dtype;
  if (t != DType::kBF16 && t != DType::kF16) return false;
  for (const bool rounds : {true, false}) {
    const DType steps = rounds ? t : DType::kF32;
    // A source, in the dtype of the steps.
    const auto source = [&](int v) {
      const int from = values.ConvertedFrom(v, t, steps);
      return from == kNone ? kNone : values.Source(from, t);
    };
    const int product = values.ConvertedFrom(stored, steps, t);
    *form = {t, kNone, kNone, rounds};
    const bool matches = values.EitherWay(product, ExprOp::kMul, steps, [&](int silu, int up) {
      form->up = source(up);
      return form->up != kNone &&
             values.EitherWay(silu, ExprOp::kMul, steps, [&](int gate, int sigmoid) {
               form->gate = source(gate);
               return form->gate != kNone && values.Is(sigmoid, ExprOp::kLogistic, steps) &&
                      values[sigmoid].a == gate;
             });
    });
    if (matches) return true;
  }
  return false;
}

bool MatchRotary(const ExprProgram& program, RotaryForm* form) {
  constexpr DType f32 = DType::kF32;
  Values values;
  if (!values.Build(program) || values.stores().size() != 2 || program.num_outs != 2) return false;
  // A half, and an angle's cosine or sine, of a product.
  const auto product = [&](int v, int* half, int* angle) {
    return values.EitherWay(v, ExprOp::kMul, f32, [&](int a, int b) {
      const int from = values.ConvertedFrom(a, form->dtype, f32);
      if (from == kNone) return false;
      *half = values.Source(from, form->dtype);
      *angle = values.Source(b, f32);
      return *half != kNone && *angle != kNone;
    });
  };
  for (int first = 0; first < 2; ++first) {
    const Values::Store &low = values.stores()[first], &high = values.stores()[1 - first];
    if (low.value == kNone || high.value == kNone) return false;
    *form = {};
    form->dtype = values[low.value].dtype;
    if (form->dtype != DType::kBF16 && form->dtype != DType::kF16) return false;
    const int difference = values.ConvertedFrom(low.value, f32, form->dtype);
    const int sum = values.ConvertedFrom(high.value, f32, form->dtype);
    if (!values.Is(difference, ExprOp::kSub, f32)) continue;
    if (!product(values[difference].a, &form->low, &form->cos) ||
        !product(values[difference].b, &form->high, &form->sin)) {
      return false;
    }
    form->low_out = low.out;
    form->high_out = high.out;
    return values.EitherWay(sum, ExprOp::kAdd, f32, [&](int a, int b) {
      int halves[2], angles[2];
      return product(a, &halves[0], &angles[0]) && product(b, &halves[1], &angles[1]) &&
             halves[0] == form->high && angles[0] == form->cos && halves[1] == form->low &&
             angles[1] == form->sin;
    });
  }
  return false;
}

bool MatchArgmax(const ExprProgram& program, ArgmaxForm* form) {
  if (program.num_stages != 2 || program.num_instrs != 3 || program.num_outs != 1) return false;
  const ExprStage &first = program.stages[0], &second = program.stages[1];
  const ExprInstr &load = program.instrs[0], &best = program.instrs[1], &store = program.instrs[2];
  const auto index = static_cast<DType>(best.aux);
  form->dtype = load.dtype;
  return first.elem_begin == 0 && first.elem_end == 2 && second.scalar_begin == 2 &&
         second.scalar_end == 3 && load.op == ExprOp::kLoad && load.aux == 0 &&
         best.op == ExprOp::kReduceArgmax && best.a == load.dst && best.dtype == load.dtype &&
         store.op == ExprOp::kStore && store.a == best.dst && store.dtype == index &&
         (index == DType::kS32 || index == DType::kU32) &&
         (load.dtype == DType::kBF16 || load.dtype == DType::kF16 || load.dtype == DType::kF32);
}

}  // namespace jaxgraph
