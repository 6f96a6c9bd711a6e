"""What each view node does to a layout."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgraph.graph import layout as ly
from jaxgraph.graph.ir import Graph, Node, Tensor
from jaxgraph.graph.layout import Layout


def apply(node: Node, x: Layout) -> Layout | None:
    """The layout of a view node's output where its input lies as ``x``, None: no strides do it."""
    attrs, out = node.attrs, node.out
    if node.kind == "reshape":
        return ly.reshape(x, out.shape)
    if node.kind == "transpose":
        return ly.transpose(x, attrs["permutation"])
    if node.kind == "broadcast":
        return ly.broadcast(x, out.shape, attrs["dims"])
    if node.kind == "slice":
        return ly.slice_(x, attrs["starts"], attrs["limits"], attrs["steps"])
    if node.kind == "rev":
        return ly.reverse(x, attrs["dims"])
    if node.kind == "bitcast":
        old, new = node.inputs[0].dtype.itemsize, out.dtype.itemsize
        return ly.reinterpret(x, old, out.shape, new)
    raise AssertionError(f"{node.kind} is not a view")


def apply_path(path: Sequence[Node], x: Layout) -> tuple[Layout | None, Node | None]:
    """Applies views from the innermost (last) to the outermost (first).

    Returns:
      (layout, None), or (None, node) with the first view that strides cannot express.
    """
    for node in reversed(path):
        y = apply(node, x)
        if y is None:
            return None, node
        x = y
    return x, None


def behind(
    x: Tensor, path: Sequence[Node] = (), own_type: bool = False
) -> tuple[Tensor, tuple[Node, ...]]:
    """What ``x`` is a view of.

    Args:
      x: any tensor.
      path: views through which it is seen itself, from the outermost to the innermost.
      own_type: not behind a view of the bits as another type.

    Returns:
      (what is no such view, the path down to it).
    """
    nodes = list(path)
    while x.is_view and not (own_type and x.node.kind == "bitcast"):
        nodes.append(x.node)
        x = x.node.inputs[0]
    return x, tuple(nodes)


def seen_through(graph: Graph, x: Tensor, path: Sequence[Node]) -> Tensor:
    """``x`` through the same views (of values, not of bits) and conversions, the last one first."""
    for node in reversed(path):
        dtype = x.dtype if node.out.is_view else node.out.dtype
        x = graph.add(node.kind, (x,), node.out.shape, dtype, node.label, **node.attrs)
    return x


def is_index(x: Tensor, path: Sequence[Node] = ()) -> bool:
    """Is ``x``, seen through the path, the index along the last axis?"""
    x, path = behind(x, path)
    if x.node.kind != "iota" or any(node.kind == "bitcast" for node in path):
        return False
    line, _ = apply_path(path, ly.contiguous(x.shape))
    return (
        line is not None
        and line.offset == 0
        and line.dims()[-1:] == ((line.shape[-1], 1),)
        and (all(stride == 0 for _, stride in line.dims()[:-1]))
    )


def strided(x: Tensor) -> Layout | None:
    """How ``x`` lies in what it is a view of, if that is row-major and strides can express it."""
    x, path = behind(x)
    layout, _ = apply_path(path, ly.contiguous(x.shape))
    return layout
