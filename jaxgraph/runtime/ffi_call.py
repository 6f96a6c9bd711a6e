"""A native split, or a kernel by itself, as one XLA FFI call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxgraph.runtime import native


class NativeSplit(Protocol):
    """What a call needs to know of a planned split."""

    @property
    def program(self) -> bytes:
        """The encoded program."""

    @property
    def result_avals(self) -> Sequence[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the results, in the order of the program's result bases."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of intermediates."""

    @property
    def aliases(self) -> Mapping[int, int]:
        """Operand index -> index of the result that is written in its place."""


def native_call(split: NativeSplit, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs a split on its operands (in the order of its operand bases); traceable.

    The program travels as bytes: an executable outlives the process, a handle would not.
    """
    return _call(native.EXECUTE, split, operands, split.result_avals)


def kernel_call(split: NativeSplit, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Launches a split's kernels by themselves, without an executor; traceable.

    Scratch memory is one more result, which XLA allocates like any other.
    """
    scratch = jax.ShapeDtypeStruct((max(split.arena_bytes, 1),), np.uint8)
    return _call(native.LAUNCH, split, operands, [*split.result_avals, scratch])[:-1]


def _call(
    target: str,
    split: NativeSplit,
    operands: Sequence[jax.Array],
    result_avals: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    operands, kind = _alike_in_shard_map(operands)
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(r.shape, r.dtype, **kind) for r in result_avals],
        vmap_method="sequential",
        input_output_aliases=dict(split.aliases),
    )
    return list(call(*operands, program=np.frombuffer(split.program, dtype=np.uint8)))


# JAX 0.9 says in `vma` which manual mesh axes an array varies over, later ones elsewhere.
_MANUAL = "manual_axis_type" if hasattr(jax.core.ShapedArray, "manual_axis_type") else "vma"


def _varying(x: jax.Array) -> frozenset[Any]:
    """The axes of an enclosing shard_map over which a value differs from device to device."""
    kind = getattr(jax.typeof(x), _MANUAL)
    return getattr(kind, "varying", kind)


def _alike_in_shard_map(operands: Sequence[jax.Array]) -> tuple[list[jax.Array], dict[str, Any]]:
    """Inside shard_map, makes all operands vary over the same axes, as JAX asks of a call.

    Returns:
      The operands, and what the results' types must say of it.
    """
    axes = frozenset().union(*map(_varying, operands))
    if not axes:
        return list(operands), {}

    def varied(x: jax.Array) -> jax.Array:
        missing = tuple(axes - _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    operands = [varied(x) for x in operands]
    first = jax.typeof(operands[0])
    sharding = jax.sharding.NamedSharding(first.sharding.mesh, jax.sharding.PartitionSpec())
    return operands, {_MANUAL: getattr(first, _MANUAL), "sharding": sharding}
