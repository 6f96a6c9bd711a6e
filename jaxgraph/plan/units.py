"""Units: the launches of a split before they have addresses, and what each reads and writes."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np

from jaxgraph.graph.expression import opcodes
from jaxgraph.graph.ir import Node, Tensor
from jaxgraph.graph.layout import Layout, contiguous, slice_
from jaxgraph.passes.cluster import Fit
from jaxgraph.passes.visible import visible_bound

# Op in ffi/core/program.h.
VIEW, EXPR, ROW, MATMUL, GATHER, SET_ROWS, COPY, ATTENTION, SORT = range(9)
OP_NAMES = ("VIEW", "EXPR", "ROW", "MATMUL", "GATHER", "SET_ROWS", "COPY", "ATTENTION", "SORT")

_SORT_OUTS = 8  # SortParams::source
_ATTENTION_BYTES = 8  # AttentionParams

NO_BOUND = 0xFF  # AttentionParams::bound_source

# An attention's cache is shared by blocks that meet in memory from this size on; below, another
# launch costs more than it gains.
_LONG_CACHE = 4096  # positions
_LARGE_CACHE_BYTES = 16 << 20
_BLOCKS = 264
_QUERIES_AT_ONCE = 8  # kMmaHeads in ffi/kernels/cuda/attention_mma.cuh


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor in the storage of ``tensor``, seen as ``dtype`` and ``layout``."""

    tensor: Tensor
    dtype: np.dtype
    layout: Layout


@dataclasses.dataclass(eq=False)
class Unit:
    """One node of the program to be: operation, operands, and its place in the user's order."""

    op: int
    outs: list[Ref]
    srcs: list[Ref]
    params: bytes
    label: str
    position: int
    dest: Tensor | None = None  # SET_ROWS: the version that it overwrites or continues

    def reads(self) -> list[Tensor]:
        return list(dict.fromkeys(r.tensor for r in self.srcs))

    def writes(self) -> list[Tensor]:
        return list(dict.fromkeys(r.tensor for r in self.outs))


def of_fit(fit: Fit) -> Unit:
    """The EXPR or ROW unit of a fused kernel."""
    outs = [Ref(s.storage, s.value.dtype, p) for s, p in zip(fit.sinks, fit.places, strict=True)]
    srcs = [Ref(t, d, at) for t, d, at in fit.sources]
    last = max(fit.sinks, key=lambda s: s.value.id).value
    return Unit(ROW if fit.is_row else EXPR, outs, srcs, fit.program, _label(last), last.id)


def of_node(node: Node, layout_of) -> Unit:
    """The unit of a matmul, gather or set_rows node; ``layout_of`` as in the fuser."""

    def ref(tensor: Tensor) -> Ref:
        base, layout = layout_of(tensor)
        return Ref(base, tensor.dtype, layout)

    srcs = [ref(t) for t in node.inputs]
    out = ref(node.out)
    if node.kind == "matmul":
        return Unit(MATMUL, [out], srcs, b"", node.label, node.out.id)
    attrs = node.attrs
    if node.kind == "gather":
        params = _index_params(attrs["mode"], attrs["dims"], attrs["fill"])
        return Unit(GATHER, [out], srcs, params, node.label, node.out.id)
    assert node.kind == "set_rows", node.kind
    # Starts known at plan time narrow the destination; the kernel sees only what it may write.
    whole, rows = out.layout, srcs[1].layout
    starts, limits = [0] * len(whole.shape), list(whole.shape)
    for d, at in attrs["fixed"]:
        starts[d], limits[d] = at, at + rows.shape[d + 1]
    narrow = Ref(out.tensor, out.dtype, slice_(whole, starts, limits, None))
    dest = srcs[0].tensor
    srcs[0] = narrow
    params = _index_params(attrs["mode"], attrs["dims"], 0)
    return Unit(SET_ROWS, [narrow], srcs, params, node.label, node.out.id, dest)


def of_attention(node: Node, scores: Fit, layout_of) -> Unit:
    """The unit of an attention node; ``scores`` is the expression from raw score to masked."""

    def ref(tensor: Tensor) -> Ref:
        base, layout = layout_of(tensor)
        return Ref(base, tensor.dtype, layout)

    leaves = [(t, d, at) for t, d, at in scores.sources if t.node.kind != "scores"]
    raw = next(i for i, (t, _, _) in enumerate(scores.sources) if t.node.kind == "scores")
    srcs = [ref(t) for t in node.inputs[:3]] + [Ref(*leaf) for leaf in leaves]
    sinks = [ref(t) for t in node.inputs[4:]]
    bound = visible_bound(node.inputs[3], layout_of)
    bound_source = NO_BOUND
    for i, (tensor, _, layout) in enumerate(leaves, start=3):
        if bound is not None and tensor is bound[0] and layout.dims() == bound[1].dims():
            bound_source = i
    params = struct.pack("<BBB5x", raw, bound_source, len(srcs) if sinks else 0) + scores.program
    outs = [ref(node.out), *_workspace(node)]
    return Unit(ATTENTION, outs, srcs + sinks, params, node.label, node.out.id)


def _workspace(node: Node) -> list[Ref]:
    """Memory for what the blocks that share a long cache tell one another, if it is worth it.

    They are enough to fill a large GPU, two on each multiprocessor; each leaves, for up to 8
    queries, a row of sums and 4 floats more.
    """
    batch, heads, group, width = node.out.shape
    keys, values = node.inputs[1:3]
    length = values.shape[2]
    groups = batch * heads * -(-group // _QUERIES_AT_ONCE)
    if length < _LONG_CACHE or keys.nbytes + values.nbytes < _LARGE_CACHE_BYTES:
        return []
    if 2 * groups > _BLOCKS:  # there is no need to share
        return []
    floats = _BLOCKS * min(group, _QUERIES_AT_ONCE) * (width + 4)
    space = Workspace(node, (floats,))
    return [Ref(space, space.dtype, contiguous(space.shape))]


class Workspace(Tensor):
    """Stands for memory that one node uses and nobody reads."""

    __slots__ = ()

    def __init__(self, node: Node, shape: tuple[int, ...]):
        super().__init__(-(1 << 32) - node.out.id, shape, np.dtype(np.float32), node)


def of_sorts(nodes: Sequence[Node], layout_of) -> list[Unit]:
    """The units of the sort nodes: those that order the same rows in the same way are one."""

    def ref(tensor: Tensor) -> Ref:
        base, layout = layout_of(tensor)
        return Ref(base, tensor.dtype, layout)

    same: dict[tuple, list[Node]] = {}
    for node in nodes:
        attrs = node.attrs
        how = (attrs["order"], attrs["chunks"], attrs["merged"], node.out.shape)
        same.setdefault((*(t.id for t in node.inputs), how), []).append(node)
    units = []
    for group in same.values():
        for some in (group[i : i + _SORT_OUTS] for i in range(0, len(group), _SORT_OUTS)):
            first, attrs = some[0], some[0].attrs
            sources = [n.attrs["source"] for n in some]
            sources += [0] * (_SORT_OUTS - len(some))
            how = (attrs["chunks"], attrs["order"], attrs["merged"])
            params = struct.pack("<IBB2x8B", *how, *sources)
            outs, srcs = [ref(n.out) for n in some], [ref(t) for t in first.inputs]
            units.append(Unit(SORT, outs, srcs, params, first.label, first.out.id))
    return units


def copy(out: Ref, src: Ref, label: str, position: int) -> Unit:
    return Unit(COPY, [out], [src], b"", label, position)


def shape_free_params(unit: Unit) -> bytes:
    """Of a unit's parameters those that no shape enters: they stay when a batch grows."""
    if unit.op in (EXPR, ROW):
        return opcodes(unit.params)
    if unit.op == ATTENTION:
        return opcodes(unit.params[_ATTENTION_BYTES:])
    if unit.op == SORT:
        return unit.params[4:]  # behind the number of chunks
    return unit.params  # of GATHER and SET_ROWS: mode, dimensions, fill value; others have none


def _index_params(mode: int, dims: tuple[int, ...], fill: int) -> bytes:
    """``IndexParams`` of ffi/core/program.h."""
    return struct.pack("<BB6x8BQ", mode, len(dims), *dims, *[0] * (8 - len(dims)), fill)


def _label(tensor: Tensor) -> str:
    """The nearest label at or above ``tensor``: constants and views made on the way have none."""
    while not tensor.node.label and tensor.node.inputs:
        tensor = tensor.node.inputs[0]
    return tensor.node.label
