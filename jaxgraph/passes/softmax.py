"""The algebra of a softmax over the last axis: what it is taken of, however it is written.

``exp(s - m)`` divided by its own sum, or multiplied by the sum's inverse, where m is the maximum of
the same s; or the same by logarithms. A sink (a learned one, after Xiao et al., 2023,
arXiv:2309.17453) is one score more for each row: it is concatenated to the others, and its weight
cut off again, or its exponential is added to the sum.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.dtypes import is_float
from jaxgraph.graph.ir import Node, Tensor


@dataclasses.dataclass(frozen=True)
class Softmax:
    """``exp(scores - m) / (sum(exp(scores - m)) + exp(sink - m))``, m the maximum of all.

    Attributes:
      scores: normalised along the last axis.
      sink: one value for each row of the scores, in their order, in any shape; None: there is none.
      joined: the concatenation of both, if that is what the softmax was taken of.
    """

    scores: Tensor
    sink: Tensor | None = None
    joined: Node | None = None


def find_softmax(
    weights: Tensor, path: tuple[Node, ...]
) -> tuple[Softmax, tuple[Node, ...]] | None:
    """The softmax that ``weights``, seen through the views of the path, are.

    Args:
      weights: what lies behind views and conversions.
      path: these views, from the outermost to the innermost.

    Returns:
      (softmax, the views through which its own weights are seen), or None.
    """
    if _is_op(weights, "div") or _is_op(weights, "mul"):
        found = _quotient(weights)
    else:
        scores = _operand_of_logarithms(weights)
        found = None if scores is None else Softmax(scores)
    if found is None or found.sink is not None:
        return None if found is None else (found, path)
    scores = _unshifted(found.scores)
    if scores.node.kind != "concat":
        return Softmax(scores), path
    apart = _without_sink(scores.node, path[-1]) if path else None
    return None if apart is None else (apart, path[:-1])


def behind_views(x: Tensor) -> tuple[Tensor, tuple[Node, ...]]:
    """What lies behind views and conversions of ``x``, and the views, the outermost first."""
    x, nodes = behind_both(x)
    return x, tuple(node for node in nodes if node.out.is_view)


def behind_both(x: Tensor) -> tuple[Tensor, tuple[Node, ...]]:
    """What lies behind views and conversions of ``x``, and those, the outermost first."""
    nodes: list[Node] = []
    while (x.is_view and x.node.kind != "bitcast") or _is_conversion(x):
        nodes.append(x.node)
        x = x.node.inputs[0]
    return x, tuple(nodes)


def without_converts(x: Tensor) -> Tensor:
    """Behind conversions between floats: the kernel computes in f32 throughout."""
    while _is_conversion(x):
        x = x.node.inputs[0]
    return x


def _is_conversion(x: Tensor) -> bool:
    return _is_op(x, "convert") and is_float(x.node.inputs[0].dtype) and is_float(x.dtype)


def is_shifted_exponential(x: Tensor) -> bool:
    """Is ``x`` exp(s - max(s)), the maximum over the last axis?"""
    return _operand_of_exponential(x) is not None


def is_sum_of(total: Tensor, x: Tensor) -> bool:
    """Is ``total`` the sum of ``x``, which is no conversion, over the last axis?"""
    return _is_reduction(total, "sum") and without_converts(total.node.inputs[0]) is x


def constant_of(x: Tensor) -> float | None:
    """The number that ``x`` is everywhere."""
    x, _ = views.behind(x)
    if x.node.kind != "const" or not is_float(x.dtype):
        return None
    bits, wide = x.node.attrs["value"], x.dtype == np.float64
    return float(
        np.array(bits, np.uint64 if wide else np.uint32).view(np.float64 if wide else np.float32)
    )


def _quotient(weights: Tensor) -> Softmax | None:
    a, b = weights.node.inputs
    if _is_op(weights, "div"):
        return _normalised(a, _row_value(b, weights))
    for top, row in ((a, b), (b, a)):
        total = _inverse_of(_row_value(row, weights))
        if total is not None:
            return _normalised(top, _rows_of(total, weights))
    return None


def _inverse_of(x: Tensor | None) -> Tensor | None:
    """y, where ``x`` is 1 / y."""
    if x is not None and _is_op(x, "div") and constant_of(x.node.inputs[0]) == 1:
        return x.node.inputs[1]
    if x is not None and _is_op(x, "integer_pow") and x.node.attrs["aux"] == -1:
        return x.node.inputs[0]
    return None


def _normalised(top: Tensor, total: Tensor | None) -> Softmax | None:
    """What ``top / total`` is a softmax of."""
    top = without_converts(top)
    if total is None:
        return None
    if _is_op(total, "add"):
        return _with_sink_in_total(top, total)
    scores = _operand_of_exponential(top) if is_sum_of(total, top) else None
    return None if scores is None else Softmax(scores)


def _unshifted(scores: Tensor) -> Tensor:
    """s, where ``scores`` is s - max(s): a softmax shifts them itself."""
    while _is_op(scores, "sub"):
        s, peak = scores.node.inputs
        if not _is_peak(_row_value(peak, scores), s):
            break
        scores = s
    return scores


def _without_sink(joined: Node, cut: Node) -> Softmax | None:
    """Scores and sink where ``cut`` takes the scores' weights out of those of both."""
    axis, attrs = joined.attrs["axis"], cut.attrs
    if axis != len(joined.out.shape) - 1 or len(joined.inputs) != 2 or cut.kind != "slice":
        return None
    start = attrs["starts"][axis]
    for scores, sink, begin in (
        (*joined.inputs, 0),
        (*joined.inputs[::-1], joined.inputs[0].shape[axis]),
    ):
        if (
            sink.shape[axis] == 1
            and cut.out.shape == scores.shape
            and start == begin
            and (attrs["steps"] is None or attrs["steps"][axis] == 1)
        ):
            return Softmax(scores, sink, joined)
    return None


def _with_sink_in_total(top: Tensor, total: Tensor) -> Softmax | None:
    """``exp(s - m) / (sum(exp(s - m)) + exp(sink - m))``, where m is ``max(max(s), sink)``."""
    shifted = _exponent(top)
    if shifted is None:
        return None
    scores, peak = shifted.node.inputs[0], _row_value(shifted.node.inputs[1], shifted)
    for summed, other in (total.node.inputs, total.node.inputs[::-1]):
        rows, rest = _rows_of(summed, top), _rows_of(other, top)
        exponent = None if rest is None else _exponent(rest)
        if rows is None or exponent is None or not is_sum_of(rows, top):
            continue
        sink = exponent.node.inputs[0]
        same_peak = _rows_of(exponent.node.inputs[1], top) is peak
        if same_peak and peak is not None and _is_peak_of_both(peak, scores, sink):
            return Softmax(scores, sink)
    return None


def _exponent(x: Tensor) -> Tensor | None:
    """y, where ``x`` is exp(y) and y a difference."""
    if not _is_op(x, "exp"):
        return None
    exponent = without_converts(x.node.inputs[0])
    return exponent if _is_op(exponent, "sub") else None


def _is_peak_of_both(row: Tensor, scores: Tensor, sink: Tensor) -> bool:
    if not _is_op(row, "max"):
        return False
    return any(
        _is_peak(_rows_of(a, scores), scores) and _are_same_rows(b, sink)
        for a, b in (row.node.inputs, row.node.inputs[::-1])
    )


def _are_same_rows(a: Tensor, b: Tensor) -> bool:
    (x, x_path), (y, y_path) = behind_views(a), behind_views(b)
    if x is not y or a.size != b.size:
        return False
    ways = [views.apply_path(path, ly.contiguous(x.shape))[0] for path in (x_path, y_path)]
    if any(way is None for way in ways):
        return False
    return ways[0].dims() == ways[1].dims() and ways[0].offset == ways[1].offset


def _operand_of_exponential(top: Tensor) -> Tensor | None:
    """s, where ``top`` is exp(s - max(s))."""
    shifted = _exponent(top)
    if shifted is None:
        return None
    s, peak = shifted.node.inputs
    return s if _is_peak(_row_value(peak, shifted), s) else None


def _operand_of_logarithms(weights: Tensor) -> Tensor | None:
    """s, where ``weights`` is exp(log_softmax(s)) or exp(s - logsumexp(s))."""
    exponent = _exponent(weights)
    if exponent is None:
        return None
    a, row = exponent.node.inputs[0], _row_value(exponent.node.inputs[1], exponent)
    top = _logarithm_of_sum(row, exponent)
    if top is not None:  # (s - max) - log(sum(exp(s - max)))
        is_shifted = _is_op(top, "exp") and without_converts(top.node.inputs[0]) is a
        return _operand_of_exponential(top) if is_shifted else None
    if row is None or not _is_op(row, "add"):
        return None
    for log, peak in (row.node.inputs, row.node.inputs[::-1]):  # s - (log(sum(..)) + max)
        top = _logarithm_of_sum(_rows_of(log, exponent), exponent)
        if top is not None and _operand_of_exponential(top) is a:
            return a if _is_peak(_rows_of(peak, exponent), a) else None
    return None


def _logarithm_of_sum(row: Tensor | None, along: Tensor) -> Tensor | None:
    """x, where ``row`` is log(sum(x)), the sum perhaps by its absolute value."""
    if row is None or not _is_op(row, "log"):
        return None
    total = _rows_of(row.node.inputs[0], along)
    if total is not None and _is_op(total, "abs"):
        total = _rows_of(total.node.inputs[0], along)
    if total is None or not _is_reduction(total, "sum"):
        return None
    return without_converts(total.node.inputs[0])


def _is_peak(row: Tensor | None, s: Tensor) -> bool:
    """Is ``row`` the maximum of ``s`` over the last axis, wherever that is finite?"""
    if row is None:
        return False
    if _is_op(row, "max"):  # jax.nn.softmax takes max(-inf, maximum)
        least = [constant_of(t) == -np.inf for t in row.node.inputs]
        return any(least) and _is_peak(_rows_of(row.node.inputs[least[0]], s), s)
    if _is_op(row, "select"):  # logsumexp takes 0 where the maximum is not finite
        condition, other, peak = (_rows_of(t, s) for t in row.node.inputs)
        finite = condition is not None and _is_op(condition, "is_finite")
        checked = _rows_of(condition.node.inputs[0], s) if finite else None
        zero = constant_of(row.node.inputs[1]) == 0
        return zero and checked is not None and checked is peak and _is_peak(peak, s)
    return _is_reduction(row, "max") and row.node.inputs[0] is s


def _rows_of(x: Tensor, along: Tensor) -> Tensor | None:
    """What ``x`` shows, one value for each row of ``along``, in order."""
    x, path = behind_views(x)
    layout, _ = views.apply_path(path, ly.contiguous(x.shape))
    if layout is None or layout.offset != 0:
        return None
    return x if layout.dims() == ly.contiguous(along.shape[:-1]).dims() else None


def _is_op(x: Tensor, op: str) -> bool:
    return x.node.kind == "elementwise" and x.node.attrs["op"] == op


def _row_value(x: Tensor, along: Tensor) -> Tensor | None:
    """r, where ``x`` is r repeated along the last axis of ``along``."""
    x, path = behind_views(x)
    layout, _ = views.apply_path(path, ly.contiguous(x.shape))
    if layout is None or layout.shape != along.shape or layout.offset != 0:
        return None
    rows = along.shape[:-1]
    expected = (*ly.contiguous_strides(rows), 0)
    for n, stride, own in zip(along.shape, layout.strides, expected, strict=True):
        if n != 1 and stride != own:
            return None
    return x


def _is_reduction(x: Tensor, op: str) -> bool:
    return x.node.kind == "reduce" and x.node.attrs["op"] == op
