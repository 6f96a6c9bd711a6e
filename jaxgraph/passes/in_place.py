"""Recognises an array put together from its own updated parts as updates of the array itself.

A scan over layers that takes a stacked cache as input and gives the stack of updated layers as
output reads, once unrolled, ``concat([set_rows(cache[0], ..), set_rows(cache[1], ..), ..])``; a
cache of keys and values in one array is taken apart and stacked again along two axes. The same
value is ``set_rows(.. set_rows(cache, at layer 0 ..) .., at layer L-1 ..)``: a chain on one array,
which storage planning can then do in place.

So is a layer that is taken out, updated, and put back: ``set_rows(cache, set_rows(cache[0], ..), at
layer 0)`` writes the whole layer for the sake of a row.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from jaxgraph.frontend.shaping import reshape, take
from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.ir import Graph, Node, Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor as ``whole[at]``.

    Attributes:
      whole: the array that it is a part of.
      at: for dimensions of ``whole``, where in them it stands; 0 where they are of size one.
      dims: for each dimension of the tensor the one of ``whole`` that it is; None: of size one.
    """

    whole: Tensor
    at: dict[int, int]
    dims: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        shape = self.whole.shape
        expected = tuple(None if n == 1 else d for d, n in enumerate(shape))
        return self.dims == expected and all(shape[d] == 1 for d in self.at)


def chain_stacked_updates(graph: Graph) -> Graph:
    """A graph that computes the same, with stacks of updates turned into chains."""
    updates: dict[int, Part] = {}  # set_rows output id -> what it is of the stacked array
    stacks: dict[int, Tensor] = {}  # concat output id -> the stacked array
    followed: set[int] = set()  # arrays of which a new version is found
    for node in graph.live_nodes():
        found = _stack_of_updates(node) if node.kind == "concat" else _put_back(node)
        if found is None:
            continue
        # One chain an array: a second stack of updates starts from the original again.
        whole = next(iter(found.values())).whole
        if whole.id in followed:
            continue
        followed.add(whole.id)
        first = stacks.get(whole.id)
        if first is not None:  # this array is itself such a version: all are one chain
            before = [part for part in updates.values() if part.whole is first]
            if all(_apart(part, other) for part in found.values() for other in before):
                whole = first
        for id, part in found.items():
            updates[id] = dataclasses.replace(part, whole=whole)
        stacks[node.out.id] = whole
    if not stacks:
        return graph

    new = Graph(rewrites=graph)
    mapped: dict[int, Tensor] = {}
    newest: dict[int, Tensor] = {}  # stacked array id -> its newest version

    def look_at(tensors: Sequence[Tensor]) -> None:
        """Whatever else has been updated since, a part is the same in the newest version."""
        for t in tensors:
            if t.id in updates:
                part = updates[t.id]
                mapped[t.id] = _take_part(new, newest[part.whole.id], part, t, t.node.label)

    for node in _updates_first(graph.live_nodes(), updates, stacks):
        out = node.out
        if out.id in stacks:
            mapped[out.id] = newest[stacks[out.id].id]
            continue
        look_at(node.inputs)
        if out.id in updates:
            inputs = [mapped[t.id] for t in node.inputs]
            part = updates[out.id]
            version = newest.get(part.whole.id, mapped[part.whole.id])
            newest[part.whole.id] = _update_part(new, node, version, inputs, part)
        else:
            mapped[out.id] = new.copy(node, mapped)
    look_at(graph.outputs)
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new


def _updates_first(
    nodes: Sequence[Node], updates: dict[int, Part], stacks: dict[int, Tensor]
) -> list[Node]:
    """The nodes in an order in which those that read an update come as late as they can.

    Who reads keys then sees the version in which the values are updated, too: the one before is
    read by nobody, and can be overwritten.
    """
    position = {node.out.id: i for i, node in enumerate(nodes)}
    waits = [len({t.id for t in node.inputs}) for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    new_versions = [node for node in nodes if node.out.id in stacks]
    on_the_way = {t.id for node in new_versions for t in _views_of_updates(node)}
    reads = [
        node.out.id not in on_the_way and any(t.id in updates for t in node.inputs)
        for node in nodes
    ]
    for i, node in enumerate(nodes):
        for t in {t.id for t in node.inputs}:
            readers[position[t]].append(i)
    ready = [(reads[i], i) for i, n in enumerate(waits) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(nodes[i])
        for reader in readers[i]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, (reads[reader], reader))
    return order


def _views_of_updates(version: Node) -> Iterator[Tensor]:
    """The new version of an array, and as what it reads the update that it puts back."""
    yield version.out
    if version.kind == "set_rows":
        update = version.inputs[1]
        while _only_unit_dimensions(update.node):
            yield update
            update = update.node.inputs[0]


def _take_part(new: Graph, version: Tensor, part: Part, like: Tensor, label: str) -> Tensor:
    for d, at in part.at.items():
        version = take(new, version, d, at, 1, label)
    return reshape(new, version, like.shape, label)


def _update_part(new: Graph, node: Node, version: Tensor, inputs: list[Tensor], part: Part):
    """The set_rows of a part, written against the whole array."""
    _, rows, *indices = inputs
    sizes = [1] * len(version.shape)
    for d, n in zip(part.dims, rows.shape[1:], strict=True):
        if d is not None:
            sizes[d] = n
    rows = reshape(new, rows, (rows.shape[0], *sizes), node.label)
    fixed = [(d, at) for d, at in part.at.items() if version.shape[d] > 1]
    fixed += [(part.dims[d], at) for d, at in node.attrs["fixed"]]
    return new.add(
        "set_rows",
        (version, rows, *indices),
        version.shape,
        version.dtype,
        node.label,
        mode=node.attrs["mode"],
        dims=tuple(part.dims[d] for d in node.attrs["dims"]),
        fixed=tuple(sorted(fixed)),
    )


def _stack_of_updates(concat: Node) -> dict[int, Part] | None:
    """What each update in the concatenation is a part of, if they are one array put together."""
    found: dict[int, Part] = {}
    part = _updated(concat.out, found)
    if part is None or not found or not part.is_whole or len(part.whole.shape) > 7:
        return None
    same = (part.whole.shape, part.whole.dtype) == (concat.out.shape, concat.out.dtype)
    return found if same else None


def _put_back(node: Node) -> dict[int, Part] | None:
    """What an update is a part of that this node writes back to where its part was taken from."""
    if node.kind != "set_rows":
        return None
    whole, rows, *columns = node.inputs
    at = dict(node.attrs["fixed"])
    for d, column in zip(node.attrs["dims"], columns, strict=True):
        number = _known_index(column)
        if number is None:
            return None
        at[d] = number
    update = rows
    while _only_unit_dimensions(update.node):
        update = update.node.inputs[0]
    found: dict[int, Part] = {}
    if update.node.kind != "set_rows" or len(whole.shape) > 7:
        return None
    part = _updated(update, found)
    if part is None or part.whole is not whole:
        return None
    sizes = tuple(1 if d in part.at else n for d, n in enumerate(whole.shape))
    same = at == {d: i for d, i in part.at.items() if whole.shape[d] > 1}
    return found if same and rows.shape == (1, *sizes) else None


def _known_index(column: Tensor) -> int | None:
    """The number that an index of one element is, if it is known."""
    column, path = views.behind(column, own_type=True)
    if column.node.kind == "concat" and len(column.shape) == 1:
        line, _ = views.apply_path(path, ly.contiguous(column.shape))
        if line is None or line.size != 1 or len(column.node.inputs) != column.size:
            return None
        return _known_index(column.node.inputs[line.offset])
    return column.node.attrs["value"] if column.node.kind == "const" else None


def _apart(a: Part, b: Part) -> bool:
    """Have two parts of one array no element in common?"""
    return any(d in b.at and b.at[d] != at for d, at in a.at.items())


def _updated(x: Tensor, found: dict[int, Part]) -> Part | None:
    """What ``x`` is a part of, with updates of it, which are added to ``found``."""
    node = x.node
    if node.kind == "set_rows":
        part = _part(node.inputs[0])
        moved = (*node.attrs["dims"], *(d for d, _ in node.attrs["fixed"]))
        if any(part.dims[d] is None for d in moved):
            return None
        found[x.id] = part
        return part
    if node.kind == "concat":
        return _put_together(node, found)
    if _only_unit_dimensions(node):
        inner = _updated(node.inputs[0], found)
        return None if inner is None else _seen_as(inner, x)
    return _part(x) if node.kind == "slice" else None  # a part that is not updated


def _put_together(concat: Node, found: dict[int, Part]) -> Part | None:
    """What the pieces, one after the other along a dimension of the whole, are together."""
    axis = concat.attrs["axis"]
    pieces: list[Part] = []
    for t in concat.inputs:
        piece = _updated(t, found) if t.shape[axis] == 1 else None
        if piece is None or (pieces and piece.whole is not pieces[0].whole):
            return None
        pieces.append(piece)
    first, second = pieces[:2]
    along = [d for d, at in first.at.items() if second.at.get(d) != at]
    if len(along) != 1 or len(pieces) != first.whole.shape[along[0]]:
        return None
    for i, piece in enumerate(pieces):
        if piece.dims != first.dims or piece.at != first.at | {along[0]: i}:
            return None
    at = {d: i for d, i in first.at.items() if d != along[0]}
    dims = (*first.dims[:axis], along[0], *first.dims[axis + 1 :])
    return Part(first.whole, at, dims)


def _part(x: Tensor) -> Part:
    """What ``x`` is a part of, through slices of size one; of itself, if of no other."""
    node = x.node
    if node.kind == "slice":
        inner = _part(node.inputs[0])
        at, dims = dict(inner.at), list(inner.dims)
        for n, d in enumerate(inner.dims):
            if x.shape[n] == node.inputs[0].shape[n]:
                continue
            if d is None or x.shape[n] != 1:
                return _all_of(x)
            at[d], dims[n] = node.attrs["starts"][n], None
        return Part(inner.whole, at, tuple(dims))
    if _only_unit_dimensions(node):
        return _seen_as(_part(node.inputs[0]), x)
    return _all_of(x)


def _all_of(x: Tensor) -> Part:
    dims = tuple(None if n == 1 else d for d, n in enumerate(x.shape))
    return Part(x, {d: 0 for d, n in enumerate(x.shape) if n == 1}, dims)


def _seen_as(part: Part, x: Tensor) -> Part:
    """The part seen with other dimensions of size one."""
    dims = iter([d for d in part.dims if d is not None])
    return Part(part.whole, part.at, tuple(None if n == 1 else next(dims) for n in x.shape))


def _only_unit_dimensions(node: Node) -> bool:
    """Is it a reshape or broadcast that only adds or drops dimensions of size one?"""
    if node.kind not in ("reshape", "broadcast") or node.out.size != node.inputs[0].size:
        return False
    inner, outer = node.inputs[0].shape, node.out.shape
    if [n for n in inner if n != 1] != [n for n in outer if n != 1]:
        return False
    dims = node.attrs.get("dims")
    return dims is None or list(dims) == sorted(dims)
