"""One fused kernel: the expression program that computes a few sinks over one iteration space.

The walk starts at each sink and goes up through virtual values. Views met on the way are collected
as a *path*; what lies behind them is a leaf, loaded through the strides that the path gives it, or
another operation, computed inline over the mapped index. Dimensions of size one carry no
information and are dropped everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxgraph.graph import layout as ly
from jaxgraph.graph import views
from jaxgraph.graph.dtypes import code_of
from jaxgraph.graph.expression import Index, Store, TooLarge, Val, assemble, count
from jaxgraph.graph.ir import Node, Tensor
from jaxgraph.graph.layout import Layout

Path = tuple[Node, ...]


class Misfit(Exception):
    """The sinks do not make one kernel; storing ``tensors`` (ids) instead would help."""

    def __init__(self, tensors: set[int]):
        super().__init__(tensors)
        self.tensors = tensors


class Storages(Protocol):
    """What a cluster must know of the graph around it."""

    stored: set[int]

    def layout(self, tensor: Tensor) -> tuple[Tensor, Layout]: ...


@dataclasses.dataclass(frozen=True)
class Sink:
    """``value`` has to be written into ``storage``, where its elements lie as ``place``."""

    value: Tensor
    storage: Tensor
    place: Layout


@dataclasses.dataclass(eq=False)
class Fit:
    """A finished kernel.

    Attributes:
      sinks: what it stores, in the order of the program's outputs.
      space: the iteration space without dimensions of size one.
      is_row: it reduces over the last axis (a ROW node, else EXPR).
      sources: loads in the order of the program's sources: tensor with storage, layout over the
        collapsed space.
      places: for each sink its layout over the collapsed space.
      program: the packed expression program.
    """

    sinks: tuple[Sink, ...]
    space: tuple[int, ...]
    is_row: bool
    sources: list[tuple[Tensor, np.dtype, Layout]]
    places: list[Layout]
    program: bytes

    @property
    def reads(self) -> list[Tensor]:
        return list(dict.fromkeys(t for t, _, _ in self.sources))


class Cluster:
    """Builds the kernel of one or several sinks; see ``build``."""

    def __init__(self, storages: Storages, sinks: Sequence[Sink], inner: bool = False):
        """``inner``: an expression inside another kernel, elementwise over the sink's shape."""
        self.storages = storages
        self.sinks = tuple(sinks)
        self.inner = inner
        self.inside = {s.value.id for s in sinks if s.value.id == s.storage.id}
        self.pieced = {s.storage.id for s in sinks} - self.inside
        self.vals: dict[tuple, Val] = {}
        self.loads: dict[tuple, tuple[int, Tensor, np.dtype, Layout]] = {}
        self.indices: dict[Index, int] = {}
        self.imms: dict[int, int] = {}

    def build(self) -> Fit:
        """The kernel of these sinks.

        Raises:
          Misfit: the sinks have no common iteration space, or something must be stored first.
        """
        reductions = self.find_reductions()
        self.choose_space(reductions)
        stores = []
        for number, sink in enumerate(self.sinks):
            per_row = self.is_row and squeezed(sink.value.shape) == self.space[:-1]
            val = self.at_sink(sink, per_row)
            stores.append(Store(val, number, sink.value.dtype))
        return self.finish(stores)

    # The iteration space.

    def find_reductions(self) -> list[Node]:
        """Reductions met on the way up from the sinks, those near the sinks first."""
        found: list[Node] = []
        seen: set[int] = set()
        stack = [s.value for s in reversed(self.sinks)]
        first = {s.value.id for s in self.sinks}
        while stack:
            tensor = stack.pop()
            if tensor.id in seen:
                continue
            seen.add(tensor.id)
            if tensor.id in self.storages.stored and tensor.id not in first:
                continue
            if tensor.node.kind == "reduce":
                found.append(tensor.node)
            if tensor.is_virtual or tensor.is_view:
                stack.extend(tensor.node.inputs)
        return found

    def choose_space(self, reductions: Sequence[Node]) -> None:
        shapes = {squeezed(s.value.shape) for s in self.sinks}
        for node in () if self.inner else reductions:
            full = squeezed(node.inputs[0].shape)
            if shapes <= {full, full[:-1]}:
                self.space, self.is_row = full, True
                return
        if reductions:
            raise Misfit({n.out.id for n in reductions})
        if len(shapes) != 1:
            raise Misfit(set())
        (self.space,) = shapes
        self.is_row = False

    # The walk.

    def at_sink(self, sink: Sink, per_row: bool) -> Val:
        """The value of a sink, over its own index space."""
        tensor = sink.value
        if tensor.id == sink.storage.id:  # stored by this kernel: compute it, do not load it
            if tensor.is_view:
                return self.value(tensor.node.inputs[0], (tensor.node,), per_row, tensor.dtype)
            return self.compute(tensor, (), per_row)
        return self.value(tensor, (), per_row)

    def value(
        self, tensor: Tensor, path: Path, per_row: bool, dtype: np.dtype | None = None
    ) -> Val:
        """``tensor`` seen through ``path``, at the current element (or row).

        ``dtype``: how its reader sees it, where a view between the two reinterprets the bytes.
        """
        dtype = dtype or tensor.dtype
        if tensor.id in self.storages.stored:
            if tensor.id not in self.inside:
                return self.load(tensor, path, per_row, dtype)
            # Computed by this very kernel: fine at the same index, impossible at another.
            if not self.is_identity(tensor, path, per_row):
                raise Misfit({tensor.id})
            if tensor.is_view:
                return self.value(tensor.node.inputs[0], (tensor.node,), per_row, tensor.dtype)
            return self.compute(tensor, path, per_row)
        if tensor.is_view:
            if tensor.node.kind == "bitcast":
                base = views.behind(tensor)[0]
                in_memory = base.id in self.storages.stored and base.id not in self.inside
                if base.is_virtual and not in_memory:  # only memory can be read in another type
                    raise Misfit({base.id})
            return self.value(tensor.node.inputs[0], (*path, tensor.node), per_row, dtype)
        if not tensor.is_virtual:
            return self.load(tensor, path, per_row, dtype)
        return self.compute(tensor, path, per_row)

    def compute(self, tensor: Tensor, path: Path, per_row: bool) -> Val:
        node = tensor.node
        if node.kind == "const":
            return self.constant(node)
        mapping = self.map(tensor, path)
        if self.is_row and not per_row and self.is_row_invariant(mapping):
            per_row = True
        key = (tensor.id, mapping.dims(), mapping.offset, per_row)
        if key not in self.vals:
            if node.kind == "iota":
                self.vals[key] = self.index(tensor, path, per_row)
            elif node.kind == "reduce":
                self.vals[key] = self.reduction(tensor, path)
            else:
                args = tuple(self.value(t, path, per_row) for t in node.inputs)
                op, aux = node.attrs["op"], node.attrs["aux"]
                compares = op in ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
                dtype = node.inputs[0].dtype if compares else tensor.dtype
                stage = max((a.stage for a in args), default=0)
                self.vals[key] = Val(op, dtype, args, aux, per_row, stage, tensor.id)
        return self.vals[key]

    def constant(self, node: Node) -> Val:
        bits = node.attrs["value"]
        key = ("const", bits, node.out.dtype)
        if key not in self.vals:
            slot = self.imms.setdefault(bits, len(self.imms))
            # Only rows have a scalar section; elsewhere a constant is made per element.
            self.vals[key] = Val("const", node.out.dtype, (), slot, self.is_row, 0)
        return self.vals[key]

    def index(self, tensor: Tensor, path: Path, per_row: bool) -> Val:
        line = self.map(tensor, path)  # an iota's value is its index, so its layout is its value
        slot = self.indices.setdefault(
            Index(line.offset, self.strides(line, per_row)), len(self.indices)
        )
        return Val("index", tensor.dtype, (), slot, per_row, 0, tensor.id)

    def load(self, tensor: Tensor, path: Path, per_row: bool, dtype: np.dtype) -> Val:
        base, lies = self.storages.layout(tensor)
        if base.id in self.pieced:  # this very kernel writes a part of it
            raise Misfit(set())
        layout, failed = views.apply_path(path, lies)
        if layout is None:
            raise self.inexpressible(tensor, path, failed)
        if self.is_row and not per_row and self.is_row_invariant(layout):
            per_row = True
        strides = self.strides(layout, per_row)
        key = ("load", base.id, dtype, layout.offset, strides, per_row)
        if key not in self.vals:
            source = (base.id, dtype, layout.offset, strides)
            if source not in self.loads:
                over = Layout(self.space, strides, layout.offset)
                self.loads[source] = (len(self.loads), base, dtype, over)
            self.vals[key] = Val("load", dtype, (), self.loads[source][0], per_row, 0)
        return self.vals[key]

    def reduction(self, tensor: Tensor, path: Path) -> Val:
        node = tensor.node
        (operand,) = node.inputs
        rows = self.space[:-1] if self.is_row else None
        mapping = self.map(tensor, path)
        along = squeezed(mapping.shape)
        strides = tuple(s for _, s in mapping.dims())
        own = ly.contiguous_strides(rows or ())
        fits = (
            rows is not None
            and squeezed(operand.shape) == self.space
            and mapping.offset == 0
            and (
                (along == rows and strides == own) or (along == self.space and strides == (*own, 0))
            )
        )
        if not fits:
            raise Misfit({tensor.id})
        source = self.value(operand, (), False)
        op = "reduce_" + node.attrs["op"]
        dtype, aux = tensor.dtype, 0
        if node.attrs["op"] in ("argmax", "argmin"):
            dtype, aux = operand.dtype, code_of(tensor.dtype)
        return Val(op, dtype, (source,), aux, True, source.stage + 1, tensor.id)

    # Index maps.

    def map(self, tensor: Tensor, path: Path) -> Layout:
        """Which element of ``tensor`` the path reads at each index, as strides."""
        layout, failed = views.apply_path(path, ly.contiguous(tensor.shape))
        if layout is None:
            raise self.inexpressible(tensor, path, failed)
        return layout

    def inexpressible(self, tensor: Tensor, path: Path, failed: Node | None) -> Misfit:
        """What to store where strides cannot express the view ``failed`` of the path.

        Its input; but that may be made of what another kernel computes, if this one is inside it.
        Then it is the operand that ``tensor`` is, with the views of it alone.
        """
        assert failed is not None
        if not self.inner:
            return Misfit({failed.inputs[0].id})
        for view in reversed(path):
            if view.inputs[0] is not tensor:
                break
            tensor = view.out
        return Misfit({tensor.id})

    def is_identity(self, tensor: Tensor, path: Path, per_row: bool) -> bool:
        mapping = self.map(tensor, path)
        own, along = squeezed(tensor.shape), squeezed(mapping.shape)
        expected = ly.contiguous_strides(own)
        if self.is_row and own == self.space[:-1] and along == self.space:
            expected = (*expected, 0)  # a row's value, read at every element of the row
        elif own != along or own not in (self.space, self.space[:-1]):
            return False
        return mapping.offset == 0 and tuple(s for _, s in mapping.dims()) == expected

    def is_row_invariant(self, layout: Layout) -> bool:
        dims = layout.dims()
        return squeezed(layout.shape) == self.space and dims[-1][1] == 0

    def strides(self, layout: Layout, per_row: bool) -> tuple[int, ...]:
        """Strides over the whole space; a row's value does not move along the last axis."""
        strides = tuple(s for _, s in layout.dims())
        if len(strides) == len(self.space):
            return strides
        assert per_row and len(strides) == len(self.space) - 1
        return (*strides, 0)

    # The result.

    def finish(self, stores: list[Store]) -> Fit:
        loads = list(self.loads.values())
        placed = []
        for sink, store in zip(self.sinks, stores, strict=True):
            kept = Layout(sink.value.shape, sink.place.strides, sink.place.offset)
            per_row = self.is_row and squeezed(sink.value.shape) == self.space[:-1]
            placed.append(Layout(self.space, self.strides(kept, per_row), kept.offset))
            if self.is_row and not per_row and store.value.per_row:
                # The same value for the whole row: an element store needs an element register.
                store.value = Val("convert", store.dtype, (store.value,), code_of(store.dtype))
                store.value.stage = store.value.args[0].stage
        indices = list(self.indices)
        walks = [o.strides for _, _, _, o in loads] + [p.strides for p in placed]
        walks += [i.strides for i in indices]
        if self.inner:
            shape, walks = _expanded(self.sinks[0].value.shape, walks)
        else:
            shape, walks = ly.collapse(self.space, walks, keep_last=self.is_row)
        n, m = len(loads), len(placed)
        indices = [Index(i.offset, w) for i, w in zip(indices, walks[n + m :], strict=True)]
        try:
            program = assemble(shape, stores, list(self.imms), indices, n)
        except TooLarge:
            raise Misfit(self.cutting_point(stores)) from None
        return Fit(
            self.sinks,
            self.space,
            self.is_row,
            [
                (t, d, Layout(shape, w, o.offset))
                for (_, t, d, o), w in zip(loads, walks[:n], strict=True)
            ],
            [Layout(shape, w, p.offset) for p, w in zip(placed, walks[n : n + m], strict=True)],
            program,
        )

    def cutting_point(self, stores: Sequence[Store]) -> set[int]:
        """The value whose own program is nearest to half of the whole."""
        total = count(stores)
        best, distance = -1, total
        for val in self.vals.values():
            inner = val.tensor_id not in self.storages.stored and val.op not in (
                "load",
                "const",
                "index",
            )
            if inner and val.tensor_id >= 0:
                size = count([Store(val, 0, val.dtype)])
                if abs(size - total // 2) < distance:
                    best, distance = val.tensor_id, abs(size - total // 2)
        return {best} if best >= 0 else set()


def _expanded(shape: tuple[int, ...], walks: list[tuple[int, ...]]):
    """The space with its dimensions of size one put back."""
    full = []
    for walk in walks:
        strides = iter(walk)
        full.append(tuple(next(strides) if n != 1 else 0 for n in shape))
    return shape, full


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
