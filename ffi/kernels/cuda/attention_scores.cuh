// Scores of a known form, as attention_decode.cu computes them (attention_form.h).
#pragma once

#include "ffi/kernels/cuda/attention_device.cuh"
#include "ffi/kernels/cuda/attention_mma.cuh"

namespace jaxgraph {

// The simple form, step by step: what all scores have in common is asked once a step. `f` takes a
// score, its row behind FirstRow(), and which of the two queries it is of.
template <int kRows, typename F>
__device__ __forceinline__ void ForEach(RowScores<kRows>& scores, F f) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) f(scores[i][j], 8 * i, j);
  }
}
template <int kRows>
__device__ __forceinline__ void RoundScores(DType dtype, RowScores<kRows>& scores) {
  if (dtype == DType::kF32) return;
  ForEach(scores, [dtype](float& x, int, int) { x = RoundTo(dtype, x); });
}
template <int kRows>
__device__ __forceinline__ void MaskSimply(const ScoreForm& form, int first, const int (&last)[2],
                                           RowScores<kRows>& scores) {
  const float factor = __uint_as_float(form.factor), fill = __uint_as_float(form.fill);
  RoundScores(form.raw, scores);
  if (form.divides) {
    ForEach(scores, [factor](float& x, int, int) { x /= factor; });
  } else {
    ForEach(scores, [factor](float& x, int, int) { x *= factor; });
  }
  RoundScores(form.scaled, scores);
  const int position = first + FirstRow();
  ForEach(scores, [&](float& x, int row, int j) {
    if (position + row > last[j]) x = fill;
  });
  RoundScores(form.masked, scores);
}

// The plain form.
template <int kRows>
__device__ __forceinline__ void MaskPlainly(const ScoreForm& form, int first, const int (&last)[2],
                                            RowScores<kRows>& scores) {
  const float factor = __uint_as_float(form.factor), fill = __uint_as_float(form.fill);
  const int position = first + FirstRow();
  ForEach(scores,
          [&](float& x, int row, int j) { x = position + row > last[j] ? fill : x * factor; });
}

// Any known form. What a query sees, and its part of the bias.
struct View {
  int from, last;  // positions
  const char* bias;
};
__device__ __forceinline__ View ViewOf(const AttentionArgs& p, int b0, int b1, int query,
                                       int last) {
  const ScoreForm& form = p.form;
  View view = {INT_MIN, last, nullptr};
  if (form.window != ScoreForm::kNoWindow) view.from = last + form.offset - form.window;
  if (p.bias != nullptr) {
    view.bias =
        p.bias + b0 * p.bias_strides[0] + b1 * p.bias_strides[1] + query * p.bias_strides[2];
  }
  return view;
}
__device__ __forceinline__ float Masked(const AttentionArgs& p, const View& view, int position,
                                        float x) {
  const ScoreForm& form = p.form;
  const float factor = __uint_as_float(form.factor), fill = __uint_as_float(form.fill);
  x = RoundTo(form.raw, x);
  x = RoundTo(form.scaled, form.divides ? x / factor : x * factor);
  if (form.capped) {
    const float in = __uint_as_float(form.cap_in);
    x = RoundTo(form.cap, form.cap_divides ? x / in : x * in);
    x = RoundTo(form.cap, tanhf(x));
    x = RoundTo(form.cap, x * __uint_as_float(form.cap_out));
  }
  if (view.bias != nullptr) {
    x += LoadFloat<float>(view.bias + min(position, p.s - 1) * p.bias_strides[3], form.bias_dtype);
  }
  x = RoundTo(form.biased, x);
  if (position > view.last || position < view.from) x = form.adds_fill ? x + fill : fill;
  return RoundTo(form.masked, x);
}

}  // namespace jaxgraph
