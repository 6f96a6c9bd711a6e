"""Packed trees in a flat step: their leaves as values of their own, at known places of a buffer.

A function that takes a packed tree begins with `unpack` of its buffer, and where a packed tree
comes back, it ends with `repack`. Both vanish here: a leaf is a value without an equation, like an
argument, and the new leaves are values that somebody outside wants. So all passes see what they
would see of an unpacked tree. What is no such pair (a buffer made within the step, a second tree
made of one buffer) is done as bytes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(eq=False)
class Pack:
    """A packed argument of a step. Values are those of the flat step.

    Attributes:
      buffer: the argument.
      spec: where its leaves lie (`jaxgraph.pack.PackSpec`).
      leaves: the leaves on entry, in the order of `spec.arrays`.
      new_leaves: ... and in the packed tree that takes its place; empty: none does.
      new_buffer: the buffer of that; a result of the step.
    """

    buffer: Any
    spec: Any
    leaves: list[Any]
    new_leaves: list[Any] = dataclasses.field(default_factory=list)
    new_buffer: Any = None


@dataclasses.dataclass(frozen=True)
class PackedLeaf:
    """A place in a pack: that of its leaf of this number."""

    pack: Pack
    number: int

    @property
    def spec(self) -> Any:
        """Where in the buffer it is (`jaxgraph.pack`)."""
        return self.pack.spec.arrays[self.number]


def leaves_of(pack: Pack) -> dict[int, PackedLeaf]:
    """By id of a leaf's value on entry: its place."""
    return {id(value): PackedLeaf(pack, n) for n, value in enumerate(pack.leaves)}


def leaf_labels(pack: Pack, label: str) -> dict[int, str]:
    """By id of a leaf's value: what a person would call it, given what the buffer is called."""
    numbers = jax.tree.unflatten(pack.spec.treedef, range(len(pack.spec.leaves)))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(numbers)[0]]
    arrays = set(map(id, pack.spec.arrays))
    names = [
        label.removesuffix(".buffer") + jax.tree_util.keystr(path)
        for path, leaf in zip(paths, pack.spec.leaves, strict=True)
        if id(leaf) in arrays
    ]
    return {id(value): name for value, name in zip(pack.leaves, names, strict=True)}


def storable(step: Any, runs: Sequence[Any]) -> dict[int, PackedLeaf]:
    """Which new leaves may take the old ones' places when they are made, by id of their value.

    Args:
      step: the flat step.
      runs: its runs of equations in execution order, with `native`, `inputs` and `outputs`.
    """
    made_in = {id(v): n for n, run in enumerate(runs) if run.native for v in run.outputs}
    last_read = {id(v): n for n, run in enumerate(runs) for v in run.inputs}
    kept = collections.Counter(id(v) for v in step.wanted)
    places: dict[int, PackedLeaf] = {}
    for pack in step.packs:
        for n, (old, new) in enumerate(zip(pack.leaves, pack.new_leaves, strict=False)):
            made = made_in.get(id(new))
            if made is None or id(new) in places or kept[id(old)] > 0:
                continue
            if last_read.get(id(old), -1) <= made:
                places[id(new)] = PackedLeaf(pack, n)
    return places


class PackFinder:
    """Follows the buffers of packed trees while a step is flattened.

    Args:
      new_value: makes a value of the step, given its aval.
    """

    def __init__(self, new_value: Callable[[Any], Any]):
        self._new_value = new_value
        self._given: set[int] = set()
        self._packs: dict[int, Pack] = {}  # by id of the buffer
        self._made_by: dict[int, Any] = {}  # id of a buffer -> the `repack` equation

    @property
    def is_empty(self) -> bool:
        """Whether no packed tree has been met."""
        return not self._packs and not self._made_by

    def give(self, value: Any) -> None:
        """An argument of the step, or an array that it closes over."""
        self._given.add(id(value))

    def unpacked(self, buffer: Any, spec: Any, avals: Sequence[Any]) -> list[Any] | None:
        """The values of the leaves in a buffer; None: they are to be made of its bytes."""
        made_by = self._made_by.get(id(buffer))
        if made_by is not None and made_by.params["spec"] is spec:
            return made_by.inputs[1:]
        pack = self._pack(buffer, spec, avals)
        return None if pack is None else list(pack.leaves)

    def note_repack(self, eqn: Any) -> None:
        """Takes note of a `repack` equation of the flat step."""
        before = self._made_by.get(id(eqn.inputs[0]))
        if before is not None and before.params["spec"] is eqn.params["spec"]:
            # All leaves are new ones: of the buffer in between, nothing is left but its place.
            eqn.inputs[0] = before.inputs[0]
        self._made_by[id(eqn.outputs[0])] = eqn

    def settle(self, returned: set[int], read: set[int]) -> tuple[list[Pack], list[Any]]:
        """What came of it.

        Args:
          returned: ids of the step's results.
          read: ids of what needed equations read.

        Returns:
          The packs, and the `repack` equations that have vanished.
        """
        gone = []
        for out, eqn in self._made_by.items():
            if out not in returned or out in read:
                continue
            buffer, *leaves = eqn.inputs
            pack = self._pack(buffer, eqn.params["spec"], [v.aval for v in leaves])
            if pack is not None and pack.new_buffer is None:
                pack.new_leaves, pack.new_buffer = leaves, eqn.outputs[0]
                gone.append(eqn)
        return list(self._packs.values()), gone

    def _pack(self, buffer: Any, spec: Any, avals: Sequence[Any]) -> Pack | None:
        if id(buffer) in self._given and id(buffer) not in self._packs:
            leaves = [self._new_value(aval) for aval in avals]
            self._packs[id(buffer)] = Pack(buffer, spec, leaves)
        pack = self._packs.get(id(buffer))
        return pack if pack is not None and pack.spec is spec else None
