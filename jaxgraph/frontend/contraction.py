"""``dot_general`` as a batched matrix product [b0, b1, M, K] x [b0, b1, K, N]."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgraph.frontend import elementwise
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.shaping import reshape, transpose
from jaxgraph.graph import dtypes, views
from jaxgraph.graph import layout as ly
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
    kinds = (lhs, rhs, eqn.outputs[0].aval.dtype)
    if all(dtypes.is_integer(t) for t in kinds):
        if _terms(eqn) > _MAX_INTEGER_TERMS:
            return "multiplies large matrices of integers"
    elif not all(dtypes.is_float(t) for t in kinds):
        return "multiplies matrices of booleans"
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
class _Side:
    """One operand, with its dimensions sorted into batch, contracted and free ones."""

    x: Tensor
    batch: tuple[int, ...]
    contracted: tuple[int, ...]

    @property
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
    exact = dtypes.is_integer(dtype)
    wide = dtype if exact else jnp.promote_types(inputs[0].dtype, inputs[1].dtype)
    lhs, rhs = (elementwise.convert(graph, t, wide, label) for t in inputs)
    swapped = lhs.size > rhs.size
    if swapped:
        few, many = _Side(rhs, rb, rc), _Side(_as_it_lies(graph, lhs), lb, lc)
    else:
        few, many = _Side(lhs, lb, lc), _Side(_as_it_lies(graph, rhs), rb, rc)
    order, apart = _where_it_lies(many)
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
    if exact:
        product = _sum_of_rows(graph, left, right, dtype, label)
    else:
        product = graph.add("matmul", (left, right), (b0, b1, m, n), dtype, label)

    product = reshape(graph, product, (*outer, *m_shape, *n_shape), label)
    number = {d: len(batch) + i for i, d in enumerate(apart)}
    number |= {d: len(outer) + len(m_shape) + i for i, d in enumerate(rest)}
    of_many = [number[d] for d in many.free]
    of_few = list(range(len(outer), len(outer) + len(m_shape)))
    free = of_many + of_few if swapped else of_few + of_many
    return [transpose(graph, product, (*range(len(batch)), *free), label)]


def _where_it_lies(side: _Side) -> tuple[list[int], tuple[int, ...]]:
    """(order of the contracted dimensions, free dimensions to treat as batch) that fit its strides.

    A weight [heads, in, head_dim] is one matrix [in, heads * head_dim] only as a copy; as it lies,
    it is a matrix for each head. What lies next to each other stays within the matrix.
    """
    order = list(range(len(side.contracted)))
    layout = views.strided(side.x)
    if layout is None:
        return order, ()
    order.sort(key=lambda i: -abs(layout.strides[side.contracted[i]]))
    contracted = tuple(side.contracted[i] for i in order)
    k = math.prod(side.sizes(contracted))
    room = 2 - len(side.batch)
    far = [d for d in side.free if abs(layout.strides[d]) > 1]
    for count in range(room + 1):
        for apart in itertools.combinations(far, count):
            rest = tuple(d for d in side.free if d not in apart)
            outer = (*side.batch, *apart)
            moved = ly.transpose(layout, (*outer, *contracted, *rest))
            shape = (*side.sizes(outer), k, math.prod(side.sizes(rest)))
            if ly.reshape(moved, shape) is not None:
                return order, apart
    return order, ()


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
    source = base = node.inputs[0]
    while base.is_view:
        base = base.node.inputs[0]
    return (
        source
        if dtypes.is_float(source.dtype) and source.dtype.itemsize == 2 and not base.is_virtual
        else x
    )
