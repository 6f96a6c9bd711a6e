"""Divides the weights of a softmax before they are mixed, where a step divides what was mixed.

``(exp(s - max(s)) @ v) / sum(exp(s - max(s)))`` saves divisions where it is written by hand. It is
``softmax(s) @ v``, in which an attention is found (attention.py), and that saves more.
"""

from __future__ import annotations

import dataclasses

from jaxgraph.frontend.elementwise import convert
from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.ir import Graph, Node, Tensor
from jaxgraph.passes.softmax import behind_both, is_shifted_exponential, is_sum_of


@dataclasses.dataclass(frozen=True)
class Mixed:
    """``(top @ v) / total`` as it is written.

    Attributes:
      product: ``top @ v``.
      top: the exponentials.
      total: their sum, one for each row of the product.
      left: views and conversions between ``top`` and the product, the outermost first.
      seen: those between the product and the division.
    """

    product: Node
    top: Tensor
    total: Tensor
    left: tuple[Node, ...]
    seen: tuple[Node, ...]


def divide_before_mixing(graph: Graph) -> Graph:
    """A graph that computes the same, with such quotients as products of quotients."""
    found = {node.out.id: m for node in graph.live_nodes() if (m := _match(node)) is not None}
    if found:
        readers, outputs = graph.consumers(), {t.id for t in graph.outputs}
        found = {id: m for id, m in found.items() if _is_read_once(m, readers, outputs)}
    if not found:
        return graph
    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    for node in graph.live_nodes():
        mixed = found.get(node.out.id)
        mapped[node.out.id] = new.copy(node, mapped) if mixed is None else _mix(new, mapped, mixed)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _mix(new: Graph, mapped: dict[int, Tensor], mixed: Mixed) -> Tensor:
    product, label = mixed.product, mixed.product.label
    top = mapped[mixed.top.id]
    total = convert(new, mapped[mixed.total.id], top.dtype, label)
    dims = tuple(range(len(total.shape)))
    rows = new.add("broadcast", (total,), top.shape, top.dtype, label, dims=dims)
    weights = new.add("elementwise", (top, rows), top.shape, top.dtype, label, op="div", aux=0)
    operands = (views.seen_through(new, weights, mixed.left), mapped[product.inputs[1].id])
    out = new.add("matmul", operands, product.out.shape, product.out.dtype, label, **product.attrs)
    return views.seen_through(new, out, mixed.seen)


def _match(quotient: Node) -> Mixed | None:
    if quotient.kind != "elementwise" or quotient.attrs["op"] != "div":
        return None
    product, seen = behind_both(quotient.inputs[0])
    if product.node.kind != "matmul" or len(product.node.inputs) != 2:
        return None
    top, left = behind_both(product.node.inputs[0])
    total, rows = behind_both(quotient.inputs[1])
    if not (is_shifted_exponential(top) and is_sum_of(total, top)):
        return None
    mixed = Mixed(product.node, top, total, left, seen)
    return mixed if _is_sum_of_its_row(mixed, rows) else None


def _is_read_once(mixed: Mixed, readers: dict[int, list[Node]], outputs: set[int]) -> bool:
    """Does the quotient alone read the product?"""
    between = (mixed.product, *mixed.seen)
    return all(len(readers[n.out.id]) == 1 and n.out.id not in outputs for n in between)


def _is_sum_of_its_row(mixed: Mixed, rows: tuple[Node, ...]) -> bool:
    """Is each element of the product, as it is seen, divided by the sum of its own row?"""
    weights = _layout(mixed.top, mixed.left)
    if weights is None or not weights.is_contiguous or weights.offset != 0:
        return False
    if mixed.top.shape[-1] != weights.shape[-1]:
        return False
    element, divisor = _layout(mixed.product.out, mixed.seen), _layout(mixed.total, rows)
    if element is None or divisor is None or element.offset != 0 or divisor.offset != 0:
        return False
    if element.shape != divisor.shape:
        return False
    width = mixed.product.out.shape[-1]
    for size, step, own in zip(element.shape, element.strides, divisor.strides, strict=True):
        if size == 1:
            continue
        if step % width == 0:
            expected = step // width
        elif step > 0 and size * step <= width:  # along a row
            expected = 0
        else:
            return False
        if own != expected:
            return False
    return True


def _layout(x: Tensor, nodes: tuple[Node, ...]) -> ly.Layout | None:
    path = tuple(node for node in nodes if node.out.is_view)
    return views.apply_path(path, ly.contiguous(x.shape))[0]
