"""``dot_general`` as a batched matrix product [b0, b1, M, K] x [b0, b1, K, N]."""

from __future__ import annotations

import math

import numpy as np
from jax import lax

from jaxgraph.frontend import elementwise
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.shaping import reshape, transpose
from jaxgraph.graph import dtypes
from jaxgraph.graph.ir import Graph, Tensor


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    lhs, rhs = (v.aval.dtype for v in eqn.inputs)
    if not all(dtypes.is_float(t) for t in (lhs, rhs, eqn.outputs[0].aval.dtype)):
        return "multiplies matrices of integers"
    precision = eqn.params.get("precision")
    if precision is not None and not (
        isinstance(precision, lax.Precision)
        or (isinstance(precision, tuple) and all(isinstance(p, lax.Precision) for p in precision))
    ):
        return "asks for a dot algorithm of its own"
    return None


def rows(eqn: FlatEqn) -> int:
    """Rows of the product's smaller side: how often each weight is used (1 in batch-1 decode)."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in eqn.inputs)
    m = math.prod(n for d, n in enumerate(lhs) if d not in (*lc, *lb))
    n = math.prod(n for d, n in enumerate(rhs) if d not in (*rc, *rb))
    return min(m, n)


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the product, with views before and behind it."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    out = eqn.outputs[0].aval
    wide = np.promote_types(inputs[0].dtype, inputs[1].dtype)
    lhs, rhs = (elementwise.convert(graph, t, wide, label) for t in inputs)

    l_free = [d for d in range(len(lhs.shape)) if d not in (*lc, *lb)]
    r_free = [d for d in range(len(rhs.shape)) if d not in (*rc, *rb)]
    batch = tuple(lhs.shape[d] for d in lb)
    m_shape = tuple(lhs.shape[d] for d in l_free)
    n_shape = tuple(rhs.shape[d] for d in r_free)
    m, n = math.prod(m_shape), math.prod(n_shape)
    k = math.prod(lhs.shape[d] for d in lc)

    # Two batch dimensions stay apart, because their strides seldom merge (batch and head).
    b0, b1 = (math.prod(batch[:-1]), batch[-1]) if batch else (1, 1)
    a = reshape(graph, transpose(graph, lhs, (*lb, *l_free, *lc), label), (b0, b1, m, k), label)
    b = reshape(graph, transpose(graph, rhs, (*rb, *rc, *r_free), label), (b0, b1, k, n), label)
    if n < m:  # the kernels expect the weight, the larger side, on the right: (ab)^T = b^T a^T
        swap = (0, 1, 3, 2)
        a, b = transpose(graph, b, swap, label), transpose(graph, a, swap, label)
        product = graph.add("matmul", (a, b), (b0, b1, n, m), out.dtype, label)
        product = transpose(graph, product, swap, label)
    else:
        product = graph.add("matmul", (a, b), (b0, b1, m, n), out.dtype, label)
    return [reshape(graph, product, (*batch, *m_shape, *n_shape), label)]
