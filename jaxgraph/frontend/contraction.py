"""``dot_general`` as a batched matrix product [b0, b1, M, K] x [b0, b1, K, N]."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgraph.frontend import elementwise
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.indexing import takes_whole_rows
from jaxgraph.frontend.shaping import reshape, transpose
from jaxgraph.graph import dtypes, views
from jaxgraph.graph import layout as ly
from jaxgraph.graph.expression import MAX_RANK
from jaxgraph.graph.ir import Graph, Tensor

# Integers have no matrix product of their own; sums of rows do for small ones.
_MAX_INTEGER_TERMS = 1 << 20

_Preset = lax.DotAlgorithmPreset
# Algorithms, by the operands' dtype, that are no more exact than the kernels' products in that
# dtype, summed in f32 (f64 for f64).
_ALGORITHMS = {
    "float16": (_Preset.DEFAULT, _Preset.F16_F16_F16, _Preset.F16_F16_F32),
    "bfloat16": (_Preset.DEFAULT, _Preset.BF16_BF16_BF16, _Preset.BF16_BF16_F32),
    "float32": (_Preset.DEFAULT, _Preset.F32_F32_F32),
    "float64": (_Preset.DEFAULT, _Preset.F64_F64_F64),
}


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    lhs, rhs = (v.aval.dtype for v in eqn.inputs)
    dtype = eqn.outputs[0].aval.dtype
    if all(dtypes.is_integer(t) for t in (lhs, rhs, dtype)):
        if _terms(eqn) > _MAX_INTEGER_TERMS:
            return "multiplies large matrices of integers"
    elif not dtypes.is_float(dtype) or not any(dtypes.is_float(t) for t in (lhs, rhs)):
        return f"multiplies {lhs} by {rhs} to {dtype}"
    return why_not_so_precise(eqn)


def why_not_so_precise(eqn: FlatEqn) -> str | None:
    """Why the precision that a product asks for cannot be native, or None."""
    lhs, rhs = (v.aval.dtype for v in eqn.inputs[:2])
    precision = eqn.params.get("precision")
    if precision is None or isinstance(precision, lax.Precision):
        return None
    if isinstance(precision, tuple) and all(isinstance(p, lax.Precision) for p in precision):
        return None
    if lhs == rhs and precision in _ALGORITHMS.get(np.dtype(lhs).name, ()):
        return None
    return "asks for a dot algorithm of its own"


def rows(eqn: FlatEqn) -> int:
    """Rows of the product's smaller side: how often each weight is used (1 in batch-1 decode)."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in eqn.inputs)
    m = math.prod(n for d, n in enumerate(lhs) if d not in (*lc, *lb))
    n = math.prod(n for d, n in enumerate(rhs) if d not in (*rc, *rb))
    return min(m, n)


def _terms(eqn: FlatEqn) -> int:
    """How many products are summed in all."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.inputs[0].aval.shape
    return eqn.outputs[0].aval.size * math.prod(lhs[d] for d in contracted)


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand, with its dimensions sorted into batch, contracted and free ones."""

    x: Tensor
    batch: tuple[int, ...]
    contracted: tuple[int, ...]

    @functools.cached_property
    def free(self) -> tuple[int, ...]:
        bound = (*self.batch, *self.contracted)
        return tuple(d for d in range(len(self.x.shape)) if d not in bound)

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.x.shape[d] for d in dims)


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the product, with views before and behind it.

    The kernels expect the weight, or whatever side is larger, on the right, and read it best where
    it lies: the order of contracted dimensions and what counts as batch follow its strides.
    """
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    dtype = eqn.outputs[0].aval.dtype
    # Integers and booleans beside floats become what the product is of, as in XLA.
    lhs, rhs = (
        t if dtypes.is_float(t.dtype) else elementwise.convert(graph, t, dtype, label)
        for t in inputs
    )
    wide = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = (elementwise.convert(graph, t, wide, label) for t in (lhs, rhs))
    return [multiply(graph, Side(lhs, lb, lc), Side(rhs, rb, rc), dtype, label)]


def multiply(graph: Graph, a: Side, b: Side, dtype, label: str) -> Tensor:
    """The product, its dimensions those of the batch, then the free ones of a and of b."""
    simple = _without_matrices(graph, a, b, dtype, label)
    if simple is not None:
        return simple
    swapped = a.x.size > b.x.size
    few, many = (b, a) if swapped else (a, b)
    many = dataclasses.replace(many, x=_as_it_lies(graph, many.x))
    where = _where_it_lies(many)
    if where is None:
        rows = math.prod(few.sizes(few.free))
        parts = _in_parts(graph, a, b, many, rows, dtype, label)
        if parts is not None:
            return parts
        where = _where_it_lies(many, row_by_row=False)
    order, apart = where or (list(range(len(many.contracted))), ())
    rest = tuple(d for d in many.free if d not in apart)

    batch = many.sizes(many.batch)
    outer = (*batch, *many.sizes(apart))
    m_shape, n_shape = few.sizes(few.free), many.sizes(rest)
    few_contracted, many_contracted = (
        tuple(side.contracted[i] for i in order) for side in (few, many)
    )
    k_shape = many.sizes(many_contracted)
    left = transpose(graph, few.x, (*few.batch, *few.free, *few_contracted), label)
    if apart:  # the same rows for each of them
        after = range(len(outer), len(outer) + len(m_shape) + len(k_shape))
        dims = (*range(len(batch)), *after)
        full = (*outer, *m_shape, *k_shape)
        left = graph.add("broadcast", (left,), full, left.dtype, label, dims=dims)
    right = transpose(graph, many.x, (*many.batch, *apart, *many_contracted, *rest), label)
    b0, b1 = _two_dimensions(outer, left, right)
    m, n, k = math.prod(m_shape), math.prod(n_shape), math.prod(k_shape)
    left = reshape(graph, left, (b0, b1, m, k), label)
    right = reshape(graph, right, (b0, b1, k, n), label)
    if dtypes.is_integer(dtype):
        product = _sum_of_rows(graph, left, right, dtype, label)
    else:
        product = graph.add("matmul", (left, right), (b0, b1, m, n), dtype, label)

    product = reshape(graph, product, (*outer, *m_shape, *n_shape), label)
    number = {d: len(batch) + i for i, d in enumerate(apart)}
    number |= {d: len(outer) + len(m_shape) + i for i, d in enumerate(rest)}
    of_many = [number[d] for d in many.free]
    of_few = list(range(len(outer), len(outer) + len(m_shape)))
    free = of_many + of_few if swapped else of_few + of_many
    return transpose(graph, product, (*range(len(batch)), *free), label)


def _in_parts(
    graph: Graph, a: Side, b: Side, many: Side, rows: int, dtype, label: str
) -> Tensor | None:
    """A sum of products along one contracted dimension, where a product over all needs a copy.

    A weight [n, h, d] contracted over n and d is no matrix, but n matrices. Their products are few
    numbers where the rows are few.
    """
    if len(many.contracted) < 2 or dtypes.is_integer(dtype):
        return None
    for i in range(len(many.contracted)):
        parts = [
            Side(
                side.x,
                (side.contracted[i], *side.batch),
                tuple(d for j, d in enumerate(side.contracted) if j != i),
            )
            for side in (a, b, many)
        ]
        terms = math.prod(parts[2].sizes(parts[2].contracted))
        if terms < 2 * rows or _where_it_lies(parts[2]) is None:
            continue
        inner = jnp.promote_types(a.x.dtype, np.float32)
        product = multiply(graph, parts[0], parts[1], inner, label)
        last = transpose(graph, product, (*range(1, len(product.shape)), 0), label)
        if last.shape[-1] == 1:
            total = reshape(graph, last, last.shape[:-1], label)
        else:
            total = graph.add("reduce", (last,), last.shape[:-1], inner, label, op="sum")
        return elementwise.convert(graph, total, dtype, label)
    return None


def _without_matrices(graph: Graph, a: Side, b: Side, dtype, label: str) -> Tensor | None:
    """A product of which no operand is a matrix as elementwise work, which fuses with what is near.

    Rows times rows (``einsum("bd,bd->b")``) are sums of rows, and without a sum
    (``einsum("bd,b->bd")``) all is multiplication.
    """
    m, n = (math.prod(side.sizes(side.free)) for side in (a, b))
    k = math.prod(a.sizes(a.contracted))
    if k > 1 and (m > 1 or n > 1):
        return None
    # Sums are of f32 terms, or of f64 ones, as those of the kernels are.
    inner = dtype if dtypes.is_integer(dtype) else jnp.promote_types(a.x.dtype, np.float32)
    batch, a_free, b_free = a.sizes(a.batch), a.sizes(a.free), b.sizes(b.free)
    terms = (*batch, *a_free, *b_free, k)
    if len(terms) > 8 or sum(size != 1 for size in terms) > MAX_RANK:
        return None
    first = tuple(range(len(batch)))
    factors = []
    for side, before in ((a, 0), (b, len(a_free))):
        own = tuple(len(batch) + before + i for i in range(len(side.free)))
        x = elementwise.convert(graph, side.x, inner, label)
        x = transpose(graph, x, (*side.batch, *side.free, *side.contracted), label)
        x = reshape(graph, x, (*batch, *side.sizes(side.free), k), label)
        dims = (*first, *own, len(terms) - 1)
        factors.append(graph.add("broadcast", (x,), terms, inner, label, dims=dims))
    product = graph.add("elementwise", factors, terms, inner, label, op="mul", aux=0)
    if k > 1:
        product = graph.add("reduce", (product,), terms[:-1], inner, label, op="sum")
    return elementwise.convert(graph, reshape(graph, product, terms[:-1], label), dtype, label)


def _where_it_lies(side: Side, row_by_row: bool = True) -> tuple[list[int], tuple[int, ...]] | None:
    """(order of the contracted dimensions, free dimensions to treat as batch) that fit its strides.

    None where there are none: then it takes a copy. With ``row_by_row`` gathered matrices stay
    apart (`_across_rows`).

    A weight [heads, in, head_dim] is one matrix [in, heads * head_dim] only as a copy; as it lies,
    it is a matrix for each head. What lies next to each other stays within the matrix.
    """
    order = list(range(len(side.contracted)))
    layout = views.strided(side.x)
    if layout is None:
        return order, ()
    across = _across_rows(side.x, layout) if row_by_row else set()
    if across & set(side.contracted):
        return None
    order.sort(key=lambda i: -abs(layout.strides[side.contracted[i]]))
    contracted = tuple(side.contracted[i] for i in order)
    k = math.prod(side.sizes(contracted))
    room = 2 - len(side.batch)
    far = [d for d in side.free if abs(layout.strides[d]) > 1]
    for count in range(room + 1):
        for apart in itertools.combinations(far, count):
            if not across & set(side.free) <= set(apart):
                continue
            rest = tuple(d for d in side.free if d not in apart)
            outer = (*side.batch, *apart)
            moved = ly.transpose(layout, (*outer, *contracted, *rest))
            shape = (*side.sizes(outer), k, math.prod(side.sizes(rest)))
            if ly.reshape(moved, shape) is not None:
                return order, apart
    return None


def _across_rows(x: Tensor, layout: ly.Layout) -> set[int]:
    """Dimensions of gathered matrices along which one follows the other.

    In memory they may be one matrix, but a product that reads them from their table takes each by
    itself.
    """
    base, _ = views.behind(x)
    if base.node.kind != "gather" or takes_whole_rows(base.node) is None:
        return set()
    row = math.prod(base.shape[1:])
    return {d for d, n in enumerate(x.shape) if n > 1 and abs(layout.strides[d]) >= row}


def _sum_of_rows(graph: Graph, a: Tensor, b: Tensor, dtype, label: str) -> Tensor:
    """a [b0, b1, M, K] times b [b0, b1, K, N], all terms of one sum in a row [b0, b1, M, N, K]."""
    b0, b1, m, k = a.shape
    n = b.shape[3]
    terms = (b0, b1, m, n, k)
    a = graph.add("broadcast", (a,), terms, dtype, label, dims=(0, 1, 2, 4))
    b = graph.add("broadcast", (b,), terms, dtype, label, dims=(0, 1, 4, 3))
    product = graph.add("elementwise", (a, b), terms, dtype, label, op="mul", aux=0)
    if k == 1:
        return reshape(graph, product, terms[:-1], label)
    return graph.add("reduce", (product,), terms[:-1], dtype, label, op="sum")


def _two_dimensions(batch: tuple[int, ...], *operands: Tensor) -> tuple[int, int]:
    """The batch dimensions as two, because their strides seldom merge to one (batch and head).

    Of the ways to do it the one that most operands allow where they lie; else the first of many
    stays apart from the rest.
    """
    ways = [(math.prod(batch[:i]), math.prod(batch[i:])) for i in range(1, len(batch))]
    if len(ways) < 2:
        return ways[0] if ways else (1, math.prod(batch))

    layouts = [(x.shape[len(batch) :], views.strided(x)) for x in operands]

    def allowed(way: tuple[int, int]) -> int:
        return sum(
            layout is not None and ly.reshape(layout, (*way, *inner)) is not None
            for inner, layout in layouts
        )

    return max(ways, key=allowed)


def _as_it_lies(graph: Graph, x: Tensor) -> Tensor:
    """``x``, or what lies in memory in a narrower float behind its conversion to f32."""
    node = x.node
    if x.is_view and node.kind != "bitcast":
        inner = node.inputs[0]
        narrow = _as_it_lies(graph, inner)
        if narrow is inner:
            return x
        return graph.add(node.kind, (narrow,), x.shape, narrow.dtype, node.label, **node.attrs)
    if node.kind != "elementwise" or node.attrs["op"] != "convert" or x.dtype != np.float32:
        return x
    source = node.inputs[0]
    base, _ = views.behind(source)
    return (
        source
        if dtypes.is_float(source.dtype) and source.dtype.itemsize == 2 and not base.is_virtual
        else x
    )
