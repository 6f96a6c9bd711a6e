"""Recognises attention of few queries against a cache, by what is computed.

``weights @ v`` is attention where ``weights`` is a softmax over the last axis of an elementwise
function of ``q @ k``. The function (scale, mask, window, soft cap, bias, ...) is not recognised; it
is kept as an expression of the raw score and handed to the kernel, so that every spelling of it is
right. The softmax is matched by its algebra: ``exp(s - m)`` divided by its own sum, where m is the
maximum of the same s. Keys and values repeated for the queries that share them are un-repeated: the
queries are grouped instead, so that the cache is read as it lies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxgraph.frontend.elementwise import constant
from jaxgraph.frontend.shaping import reshape
from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.dtypes import is_float, is_integer
from jaxgraph.graph.ir import Graph, Node, Tensor

LayoutOf = Callable[[Tensor], tuple[Tensor, ly.Layout]]


# A view, and the axis on which its values repeat; from the outermost view to the one that repeats.
Repetition = tuple[tuple[Node, int], ...]


@dataclasses.dataclass(frozen=True)
class Match:
    """``weights @ v``: the two products, and the masked scores between them.

    ``path`` holds the views from the left side of ``last``, the outermost, to the softmax. Of b1
    heads ``repeats`` neighbours share their keys and values, through views ``k`` and ``v``.
    """

    first: Node  # q @ k
    scores: Tensor  # what the softmax is taken of
    path: tuple[Node, ...]
    last: Node  # weights @ v
    repeats: int = 1
    k: Repetition = ()
    v: Repetition = ()


def find_attention(graph: Graph) -> Graph:
    """A graph that computes the same, with ``attention`` nodes in place of what was matched.

    An attention node has the inputs q [b0, b1, g, d], k [b0, b1, d, s], v [b0, b1, s, dv] and the
    masked scores, an expression over [b0, b1, g, s] whose leaf ``scores`` stands for q @ k.
    """
    matches: dict[int, Match] = {}
    readers = graph.consumers()
    outputs = {t.id for t in graph.outputs}
    for node in graph.live_nodes():
        if node.kind == "matmul":
            match = _match(node, readers, outputs)
            if match is not None:
                matches[node.out.id] = _without_repeats(match)
    if not matches:
        return graph

    products = {m.first.out.id: m for m in matches.values()}
    lengths = {n.out.id: n for m in matches.values() for n in _comparisons_with_lengths(m.scores)}
    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    for node in graph.live_nodes():
        out = node.out
        if out.id in products:
            mapped[out.id] = _raw_scores(new, mapped, products[out.id])
        elif out.id in matches:
            mapped[out.id] = _attention(new, mapped, matches[out.id])
        elif out.id in lengths:
            mapped[out.id] = _compared_with_last(new, mapped, node)
        else:
            mapped[out.id] = new.copy(node, mapped)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _raw_scores(new: Graph, mapped: dict[int, Tensor], match: Match) -> Tensor:
    """The leaf that stands for q @ k. Its operands make it unique; nothing computes it alone."""
    out, label = match.first.out, match.first.label
    q, k = _queries_and_keys(new, mapped, match)
    leaf = new.add("scores", (q, k), (*q.shape[:3], k.shape[3]), out.dtype, label)
    return reshape(new, leaf, out.shape, label)


def _attention(new: Graph, mapped: dict[int, Tensor], match: Match) -> Tensor:
    out, label = match.last.out, match.last.label
    q, k = _queries_and_keys(new, mapped, match)
    v = _unrepeated(new, mapped, match.last.inputs[1], match.v, match.repeats)
    masked = mapped[match.scores.id]
    for view in reversed(match.path):
        masked = new.add(
            view.kind, (masked,), view.out.shape, masked.dtype, view.label, **view.attrs
        )
    masked = reshape(new, masked, (*q.shape[:3], k.shape[3]), label)
    mixed = new.add("attention", (q, k, v, masked), (*q.shape[:3], v.shape[3]), out.dtype, label)
    return reshape(new, mixed, out.shape, label)


def _queries_and_keys(new: Graph, mapped: dict[int, Tensor], match: Match) -> tuple[Tensor, Tensor]:
    q, k = match.first.inputs
    b0, b1, g, d = q.shape
    n = match.repeats
    grouped = reshape(new, mapped[q.id], (b0, b1 // n, n * g, d), match.first.label)
    return grouped, _unrepeated(new, mapped, k, match.k, n)


def _match(last: Node, readers: dict[int, list[Node]], outputs: set[int]) -> Match | None:
    weights, path = _behind_views(last.inputs[0])
    masked = _softmax_operand(weights)
    if masked is None:
        return None
    # The last product sums over what the softmax normalises, one row of it for each of its own.
    rows, _ = views.apply_path(path, ly.contiguous(weights.shape))
    length = last.inputs[0].shape[-1]
    if rows is None or not rows.is_dense or weights.shape[-1] != length:
        return None
    if length > 1 and rows.strides[-1] != 1:
        return None
    first = _product_in(masked, path)
    if first is None or first.out.id in outputs or first.out.shape != last.inputs[0].shape:
        return None
    if not _read_only_within(first.out, weights, readers, outputs):
        return None
    if not _read_one_by_one(first.out, masked, readers):
        return None
    if not all(is_float(t.dtype) for t in (*first.inputs, last.inputs[1])):
        return None
    return Match(first, masked, path, last)


def _behind_views(x: Tensor) -> tuple[Tensor, tuple[Node, ...]]:
    """What lies behind views and conversions of ``x``, and the views, the outermost first."""
    path: list[Node] = []
    while True:
        inner = _without_converts(x)
        if inner.is_view and inner.node.kind != "bitcast":
            path.append(inner.node)
            inner = inner.node.inputs[0]
        if inner is x:
            return x, tuple(path)
        x = inner


# Repeated keys and values.


def _without_repeats(match: Match) -> Match:
    """The match with as many heads as the cache has, where all others are copies of those."""
    heads = match.first.out.shape[1]
    for n in range(heads, 1, -1):
        if heads % n == 0:
            k = _repetition(match.first.inputs[1], 1, n)
            v = _repetition(match.last.inputs[1], 1, n)
            if k and v:
                return dataclasses.replace(match, repeats=n, k=k, v=v)
    return match


def _repetition(x: Tensor, axis: int, times: int) -> Repetition:
    """The views that make each value along ``axis`` stand ``times`` times; empty if they do not."""
    path: list[tuple[Node, int]] = []
    while x.is_view or _without_converts(x) is not x:
        node = x.node
        path.append((node, axis))
        inner = node.inputs[0]
        if node.kind == "broadcast":
            dims = node.attrs["dims"]
            if axis not in dims or inner.shape[dims.index(axis)] != x.shape[axis]:
                return tuple(path)
            axis = dims.index(axis)
        elif node.kind == "transpose":
            axis = node.attrs["permutation"][axis]
        elif node.kind == "reshape":
            found = _axis_before(inner.shape, x.shape, axis, times)
            if found is None:
                return ()
            axis = found
        elif node.kind != "elementwise":
            return ()
        x = inner
    return ()


def _axis_before(old: tuple[int, ...], new: tuple[int, ...], axis: int, times: int) -> int | None:
    """The axis of ``old`` whose innermost part of size ``times`` a reshape puts into ``axis``."""
    inside = math.prod(new[axis + 1 :])
    for d, n in enumerate(old):
        if n % times == 0 and math.prod(old[d + 1 :]) == inside:
            return d
    return None


def _unrepeated(
    new: Graph, mapped: dict[int, Tensor], x: Tensor, repetition: Repetition, times: int
) -> Tensor:
    """``x`` with one value where ``times`` equal ones stood."""
    if not repetition:
        return mapped[x.id]
    base = mapped[repetition[-1][0].inputs[0].id]
    for node, axis in reversed(repetition):
        shape = list(node.out.shape)
        shape[axis] //= times
        base = new.add(node.kind, (base,), shape, node.out.dtype, node.label, **node.attrs)
    return base


# The algebra of the softmax.


def _softmax_operand(weights: Tensor) -> Tensor | None:
    """s, where ``weights`` is softmax(s) over the last axis."""
    if _is_op(weights, "div"):
        top = _without_converts(weights.node.inputs[0])
        total = _row_value(weights.node.inputs[1], weights)
        if total is None or not _is_sum_of(total, top):
            return None
        return _operand_of_exponential(top)
    return _operand_of_logarithms(weights)


def _operand_of_exponential(top: Tensor) -> Tensor | None:
    """s, where ``top`` is exp(s - max(s))."""
    if not _is_op(top, "exp"):
        return None
    shifted = _without_converts(top.node.inputs[0])
    if not _is_op(shifted, "sub"):
        return None
    s, peak = shifted.node.inputs
    return s if _is_peak(_row_value(peak, shifted), s) else None


def _operand_of_logarithms(weights: Tensor) -> Tensor | None:
    """s, where ``weights`` is exp(log_softmax(s)) or exp(s - logsumexp(s))."""
    if not _is_op(weights, "exp"):
        return None
    exponent = _without_converts(weights.node.inputs[0])
    if not _is_op(exponent, "sub"):
        return None
    a, row = exponent.node.inputs[0], _row_value(exponent.node.inputs[1], exponent)
    top = _logarithm_of_sum(row, exponent)
    if top is not None:  # (s - max) - log(sum(exp(s - max)))
        is_shifted = _is_op(top, "exp") and _without_converts(top.node.inputs[0]) is a
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
    return _without_converts(total.node.inputs[0])


def _is_peak(row: Tensor | None, s: Tensor) -> bool:
    """Is ``row`` the maximum of ``s`` over the last axis, wherever that is finite?"""
    if row is None:
        return False
    if _is_op(row, "max"):  # jax.nn.softmax takes max(-inf, maximum)
        least = [_constant(t) == -np.inf for t in row.node.inputs]
        return any(least) and _is_peak(_rows_of(row.node.inputs[least[0]], s), s)
    if _is_op(row, "select"):  # logsumexp takes 0 where the maximum is not finite
        condition, other, peak = (_rows_of(t, s) for t in row.node.inputs)
        finite = condition is not None and _is_op(condition, "is_finite")
        checked = _rows_of(condition.node.inputs[0], s) if finite else None
        zero = _constant(row.node.inputs[1]) == 0
        return zero and checked is not None and checked is peak and _is_peak(peak, s)
    return _is_reduction(row, "max") and row.node.inputs[0] is s


def _rows_of(x: Tensor, along: Tensor) -> Tensor | None:
    """What ``x`` shows, one value for each row of ``along``, in order."""
    x, path = _behind_views(x)
    layout, _ = views.apply_path(path, ly.contiguous(x.shape))
    if layout is None or layout.offset != 0:
        return None
    return x if layout.dims() == ly.contiguous(along.shape[:-1]).dims() else None


def _is_op(x: Tensor, op: str) -> bool:
    return x.node.kind == "elementwise" and x.node.attrs["op"] == op


def _is_sum_of(total: Tensor, x: Tensor) -> bool:
    return _is_reduction(total, "sum") and _without_converts(total.node.inputs[0]) is x


def _row_value(x: Tensor, along: Tensor) -> Tensor | None:
    """r, where ``x`` is r repeated along the last axis of ``along``."""
    x, path = _behind_views(x)
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


def _without_converts(x: Tensor) -> Tensor:
    """Behind conversions between floats: the kernel computes in f32 throughout."""
    while (
        x.node.kind == "elementwise"
        and x.node.attrs["op"] == "convert"
        and is_float(x.node.inputs[0].dtype)
        and is_float(x.dtype)
    ):
        x = x.node.inputs[0]
    return x


def _product_in(masked: Tensor, path: tuple[Node, ...]) -> Node | None:
    """The only matrix product that ``masked``, seen through the path, reads element for element.

    Products read in another order, a bias say, are leaves; one that is read in both ways is none.
    """
    aligned: set[Node] = set()
    others: set[Node] = set()
    stack, seen = [(masked, path)], set()
    while stack:
        x, path = stack.pop()
        while x.is_view:
            path, x = (*path, x.node), x.node.inputs[0]
        if (x.id, path) in seen:
            continue
        seen.add((x.id, path))
        if x.node.kind == "elementwise":
            stack.extend((t, path) for t in x.node.inputs)
        elif x.node.kind == "matmul":
            place, _ = views.apply_path(path, ly.contiguous(x.shape))
            same = place is not None and place.is_contiguous and place.offset == 0
            (aligned if same and place.size == x.size else others).add(x.node)
    return aligned.pop() if len(aligned) == 1 and not aligned & others else None


def _read_only_within(
    product: Tensor, weights: Tensor, readers: dict[int, list[Node]], outputs: set[int]
) -> bool:
    """Does everything that reads the scores lead to the softmax and nowhere else?"""
    ends = {weights.id}
    stack, seen = [product.id], set()
    while stack:
        tensor = stack.pop()
        if tensor in ends or tensor in seen:
            continue
        seen.add(tensor)
        if tensor in outputs:
            return False
        for reader in readers.get(tensor, ()):
            if not (reader.out.is_view or reader.out.is_virtual) or reader.kind == "concat":
                return False
            stack.append(reader.out.id)
    return not (weights.id in outputs or len(_final_readers(weights, readers)) != 1)


def _read_one_by_one(product: Tensor, masked: Tensor, readers: dict[int, list[Node]]) -> bool:
    """Is each masked score made of its own raw score? (Not so where rows of scores are normed.)"""
    stack = [product]
    while stack:
        tensor = stack.pop()
        if tensor is masked:
            continue
        for reader in readers.get(tensor.id, ()):
            if not reader.out.is_view and reader.kind != "elementwise":
                return False
            stack.append(reader.out)
    return True


def _final_readers(x: Tensor, readers: dict[int, list[Node]]) -> set[int]:
    """Nodes that read ``x`` behind views and conversions."""
    found: set[int] = set()
    stack = [x]
    while stack:
        for reader in readers.get(stack.pop().id, ()):
            if reader.out.is_view or _without_converts(reader.out) is not reader.out:
                stack.append(reader.out)
            else:
                found.add(reader.out.id)
    return found


# Below this a masked score has weight zero beside any real one, in every dtype that holds it.
_HIDDEN = -1e30
# A mask that is multiplied with less hides no longer what it hid.
_FACTOR = 1e-6


def bound_of(masked: Tensor) -> tuple[Tensor, tuple[Node, ...]] | None:
    """The integers t for which every position beyond t is masked, if the mask says so.

    Args:
      masked: the masked scores of an attention node, [b0, b1, g, s].

    Returns:
      (integer tensor, the views through which the scores see it), or None where the mask is of
      another kind. The bound may be loose, which is harmless.
    """
    return _bound_of_scores(masked, (), [])


def _comparisons_with_lengths(masked: Tensor) -> list[Node]:
    """``position < length`` where that would be a bound if no length were 0."""
    refused: list[Node] = []
    return refused if _bound_of_scores(masked, (), refused) is None else []


# A position is no number below 0, so it is less than a length where it is not more than the last
# one seen, and -1 is the last of none.
_WITH_LAST = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


def _compared_with_last(new: Graph, mapped: dict[int, Tensor], node: Node) -> Tensor:
    """The comparison with max(length, 0) - 1 in the length's place: a bound, as it is stored."""
    inputs = list(node.inputs)
    at = 1 if node.attrs["op"] in ("lt", "ge") else 0
    seen: list[Node] = []
    length = inputs[at]
    while length.is_view and length.node.kind != "bitcast":
        seen.append(length.node)
        length = length.node.inputs[0]
    shape, dtype, label = length.shape, length.dtype, node.label
    zero, one = (constant(new, n, shape, dtype, label) for n in range(2))
    last = new.add("elementwise", (mapped[length.id], zero), shape, dtype, label, op="max", aux=0)
    last = new.add("elementwise", (last, one), shape, dtype, label, op="sub", aux=0)
    for view in reversed(seen):
        last = new.add(view.kind, (last,), view.out.shape, dtype, view.label, **view.attrs)
    operands = [last if i == at else mapped[t.id] for i, t in enumerate(inputs)]
    attrs = node.attrs | {"op": _WITH_LAST[node.attrs["op"]]}
    return new.add("elementwise", operands, node.out.shape, node.out.dtype, label, **attrs)


def visible_bound(masked: Tensor, layout_of: LayoutOf) -> tuple[Tensor, ly.Layout] | None:
    """Where the bound of an attention node lies, if its mask has one.

    Args:
      masked: the masked scores.
      layout_of: for a tensor that is stored or a view of one, (stored tensor, its layout in it).
        What ``bound_of`` found is.

    Returns:
      (stored integer tensor, its layout over [b0, b1, g, s], not moving along s), or None.
    """
    found = bound_of(masked)
    if found is None:
        return None
    base, lies = layout_of(found[0])
    layout, _ = views.apply_path(found[1], lies)
    if layout is None or base.dtype != found[0].dtype:
        return None
    return base, layout


def _bound_of_scores(x: Tensor, path: tuple[Node, ...], refused: list[Node]):
    """What ``bound_of`` says; ``refused``: comparisons with lengths that may be 0 are added."""
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    node = x.node
    if node.kind != "elementwise":
        return None
    op = node.attrs["op"]
    if op == "convert":
        return _bound_of_scores(node.inputs[0], path, refused)
    if op == "select":
        condition, *cases = node.inputs
        for hidden, fill in enumerate(map(_constant, cases)):
            if fill is not None and fill <= _HIDDEN:
                # A finite fill says nothing where other conditions may hide a whole row.
                return _bound_of_mask(condition, path, fill != -np.inf, hidden == 1, refused)
        return None
    if op == "add":
        a, b = (_bound_of_scores(t, path, refused) for t in node.inputs)
        return a or b
    if op in ("mul", "div"):
        factor = _constant(node.inputs[1])
        if factor is not None and op == "div":
            factor = 1 / factor if factor else 0.0
        if factor is not None and factor > _FACTOR:
            return _bound_of_scores(node.inputs[0], path, refused)
    return None


_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "and": "or", "or": "and"}


def _bound_of_mask(
    x: Tensor, path: tuple[Node, ...], alone: bool, negated: bool, refused: list[Node]
):
    """The bound of what ``x`` lets be seen, or, ``negated``, hides; ``alone``: by itself."""
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    node = x.node
    if node.kind != "elementwise":
        return None
    op = node.attrs["op"]
    if op == "not":
        return _bound_of_mask(node.inputs[0], path, alone, not negated, refused)
    op = _NEGATED.get(op) if negated else op
    if op == "and":
        for condition, other in (node.inputs, node.inputs[::-1]):
            if not alone or _is_always(other, not negated):
                found = _bound_of_mask(condition, path, alone, negated, refused)
                if found is not None:
                    return found
        return None
    if op in ("le", "lt"):
        position, bound = node.inputs
    elif op in ("ge", "gt"):
        bound, position = node.inputs
    else:
        return None
    if not views.is_index(position, path):
        return None
    room = 1 if op in ("lt", "gt") else 0
    found = _integer_of_row(bound, path, room, alone)
    signed = np.issubdtype(bound.dtype, np.signedinteger)
    if found is None and signed and _integer_of_row(bound, path, room, False) is not None:
        refused.append(node)
    return found


def _integer_of_row(x: Tensor, path: tuple[Node, ...], room: int, alone: bool):
    """t or t - 1, as it is computed, where positions up to t - room are seen and ``x`` is t.

    With ``alone`` position 0 is seen wherever the bound is not negative: a row of which nothing is
    seen is a mean of all positions where what hides them is finite.
    """
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    if not is_integer(x.dtype) or x.node.kind == "iota":
        return None
    line, _ = views.apply_path(path, ly.contiguous(x.shape))
    if line is None or line.strides[-1] != 0:
        return None
    y, number = _sum_with_number(x)
    # Where the sum wraps, y is the largest number, which bounds nothing.
    if room == 1 and number == 1:
        return _integer_of_row(y, path, 0, alone)
    return None if alone and room == 1 else (x, path)


def _sum_with_number(x: Tensor) -> tuple[Tensor, int]:
    """(y, n) where ``x`` is y + n."""
    if x.node.kind == "elementwise" and x.node.attrs["op"] == "add":
        for y, other in (x.node.inputs, x.node.inputs[::-1]):
            number = _integer(other)
            if number is not None:
                return y, number
    return x, 0


def _integer(x: Tensor) -> int | None:
    while x.is_view:
        x = x.node.inputs[0]
    return x.node.attrs["value"] if x.node.kind == "const" and is_integer(x.dtype) else None


def _is_always(x: Tensor, value: bool) -> bool:
    while x.is_view:
        x = x.node.inputs[0]
    return x.node.kind == "const" and x.dtype == np.bool_ and x.node.attrs["value"] == value


def _constant(x: Tensor) -> float | None:
    while x.is_view:
        x = x.node.inputs[0]
    if x.node.kind != "const" or not is_float(x.dtype):
        return None
    bits, wide = x.node.attrs["value"], x.dtype == np.float64
    return float(
        np.array(bits, np.uint64 if wide else np.uint32).view(np.float64 if wide else np.float32)
    )
