"""top_k, sort and running sums of short axes, as comparisons of all pairs.

An element's place in an order is how many others stand before it, and a running sum is a sum over
a triangle: both are rows that the kernels know. The work is quadratic, so only axes that are short
(experts of a router, beams, groups) are done here.
"""

from __future__ import annotations

import math

import numpy as np

from jaxgraph.frontend.elementwise import constant
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.shaping import reshape, transpose
from jaxgraph.graph import dtypes
from jaxgraph.graph.ir import Graph, Tensor

_RUNNING = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min"}
NAMES = frozenset({"top_k", "sort", *_RUNNING})

_MAX_LENGTH = 256
_MAX_RANK = 7  # the pairs have one dimension more, and a tensor has at most eight


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    x = eqn.inputs[0].aval
    if len(x.shape) > _MAX_RANK:
        return f"orders an array of more than {_MAX_RANK} dimensions"
    n = x.shape[_axis(eqn)]
    if n > _MAX_LENGTH:
        return f"is {eqn.primitive.name} of {n} elements, native up to {_MAX_LENGTH}"
    if eqn.primitive.name == "sort" and eqn.params["num_keys"] != 1:
        return "sorts by several keys"
    if eqn.primitive.name in ("top_k", *_RUNNING) and x.dtype == np.bool_:
        return "orders booleans"
    return None


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the comparisons and sums, and returns the equation's outputs."""
    rank, axis = len(inputs[0].shape), _axis(eqn)
    order = [d for d in range(rank) if d != axis] + [axis]
    back = [order.index(d) for d in range(rank)]
    last = [transpose(graph, t, order, label) for t in inputs]
    rows = _Rows(graph, last[0].shape, label)
    name = eqn.primitive.name
    if name == "top_k":
        outputs = _top_k(rows, last[0], int(eqn.params["k"]))
    elif name == "sort":
        place = rows.count(lambda i, j: rows.sorts_before(last[0], j, i))
        outputs = [rows.at_places(t, place, rows.n) for t in last]
    else:
        outputs = [rows.running(last[0], _RUNNING[name], eqn.params["reverse"])]
    return [transpose(graph, t, back, label) for t in outputs]


def _axis(eqn: FlatEqn) -> int:
    params = eqn.params
    axis = params["dimension"] if "dimension" in params else params.get("axis", -1)
    return axis % len(eqn.inputs[0].aval.shape)


def _top_k(rows: _Rows, x: Tensor, k: int) -> list[Tensor]:
    keys = _total_order(rows.graph, x, rows.label)
    place = rows.count(lambda i, j: rows.stands_before(keys, j, i))
    return [rows.at_places(x, place, k), rows.indices_at(place, k)]


def _total_order(graph: Graph, x: Tensor, label: str) -> Tensor:
    """Integers in the order that ``top_k`` gives floats: -NaN, -inf, .., -0, 0, .., inf, NaN."""
    if not dtypes.is_float(x.dtype):
        return x
    signed = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = graph.add("bitcast", (x,), x.shape, signed, label)

    def op(name: str, a: Tensor, b: int) -> Tensor:
        number = constant(graph, b, x.shape, signed, label)
        return graph.add("elementwise", (a, number), x.shape, signed, label, op=name, aux=0)

    sign = op("shr_arithmetic", bits, 8 * x.dtype.itemsize - 1)
    flipped = op("and", sign, np.iinfo(signed).max)
    return graph.add("elementwise", (bits, flipped), x.shape, signed, label, op="xor", aux=0)


class _Rows:
    """All pairs (i, j) of elements in rows [..., n], as arrays [..., i, j]."""

    def __init__(self, graph: Graph, shape: tuple[int, ...], label: str):
        self.graph, self.label = graph, label
        self.outer, self.n = shape[:-1], shape[-1]

    def op(self, name: str, *args: Tensor, dtype=np.bool_, aux: int = 0) -> Tensor:
        shape = args[0].shape
        return self.graph.add("elementwise", args, shape, dtype, self.label, op=name, aux=aux)

    def spread(self, x: Tensor, count: int, along: int) -> Tensor:
        """``x`` [..., m] repeated to [..., m, count] (``along`` 0) or [..., count, m] (1)."""
        outer, m = x.shape[:-1], x.shape[-1]
        shape = (*outer, m, count) if along == 0 else (*outer, count, m)
        dims = (*range(len(outer)), len(outer) + along)
        return self.graph.add("broadcast", (x,), shape, x.dtype, self.label, dims=dims)

    def index(self, rows: int, along: int) -> Tensor:
        """The number of i (``along`` 0) or j (1) at each of [..., rows, n]."""
        size = rows if along == 0 else self.n
        line = self.graph.add("iota", (), (size,), np.int32, self.label)
        shape = (*self.outer, rows, self.n)
        dims = (len(self.outer) + along,)
        return self.graph.add("broadcast", (line,), shape, np.int32, self.label, dims=dims)

    def reduce(self, x: Tensor, op: str, dtype) -> Tensor:
        if x.shape[-1] == 1:  # the passes count on rows longer than one
            return reshape(self.graph, x, x.shape[:-1], self.label)
        return self.graph.add("reduce", (x,), x.shape[:-1], dtype, self.label, op=op)

    def count(self, before) -> Tensor:
        """For each i the number of j for which ``before(i, j)``."""
        hit = self.op("convert", before(0, 1), dtype=np.int32, aux=dtypes.PRED)
        return self.reduce(hit, "sum", np.int32)

    def stands_before(self, keys: Tensor, a: int, b: int) -> Tensor:
        """Does a come before b among largest first, the earlier first among equals?"""
        x, y = self.spread(keys, self.n, a), self.spread(keys, self.n, b)
        return self.op("or", self.op("gt", x, y), self.op("and", self.op("eq", x, y), self.earlier))

    def sorts_before(self, keys: Tensor, a: int, b: int) -> Tensor:
        """Does a come before b among smallest first, NaN last, the earlier first among equals?"""
        x, y = self.spread(keys, self.n, a), self.spread(keys, self.n, b)
        less, same = self.op("lt", x, y), self.op("eq", x, y)
        if dtypes.is_float(keys.dtype):
            x_nan, y_nan = self.op("ne", x, x), self.op("ne", y, y)
            less = self.op("or", less, self.op("and", self.op("not", x_nan), y_nan))
            same = self.op("or", same, self.op("and", x_nan, y_nan))
        return self.op("or", less, self.op("and", same, self.earlier))

    @property
    def earlier(self) -> Tensor:
        """j < i: the other element stands before this one."""
        return self.op("lt", self.index(self.n, 1), self.index(self.n, 0))

    def hits(self, place: Tensor, count: int) -> Tensor:
        """[..., count, n]: is j the element whose place is i?"""
        return self.op("eq", self.spread(place, count, 1), self.index(count, 0))

    def at_places(self, x: Tensor, place: Tensor, count: int) -> Tensor:
        """The elements of ``x`` whose places are 0 .. count - 1."""
        hits = self.hits(place, count)
        lowest = _lowest(x.dtype)
        fill = constant(self.graph, lowest, hits.shape, x.dtype, self.label)
        kept = self.op("select", hits, fill, self.spread(x, count, 1), dtype=x.dtype)
        return self.reduce(kept, "or" if x.dtype == np.bool_ else "max", x.dtype)

    def indices_at(self, place: Tensor, count: int) -> Tensor:
        hits = self.hits(place, count)
        own = self.index(count, 1)
        zero = constant(self.graph, 0, hits.shape, np.int32, self.label)
        return self.reduce(self.op("select", hits, zero, own, dtype=np.int32), "max", np.int32)

    def running(self, x: Tensor, op: str, reverse: bool) -> Tensor:
        """For each i the reduction of all elements up to it (from it on: ``reverse``)."""
        taken = self.op("ge" if reverse else "le", self.index(self.n, 1), self.index(self.n, 0))
        number = {"sum": 0, "prod": 1, "max": _lowest(x.dtype), "min": _highest(x.dtype)}[op]
        fill = constant(self.graph, number, taken.shape, x.dtype, self.label)
        kept = self.op("select", taken, fill, self.spread(x, self.n, 1), dtype=x.dtype)
        return self.reduce(kept, op, x.dtype)


def _lowest(dtype: np.dtype):
    if dtypes.is_float(dtype):
        return -math.inf
    return False if dtype == np.bool_ else np.iinfo(dtype).min


def _highest(dtype: np.dtype):
    return math.inf if dtypes.is_float(dtype) else np.iinfo(dtype).max
