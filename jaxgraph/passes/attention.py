"""Recognises attention of few queries against a cache, by what is computed.

``weights @ v`` is attention where ``weights`` is a softmax over the last axis of an elementwise
function of ``q @ k``. The function (scale, mask, window, soft cap, bias, ...) is not recognised; it
is kept as an expression of the raw score and handed to the kernel, so that every spelling of it is
right. The softmax is matched by its algebra: ``exp(s - m)`` divided by its own sum, where m is the
maximum of the same s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.dtypes import is_float, is_integer
from jaxgraph.graph.ir import Graph, Node, Tensor

LayoutOf = Callable[[Tensor], tuple[Tensor, ly.Layout]]


@dataclasses.dataclass(frozen=True)
class Match:
    """``weights @ v``: the two products, and the masked scores between them."""

    first: Node  # q @ k
    scores: Tensor  # what the softmax is taken of
    last: Node  # weights @ v


def find_attention(graph: Graph) -> Graph:
    """A graph that computes the same, with ``attention`` nodes in place of what was matched.

    An attention node has the inputs q [b0, b1, g, d], k [b0, b1, d, s], v [b0, b1, s, dv] and the
    masked scores, an expression over [b0, b1, g, s] whose leaf ``scores`` stands for q @ k.
    """
    matches = {}
    readers = graph.consumers()
    outputs = {t.id for t in graph.outputs}
    for node in graph.live_nodes():
        if node.kind == "matmul":
            match = _match(node, readers, outputs)
            if match is not None:
                matches[node.out.id] = match
    if not matches:
        return graph

    products = {m.first.out.id for m in matches.values()}
    new = Graph()
    mapped: dict[int, Tensor] = {}
    for node in graph.live_nodes():
        out = node.out
        if node.kind == "input":
            mapped[out.id] = new.add_input(out.shape, out.dtype, node.label)
            continue
        inputs = [mapped[t.id] for t in node.inputs]
        if out.id in products:
            # The operands make the leaf unique to its attention; nothing ever computes it alone.
            kind, attrs = "scores", {}
        elif out.id in matches:
            match = matches[out.id]
            q, k = (mapped[t.id] for t in match.first.inputs)
            masked = mapped[match.scores.id]
            shape = match.first.out.shape
            if masked.shape != shape:
                masked = new.add("reshape", (masked,), shape, masked.dtype, node.label)
            inputs = [q, k, inputs[1], masked]
            kind, attrs = "attention", {}
        else:
            kind, attrs = node.kind, node.attrs
        mapped[out.id] = new.add(kind, inputs, out.shape, out.dtype, node.label, **attrs)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _match(last: Node, readers: dict[int, list[Node]], outputs: set[int]) -> Match | None:
    weights = _same_elements(last.inputs[0], through_converts=True)
    masked = _softmax_operand(weights)
    if masked is None:
        return None
    first = _product_in(masked)
    if first is None or first.out.id in outputs:
        return None
    b0, b1, g, s = first.out.shape
    if last.inputs[0].shape != (b0, b1, g, s) or weights.size != b0 * b1 * g * s:
        return None
    if weights.shape[-1] != s or not _read_only_within(first.out, weights, readers, outputs):
        return None
    if not all(is_float(t.dtype) for t in (*first.inputs, last.inputs[1])):
        return None
    return Match(first, masked, last)


def _softmax_operand(weights: Tensor) -> Tensor | None:
    """s, where ``weights`` is softmax(s) over the last axis."""
    node = weights.node
    if node.kind != "elementwise" or node.attrs["op"] != "div":
        return None
    top = _without_converts(node.inputs[0])
    total = _row_value(node.inputs[1], weights)
    if total is None or not _is_reduction(total, "sum"):
        return None
    if _without_converts(total.node.inputs[0]) is not top:
        return None
    if top.node.kind != "elementwise" or top.node.attrs["op"] != "exp":
        return None
    shifted = _without_converts(top.node.inputs[0])
    if shifted.node.kind != "elementwise" or shifted.node.attrs["op"] != "sub":
        return None
    s = shifted.node.inputs[0]
    peak = _row_value(shifted.node.inputs[1], shifted)
    if peak is not None and peak.node.kind == "elementwise" and peak.node.attrs["op"] == "max":
        # jax.nn.softmax takes max(-inf, maximum) to give empty rows a value.
        peak = next((t for t in peak.node.inputs if t.node.kind == "reduce"), None)
    if peak is None or not _is_reduction(peak, "max") or peak.node.inputs[0] is not s:
        return None
    return s


def _row_value(x: Tensor, along: Tensor) -> Tensor | None:
    """r, where ``x`` is r repeated along the last axis of ``along``."""
    path: list[Node] = []
    while x.is_view:
        path.append(x.node)
        x = x.node.inputs[0]
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


def _same_elements(x: Tensor, through_converts: bool) -> Tensor:
    """Behind views that keep every element in its row-major place."""
    while True:
        if through_converts and _without_converts(x) is not x:
            x = _without_converts(x)
            continue
        if not x.is_view:
            return x
        inner = x.node.inputs[0]
        layout = views.apply(x.node, ly.contiguous(inner.shape))
        if x.node.kind == "bitcast" or layout is None or x.size != inner.size:
            return x
        if not (layout.is_contiguous and layout.offset == 0):
            return x
        x = inner


def _product_in(masked: Tensor) -> Node | None:
    """The only matrix product of the same elements in the expression ``masked``."""
    found: set[int] = set()
    product: Node | None = None
    stack, seen = [masked], set()
    while stack:
        x = stack.pop()
        base = _same_elements(x, through_converts=False)
        if base.node.kind == "matmul" and base.size == masked.size:
            found.add(base.id)
            product = base.node
        elif base.id not in seen:
            seen.add(base.id)
            if base.node.kind == "elementwise":
                stack.extend(base.node.inputs)
    return product if len(found) == 1 else None


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


def visible_bound(masked: Tensor, layout_of: LayoutOf) -> tuple[Tensor, ly.Layout] | None:
    """The integers t for which every position beyond t is masked, if the mask says so.

    Args:
      masked: the masked scores of an attention node, [b0, b1, g, s].
      layout_of: for a tensor that is stored or a view of one, (stored tensor, its layout in it).

    Returns:
      (stored integer tensor, its layout over [b0, b1, g, s], not moving along s), or None where the
      mask is of another kind. For ``position < t`` the bound is loose by one, which is harmless.
    """
    return _bound_of_scores(masked, (), layout_of)


def _bound_of_scores(x: Tensor, path: tuple[Node, ...], layout_of: LayoutOf):
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    node = x.node
    if node.kind != "elementwise":
        return None
    op = node.attrs["op"]
    if op == "convert":
        return _bound_of_scores(node.inputs[0], path, layout_of)
    if op == "select":
        visible, hidden, _ = node.inputs
        fill = _constant(hidden)
        if fill is None or fill > _HIDDEN:
            return None
        # A finite fill says nothing where other conditions may hide a whole row.
        return _bound_of_mask(visible, path, layout_of, alone=fill != -np.inf)
    if op == "add":
        a, b = (_bound_of_scores(t, path, layout_of) for t in node.inputs)
        return a or b
    if op in ("mul", "div"):
        factor = _constant(node.inputs[1])
        if factor is not None and factor > 0:
            return _bound_of_scores(node.inputs[0], path, layout_of)
    return None


def _bound_of_mask(x: Tensor, path: tuple[Node, ...], layout_of: LayoutOf, alone: bool):
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    node = x.node
    if node.kind != "elementwise":
        return None
    op = node.attrs["op"]
    if op == "and" and not alone:
        a, b = (_bound_of_mask(t, path, layout_of, alone) for t in node.inputs)
        return a or b
    if op in ("le", "lt"):
        position, bound = node.inputs
    elif op in ("ge", "gt"):
        bound, position = node.inputs
    else:
        return None
    return _integer_of_row(bound, path, layout_of) if _is_position(position, path) else None


def _is_position(x: Tensor, path: tuple[Node, ...]) -> bool:
    """Is ``x``, seen through the path, the index along the last axis?"""
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    if x.node.kind != "iota":
        return False
    line, _ = views.apply_path(path, ly.contiguous(x.shape))
    return (
        line is not None
        and line.offset == 0
        and line.dims()[-1:] == ((line.shape[-1], 1),)
        and (all(stride == 0 for _, stride in line.dims()[:-1]))
    )


def _integer_of_row(x: Tensor, path: tuple[Node, ...], layout_of: LayoutOf):
    while x.is_view:
        path, x = (*path, x.node), x.node.inputs[0]
    if not is_integer(x.dtype) or x.is_virtual:
        return None
    base, lies = layout_of(x)
    layout, _ = views.apply_path(path, lies)
    if layout is None or base.dtype != x.dtype or layout.strides[-1] != 0:
        return None
    return base, layout


def _constant(x: Tensor) -> float | None:
    while x.is_view:
        x = x.node.inputs[0]
    if x.node.kind != "const" or not is_float(x.dtype):
        return None
    bits, wide = x.node.attrs["value"], x.dtype == np.float64
    return float(
        np.array(bits, np.uint64 if wide else np.uint32).view(np.float64 if wide else np.float32)
    )
