"""Recognises a stack of updated layers as updates of the stacked array itself.

A scan over layers that takes a stacked cache as input and gives the stack of updated layers as
output reads, once unrolled, ``concat([set_rows(cache[0], ..), set_rows(cache[1], ..), ..])``. The
same value is ``set_rows(.. set_rows(cache, at layer 0 ..) .., at layer L-1 ..)``: a chain on one
array, which storage planning can then do in place.
"""

from __future__ import annotations

from jaxgraph.frontend.shaping import reshape, take
from jaxgraph.graph.ir import Graph, Node, Tensor


def chain_stacked_updates(graph: Graph) -> Graph:
    """A graph that computes the same, with stacks of updates turned into chains."""
    updates: dict[int, tuple[Tensor, int]] = {}  # set_rows output id -> (stacked array, layer)
    stacks: set[int] = set()
    for node in graph.live_nodes():
        if node.kind == "concat" and node.attrs["axis"] == 0:
            found = _stack_of_updates(node)
            # One chain an array: a second stack of updates starts from the original again.
            taken = {stack.id for stack, _ in updates.values()}
            if found is not None and not taken & {stack.id for stack, _ in found.values()}:
                stacks.add(node.out.id)
                updates.update(found)
    if not stacks:
        return graph

    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    newest: dict[int, Tensor] = {}  # stacked array id -> its newest version
    for node in graph.live_nodes():
        out = node.out
        if out.id in updates:
            inputs = [mapped[t.id] for t in node.inputs]
            stacked, layer = updates[out.id]
            version = newest.get(stacked.id, mapped[stacked.id])
            newest[stacked.id] = version = _update_layer(new, node, version, inputs, layer)
            mapped[out.id] = reshape(
                new, take(new, version, 0, layer, 1, node.label), out.shape, node.label
            )
        elif out.id in stacks:
            first = _updated(node.inputs[0])
            assert first is not None
            mapped[out.id] = newest[updates[first.id][0].id]
        else:
            mapped[out.id] = new.copy(node, mapped)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _update_layer(new: Graph, node: Node, version: Tensor, inputs: list[Tensor], layer: int):
    """The set_rows of one layer, written against the whole stack."""
    _, rows, *indices = inputs
    rows = reshape(new, rows, (rows.shape[0], 1, *rows.shape[1:]), node.label)
    dims = tuple(d + 1 for d in node.attrs["dims"])
    fixed = ((0, layer), *((d + 1, at) for d, at in node.attrs["fixed"]))
    return new.add(
        "set_rows",
        (version, rows, *indices),
        version.shape,
        version.dtype,
        node.label,
        mode=node.attrs["mode"],
        dims=dims,
        fixed=fixed,
    )


def _stack_of_updates(concat: Node) -> dict[int, tuple[Tensor, int]] | None:
    """What each piece of ``concat([set_rows(x[0]), set_rows(x[1]), ..])`` updates, if it is one."""
    found: dict[int, tuple[Tensor, int]] = {}
    stacked: Tensor | None = None
    for layer, piece in enumerate(concat.inputs):
        update = _updated(piece)
        source = _layer_of(update.node.inputs[0]) if update is not None else None
        if update is None or source is None or source[1] != layer:
            return None
        if stacked is None:
            stacked = source[0]
        if source[0] is not stacked or len(stacked.shape) > 7:
            return None
        found[update.id] = source
    same = stacked is not None and (stacked.shape, stacked.dtype) == (
        concat.out.shape,
        concat.out.dtype,
    )
    return found if same else None


def _updated(piece: Tensor) -> Tensor | None:
    """The set_rows behind ``expand_dims(set_rows(..), 0)``."""
    source = _through_unit_views(piece)
    if source.node.kind != "set_rows" or piece.shape != (1, *source.shape):
        return None
    return source


def _layer_of(x: Tensor) -> tuple[Tensor, int] | None:
    """(stack, i) where ``x`` is ``stack[i]``."""
    source = _through_unit_views(x)
    if source.node.kind != "slice":
        return None
    stack, attrs = source.node.inputs[0], source.node.attrs
    layer = attrs["starts"][0]
    whole = attrs["starts"][1:] == (0,) * (len(stack.shape) - 1)
    if not whole or source.shape != (1, *stack.shape[1:]) or x.shape != stack.shape[1:]:
        return None
    return stack, layer


def _through_unit_views(x: Tensor) -> Tensor:
    """Behind reshapes and broadcasts that only add or drop dimensions of size one."""
    while x.node.kind in ("reshape", "broadcast") and x.size == x.node.inputs[0].size:
        inner = x.node.inputs[0]
        if [n for n in inner.shape if n != 1] != [n for n in x.shape if n != 1]:
            break
        dims = x.node.attrs.get("dims")
        if dims is not None and list(dims) != sorted(dims):
            break
        x = inner
    return x
