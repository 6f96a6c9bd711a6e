"""A native split as one XLA FFI call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

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
    def aliases(self) -> Mapping[int, int]:
        """Operand index -> index of the result that is written in its place."""


def native_call(split: NativeSplit, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs a split on its operands (in the order of its operand bases); traceable.

    The program travels as bytes: an executable outlives the process, a handle would not.
    """
    call = jax.ffi.ffi_call(
        native.TARGET,
        list(split.result_avals),
        vmap_method="sequential",
        input_output_aliases=dict(split.aliases),
    )
    return list(call(*operands, program=np.frombuffer(split.program, dtype=np.uint8)))
