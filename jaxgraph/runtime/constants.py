"""Arrays that a wrapped function closes over, made operands."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from jaxgraph.runtime.nested_constants import lift

# Closed-over arrays of this size or more become operands, whose addresses a plan can use; smaller
# ones stay constants, whose values it may look at.
_HOIST_BYTES = 4096


class ClosedOverArrays(Exception):
    """Ends a trace that met closed-over arrays which should be operands."""

    def __init__(self, arrays: Sequence[Any]):
        super().__init__()
        self.arrays = arrays


class Constants:
    """The arrays a function closes over, passed to it as its first argument.

    Baked into the executable they would be copied, and compiling would look at every byte. They are
    known only once the function was traced: so a trace that meets new ones ends with
    `ClosedOverArrays`, and the call starts again with them as an argument.

    Attributes:
      arrays: as the function closes over them.
      prefix: what goes in front of a call's arguments: one tuple of arrays, or nothing.
    """

    def __init__(self, found: Sequence[Any] = (), *, hoist: bool = True):
        self.arrays = tuple(found)  # keeps alive what the identities were taken from
        self._places = {_identity(array): i for i, array in enumerate(self.arrays)}
        self._hoist = hoist
        self.prefix = (tuple(jnp.asarray(array) for array in self.arrays),) if found else ()

    def extended(self, arrays: Sequence[Any]) -> Constants:
        """These arrays and those."""
        new = {_identity(a): a for a in arrays if _identity(a) not in self._places}
        if not new:
            return self
        return Constants((*self.arrays, *new.values()), hoist=self._hoist)

    def hoist_from(self, closed: Any, traced: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Turns consts of a closed jaxpr into leading operands.

        Args:
          closed: the jaxpr.
          traced: the tracers of `prefix`'s arrays in the present trace.

        Returns:
          The jaxpr, and the values of its new operands: arrays found before, and tracers of an
          enclosing trace. Small arrays stay consts.

        Raises:
          ClosedOverArrays: there are large ones that were not found before.
        """
        closed = lift(closed, _is_large)
        new, moved, kept = [], [], []
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            if isinstance(value, jax.core.Tracer):
                moved.append((variable, value))
            elif (place := self._places.get(_identity(value))) is not None:
                moved.append((variable, traced[place]))
            else:
                kept.append((variable, value))
                if self._hoist and _is_large(value):
                    new.append(value)
        if new:
            raise ClosedOverArrays(new)
        if not moved:
            return closed, []
        opened = closed.jaxpr.replace(
            constvars=[variable for variable, _ in kept],
            invars=[*(variable for variable, _ in moved), *closed.jaxpr.invars],
        )
        closed = jex.core.ClosedJaxpr(opened, [value for _, value in kept])
        return closed, [value for _, value in moved]


def _is_large(array: Any) -> bool:
    return isinstance(array, (jax.Array, np.ndarray)) and array.nbytes >= _HOIST_BYTES


def _identity(array: Any) -> Any:
    """What tells one closed-over array from another, the same at the next trace.

    A JAX array is immutable, so it is itself. A numpy array is its content: the function may make
    it anew in each trace (a mask, a table), and may change it between two.
    """
    if isinstance(array, jax.Array):
        return id(array)
    view = np.ascontiguousarray(array)
    digest = hashlib.blake2b(view.view(np.uint8).reshape(-1), digest_size=16).digest()
    return digest, view.shape, view.dtype.str
