"""Moves elementwise work in front of concatenations.

``convert(concat(a, b))`` stores the pieces, reads them back, and stores them again;
``concat(convert(a), convert(b))`` stores them once, where they are computed. Rotary embeddings are
written in the first form by nearly everybody, and many as ``q * cos + concat(-q2, q1) * sin``: what
stands beside the concatenation is cut at its borders.
"""

from __future__ import annotations

from jaxgraph.frontend.shaping import take
from jaxgraph.graph.ir import Graph, Node, Tensor

# Of a concatenation that moves behind an operation of several operands: each is cut into as many.
_MAX_PIECES = 8
_MAX_DEPTH = 16  # operations on top of each other that are cut


def push_through_concat(graph: Graph) -> Graph:
    """A graph that computes the same, with elementwise operations applied to the pieces."""
    readers = graph.consumers()
    outputs = {t.id for t in graph.outputs}

    def moved(node: Node) -> Node | None:
        """The concatenation that the operation moves in front of, as it is now."""
        if node.kind != "elementwise":
            return None
        for tensor in node.inputs:
            now = mapped[tensor.id].node
            if now.kind != "concat" or len(readers[tensor.id]) != 1 or tensor.id in outputs:
                continue
            if len(node.inputs) == 1 or len(now.inputs) <= _MAX_PIECES:
                return now
        return None

    if not any(node.kind == "concat" for node in graph.live_nodes()):
        return graph
    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    once: set[int] = set()  # of the new graph: what one operation reads
    for node in graph.live_nodes():
        out = node.out
        concat = moved(node)
        if concat is None:
            mapped[out.id] = new.copy(node, mapped)
        else:
            inputs = [mapped[t.id] for t in node.inputs]
            mapped[out.id] = _by_pieces(new, node, inputs, concat, once)
        if len(readers.get(out.id, ())) == 1 and out.id not in outputs:
            once.add(mapped[out.id].id)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _by_pieces(
    new: Graph, node: Node, inputs: list[Tensor], concat: Node, once: set[int]
) -> Tensor:
    """The operation on each piece, and what stands beside it, put together again."""
    axis, start, pieces = concat.attrs["axis"], 0, []
    for number, piece in enumerate(concat.inputs):
        size = piece.shape[axis]
        operands = [
            x.node.inputs[number]
            if _is_cut_alike(x.node, concat)
            else _cut(new, x, axis, start, size, once)
            for x in inputs
        ]
        shape, dtype = piece.shape, node.out.dtype
        pieces.append(new.add("elementwise", operands, shape, dtype, node.label, **node.attrs))
        start += size
    return new.add("concat", pieces, node.out.shape, node.out.dtype, node.label, axis=axis)


def _cut(
    new: Graph, x: Tensor, axis: int, start: int, size: int, once: set[int], depth: int = 0
) -> Tensor:
    """``x[start:start + size]``; what only this reads is computed for each piece by itself."""
    node = x.node
    if node.kind != "elementwise" or x.id not in once or depth == _MAX_DEPTH:
        return take(new, x, axis, start, size, node.label)
    inputs = [_cut(new, t, axis, start, size, once, depth + 1) for t in node.inputs]
    return new.add("elementwise", inputs, inputs[0].shape, x.dtype, node.label, **node.attrs)


def _is_cut_alike(node: Node, concat: Node) -> bool:
    axis = concat.attrs["axis"]
    return (
        node.kind == "concat"
        and node.attrs["axis"] == axis
        and [t.shape[axis] for t in node.inputs] == [t.shape[axis] for t in concat.inputs]
    )
