"""Clusters elementwise operations and row reductions into EXPR and ROW kernels.

Elementwise values, iotas, constants and row reductions are *virtual*: they are computed inside the
kernel that needs them. A virtual value gets storage (becomes a *sink*) only where somebody needs
it in memory: a matrix product, an index, an output, several kernels at once, or a kernel for which
it does not fit (another iteration space, an inexpressible view, too large a program).

The search is by trial: kernels are built for the present set of sinks; what does not fit is added
to the set, until all fits. Then kernels over the same iteration space are merged, where that makes
no cycle, into one with several stores.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter

from jaxgraph.errors import PlanError
from jaxgraph.frontend.elementwise import TRANSCENDENTAL
from jaxgraph.graph import views
from jaxgraph.graph.ir import Graph, Node, Tensor
from jaxgraph.graph.layout import Layout, contiguous
from jaxgraph.passes.alike import Kernels
from jaxgraph.passes.cluster import Fit, Misfit, Sink
from jaxgraph.passes.visible import bound_of

# Operations on top of each other in one expression; a program holds 112 instructions.
_MAX_DEPTH = 80
# Elements of a kernel that costs its launch and nothing else.
_FEW = 64


@dataclasses.dataclass(eq=False)
class FusedGraph:
    """A graph whose virtual values are settled.

    Attributes:
      graph: the graph.
      clusters: fused kernels, in no particular order.
      inner: for each attention node, by output id, the expression of its scores.
      layout_of: for a tensor that is stored or a view of one: (stored tensor, its layout in it).
    """

    graph: Graph
    clusters: list[Fit]
    inner: dict[int, Fit]
    layout_of: Callable[[Tensor], tuple[Tensor, Layout]]


def fuse(graph: Graph, merge: bool = True) -> FusedGraph:
    """Decides what is stored and which kernel computes it.

    Args:
      graph: the graph of one native split.
      merge: also merge kernels over one iteration space (off: one store a kernel).
    """
    return _Fuser(graph).run(merge)


class _Fuser:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = graph.live_nodes()
        self.consumers = graph.consumers()
        self.stored: set[int] = set()
        self.row_major: set[int] = set()  # updates that do not lie as their array does
        self.own_layouts: dict[int, Layout] = {}
        self.layouts: dict[tuple[int, int], Layout] = {}
        self.inner: dict[int, Fit] = {}
        self.kernels = Kernels()
        for node in self.nodes:
            if not node.out.is_view and not node.out.is_virtual:
                self.stored.add(node.out.id)
            if node.kind == "attention":  # a kernel can look only at a bound that lies in memory
                bound = bound_of(node.inputs[3])
                if bound is not None:
                    self.stored.add(bound[0].id)

    def run(self, merge: bool) -> FusedGraph:
        self.store_deep_values()
        while True:
            self.need_operands()
            self.settle_shared()
            fits, misfits = [], set()
            for sink in self.sinks():
                try:
                    fits.append(self.kernels.build(self, (sink,)))
                except Misfit as misfit:
                    misfits |= misfit.tensors
            for node in self.nodes:
                if node.kind == "attention":
                    try:
                        self.inner[node.out.id] = self.scores_of(node)
                    except Misfit as misfit:
                        misfits |= misfit.tensors
            if not misfits:
                break
            self.store(misfits)
        if merge:
            fits = self.drop_unread(_Merger(self, fits).run())
        return FusedGraph(self.graph, fits, self.inner, self.layout)

    def scores_of(self, attention: Node) -> Fit:
        """The expression from a raw score to what the softmax is taken of."""
        masked = attention.inputs[3]
        sink = Sink(masked, attention.out, contiguous(masked.shape))
        return self.kernels.build(self, (sink,), inner=True)

    def operands(self, node: Node) -> Sequence[Tensor]:
        """What a node that is no cluster reads from memory."""
        if node.kind == "attention":
            return (*_in_memory(node), *self.inner[node.out.id].reads)
        return () if node.kind in ("concat", "scores") else node.inputs

    def drop_unread(self, fits: list[Fit]) -> list[Fit]:
        """Un-stores what only its own kernel needed, now that its readers have joined it."""
        read = {t.id for fit in fits for t in fit.reads}
        read |= {self.layout(t)[0].id for t in self.graph.outputs}
        for node in self.nodes:
            if node.out.id in self.stored and not (node.out.is_virtual or node.out.is_view):
                read |= {self.layout(t)[0].id for t in self.operands(node)}
        kept = []
        for fit in fits:
            sinks = tuple(s for s in fit.sinks if s.storage.id in read)
            if not sinks:
                continue
            if len(sinks) < len(fit.sinks):
                unread = {s.storage.id for s in fit.sinks} - {s.storage.id for s in sinks}
                self.stored -= unread
                try:
                    fit = self.kernels.build(self, sinks)
                except Misfit:  # the kernel itself needs the store, to read it in another type, say
                    self.stored |= unread
            kept.append(fit)
        return kept

    def store(self, tensors: set[int]) -> None:
        """Stores tensors (ids) that something else cannot be built without.

        An update that is stored already lies as its array does, in which strides cannot express a
        view of it: it is stored row-major instead.
        """
        updates = (n.out for n in self.nodes if n.kind == "set_rows" and n.out.id in tensors)
        turned = {t.id for t in updates if not self.own_layout(t).is_contiguous}
        if tensors <= self.stored and not turned:
            raise PlanError("an expression does not fit into any kernel")
        self.stored |= tensors
        self.row_major |= turned

    def need_operands(self) -> None:
        """Stores what kernels of other kinds, and whoever reads the outputs, need in memory.

        Once a view is stored, an update of it lies as this copy does, and updates of that update
        do, too: all layouts are found anew.
        """
        needed: list[Tensor] = []
        for node in self.nodes:
            if not (node.out.is_view or node.out.is_virtual or node.kind == "concat"):
                needed += _in_memory(node)
        needed += self.graph.outputs
        settled = False
        while not settled:
            self.layouts.clear()
            self.own_layouts.clear()
            settled = all([self.need_storage(t) for t in needed])

    def need_storage(self, tensor: Tensor) -> bool:
        """Stores what ``tensor`` is a view of; where strides cannot express it, what is on the way.

        Returns whether strides express it.
        """
        base = tensor
        while base.is_view and base.id not in self.stored:
            base = base.node.inputs[0]
        self.stored.add(base.id)
        try:
            self.layout(tensor)
        except Misfit as misfit:
            self.store(misfit.tensors)
            return False
        return True

    def layout(self, tensor: Tensor) -> tuple[Tensor, Layout]:
        """(stored tensor, how ``tensor`` lies in it), for a tensor that is stored or a view."""
        path: list[Node] = []
        base = tensor
        while base.id not in self.stored:
            path.append(base.node)
            base = base.node.inputs[0]
        if (tensor.id, base.id) not in self.layouts:
            layout, failed = views.apply_path(path, self.own_layout(base))
            if layout is None:
                assert failed is not None
                raise Misfit({failed.inputs[0].id})
            self.layouts[tensor.id, base.id] = layout
        return base, self.layouts[tensor.id, base.id]

    def own_layout(self, tensor: Tensor) -> Layout:
        """How a stored tensor lies in its buffer: row-major, but an update lies as its array does.

        So an array that is updated through a transposed view needs no copy.
        """
        if tensor.node.kind != "set_rows":
            return contiguous(tensor.shape)
        if tensor.id not in self.own_layouts:
            dest = tensor.node.inputs[0]
            base, layout = self.layout(dest)
            dense = layout.is_dense and layout.size == base.size and dest.dtype == base.dtype
            alike = dense and tensor.id not in self.row_major
            self.own_layouts[tensor.id] = layout if alike else contiguous(tensor.shape)
        return self.own_layouts[tensor.id]

    def store_deep_values(self) -> None:
        """Cuts very long chains of operations beforehand: they would not fit into one program."""
        depth: dict[int, int] = {}
        for node in self.nodes:
            out = node.out
            above = max((depth[t.id] for t in node.inputs if t.id not in self.stored), default=0)
            depth[out.id] = above + (node.kind == "elementwise")
            if out.is_virtual and depth[out.id] >= _MAX_DEPTH:
                self.stored.add(out.id)

    def settle_shared(self) -> None:
        """Stores virtual values that several kernels would compute, unless they are cheap."""
        homes: dict[int, set[object]] = {}
        for node in reversed(self.nodes):
            out = node.out
            here: set[object] = set()
            for reader in self.consumers.get(out.id, ()):
                if reader.kind == "attention" and out is reader.inputs[3]:
                    here.add(reader.out.id)
                if reader.kind == "concat":
                    here |= {(reader.out.id, i) for i, t in enumerate(reader.inputs) if t is out}
                elif reader.out.id in self.stored and (reader.out.is_virtual or reader.out.is_view):
                    here.add(reader.out.id)
                elif reader.out.is_virtual or reader.out.is_view:
                    here |= homes[reader.out.id]
            if (
                out.is_virtual
                and out.id not in self.stored
                and len(here) > 1
                and not self.is_cheap(out)
            ):
                self.stored.add(out.id)
            homes[out.id] = {out.id} if out.id in self.stored else here

    def is_cheap(self, tensor: Tensor, budget: int = 6) -> bool:
        """Cheaper to compute in every kernel that reads it than to store once.

        Leaves may be constants, iotas and single elements; a lone conversion of anything is cheap
        too. Sums of rows are not, else a residual stream would grow into every later layer.
        """
        node = tensor.node
        if node.kind in ("const", "iota"):
            return True
        if node.kind != "elementwise":
            return False
        if node.attrs["op"] == "convert" and not views.behind(node.inputs[0])[0].is_virtual:
            return True
        seen: set[int] = set()
        stack, ops = [tensor], 0
        while stack:
            t = stack.pop()
            if t.id in seen:
                continue
            seen.add(t.id)
            if t.id in self.stored or not (t.is_virtual or t.is_view):
                if t.size > 1:
                    return False
            elif t.is_view:
                stack.append(t.node.inputs[0])
            elif t.node.kind == "elementwise":
                ops += 1
                if t.node.attrs["op"] in TRANSCENDENTAL or ops > budget:
                    return False
                stack.extend(t.node.inputs)
            elif t.node.kind == "reduce":
                return False
        return True

    def sinks(self) -> Iterable[Sink]:
        """Every value that some kernel of ours has to store, and where."""
        for node in self.nodes:
            out = node.out
            if node.kind == "concat":
                start = 0
                for piece in node.inputs:
                    offset = start * contiguous(out.shape).strides[node.attrs["axis"]]
                    place = Layout(piece.shape, contiguous(out.shape).strides, offset)
                    yield Sink(piece, out, place)
                    start += piece.shape[node.attrs["axis"]]
            elif out.id in self.stored and (out.is_virtual or out.is_view):
                yield Sink(out, out, contiguous(out.shape))


def _in_memory(node: Node) -> Sequence[Tensor]:
    """The inputs that a kernel reads as they lie: of an attention all but its masked scores."""
    return (*node.inputs[:3], *node.inputs[4:]) if node.kind == "attention" else node.inputs


class _Merger:
    """Joins clusters over the same iteration space, one pair after the other."""

    def __init__(self, fuser: _Fuser, fits: Sequence[Fit]):
        self.fuser = fuser
        self.fits: dict[int, Fit] = dict(enumerate(fits))
        self.rank: dict[int, int] = {}  # an order in which the units may run

    def run(self) -> list[Fit]:
        units = self._units()
        order = TopologicalSorter(units).static_order()
        self.rank.update({unit: i for i, unit in enumerate(order)})
        for a, b in self._candidates():
            a, b = self._find(a), self._find(b)
            if a == b or a not in self.fits or b not in self.fits:
                continue
            first, last = sorted((a, b), key=self.rank.__getitem__)
            between = self._between(units, last, first)
            if first in between:  # through some third unit: then one kernel cannot be both
                continue
            try:
                sinks = (*self.fits[a].sinks, *self.fits[b].sinks)
                joined = self.fuser.kernels.build(self.fuser, sinks)
            except Misfit:
                continue
            self.fits[b] = joined
            del self.fits[a]
            self.parent[a] = b
            self._rank_as_one(first, last, b, between)
            self._redirect(units, a, b)
        return list(self.fits.values())

    def _find(self, a: int) -> int:
        while a in self.parent:
            a = self.parent[a]
        return a

    def _units(self) -> dict[int, set[int]]:
        """The dependency graph: unit -> units it reads. Clusters are 0.., other nodes behind."""
        self.parent: dict[int, int] = {}
        writers: dict[int, set[int]] = {}
        for i, fit in self.fits.items():
            for sink in fit.sinks:
                writers.setdefault(sink.storage.id, set()).add(i)
        others = [
            n
            for n in self.fuser.nodes
            if n.kind not in ("input", "concat", "scores")
            and not n.out.is_view
            and not n.out.is_virtual
        ]
        reads: dict[int, set[int]] = {}
        for i, node in enumerate(others, start=len(self.fits)):
            writers.setdefault(node.out.id, set()).add(i)
        for i, fit in self.fits.items():
            reads[i] = {w for t in fit.reads for w in writers.get(t.id, ())} - {i}
        for i, node in enumerate(others, start=len(self.fits)):
            bases = [self.fuser.layout(t)[0] for t in self.fuser.operands(node)]
            reads[i] = {w for t in bases for w in writers.get(t.id, ())}
        self.writers = writers
        self.readers: dict[int, set[int]] = {}
        for i, sources in reads.items():
            for w in sources:
                self.readers.setdefault(w, set()).add(i)
        return reads

    def _candidates(self) -> list[tuple[int, int]]:
        """Pairs worth a trial: producer and consumer, pieces of one concatenation, lone scalars,
        and what a few elements of operands become, such as each layer's lengths of sequences.
        """
        pairs: list[tuple[int, int]] = []
        for b, fit in self.fits.items():
            for tensor in fit.reads:
                pairs += [(a, b) for a in self.writers.get(tensor.id, ()) if a in self.fits]
        for group in self.writers.values():
            pieces = sorted(w for w in group if w in self.fits)
            pairs += list(zip(pieces, pieces[1:], strict=False))
        scalars = [i for i, fit in self.fits.items() if fit.space == ()]
        pairs += list(zip(scalars, scalars[1:], strict=False))
        small: dict[tuple[int, ...], list[int]] = {}
        for i, fit in self.fits.items():
            if math.prod(fit.space) <= _FEW and not any(t.id in self.writers for t in fit.reads):
                small.setdefault(fit.space, []).append(i)
        for group in small.values():
            pairs += list(zip(group, group[1:], strict=False))
        return [(a, b) for a, b in pairs if a != b and self._same_space(a, b)]

    def _same_space(self, a: int, b: int) -> bool:
        x, y = self.fits[a], self.fits[b]
        return x.space == y.space or x.space[:-1] == y.space or x.space == y.space[:-1]

    def _between(self, edges: Mapping[int, set[int]], start: int, end: int) -> set[int]:
        """What can be reached from ``start`` and ranks no further than ``end``.

        ``end`` itself only through some third unit, ``start`` never.
        """
        far, near = self.rank[end], self.rank[start]
        low, high = min(far, near), max(far, near)
        seen: set[int] = set()
        stack = [u for u in edges.get(start, ()) if u not in (start, end)]
        while stack:
            unit = stack.pop()
            if unit not in seen and low <= self.rank[unit] <= high:
                seen.add(unit)
                stack.extend(edges.get(unit, ()))
        return seen

    def _rank_as_one(self, first: int, last: int, joined: int, before: set[int]) -> None:
        """Ranks two units as one: behind what the last, before what the first is needed for."""
        after = self._between(self.readers, first, last)
        ranks = sorted(self.rank[u] for u in (first, last, *before, *after))
        now = (sorted(us, key=self.rank.__getitem__) for us in (before, (joined,), after))
        self.rank.update(zip(itertools.chain(*now), ranks, strict=False))  # one is left over

    def _redirect(self, reads: dict[int, set[int]], a: int, b: int) -> None:
        sources = reads.pop(a)
        for source in sources:
            self.readers[source] = (self.readers[source] - {a}) | {b}
        reads[b] = (reads[b] | sources) - {a, b}
        for reader in self.readers.pop(a, set()):
            if reader in reads:
                reads[reader] = {b if u == a else u for u in reads[reader]} - {reader}
                self.readers.setdefault(b, set()).add(reader)
