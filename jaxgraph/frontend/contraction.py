"""``dot_general`` as a batched matrix product [b0, b1, M, K] x [b0, b1, K, N]."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgraph.frontend import elementwise
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.shaping import reshape, transpose
from jaxgraph.graph import dtypes, views
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


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the product, with views before and behind it."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    out = eqn.outputs[0].aval
    exact = dtypes.is_integer(out.dtype)
    wide = out.dtype if exact else jnp.promote_types(inputs[0].dtype, inputs[1].dtype)
    lhs, rhs = (elementwise.convert(graph, t, wide, label) for t in inputs)
    # The kernels widen what they read; a weight or a cache is not stored in a wider type first.
    if lhs.size > rhs.size:
        lhs = _as_it_lies(graph, lhs)
    else:
        rhs = _as_it_lies(graph, rhs)

    l_free = [d for d in range(len(lhs.shape)) if d not in (*lc, *lb)]
    r_free = [d for d in range(len(rhs.shape)) if d not in (*rc, *rb)]
    batch = tuple(lhs.shape[d] for d in lb)
    m_shape = tuple(lhs.shape[d] for d in l_free)
    n_shape = tuple(rhs.shape[d] for d in r_free)
    m, n = math.prod(m_shape), math.prod(n_shape)
    k = math.prod(lhs.shape[d] for d in lc)

    lhs = transpose(graph, lhs, (*lb, *l_free, *lc), label)
    rhs = transpose(graph, rhs, (*rb, *rc, *r_free), label)
    b0, b1 = _two_dimensions(batch, lhs, rhs)
    a = reshape(graph, lhs, (b0, b1, m, k), label)
    b = reshape(graph, rhs, (b0, b1, k, n), label)
    if exact:
        product = _sum_of_rows(graph, a, b, out.dtype, label)
    elif n < m:  # the kernels expect the weight, the larger side, on the right: (ab)^T = b^T a^T
        swap = (0, 1, 3, 2)
        a, b = transpose(graph, b, swap, label), transpose(graph, a, swap, label)
        product = graph.add("matmul", (a, b), (b0, b1, n, m), out.dtype, label)
        product = transpose(graph, product, swap, label)
    else:
        product = graph.add("matmul", (a, b), (b0, b1, m, n), out.dtype, label)
    return [reshape(graph, product, (*batch, *m_shape, *n_shape), label)]


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

    def allowed(way: tuple[int, int]) -> int:
        return sum(views.lies_as(x, (*way, *x.shape[len(batch) :])) for x in operands)

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
