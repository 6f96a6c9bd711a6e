"""Gives every stored tensor a place: an operand, a result, or a part of the arena.

Updates (SET_ROWS) happen in place where nobody can tell the difference: the version they overwrite
is read by nobody afterwards, and an operand is overwritten only where its final version is a result
of the same type, so that the two can share a buffer. Elsewhere a copy is made first.

Leaves of a packed operand are operands like others, but for this: it is settled beforehand which
result each becomes, and what is not made in its place is copied there in the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jaxgraph.graph.ir import Graph, Tensor
from jaxgraph.graph.layout import contiguous
from jaxgraph.passes.fuse import FusedGraph
from jaxgraph.plan import units as un
from jaxgraph.plan.regions import Mark, mark_regions
from jaxgraph.plan.schedule import Buffer, order_units, pack_arena
from jaxgraph.plan.units import Ref, Unit


@dataclasses.dataclass(eq=False)
class StoragePlan:
    """Units in execution order and where their tensors lie.

    Attributes:
      units: in execution order.
      buffers: by tensor id.
      arena_bytes: size of the arena.
      aliases: operand index -> result index of arrays updated in place.
      copied_updates: labels of updates that had to copy their array first, with bytes and reason.
      widest_live: the largest number of arena bytes alive at once, a lower bound of any packing.
      marks: the units that stand in fork-join regions.
    """

    units: list[Unit]
    buffers: dict[int, Buffer]
    arena_bytes: int
    aliases: dict[int, int]
    copied_updates: list[tuple[str, int, str]]
    widest_live: int
    marks: dict[Unit, Mark]

    @property
    def arena_buffers(self) -> list[Buffer]:
        """The buffers that lie in the arena, each once."""
        return list({id(b): b for b in self.buffers.values() if b.kind == "arena"}.values())


def plan_storage(
    fused: FusedGraph,
    guard_bytes: int = 0,
    packed: Mapping[int, int | None] = MappingProxyType({}),
) -> StoragePlan:
    """Storage and order for a fused graph.

    Args:
      fused: the graph.
      guard_bytes: kept free behind every buffer in the arena.
      packed: operand index -> result index of packed leaves; None: the leaf stays as it is.
    """
    return _Planner(fused, packed).run(guard_bytes)


class _Planner:
    def __init__(self, fused: FusedGraph, packed: Mapping[int, int | None]):
        self.packed = packed
        self.graph: Graph = fused.graph
        self.layout_of = fused.layout_of
        nodes = self.graph.live_nodes()
        self.units = [un.of_fit(f) for f in fused.clusters]
        self.units += [
            un.of_node(n, self.layout_of)
            for n in nodes
            if n.kind in ("matmul", "gather", "set_rows")
        ]
        self.units += un.of_sorts([n for n in nodes if n.kind == "sort"], self.layout_of)
        self.units += [
            un.of_attention(n, fused.inner[n.out.id], self.layout_of)
            for n in nodes
            if n.kind == "attention"
        ]
        self.units.sort(key=lambda u: u.position)
        self.overwrites: dict[int, Unit] = {}  # version id -> the update that overwrites it
        self.before: dict[Unit, set[Unit]] = {}
        self.readers: dict[int, list[Unit]] = {}  # tensor id -> who reads it
        self.ranks: dict[Unit, int] = {}  # a legal order; empty: none is known
        self.copied: list[tuple[str, int, str]] = []
        self.aliases: dict[int, int] = {}

    def run(self, guard_bytes: int) -> StoragePlan:
        self.find_dependencies()
        self.choose_in_place()
        buffers = self.assign_buffers()
        self.copy_outputs(buffers)
        order, marks = mark_regions(order_units(self.units, self.before), self.before)
        region_of = {unit: mark.region for unit, mark in marks.items()}
        arena, widest = pack_arena(order, buffers, region_of, guard_bytes)
        return StoragePlan(order, buffers, arena, self.aliases, self.copied, widest, marks)

    def find_dependencies(self) -> None:
        writers: dict[int, set[Unit]] = {}
        for unit in self.units:
            for tensor in unit.writes():
                writers.setdefault(tensor.id, set()).add(unit)
        self.writers = writers
        for unit in self.units:
            sources = unit.reads() + ([unit.dest] if unit.dest is not None else [])
            self.add(unit, {w for t in sources for w in writers.get(t.id, ())} - {unit})

    def add(self, unit: Unit, before: set[Unit]) -> None:
        """Takes down what must run before a unit, and what it reads."""
        self.before[unit] = before
        for tensor in unit.reads():
            self.readers.setdefault(tensor.id, []).append(unit)

    def add_copy(self, copy: Unit, before: set[Unit]) -> None:
        self.units.append(copy)
        self.add(copy, before)

    # Updates in place.

    def choose_in_place(self) -> None:
        shown: dict[int, list[int]] = {}  # tensor id -> the results that are views of it
        for j, tensor in enumerate(self.graph.outputs):
            shown.setdefault(self.layout_of(tensor)[0].id, []).append(j)
        updates = [u for u in self.units if u.op == un.SET_ROWS]
        reasons: dict[Unit, str] = {}
        for unit in updates:
            reason = self.why_copy(unit, shown)
            if reason is None:
                self.overwrites[unit.dest.id] = unit
            else:
                reasons[unit] = reason
        for tensor in self.graph.inputs:
            first = self.overwrites.get(tensor.id)
            if first is not None and not self.alias_with_result(tensor, first, shown):
                del self.overwrites[tensor.id]
                reasons[first] = "its new value is not returned in a result of the same type"
        for unit, reason in reasons.items():
            self.copy_first(unit, reason)
        # Whoever reads a version, copies included, comes before the update that overwrites it. An
        # update for which that is impossible copies, too; its copy is one more reader of a version
        # that another update may overwrite, so that all of them are looked at again.
        settled = False
        while not settled:
            settled = True
            for unit in updates:
                if self.overwrites.get(unit.dest.id) is not unit:
                    continue
                readers = {u for u in self.readers.get(unit.dest.id, ()) if u is not unit}
                if self.depend(readers, unit):
                    del self.overwrites[unit.dest.id]
                    self.drop_alias(unit)
                    self.copy_first(unit, "its old value is read after the update")
                    settled = False
                else:
                    self.before[unit] |= readers
                    if any(self.ranks[r] > self.ranks[unit] for r in readers):
                        self.ranks = {}

    def why_copy(self, unit: Unit, shown: Mapping[int, list[int]]) -> str | None:
        dest = unit.dest
        assert dest is not None
        node_dest = self.graph.nodes[unit.outs[0].tensor.id].inputs[0]
        _, layout = self.layout_of(node_dest)
        if not (layout.is_dense and layout.size == dest.size):
            return "only a part of its array is updated"
        if node_dest.dtype != dest.dtype:
            return "its array is seen in another type"
        if layout != self.layout_of(unit.outs[0].tensor)[1]:
            return "its array lies in another order"
        if any(r.tensor is dest for r in unit.srcs[1:]):
            return "it is updated from its own old value"
        if dest.id in shown:
            return "its old value is returned"
        if dest.id in self.overwrites:
            return "its old value is updated twice"
        return None

    def alias_with_result(
        self, operand: Tensor, unit: Unit, shown: Mapping[int, list[int]]
    ) -> bool:
        """Binds an operand to the result that is the last version of its chain of updates."""
        last = unit.outs[0].tensor
        while last.id in self.overwrites:
            last = self.overwrites[last.id].outs[0].tensor
        index = operand.node.attrs["index"]
        for j in shown.get(last.id, ()):
            if self.packed[index] != j if index in self.packed else j in self.packed.values():
                continue
            tensor = self.graph.outputs[j]
            _, layout = self.layout_of(tensor)
            same = (tensor.shape, tensor.dtype) == (operand.shape, operand.dtype)
            whole = layout.is_contiguous and layout.offset == 0
            if same and whole and j not in self.aliases.values():
                self.aliases[index] = j
                return True
        return False

    def drop_alias(self, unit: Unit) -> None:
        """An update in the middle of a chain copies after all: the operand stays as it was."""
        version = unit.dest
        assert version is not None
        while version.node.kind == "set_rows":
            above = next(u for u in self.writers[version.id] if u.op == un.SET_ROWS)
            if self.overwrites.get(above.dest.id) is not above:
                return
            version = above.dest
        if version.node.kind == "input":
            self.aliases.pop(version.node.attrs["index"], None)
            first = self.overwrites.pop(version.id, None)
            if first is not None and first is not unit:
                self.copy_first(first, "a later update of its array had to copy")

    def copy_first(self, unit: Unit, reason: str) -> None:
        """Makes ``unit`` update a copy of its destination."""
        node_dest = self.graph.nodes[unit.outs[0].tensor.id].inputs[0]
        base, layout = self.layout_of(node_dest)
        out = unit.outs[0].tensor
        copy = un.copy(
            Ref(out, out.dtype, self.layout_of(out)[1]),
            Ref(base, node_dest.dtype, layout),
            f"copy for {unit.label}",
            unit.position,
        )
        self.copied.append((unit.label, out.nbytes, reason))
        self.add_copy(copy, {w for w in self.writers.get(base.id, ()) if w is not unit})
        self.writers.setdefault(out.id, set()).add(copy)
        self.before[unit].add(copy)
        for reader in self.readers.get(out.id, ()):  # these wait for the update itself
            if reader is not unit and reader is not copy:
                self.before[reader].add(copy)
        self.ranks = {}

    def depend(self, units: Iterable[Unit], first: Unit) -> bool:
        """Must ``first`` run before one of the units? Only what ranks behind it can need it."""
        if not self.ranks:
            self.ranks = {u: i for i, u in enumerate(order_units(self.units, self.before))}
        seen: set[Unit] = set()
        stack = list(units)
        while stack:
            unit = stack.pop()
            if unit is first:
                return True
            if unit not in seen and self.ranks[unit] > self.ranks[first]:
                seen.add(unit)
                stack.extend(self.before[unit])
        return False

    # Buffers.

    def assign_buffers(self) -> dict[int, Buffer]:
        buffers: dict[int, Buffer] = {}
        for i, tensor in enumerate(self.graph.inputs):
            buffers[tensor.id] = Buffer("operand", i, tensor.nbytes)
        for unit in self.units:
            for tensor in unit.writes():
                self.buffer_of(tensor, buffers)
        return buffers

    def buffer_of(self, tensor: Tensor, buffers: dict[int, Buffer]) -> Buffer:
        """The tensor's buffer: that of the first version where updates in place lead to it."""
        versions = []
        while tensor.id not in buffers:
            versions.append(tensor)
            update = next((u for u in self.writers[tensor.id] if u.op == un.SET_ROWS), None)
            if update is None or self.overwrites.get(update.dest.id) is not update:
                buffers[tensor.id] = Buffer("arena", -1, tensor.nbytes)
            else:
                tensor = update.dest
        for version in versions:
            buffers[version.id] = buffers[tensor.id]
        return buffers[tensor.id]

    def copy_outputs(self, buffers: dict[int, Buffer]) -> None:
        """Lets outputs be computed where they are wanted; what cannot be is copied there."""
        apart = {*self.aliases.values(), *self.packed.values()}
        for j, tensor in enumerate(self.graph.outputs):
            if j in apart:
                continue
            base, layout = self.layout_of(tensor)
            buffer = buffers[base.id]
            whole = layout.is_contiguous and layout.offset == 0 and layout.size == base.size
            if buffer.kind == "arena" and whole and base.id not in self.overwrites:
                buffer.kind, buffer.index = "result", j
                continue
            result = _ResultTensor(tensor, j)
            buffers[result.id] = Buffer("result", j, tensor.nbytes)
            copy = un.copy(
                Ref(result, tensor.dtype, contiguous(tensor.shape)),
                Ref(base, tensor.dtype, layout),
                f"result[{j}]",
                len(self.graph.nodes) + j,
            )
            self.add_copy(copy, set(self.writers.get(base.id, ())))
        self.fill_packed(buffers)

    def fill_packed(self, buffers: dict[int, Buffer]) -> None:
        """Brings the new leaves of packed operands that were not made in place to their places."""
        moves: list[tuple[Tensor, int]] = []  # operand, result
        returned = {self.layout_of(t)[0].id for t in self.graph.outputs}
        for i, j in self.packed.items():
            if j is None or i in self.aliases:
                continue
            self.aliases[i] = j
            operand = self.graph.inputs[i]
            base, layout = self.layout_of(self.graph.outputs[j])
            whole = layout.is_contiguous and layout.offset == 0 and layout.size == base.size
            if base is operand and whole:
                continue  # it stays as it is
            read = operand.id in returned or operand.id in self.readers
            buffer = buffers[base.id]
            free = buffer.kind == "arena" and base.id not in self.overwrites
            if whole and free and not read:
                buffer.kind, buffer.index = "operand", i
                continue
            moves.append((operand, j))
        replaced = {operand.id for operand, _ in moves}
        sources: list[Ref] = []
        for operand, j in moves:
            tensor = self.graph.outputs[j]
            base, layout = self.layout_of(tensor)
            source = Ref(base, tensor.dtype, layout)
            if base.id in replaced:  # two leaves trade places, or one is turned in its own
                aside = _ResultTensor(tensor, len(self.graph.outputs) + j)
                buffers[aside.id] = Buffer("arena", -1, tensor.nbytes)
                source = self.copy_to(aside, source, operand.node.label, j, set())
            sources.append(source)
        for (operand, j), source in zip(moves, sources, strict=True):
            self.copied.append(
                (operand.node.label, operand.nbytes, "its new value is made elsewhere")
            )
            result = _ResultTensor(self.graph.outputs[j], j)
            buffers[result.id] = buffers[operand.id]
            readers = set(self.readers.get(operand.id, ()))
            self.copy_to(result, source, operand.node.label, j, readers)

    def copy_to(self, tensor: Tensor, source: Ref, label: str, j: int, after: set[Unit]) -> Ref:
        """Adds a copy of ``source`` to the storage of ``tensor``, after these units."""
        out = Ref(tensor, source.dtype, contiguous(tensor.shape))
        copy = un.copy(out, source, label, len(self.graph.nodes) + j)
        self.add_copy(copy, after | self.writers.get(source.tensor.id, set()))
        self.writers[tensor.id] = {copy}
        return out


class _ResultTensor(Tensor):
    """Stands for a result that is only a copy of something."""

    __slots__ = ()

    def __init__(self, like: Tensor, j: int):
        super().__init__(-1 - j, like.shape, like.dtype, like.node)
