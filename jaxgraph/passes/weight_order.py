"""In which order of dimensions a packed weight lies best: the contracted ones last.

A product of one row reads a weight fastest along the contracted dimensions, whole columns of the
product one after the other ([out, in]); JAX users mostly write [in, out].
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from jaxgraph.frontend import contraction
from jaxgraph.frontend.flatten import FlatEqn, FlatStep, Value
from jaxgraph.graph import dtypes

# The kernels read 16 bytes at once.
_MULTIPLE = 8

_Readers = dict[int, list[FlatEqn]]


def weight_orders(step: FlatStep) -> list[tuple[int, ...] | None]:
    """For each input of a step the order of dimensions in which it should lie; None: as it is.

    Only inputs in bf16 or f16 that nothing but products of a single row read, directly, turned or
    slice by slice, and all in the same way, are asked to lie otherwise than row-major.
    """
    readers: _Readers = defaultdict(list)
    for eqn in step.eqns:
        for value in {id(v): v for v in eqn.inputs}.values():
            readers[id(value)].append(eqn)
    results = {id(v) for v in step.outputs}
    return [_order(v, readers, results) for v in step.inputs]


def _order(value: Value, readers: _Readers, results: set[int]) -> tuple[int, ...] | None:
    rank = len(value.aval.shape)
    if rank < 2 or not dtypes.is_native(value.aval.dtype):
        return None
    if dtypes.code_of(value.aval.dtype) not in (dtypes.BF16, dtypes.F16):
        return None
    wanted = set(_wanted(value, tuple(range(rank)), rank, readers, results))
    if len(wanted) != 1:
        return None
    (order,) = wanted
    return None if order == tuple(range(rank)) else order


def _wanted(
    value: Value, dims: Sequence[int], rank: int, readers: _Readers, results: set[int]
) -> Iterator[tuple[int, ...] | None]:
    """What each reader asks for, of an input of which dimension d of `value` is dims[d]."""
    if id(value) in results:
        yield None
    for eqn in readers[id(value)]:
        name = eqn.primitive.name
        if name in ("slice", "split", "squeeze"):
            gone = eqn.params["dimensions"] if name == "squeeze" else ()
            left = [dim for d, dim in enumerate(dims) if d not in gone]
            for out in eqn.outputs:
                yield from _wanted(out, left, rank, readers, results)
        elif name == "transpose":
            turned = [dims[d] for d in eqn.params["permutation"]]
            yield from _wanted(eqn.outputs[0], turned, rank, readers, results)
        elif name == "dot_general":
            yield _of_product(eqn, value, dims, rank)
        else:
            yield None


def _of_product(
    eqn: FlatEqn, value: Value, dims: Sequence[int], rank: int
) -> tuple[int, ...] | None:
    contracted, batch = (
        sides[0 if eqn.inputs[0] is value else 1] for sides in eqn.params["dimension_numbers"]
    )
    terms = math.prod(value.aval.shape[d] for d in contracted)
    if eqn.inputs[0] is eqn.inputs[1] or batch or contraction.rows(eqn) != 1 or terms % _MULTIPLE:
        return None
    last = sorted(dims[d] for d in contracted)
    free = sorted(dim for d, dim in enumerate(dims) if d not in contracted)
    outer = [d for d in range(rank) if d not in dims]
    return (*outer, *free, *last)
