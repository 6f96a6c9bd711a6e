"""``ragged_dot``: rows in order of their groups, each times the matrix of its group.

Few rows, as experts see them in a decode step, are products by an index: none reads a matrix that
no row asks for.
"""

from __future__ import annotations

import numpy as np

from jaxgraph.frontend import contraction, ordering
from jaxgraph.frontend.elementwise import Builder, convert
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.indexing import CLIP
from jaxgraph.frontend.shaping import reshape
from jaxgraph.graph import dtypes
from jaxgraph.graph.ir import Graph, Tensor

NAMES = frozenset({"ragged_dot_general"})


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    if len(eqn.inputs) != 3 or eqn.params.get("group_offset") is not None:
        return "has groups that do not begin with the first row"
    rows, table, _ = (v.aval for v in eqn.inputs)
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = dims.dot_dimension_numbers
    ragged, group = tuple(dims.lhs_ragged_dimensions), tuple(dims.rhs_group_dimensions)
    simple = (len(rows.shape), len(table.shape), *lb, *rb) == (2, 3)
    if not simple or (ragged, group, tuple(lc)) != ((0,), (0,), (1,)):
        return "is no product of rows by a matrix for each group of them"
    if rows.dtype != table.dtype or not dtypes.is_float(rows.dtype):
        return f"multiplies {rows.dtype} by {table.dtype} in groups"
    if rows.shape[0] > table.shape[0]:
        return f"multiplies {rows.shape[0]} rows by {table.shape[0]} matrices"
    return contraction.why_not_so_precise(eqn)


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the product and what finds each row's group; rows of no group are zero."""
    rows, table, sizes = inputs
    out = eqn.outputs[0].aval
    m, groups = rows.shape[0], table.shape[0]
    (_, (contracted,)), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    group = _groups_before(graph, m, convert(graph, sizes, np.int32, label), label)
    op = Builder(graph, group, np.int32, label)
    last = op.number(groups - 1)
    gathered = graph.add(
        "gather",
        (table, op("min", group, last)),
        (m, 1, *table.shape[1:]),
        table.dtype,
        label,
        mode=CLIP,
        dims=(0,),
        fill=0,
    )
    matrices = reshape(graph, gathered, (m, *table.shape[1:]), label)
    left = contraction.Side(rows, batch=(0,), contracted=(1,))
    right = contraction.Side(matrices, batch=(0,), contracted=(contracted,))
    product = contraction.multiply(graph, left, right, out.dtype, label)
    none = op.test("gt", group, last)
    none = graph.add("broadcast", (none,), out.shape, np.bool_, label, dims=(0,))
    return [Builder(graph, product, out.dtype, label).choose(none, 0, product)]


def _groups_before(graph: Graph, m: int, sizes: Tensor, label: str) -> Tensor:
    """For each of ``m`` rows how many groups end before it."""
    shape = (m, *sizes.shape)
    ends = ordering.running_sums(graph, sizes, label)
    ends = graph.add("broadcast", (ends,), shape, np.int32, label, dims=(1,))
    row = graph.add("iota", (), (m,), np.int32, label)
    row = graph.add("broadcast", (row,), shape, np.int32, label, dims=(0,))
    ended = Builder(graph, ends, np.int32, label).test("le", ends, row)
    ended = convert(graph, ended, np.int32, label)
    if sizes.shape[0] == 1:  # nothing to reduce; the passes count on rows longer than one
        return reshape(graph, ended, (m,), label)
    return graph.add("reduce", (ended,), (m,), np.int32, label, op="sum")
