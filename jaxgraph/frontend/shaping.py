"""Primitives that only look at data in another way, put pieces together, or reduce an axis."""

from __future__ import annotations

import math

import numpy as np

from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.graph import dtypes, views
from jaxgraph.graph.ir import Graph, Tensor

VIEWS = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "transpose",
        "slice",
        "rev",
        "split",
        "bitcast_convert_type",
        "iota",
        "concatenate",
        "stack",
        "unstack",
        "tile",
        "pad",
    }
)
_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
}
REDUCTIONS = frozenset(_REDUCTIONS)


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    name = eqn.primitive.name
    if name == "reshape" and eqn.params.get("dimensions") is not None:
        return "reshapes in an order of dimensions of its own"
    if name == "pad" and any(
        max(0, -low) + max(0, -high) >= (n - 1) * (gap + 1) + 1
        for n, (low, high, gap) in zip(
            eqn.inputs[0].aval.shape, eqn.params["padding_config"], strict=True
        )
    ):
        return "pads away a whole axis"
    if name == "tile" and 2 * len(eqn.params["reps"]) > 8:
        return "tiles an array of more than 4 dimensions"
    if name in ("stack", "pad") and len(eqn.outputs[0].aval.shape) > 7:
        return "puts together an array of more than 7 dimensions"
    if name == "bitcast_convert_type" and np.bool_ in (
        eqn.inputs[0].aval.dtype,
        eqn.outputs[0].aval.dtype,
    ):
        return "reinterprets booleans"
    if name in ("argmax", "argmin") and len(eqn.params["axes"]) != 1:
        return "takes an argmax over several axes"
    return None


def lower_view(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the view (or iota, or concatenation) and returns its outputs."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outputs[0].aval
    if name == "iota":
        dim = params["dimension"]
        line = graph.add("iota", (), (out.shape[dim],), out.dtype, label)
        return [graph.add("broadcast", (line,), out.shape, out.dtype, label, dims=(dim,))]
    if name == "concatenate":
        pieces = [t for t in inputs if t.size]
        return [concatenate(graph, pieces, params["dimension"], label)]
    if name == "stack":
        axis = params["axis"]
        thin = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
        return [concatenate(graph, [reshape(graph, t, thin, label) for t in inputs], axis, label)]
    if name == "pad":
        return [_pad(graph, *inputs, params["padding_config"], label)]
    (x,) = inputs
    if name == "unstack":
        axis = params["axis"]
        thin = [take(graph, x, axis, i, 1, label) for i in range(x.shape[axis])]
        return [reshape(graph, t, out.shape, label) for t in thin]
    if name == "tile":
        reps = tuple(params["reps"])
        apart = tuple(n for pair in zip(reps, x.shape, strict=True) for n in pair)
        places = tuple(range(1, 2 * len(reps), 2))
        wide = graph.add("broadcast", (x,), apart, x.dtype, label, dims=places)
        return [reshape(graph, wide, out.shape, label)]
    if name == "split":
        pieces, start = [], 0
        for size in params["sizes"]:
            pieces.append(take(graph, x, params["axis"], start, int(size), label))
            start += int(size)
        return pieces
    if name in ("reshape", "squeeze", "expand_dims"):
        return [reshape(graph, x, out.shape, label)]
    if name == "broadcast_in_dim":
        dims = tuple(params["broadcast_dimensions"])
        return [graph.add("broadcast", (x,), out.shape, out.dtype, label, dims=dims)]
    if name == "transpose":
        return [transpose(graph, x, params["permutation"], label)]
    if name == "slice":
        steps = params["strides"]
        return [
            graph.add(
                "slice",
                (x,),
                out.shape,
                out.dtype,
                label,
                starts=tuple(params["start_indices"]),
                limits=tuple(params["limit_indices"]),
                steps=tuple(steps) if steps is not None else None,
            )
        ]
    if name == "rev":
        dims = tuple(params["dimensions"])
        return [graph.add("rev", (x,), out.shape, out.dtype, label, dims=dims)]
    return [bitcast(graph, x, out.shape, out.dtype, label)]


def lower_reduction(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends a reduction over the last axis, after views that bring the reduced axes there."""
    (x,) = inputs
    out = eqn.outputs[0].aval
    axes = tuple(a % len(x.shape) for a in eqn.params["axes"])
    if not axes:
        return [x]
    kept = [d for d in range(len(x.shape)) if d not in axes]
    rows = tuple(x.shape[d] for d in kept)
    moved = transpose(graph, x, (*kept, *axes), label)
    flat = reshape(graph, moved, (*rows, math.prod(x.shape[a] for a in axes)), label)
    op = _REDUCTIONS[eqn.primitive.name]
    if flat.shape[-1] == 1:  # nothing to reduce; the passes count on rows longer than one
        if op.startswith("arg"):
            zero = graph.add("const", (), (), out.dtype, label, value=0)
            return [graph.add("broadcast", (zero,), out.shape, out.dtype, label, dims=())]
        return [reshape(graph, x, out.shape, label)]
    reduced = graph.add("reduce", (flat,), rows, out.dtype, label, op=op)
    return [reshape(graph, reduced, out.shape, label)]


def _pad(graph: Graph, x: Tensor, fill: Tensor, config, label: str) -> Tensor:
    """Edges and gaps are concatenated; a negative edge is cut off."""

    def filled(shape) -> Tensor:
        return graph.add("broadcast", (fill,), shape, x.dtype, label, dims=())

    for axis, (low, high, interior) in enumerate(config):
        n = x.shape[axis]
        if interior and n > 1:
            before, behind = x.shape[:axis], x.shape[axis + 1 :]
            cell = reshape(graph, x, (*before, n, 1, *behind), label)
            gap = filled((*before, n, interior, *behind))
            spread = concatenate(graph, [cell, gap], axis + 1, label)
            x = reshape(graph, spread, (*before, n * (interior + 1), *behind), label)
            n = n * (interior + 1) - interior
            x = take(graph, x, axis, 0, n, label)
        start, stop = max(0, -low), n - max(0, -high)
        x = take(graph, x, axis, start, stop - start, label)
        edge = list(x.shape)
        pieces = []
        for size, piece in ((low, None), (0, x), (high, None)):
            if piece is None and size > 0:
                edge[axis] = size
                piece = filled(tuple(edge))
            if piece is not None:
                pieces.append(piece)
        x = concatenate(graph, pieces, axis, label)
    return x


def concatenate(graph: Graph, pieces: list[Tensor], axis: int, label: str) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces[0].shape)
    shape[axis] = sum(t.shape[axis] for t in pieces)
    return graph.add("concat", pieces, shape, pieces[0].dtype, label, axis=axis)


def bitcast(graph: Graph, x: Tensor, shape, dtype, label: str) -> Tensor:
    """The bits of ``x`` as another type: what lies in memory is read so, another value made so."""
    if x.dtype == np.dtype(dtype):
        return x
    base, _ = views.behind(x)
    if base.is_virtual and x.dtype.itemsize == np.dtype(dtype).itemsize:
        aux = dtypes.code_of(x.dtype)
        return graph.add("elementwise", (x,), x.shape, dtype, label, op="bitcast", aux=aux)
    return graph.add("bitcast", (x,), shape, dtype, label)


def reshape(graph: Graph, x: Tensor, shape, label: str) -> Tensor:
    shape = tuple(int(n) for n in shape)
    return x if shape == x.shape else graph.add("reshape", (x,), shape, x.dtype, label)


def broadcast_last(graph: Graph, x: Tensor, shape, label: str) -> Tensor:
    """One value of ``x``, in order, for each row of ``shape``: repeated along its last axis."""
    rows = tuple(int(n) for n in shape[:-1])
    dims = tuple(range(len(rows)))
    x = reshape(graph, x, rows, label)
    return graph.add("broadcast", (x,), shape, x.dtype, label, dims=dims)


def transpose(graph: Graph, x: Tensor, permutation, label: str) -> Tensor:
    permutation = tuple(int(p) for p in permutation)
    if permutation == tuple(range(len(x.shape))):
        return x
    shape = tuple(x.shape[p] for p in permutation)
    return graph.add("transpose", (x,), shape, x.dtype, label, permutation=permutation)


def take(graph: Graph, x: Tensor, axis: int, start: int, size: int, label: str) -> Tensor:
    """``x[start:start + size]`` along ``axis``, as a view."""
    if start == 0 and size == x.shape[axis]:
        return x
    starts = tuple(start if d == axis else 0 for d in range(len(x.shape)))
    limits = tuple(start + size if d == axis else n for d, n in enumerate(x.shape))
    shape = tuple(hi - lo for lo, hi in zip(starts, limits, strict=True))
    return graph.add("slice", (x,), shape, x.dtype, label, starts=starts, limits=limits, steps=None)
