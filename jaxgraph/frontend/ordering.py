"""top_k and sort as SORT nodes, and running sums as sums over triangles.

A SORT node orders pieces of a few thousand elements, and others merge pieces that are in order.
The largest of a long row are among the largest of its pieces, which are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxgraph.frontend.elementwise import constant
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.shaping import concatenate, reshape, take, transpose
from jaxgraph.graph import dtypes, views
from jaxgraph.graph.ir import Graph, Tensor

_RUNNING = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min"}
_BINARY = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}
_LARGEST = ("top_k", "approx_top_k")
NAMES = frozenset({"sort", *_LARGEST, *_RUNNING})

# As in ffi/core/program.h: SortOrder, kSortMaxLength, kSortMaxMerged, kSortPositions,
# SortParams::source.
ASCENDING, DESCENDING = range(2)
MAX_LENGTH = 4096
MAX_MERGED = 8
POSITIONS = 0xFF
_MAX_OPERANDS = 8

_MAX_PIECES = 1 << 15
# Of each piece of a long row; more are the first of a sort of all.
_MAX_LARGEST = MAX_LENGTH // 4
# Of all rows of a sort by merging (measured: docs/kernels.md), and of what it begins with, which
# keeps more blocks busy than whole kernels' lengths would.
_MAX_SORTED = 1 << 15
_SORTED_PIECE = 1024
# A triangle is quadratic work, so longer rows are cut into pieces, and their sums are summed.
_TRIANGLE, _PIECE = 256, 64
_MAX_RUNNING = 1 << 13
_MAX_RANK = 6  # triangles of pieces have two dimensions more, and a tensor has at most eight


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    name, x = eqn.primitive.name, eqn.inputs[0].aval
    n = x.shape[_axis(eqn)]
    merged = n > MAX_LENGTH and x.size > _MAX_SORTED
    if name == "approx_top_k":
        exact = eqn.params["aggregate_to_topk"] and eqn.params["reduction_input_size_override"] < 0
        if not (exact and eqn.params["is_max_k"]):
            return "takes the least elements, or a part of the largest"
    if name in _LARGEST:
        k = int(eqn.params["k"])
        if k == 0:
            return "takes none of the elements"
        few = k <= _MAX_LARGEST and _pieces(n) <= _MAX_PIECES
        return None if few or not merged else f"is the {k} largest of {n} elements"
    if name == "sort":
        if merged:
            return f"is sort of {x.size} elements, native up to {_MAX_SORTED}"
        return "sorts many arrays at once" if len(eqn.inputs) > _MAX_OPERANDS else None
    if len(x.shape) > _MAX_RANK:
        return f"sums up an array of more than {_MAX_RANK} dimensions"
    if n > _MAX_RUNNING:
        return f"is {name} of {n} elements, native up to {_MAX_RUNNING}"
    return "sums up booleans" if x.dtype == np.bool_ else None


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the nodes, over rows along the last axis, and returns the equation's outputs."""
    rank, axis, name = len(inputs[0].shape), _axis(eqn), eqn.primitive.name
    order = [d for d in range(rank) if d != axis] + [axis]
    back = [order.index(d) for d in range(rank)]
    last = [transpose(graph, t, order, label) for t in inputs]
    outer, n = last[0].shape[:-1], last[0].shape[-1]
    if name in _RUNNING:
        rows = _Running(graph, _RUNNING[name], eqn.params["reverse"], label)
        return [transpose(graph, rows.over(last[0]), back, label)]
    rows = [reshape(graph, t, (math.prod(outer), n), label) for t in last]
    if name in _LARGEST:
        outputs = _top_k(graph, rows[0], int(eqn.params["k"]), label)
    else:
        outputs = _sort(graph, rows, eqn.params["num_keys"], label)
    whole = [reshape(graph, t, (*outer, t.shape[1]), label) for t in outputs]
    return [transpose(graph, t, back, label) for t in whole]


def _axis(eqn: FlatEqn) -> int:
    names = ("dimension", "reduction_dimension", "axis")
    axis = next((eqn.params[n] for n in names if n in eqn.params), -1)
    return axis % len(eqn.inputs[0].aval.shape)


def _pieces(n: int) -> int:
    return -(-n // MAX_LENGTH)


def _ordered(
    graph: Graph, rows: Sequence[Tensor], sources: Sequence[int], k: int, label: str, **attrs
) -> list[Tensor]:
    """The first ``k`` of each piece of ``rows``, ordered by the first of them.

    Of whole pieces the lengths may differ by one, and each stays in its place.
    """
    count, n = rows[0].shape
    attrs.setdefault("merged", 0)
    shape = (count, n if attrs["chunks"] * (k + 1) > n else attrs["chunks"] * k)
    return [
        graph.add(
            "sort",
            rows,
            shape,
            np.int32 if i == POSITIONS else rows[i].dtype,
            label,
            source=i,
            **attrs,
        )
        for i in sources
    ]


def _whole(
    graph: Graph, rows: Sequence[Tensor], sources: Sequence[int], order: int, label: str
) -> list[Tensor]:
    """All of ``rows``, ordered by the first of them, which is the first of the sources, too.

    In pieces, which are merged.
    """
    n = rows[0].shape[1]
    chunks = 1
    while n > MAX_LENGTH and chunks * _SORTED_PIECE < n:
        chunks *= 2
    rows = _ordered(graph, rows, sources, n // chunks, label, order=order, chunks=chunks)
    sources = range(len(sources))  # what was asked for, the keys first, is now what is merged
    while chunks > 1:
        merged = min(chunks, MAX_MERGED)
        chunks //= merged
        k = n // chunks
        rows = _ordered(graph, rows, sources, k, label, order=order, chunks=chunks, merged=merged)
    return rows


def _top_k(graph: Graph, x: Tensor, k: int, label: str) -> list[Tensor]:
    rows, sources = [x], [0, POSITIONS]
    if k > _MAX_LARGEST and _pieces(x.shape[1]) > 1:
        rows = _whole(graph, rows, sources, DESCENDING, label)
        return [take(graph, t, 1, 0, k, label) for t in rows]
    while True:
        chunks = _pieces(rows[0].shape[1])
        rows = _ordered(graph, rows, sources, k, label, order=DESCENDING, chunks=chunks)
        if chunks == 1:
            return rows
        sources = [0, 1]  # the positions go along


def _sort(graph: Graph, rows: list[Tensor], num_keys: int, label: str) -> list[Tensor]:
    """By the last key first: sorts by earlier keys leave equal elements in that order."""
    for key in reversed(range(num_keys)):
        operands = [rows[key]]
        sources = [_source(t, operands) for t in rows]
        # The key first, and each source once: what is merged is what was put in order before.
        needed = list(dict.fromkeys([0, *sources]))
        made = _whole(graph, operands, needed, ASCENDING, label)
        rows = [made[needed.index(source)] for source in sources]
    return rows


def _source(x: Tensor, operands: list[Tensor]) -> int:
    """The number of ``x`` among the operands, of which it becomes one; an index is none."""
    if x.dtype == np.int32 and x.shape[1] > 1 and views.is_index(x):
        return POSITIONS
    if x not in operands:
        operands.append(x)
    return operands.index(x)


def running_sums(graph: Graph, x: Tensor, label: str) -> Tensor:
    """For each element of ``x``, along the last axis, the sum of all up to it."""
    return _Running(graph, "sum", False, label).over(x)


class _Running:
    """For each element of a row the reduction of all up to it (from it on: ``reverse``)."""

    def __init__(self, graph: Graph, op: str, reverse: bool, label: str):
        self.graph, self.op, self.reverse, self.label = graph, op, reverse, label

    def over(self, x: Tensor) -> Tensor:
        outer, n = x.shape[:-1], x.shape[-1]
        if n <= _TRIANGLE:
            return self.triangle(x)
        count = -(-n // _PIECE)
        if count * _PIECE > n:
            rest = self.neutral((*outer, count * _PIECE - n), x.dtype)
            x = concatenate(self.graph, [x, rest], len(outer), self.label)
        x = reshape(self.graph, x, (*outer, count, _PIECE), self.label)
        within = self.triangle(x)
        whole = take(self.graph, within, len(outer) + 1, self.end(_PIECE), 1, self.label)
        totals = self.over(reshape(self.graph, whole, (*outer, count), self.label))
        # What stands before a piece: the running totals, one place further.
        first = 1 if self.reverse else 0
        moved = [take(self.graph, totals, len(outer), first, count - 1, self.label)]
        moved.insert(len(moved) if self.reverse else 0, self.neutral((*outer, 1), x.dtype))
        before = concatenate(self.graph, moved, len(outer), self.label)
        before = self.broadcast(before, within.shape, range(len(outer) + 1))
        out = self.elementwise(_BINARY[self.op], before, within, dtype=x.dtype)
        out = reshape(self.graph, out, (*outer, count * _PIECE), self.label)
        return take(self.graph, out, len(outer), 0, n, self.label)

    def end(self, n: int) -> int:
        """Where the reduction of a whole row stands."""
        return 0 if self.reverse else n - 1

    def triangle(self, x: Tensor) -> Tensor:
        """By a row [.., i, j] for each element i, with what lies on the other side of it hidden."""
        outer, n = x.shape[:-1], x.shape[-1]
        if n == 1:  # the passes count on rows longer than one
            return x
        shape = (*outer, n, n)
        line = self.graph.add("iota", (), (n,), np.int32, self.label)
        i, j = (self.broadcast(line, shape, (len(outer) + d,)) for d in range(2))
        taken = self.elementwise("ge" if self.reverse else "le", j, i)
        spread = self.broadcast(x, shape, (*range(len(outer)), len(outer) + 1))
        kept = self.elementwise(
            "select", taken, self.neutral(shape, x.dtype), spread, dtype=x.dtype
        )
        return self.graph.add("reduce", (kept,), x.shape, x.dtype, self.label, op=self.op)

    def neutral(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        least, most = (
            (-math.inf, math.inf)
            if dtypes.is_float(dtype)
            else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        )
        number = {"sum": 0, "prod": 1, "max": least, "min": most}[self.op]
        return constant(self.graph, number, shape, dtype, self.label)

    def broadcast(self, x: Tensor, shape: tuple[int, ...], dims) -> Tensor:
        return self.graph.add("broadcast", (x,), shape, x.dtype, self.label, dims=tuple(dims))

    def elementwise(self, op: str, *args: Tensor, dtype=np.bool_) -> Tensor:
        shape = args[0].shape
        return self.graph.add("elementwise", args, shape, dtype, self.label, op=op, aux=0)
