"""Products with weights, and rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxgraph.ops import checks, kernel


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


_ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "relu2": _relu2,
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def linear(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    out_in: bool = False,
) -> Array:
    """``activation(x @ weight + bias) + residual``.

    The product is summed in float32 and rounded to the result's dtype; what follows is computed in
    that dtype, as the plain formula would.

    Args:
      x: floats [..., k]. Up to 16 rows (64 of 16-bit floats on Hopper) are a decode step's and use
        our kernels; more are left to XLA, whose library is the better one there.
      weight: floats [k, n], or [n, k] with `out_in`.
      bias: floats [n].
      activation: None, "relu", "relu2" (its square), "silu", "gelu" (with erf) or "gelu_tanh".
      residual: floats [..., n].
      out_in: how the weight lies in memory.

    Returns:
      Floats [..., n], of the dtype that the operands promote to.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    n = _check_product("weight", x, weight, out_in)
    checks.one_of("activation", activation, tuple(_ACTIVATIONS))
    if bias is not None:
        bias = jnp.asarray(bias)
        checks.floating("bias", bias)
        checks.shape("bias", bias, n)
    if residual is not None:
        residual = jnp.asarray(residual)
        checks.floating("residual", residual)
        checks.shape("residual", residual, *x.shape[:-1], n)
    static: dict[str, Any] = {"activation": activation, "out_in": out_in}
    return kernel.call(_linear, x, weight, bias, residual, **static)


def _linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_in: bool,
) -> Array:
    y = _product(x, weight, out_in)
    if bias is not None:
        y = y + bias
    y = _ACTIVATIONS[activation](y)
    return y if residual is None else residual + y


def glu(
    x: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    *,
    activation: str = "silu",
    out_in: bool = False,
) -> Array:
    """``activation(x @ gate) * (x @ up)`` (Shazeer, 2020, arXiv:2002.05202).

    Args:
      x: floats [..., k].
      gate: floats [k, n], or [n, k] with `out_in`.
      up: floats of gate's shape.
      activation: as for `linear`.
      out_in: how the weights lie in memory.

    Returns:
      Floats [..., n], of the dtype that the operands promote to.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    x, gate, up = jnp.asarray(x), jnp.asarray(gate), jnp.asarray(up)
    _check_product("gate", x, gate, out_in)
    _check_product("up", x, up, out_in)
    checks.shape("up", up, *gate.shape)
    checks.one_of("activation", activation, tuple(_ACTIVATIONS))
    static: dict[str, Any] = {"activation": activation, "out_in": out_in}
    return kernel.call(_glu, x, gate, up, **static)


def _glu(x: Array, gate: Array, up: Array, *, activation: str | None, out_in: bool) -> Array:
    return _ACTIVATIONS[activation](_product(x, gate, out_in)) * _product(x, up, out_in)


def _product(x: Array, weight: Array, out_in: bool) -> Array:
    return x @ (weight.T if out_in else weight)


def _check_product(name: str, x: Array, weight: Array, out_in: bool) -> int:
    checks.floating("x", x)
    checks.at_least("x", x, 1)
    checks.floating(name, weight)
    k = x.shape[-1]
    checks.shape(name, weight, *((None, k) if out_in else (k, None)))
    return weight.shape[0 if out_in else 1]


def embedding(table: ArrayLike, ids: ArrayLike) -> Array:
    """``table[ids]``: rows of a table; ids beyond its ends give the first or last row.

    Args:
      table: numbers [v, d], v at least 1.
      ids: integers [...].

    Returns:
      [..., d], of the table's dtype.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape, or the table is empty.
    """
    table, ids = jnp.asarray(table), jnp.asarray(ids)
    checks.shape("table", table, None, None)
    checks.integer("ids", ids)
    if table.shape[0] == 0:
        raise ValueError("table must have one row or more")
    return kernel.call(_embedding, table, ids)


def _embedding(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0, mode="clip")
