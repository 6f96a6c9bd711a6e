"""Complex numbers as pairs of real ones.

Kernels know none, but most complex values of a decode step are rotations of queries and keys, of
which in the end only the parts are read. So what is computed with them is computed with their
parts, too; of the two nobody computes what nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Pair = tuple[Any, Any]

# Equations that move elements and compute nothing: each part is moved alike.
_MOVES = frozenset(
    [
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "gather",
        "reshape",
        "rev",
        "select_n",
        "slice",
        "split",
        "squeeze",
        "transpose",
    ]
)


def _multiplied(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _exponential(x: Pair) -> Pair:
    # As XLA does it, with what overflows: by two roots, and a number without an imaginary part has
    # none then.
    root = jnp.exp(x[0] * 0.5)
    turned = jnp.where(x[1] == 0, x[1], root * jnp.sin(x[1]) * root)
    return root * jnp.cos(x[1]) * root, turned


_COMPUTE: dict[str, Callable[..., Pair]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[0], x[1] - y[1]),
    "mul": _multiplied,
    "neg": lambda x: (-x[0], -x[1]),
    "exp": _exponential,
}


def is_complex(value: Any) -> bool:
    """Has this value or variable complex elements?"""
    return getattr(getattr(value.aval, "dtype", None), "kind", "") == "c"


def rule_of(eqn: Any) -> Callable[..., list[Any]] | None:
    """A function of an equation's inputs, a pair for each complex one, that gives its outputs.

    Args:
      eqn: of a jaxpr, with a complex output.

    Returns:
      A function that JAX can trace; its list has both parts of each output, one after the other.
      None: there is no such rule.
    """
    name, params = eqn.primitive.name, eqn.params
    if not all(map(is_complex, eqn.outvars)):
        return None
    if name == "complex":
        return lambda x, y: [x, y]
    if name == "conj":
        return lambda x: [x[0], -x[1]] if isinstance(x, tuple) else [x, jnp.zeros_like(x)]
    if name == "convert_element_type":
        real = np.zeros((), params["new_dtype"]).real.dtype
        return lambda x: [
            part.astype(real) for part in (x if isinstance(x, tuple) else (x, jnp.zeros_like(x)))
        ]
    if name in _COMPUTE:
        return lambda *args: list(_COMPUTE[name](*args))
    if name in _MOVES:
        return lambda *args: _moved(eqn, args)
    return None


def _moved(eqn: Any, args: tuple[Any, ...]) -> list[Any]:
    """The parts of each output, from equations that move the parts of the inputs."""
    outputs = []
    for i in range(2):
        params = eqn.params
        if "fill_value" in params:
            outside = params["fill_value"]
            outside = np.asarray(np.nan if outside is None else outside)  # NaN + 0j
            params = params | {"fill_value": float((outside.real, outside.imag)[i])}
        operands = [x[i] if isinstance(x, tuple) else x for x in args]
        out = eqn.primitive.bind(*operands, **params)
        outputs.append(out if eqn.primitive.multiple_results else [out])
    return [part for pair in zip(*outputs, strict=True) for part in pair]


def taken_apart(known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parts of complex numbers that are known when the step is planned."""
    return np.ascontiguousarray(known.real), np.ascontiguousarray(known.imag)


PARTS = (lax.real_p, lax.imag_p)
