"""gather, scatter, dynamic_slice and dynamic_update_slice as slices at starts read on the device.

Both node kinds know one form: ``n`` slices of the operand's rank, whose starts are given for some
dimensions by index vectors of length ``n`` (``IndexParams`` in ``ffi/core/program.h``).
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax

from jaxgraph.frontend.elementwise import Builder, convert
from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.frontend.shaping import reshape, take, transpose
from jaxgraph.graph import dtypes, expression
from jaxgraph.graph.ir import Graph, Node, Tensor

# What a scatter does with the old value, by primitive: an instruction of ffi/core/expr.h.
_COMBINE = {
    "scatter-add": "add",
    "scatter-sub": "sub",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}
NAMES = frozenset({"gather", "scatter", "dynamic_slice", "dynamic_update_slice", *_COMBINE})
CLIP, FILL_OR_DROP, PROMISE_IN_BOUNDS = range(3)
_MAX_RANK = 7  # the slices have one dimension more, and a tensor has at most eight
# Updates that may meet are added up element by element: so many terms for all of them.
_MAX_MEETING = 1 << 20

_MODES = {
    lax.GatherScatterMode.CLIP: CLIP,
    lax.GatherScatterMode.FILL_OR_DROP: FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS: PROMISE_IN_BOUNDS,
}


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    if len(eqn.inputs[0].aval.shape) > _MAX_RANK:
        return f"indexes an array of more than {_MAX_RANK} dimensions"
    mode = eqn.params.get("mode")
    if mode is not None and lax.GatherScatterMode.from_any(mode) not in _MODES:
        return f"has an index mode without a native form ({mode})"
    if eqn.primitive.name in _COMBINE and not (_touches_each_once(eqn) or _can_meet(eqn)):
        return "may combine several updates of one element"
    if eqn.primitive.name in ("gather", "scatter", *_COMBINE):
        indices = eqn.inputs[1].aval
        if not dtypes.is_integer(indices.dtype) or indices.shape[-1] > 8:
            return "indexes in a form without a native kernel"
    return None


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the nodes of an indexing equation and returns its output."""
    return [_LOWER[eqn.primitive.name](graph, eqn, inputs, label)]


def _dynamic_slice(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> Tensor:
    x, *starts = inputs
    sizes = eqn.params["slice_sizes"]
    x, dims, indices, _ = _dynamic_starts(graph, eqn, x, starts, sizes, 1, label, narrow=True)
    if not dims:
        return x
    rows = graph.add(
        "gather", (x, *indices), (1, *sizes), x.dtype, label, mode=CLIP, dims=dims, fill=0
    )
    return reshape(graph, rows, sizes, label)


def _dynamic_update_slice(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> Tensor:
    x, update, *starts = inputs
    _, dims, indices, fixed = _dynamic_starts(
        graph, eqn, x, starts, update.shape, 2, label, narrow=False
    )
    rows = reshape(graph, update, (1, *update.shape), label)
    return graph.add(
        "set_rows", (x, rows, *indices), x.shape, x.dtype, label, mode=CLIP, dims=dims, fixed=fixed
    )


def _dynamic_starts(graph, eqn, x, starts, sizes, first_start, label, narrow):
    """Sorts the starts into those read on the device and those known now.

    Returns (x, dims, indices, fixed): the dimensions whose start comes from ``indices``, and
    ``fixed``, pairs (dimension, start) of known ones. With ``narrow`` x is sliced by the latter.
    """
    dims, indices, fixed = [], [], []
    for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        room = x.shape[d] - size
        if room == 0:  # clamped to zero, whatever it is
            continue
        known = eqn.inputs[first_start + d].known
        if known is None:
            dims.append(d)
            indices.append(reshape(graph, start, (1,), label))
            continue
        at = min(max(int(known), 0), room)
        fixed.append((d, at))
    if narrow:
        for d, at in fixed:
            x = take(graph, x, d, at, sizes[d], label)
    return x, tuple(dims), indices, tuple(fixed)


def _gather(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> Tensor:
    x, indices = inputs
    dn, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    batching = tuple(dn.operand_batching_dims)
    batch_shape, dims, columns = _index_columns(
        graph, indices, dn.start_index_map, batching, dn.start_indices_batching_dims, label
    )
    mode = _MODES[lax.GatherScatterMode.from_any(eqn.params["mode"])]
    fill = dtypes.storage_bits(_fill_value(eqn.params["fill_value"], x.dtype), x.dtype)
    n = math.prod(batch_shape)
    rows = graph.add(
        "gather", (x, *columns), (n, *sizes), x.dtype, label, mode=mode, dims=dims, fill=fill
    )
    gone = (*dn.collapsed_slice_dims, *batching)
    window = tuple(s for d, s in enumerate(sizes) if d not in gone)
    rows = reshape(graph, rows, (*batch_shape, *window), label)
    # The batch dimensions fill the places that offset_dims leaves, in order.
    rank = len(batch_shape) + len(window)
    batch_places = [d for d in range(rank) if d not in dn.offset_dims]
    order = [0] * rank
    for source, place in enumerate([*batch_places, *dn.offset_dims]):
        order[place] = source
    return transpose(graph, rows, order, label)


def _scatter(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> Tensor:
    x, indices, updates = inputs
    dn = eqn.params["dimension_numbers"]
    batching = tuple(dn.operand_batching_dims)
    batch_shape, dims, columns = _index_columns(
        graph,
        indices,
        dn.scatter_dims_to_operand_dims,
        batching,
        dn.scatter_indices_batching_dims,
        label,
    )
    batch_places = [d for d in range(len(updates.shape)) if d not in dn.update_window_dims]
    moved = transpose(graph, updates, (*batch_places, *dn.update_window_dims), label)
    gone = (*dn.inserted_window_dims, *batching)
    window = iter(updates.shape[d] for d in dn.update_window_dims)
    sizes = tuple(1 if d in gone else next(window) for d in range(len(x.shape)))
    rows = reshape(graph, moved, (math.prod(batch_shape), *sizes), label)
    mode = _MODES[lax.GatherScatterMode.from_any(eqn.params["mode"])]
    if eqn.primitive.name in _COMBINE and not _touches_each_once(eqn):
        return _with_all_updates(graph, x, rows, columns, dims, mode, label)
    if eqn.primitive.name in _COMBINE:
        op = _COMBINE[eqn.primitive.name]
        old = graph.add(
            "gather", (x, *columns), rows.shape, x.dtype, label, mode=mode, dims=dims, fill=0
        )
        rows = graph.add("elementwise", (old, rows), rows.shape, x.dtype, label, op=op, aux=0)
    return graph.add(
        "set_rows", (x, rows, *columns), x.shape, x.dtype, label, mode=mode, dims=dims, fixed=()
    )


def _with_all_updates(
    graph: Graph,
    x: Tensor,
    rows: Tensor,
    columns: list[Tensor],
    dims: tuple[int, ...],
    mode: int,
    label: str,
) -> Tensor:
    """``x`` plus the sum of the rows that hit each element; the old value where none does."""
    n = rows.shape[0]
    shape = (*x.shape, n)
    hit = None
    for d, column in zip(dims, columns, strict=True):
        if column.dtype.itemsize < 4:
            column = convert(graph, column, np.int32, label)
        if mode == CLIP:
            op = Builder(graph, column, column.dtype, label)
            column = op("min", op("max", column, 0), x.shape[d] - 1)
        place = graph.add("iota", (), (x.shape[d],), np.int32, label)
        place = convert(graph, place, column.dtype, label)
        place, column = (
            graph.add("broadcast", (t,), shape, column.dtype, label, dims=(at,))
            for t, at in ((place, d), (column, len(x.shape)))
        )
        op = Builder(graph, place, column.dtype, label)
        here = op.test("eq", place, column)
        hit = here if hit is None else op.test("and", hit, here)
    assert hit is not None
    wide = np.promote_types(x.dtype, np.float32) if dtypes.is_float(x.dtype) else x.dtype
    rows = transpose(graph, convert(graph, rows, wide, label), (*range(1, len(shape)), 0), label)
    rows = graph.add("broadcast", (rows,), shape, wide, label, dims=tuple(range(len(shape))))
    kept = Builder(graph, rows, wide, label).choose(hit, rows, 0)
    total = graph.add("reduce", (kept,), x.shape, wide, label, op="sum")
    is_hit = graph.add("reduce", (hit,), x.shape, np.bool_, label, op="or")
    total = Builder(graph, x, wide, label)("add", convert(graph, x, wide, label), total)
    total = convert(graph, total, x.dtype, label)
    return Builder(graph, x, x.dtype, label).choose(is_hit, total, x)


def takes_whole_rows(gather: Node) -> tuple[int, int] | None:
    """Of a gather node that takes ``x[i]`` for each index, along any one dimension of the array.

    Returns (the dimension, which of the indices it is), None where it takes something else.
    """
    whole, sizes = gather.inputs[0].shape, gather.out.shape[1:]
    at = [
        (d, column)
        for column, d in enumerate(gather.attrs["dims"])
        # Where the slice has the whole dimension, a start is clamped to zero.
        if gather.attrs["mode"] == FILL_OR_DROP or sizes[d] < whole[d]
    ]
    if len(at) != 1:
        return None
    ((d, column),) = at
    rest_is_whole = all(n == m for i, (n, m) in enumerate(zip(sizes, whole, strict=True)) if i != d)
    return (d, column) if sizes[d] == 1 and rest_is_whole else None


def _touches_each_once(eqn: FlatEqn) -> bool:
    """Is it known that no element gets two updates, so that read, combine and write will do?"""
    dn = eqn.params["dimension_numbers"]
    indices = eqn.inputs[1].aval.shape[:-1]
    rows = math.prod(n for d, n in enumerate(indices) if d not in dn.scatter_indices_batching_dims)
    return rows == 1 or eqn.params["unique_indices"]


def _can_meet(eqn: FlatEqn) -> bool:
    """Are they few updates of single elements or whole rows, that are added?"""
    x, indices, updates = (v.aval for v in eqn.inputs)
    dn = eqn.params["dimension_numbers"]
    indexed = {*dn.scatter_dims_to_operand_dims, *dn.operand_batching_dims}
    gone = {*dn.inserted_window_dims, *dn.operand_batching_dims}
    window = tuple(n for d, n in enumerate(x.shape) if d not in gone)
    n = math.prod(indices.shape[:-1])
    return (
        eqn.primitive.name == "scatter-add"
        and x.dtype != np.bool_
        and indexed == gone
        and tuple(updates.shape[d] for d in dn.update_window_dims) == window
        and x.size * n <= _MAX_MEETING
        and sum(size != 1 for size in (*x.shape, n)) <= expression.MAX_RANK
    )


def _index_columns(graph, indices, index_map, operand_batching, index_batching, label):
    """(batch shape, operand dimensions, one index vector [n] for each of them)."""
    batch_shape = indices.shape[:-1]
    n = math.prod(batch_shape)
    columns = []
    for c in range(indices.shape[-1]):
        column = take(graph, indices, len(batch_shape), c, 1, label)
        columns.append(reshape(graph, column, (n,), label))
    for d in index_batching:
        line = graph.add("iota", (), (batch_shape[d],), np.int32, label)
        line = graph.add("broadcast", (line,), batch_shape, np.int32, label, dims=(d,))
        columns.append(reshape(graph, line, (n,), label))
    return batch_shape, (*index_map, *operand_batching), columns


def _fill_value(value, dtype: np.dtype):
    """What FILL_OR_DROP gives outside; the defaults are those that ``lax.gather`` documents."""
    if value is not None:
        return value
    if dtypes.is_float(dtype):
        return np.nan
    if dtype == np.bool_:
        return True
    info = np.iinfo(dtype)
    return info.min if info.min < 0 else info.max


_LOWER = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    **dict.fromkeys(_COMBINE, _scatter),
}
