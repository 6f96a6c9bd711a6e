"""How far an attention sees: the bound behind which a mask hides every position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxgraph.frontend.elementwise import Builder
from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.dtypes import is_integer
from jaxgraph.graph.ir import Graph, Node, Tensor
from jaxgraph.passes.softmax import constant_of

LayoutOf = Callable[[Tensor], tuple[Tensor, ly.Layout]]

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


def comparisons_with_lengths(masked: Tensor) -> list[Node]:
    """``position < length`` where that would be a bound if no length were 0."""
    refused: list[Node] = []
    return refused if _bound_of_scores(masked, (), refused) is None else []


# A position is no number below 0, so it is less than a length where it is not more than the last
# one seen, and -1 is the last of none.
_WITH_LAST = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


def compared_with_last(new: Graph, mapped: dict[int, Tensor], node: Node) -> Tensor:
    """The comparison with max(length, 0) - 1 in the length's place: a bound, as it is stored."""
    inputs = list(node.inputs)
    at = 1 if node.attrs["op"] in ("lt", "ge") else 0
    length, seen = views.behind(inputs[at], own_type=True)
    label = node.label
    op = Builder(new, length, length.dtype, label)
    last = views.seen_through(new, op("sub", op("max", mapped[length.id], 0), 1), seen)
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
    x, path = views.behind(x, path)
    node = x.node
    if node.kind != "elementwise":
        return None
    op = node.attrs["op"]
    if op == "convert":
        return _bound_of_scores(node.inputs[0], path, refused)
    if op == "select":
        condition, *cases = node.inputs
        for hidden, fill in enumerate(map(constant_of, cases)):
            if fill is not None and fill <= _HIDDEN:
                # A finite fill says nothing where other conditions may hide a whole row.
                return _bound_of_mask(condition, path, fill != -np.inf, hidden == 1, refused)
        return None
    if op == "add":
        a, b = (_bound_of_scores(t, path, refused) for t in node.inputs)
        return a or b
    if op in ("mul", "div"):
        factor = constant_of(node.inputs[1])
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
    x, path = views.behind(x, path)
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
    x, path = views.behind(x, path)
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
    x, _ = views.behind(x)
    return x.node.attrs["value"] if x.node.kind == "const" and is_integer(x.dtype) else None


def _is_always(x: Tensor, value: bool) -> bool:
    x, _ = views.behind(x)
    return x.node.kind == "const" and x.dtype == np.bool_ and x.node.attrs["value"] == value
