"""Products that multiply by matrices chosen from a table read them where they lie.

``x @ experts[chosen]`` gathers whole matrices: each is read, written and read again. A product node
with a third operand, an index for each matrix of its batch, reads the table itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxgraph.frontend.elementwise import constant
from jaxgraph.frontend.indexing import FILL_OR_DROP, takes_whole_rows
from jaxgraph.frontend.shaping import reshape, take, transpose
from jaxgraph.graph import dtypes, views
from jaxgraph.graph import layout as ly
from jaxgraph.graph.ir import Graph, Node, Tensor

# Of rows that share a matrix. The kernels that take an index read it again for each eight rows;
# those that stream a gathered one do not.
_MAX_ROWS = 8


def choose_matrices(graph: Graph) -> Graph:
    """A graph that computes the same, with products of gathered matrices by index."""
    live = graph.live_nodes()
    products = {n.out.id for n in live if n.kind == "matmul" and _is_gathered(n.inputs[1])}
    if not products:
        return graph
    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    for node in live:
        product = None
        if node.out.id in products:
            product = _by_index(new, node, *[mapped[t.id] for t in node.inputs])
        mapped[node.out.id] = product or new.copy(node, mapped)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _is_gathered(x: Tensor) -> bool:
    return views.behind(x, own_type=True)[0].node.kind == "gather"


def _by_index(new: Graph, node: Node, left: Tensor, right: Tensor) -> Tensor | None:
    """The product that reads the table; None: its right operand is not gathered whole matrices, or
    many rows share them.
    """
    if node.out.shape[2] > _MAX_ROWS:
        return None
    right, path = views.behind(right, own_type=True)
    gather = right.node
    place, _ = views.apply_path(path, ly.contiguous(right.shape))
    found = _rows_of_a_table(new, gather)
    if place is None or found is None:
        return None
    table, index = found
    size = math.prod(table.shape[1:])
    first, inside = divmod(place.offset, size)
    batch, strides = place.shape[:2], place.strides[:2]
    if any(n > 1 and s % size for n, s in zip(batch, strides, strict=True)):
        return None
    chosen = _vector_as(new, index, batch, [s // size for s in strides], first)
    matrices = _matrices_of(new, table, place.shape[2:], place.strides[2:], inside)
    if chosen is None or matrices is None or views.strided(matrices) is None:
        return None
    out = node.out
    product = new.add("matmul", (left, matrices, chosen), out.shape, out.dtype, node.label)
    if gather.attrs["mode"] != FILL_OR_DROP:
        return product
    return _nan_outside(new, product, chosen, table.shape[0], node.label)


def _rows_of_a_table(new: Graph, gather: Node) -> tuple[Tensor, Tensor] | None:
    """(table [E, ...], index [n]) of a gather that takes whole rows; None: it does something else.

    Outside of the table it may give a NaN, of which every product is NaN, but no other number.
    """
    x, *columns = gather.inputs
    found = takes_whole_rows(gather)
    if found is None:
        return None
    if gather.attrs["mode"] == FILL_OR_DROP:
        fill = dtypes.from_storage(gather.attrs["fill"], x.dtype)
        if not dtypes.is_float(x.dtype) or not np.isnan(fill):
            return None
    d, column = found
    rest = [i for i in range(len(x.shape)) if i != d]
    return transpose(new, x, (d, *rest), gather.label), columns[column]


def _vector_as(
    new: Graph, index: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Tensor | None:
    """``index`` [n] seen as two dimensions with these strides."""
    label, (n,) = index.node.label, index.shape
    big, small = sorted((0, 1), key=lambda d: (shape[d] > 1, strides[d]), reverse=True)
    if shape[small] == 1:
        step = strides[big] if shape[big] > 1 else 1
        if step != 1:
            return None
        return reshape(new, take(new, index, 0, offset, shape[big], label), shape, label)
    pitch = strides[big]
    if strides[small] != 1 or pitch < shape[small] or offset + shape[big] * pitch > n:
        return None
    lines = take(new, index, 0, offset, shape[big] * pitch, label)
    lines = reshape(new, lines, (shape[big], pitch), label)
    lines = take(new, lines, 1, 0, shape[small], label)
    return lines if big == 0 else transpose(new, lines, (1, 0), label)


def _matrices_of(
    new: Graph, table: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Tensor | None:
    """[E, 1, K, N]: of each row of ``table``, row-major, the matrix that lies so in it."""
    label, count = table.node.label, table.shape[0]
    size = math.prod(table.shape[1:])
    big, small = sorted((0, 1), key=lambda d: (shape[d] > 1, strides[d]), reverse=True)
    if shape[small] > 1 and strides[small] != 1:
        return None
    pitch = strides[big] if shape[big] > 1 else size
    if shape[small] == 1 and shape[big] > 1 and pitch == 1:  # a vector
        big, small, pitch = small, big, size
    if pitch < 1 or size % pitch:
        return None
    row, column = divmod(offset, pitch)
    if row + shape[big] > size // pitch or column + shape[small] > pitch:
        return None
    lines = reshape(new, table, (count, 1, size // pitch, pitch), label)
    lines = take(new, lines, 2, row, shape[big], label)
    lines = take(new, lines, 3, column, shape[small], label)
    return lines if big == 0 else transpose(new, lines, (0, 1, 3, 2), label)


def _nan_outside(new: Graph, product: Tensor, index: Tensor, count: int, label: str) -> Tensor:
    """``product``, NaN where the index is none of ``count``."""
    shape, dtype = product.shape, product.dtype

    def compare(op: str, bound: int) -> Tensor:
        number = constant(new, bound, index.shape, index.dtype, label)
        return new.add("elementwise", (index, number), index.shape, np.bool_, label, op=op, aux=0)

    inside = None
    for op, bound in (("ge", 0), ("lt", count)):
        if bound > np.iinfo(index.dtype).max:
            continue
        test = compare(op, bound)
        inside = (
            test
            if inside is None
            else new.add(
                "elementwise", (inside, test), index.shape, np.bool_, label, op="and", aux=0
            )
        )
    inside = new.add("broadcast", (inside,), shape, np.bool_, label, dims=(0, 1))
    nan = constant(new, np.nan, shape, dtype, label)
    return new.add("elementwise", (inside, nan, product), shape, dtype, label, op="select", aux=0)
