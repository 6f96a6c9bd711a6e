"""Recognises attention of few queries against a cache, by what is computed.

``weights @ v`` is attention where ``weights`` is a softmax over the last axis of an elementwise
function of ``q @ k``. The function (scale, mask, window, soft cap, bias, ...) is not recognised; it
is kept as an expression of the raw score and handed to the kernel, so that every spelling of it is
right. The softmax is matched by its algebra (softmax.py), and may have a sink. Keys and values
repeated for the queries that share them are un-repeated: the queries are grouped instead, so that
the cache is read as it lies.
"""

from __future__ import annotations

import dataclasses
import math

from jaxgraph.frontend.shaping import broadcast_last, reshape, take
from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.dtypes import is_float
from jaxgraph.graph.ir import Graph, Node, Tensor
from jaxgraph.passes.softmax import Softmax, behind_views, find_softmax, without_converts
from jaxgraph.passes.visible import compared_with_last, comparisons_with_lengths

# A view, and the axis on which its values repeat; from the outermost view to the one that repeats.
Repetition = tuple[tuple[Node, int], ...]


@dataclasses.dataclass(frozen=True)
class Match:
    """``weights @ v``: the two products, and the softmax between them.

    ``path`` holds the views from the left side of ``last``, the outermost, to the softmax. Of b1
    heads ``repeats`` neighbours share their keys and values, through views ``k`` and ``v``.
    """

    first: Node  # q @ k
    softmax: Softmax  # of the masked scores
    path: tuple[Node, ...]
    last: Node  # weights @ v
    repeats: int = 1
    k: Repetition = ()
    v: Repetition = ()


def find_attention(graph: Graph) -> Graph:
    """A graph that computes the same, with ``attention`` nodes in place of what was matched.

    An attention node has the inputs q [b0, b1, g, d], k [b0, b1, d, s], v [b0, b1, s, dv], the
    masked scores, an expression over [b0, b1, g, s] whose leaf ``scores`` stands for q @ k, and
    maybe a sink [b0, b1, g, 1].
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
    masked = [m.softmax.scores for m in matches.values()]
    lengths = {n.out.id: n for scores in masked for n in comparisons_with_lengths(scores)}
    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    for node in graph.live_nodes():
        out = node.out
        if out.id in products:
            mapped[out.id] = _raw_scores(new, mapped, products[out.id])
        elif out.id in matches:
            mapped[out.id] = _attention(new, mapped, matches[out.id])
        elif out.id in lengths:
            mapped[out.id] = compared_with_last(new, mapped, node)
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
    shape = (*q.shape[:3], k.shape[3])
    masked = views.seen_through(new, mapped[match.softmax.scores.id], match.path)
    inputs = [q, k, v, reshape(new, masked, shape, label)]
    if match.softmax.sink is not None:
        # A column beside the scores, in the order in which these are seen.
        column = _narrowest(new, mapped, match.softmax.sink)
        column = broadcast_last(new, column, match.softmax.scores.shape, label)
        column = reshape(new, views.seen_through(new, column, match.path), shape, label)
        inputs.append(take(new, column, 3, 0, 1, label))
    mixed = new.add("attention", inputs, (*q.shape[:3], v.shape[3]), out.dtype, label)
    return reshape(new, mixed, out.shape, label)


def _narrowest(new: Graph, mapped: dict[int, Tensor], x: Tensor) -> Tensor:
    """``x`` before conversions that lose nothing: the kernel makes them as it reads."""
    path: list[Node] = []
    while True:
        inner = x.node.inputs[0] if x.node.inputs else x
        if x.is_view and x.node.kind != "bitcast":
            path.append(x.node)
        elif without_converts(x) is x or inner.dtype.itemsize >= x.dtype.itemsize:
            return views.seen_through(new, mapped[x.id], tuple(path))
        x = inner


def _queries_and_keys(new: Graph, mapped: dict[int, Tensor], match: Match) -> tuple[Tensor, Tensor]:
    q, k = match.first.inputs
    b0, b1, g, d = q.shape
    n = match.repeats
    grouped = reshape(new, mapped[q.id], (b0, b1 // n, n * g, d), match.first.label)
    return grouped, _unrepeated(new, mapped, k, match.k, n)


def _match(last: Node, readers: dict[int, list[Node]], outputs: set[int]) -> Match | None:
    weights, path = behind_views(last.inputs[0])
    found = find_softmax(weights, path)
    if found is None:
        return None
    softmax, path = found
    masked = softmax.scores
    # The last product sums over what the softmax normalises, one row of it for each of its own.
    rows, _ = views.apply_path(path, ly.contiguous(masked.shape))
    length = last.inputs[0].shape[-1]
    if rows is None or not rows.is_dense or masked.shape[-1] != length:
        return None
    if length > 1 and rows.strides[-1] != 1:
        return None
    first = _product_in(masked, path)
    if first is None or first.out.id in outputs or first.out.shape != last.inputs[0].shape:
        return None
    if not _read_only_within(first.out, weights, softmax.joined, readers, outputs):
        return None
    if not _read_one_by_one(first.out, masked, readers):
        return None
    if softmax.sink is not None and (length == 0 or _is_made_of(softmax.sink, first.out)):
        return None
    if not all(is_float(t.dtype) for t in (*first.inputs, last.inputs[1])):
        return None
    return Match(first, softmax, path, last)


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
    while x.is_view or without_converts(x) is not x:
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


def _product_in(masked: Tensor, path: tuple[Node, ...]) -> Node | None:
    """The only matrix product that ``masked``, seen through the path, reads element for element.

    Products read in another order, a bias say, are leaves; one that is read in both ways is none.
    """
    aligned: set[Node] = set()
    others: set[Node] = set()
    stack, seen = [(masked, path)], set()
    while stack:
        x, path = stack.pop()
        x, path = views.behind(x, path)
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
    product: Tensor,
    weights: Tensor,
    joined: Node | None,
    readers: dict[int, list[Node]],
    outputs: set[int],
) -> bool:
    """Does everything that reads the scores lead to the softmax and nowhere else?

    ``joined``: the concatenation with a sink, which is part of the softmax.
    """
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
            if not (reader.out.is_view or reader.out.is_virtual) and reader is not joined:
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


def _is_made_of(x: Tensor, source: Tensor) -> bool:
    stack, seen = [x], set()
    while stack:
        tensor = stack.pop()
        if tensor is source:
            return True
        if tensor.id not in seen and tensor.id > source.id:  # what is made later has a larger id
            seen.add(tensor.id)
            stack.extend(tensor.node.inputs)
    return False


def _final_readers(x: Tensor, readers: dict[int, list[Node]]) -> set[int]:
    """Nodes that read ``x`` behind views and conversions."""
    found: set[int] = set()
    stack = [x]
    while stack:
        for reader in readers.get(stack.pop().id, ()):
            if reader.out.is_view or without_converts(reader.out) is not reader.out:
                stack.append(reader.out)
            else:
                found.add(reader.out.id)
    return found
