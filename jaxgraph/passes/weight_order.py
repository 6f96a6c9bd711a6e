"""In which order of dimensions a packed weight lies best: the contracted ones last.

A product of one row reads a weight fastest along the contracted dimensions, whole columns of the
product one after the other ([out, in]); JAX users mostly write [in, out].
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from jaxgraph.frontend import contraction
from jaxgraph.frontend.flatten import FlatEqn, FlatStep, Value
from jaxgraph.graph import dtypes

# The kernels read 16 bytes at once.
_MULTIPLE = 8

# Only small weights are laid otherwise. Measured on an H200 in whole steps of one row: steps whose
# largest product reads 1.8 MB are 12 % faster for it, with 34 MB 2 % slower, with 1 GB 9 % slower.
_MOST_BYTES = 8 << 20

_Readers = dict[int, list[FlatEqn]]


def weight_orders(step: FlatStep) -> list[tuple[int, ...] | None]:
    """For each input of a step the order of dimensions in which it should lie; None: as it is.

    Only inputs in bf16 or f16 that nothing but products of a single row read, directly, turned or
    slice by slice, and all in the same way, are asked to lie otherwise than row-major. If the
    largest of them is too large for that, none is: products of the same row are one kernel only
    where their weights lie alike.
    """
    readers: _Readers = defaultdict(list)
    for eqn in step.eqns:
        for value in {id(v): v for v in eqn.inputs}.values():
            readers[id(value)].append(eqn)
    results = {id(v) for v in step.outputs}
    wishes = [_wish(v, readers, results) for v in step.inputs]
    largest = max((wish.nbytes for wish in wishes if wish is not None), default=0)
    if largest > _MOST_BYTES:
        return [None] * len(wishes)
    return [None if wish is None else wish.order for wish in wishes]


@dataclasses.dataclass(frozen=True)
class _Wish:
    """In which order of dimensions a weight should lie, and what the product reads of it."""

    order: tuple[int, ...]
    nbytes: int


def _wish(value: Value, readers: _Readers, results: set[int]) -> _Wish | None:
    """What all readers of an input ask for; None: nothing, or not the same."""
    rank = len(value.aval.shape)
    if rank < 2 or not dtypes.is_native(value.aval.dtype):
        return None
    if dtypes.code_of(value.aval.dtype) not in (dtypes.BF16, dtypes.F16):
        return None
    wishes = list(_wishes(value, tuple(range(rank)), rank, readers, results))
    if not wishes or None in wishes or len({wish.order for wish in wishes}) != 1:
        return None
    widest = max(wishes, key=lambda wish: wish.nbytes)
    return None if widest.order == tuple(range(rank)) else widest


def _wishes(
    value: Value, dims: Sequence[int], rank: int, readers: _Readers, results: set[int]
) -> Iterator[_Wish | None]:
    """What each reader asks for, of an input of which dimension d of `value` is dims[d]."""
    if id(value) in results:
        yield None
    for eqn in readers[id(value)]:
        name = eqn.primitive.name
        if name in ("slice", "split", "squeeze"):
            gone = eqn.params["dimensions"] if name == "squeeze" else ()
            left = [dim for d, dim in enumerate(dims) if d not in gone]
            for out in eqn.outputs:
                yield from _wishes(out, left, rank, readers, results)
        elif name == "transpose":
            turned = [dims[d] for d in eqn.params["permutation"]]
            yield from _wishes(eqn.outputs[0], turned, rank, readers, results)
        elif name == "dot_general":
            yield _of_product(eqn, value, dims, rank)
        else:
            yield None


def _of_product(eqn: FlatEqn, value: Value, dims: Sequence[int], rank: int) -> _Wish | None:
    contracted, batch = (
        sides[0 if eqn.inputs[0] is value else 1] for sides in eqn.params["dimension_numbers"]
    )
    terms = math.prod(value.aval.shape[d] for d in contracted)
    if eqn.inputs[0] is eqn.inputs[1] or batch or contraction.rows(eqn) != 1 or terms % _MULTIPLE:
        return None
    last = sorted(dims[d] for d in contracted)
    free = sorted(dim for d, dim in enumerate(dims) if d not in contracted)
    outer = [d for d in range(rank) if d not in dims]
    nbytes = value.aval.size * value.aval.dtype.itemsize
    return _Wish((*outer, *free, *last), nbytes)
