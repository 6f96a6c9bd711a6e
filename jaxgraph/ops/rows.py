"""Functions of the last axis: norms, softmax, argmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxgraph.ops import checks, kernel


def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, *, eps: float = 1e-6) -> Array:
    """Divides rows by their root mean square (Zhang and Sennrich, 2019, arXiv:1910.07467).

    ``x / sqrt(mean(x**2) + eps) * weight``, computed in float32 and rounded to x's dtype before
    the weight, as Llama does.

    Args:
      x: floats [..., d].
      weight: floats [d], or None for ones.
      eps: added to the mean of squares.

    Returns:
      Floats [..., d], of the dtype that `x` and `weight` promote to.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    x = jnp.asarray(x)
    checks.floating("x", x)
    checks.at_least("x", x, 1)
    if weight is not None:
        weight = jnp.asarray(weight)
        checks.floating("weight", weight)
        checks.shape("weight", weight, x.shape[-1])
    return kernel.call(_rms_norm, x, weight, eps=float(eps))


def _rms_norm(x: Array, weight: Array | None, *, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scaled = scaled.astype(x.dtype)
    return scaled if weight is None else scaled * weight


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
) -> Array:
    """Takes rows to mean 0 and variance 1 (Ba et al., 2016, arXiv:1607.06450).

    ``(x - mean) / sqrt(variance + eps) * weight + bias``, all in float32, rounded once.

    Args:
      x: floats [..., d].
      weight: floats [d], or None for ones.
      bias: floats [d], or None for zeros.
      eps: added to the variance, which is that of the whole row (divided by d).

    Returns:
      Floats [..., d], of x's dtype.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    x = jnp.asarray(x)
    checks.floating("x", x)
    checks.at_least("x", x, 1)
    given: list[Any] = []
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            vector = jnp.asarray(vector)
            checks.floating(name, vector)
            checks.shape(name, vector, x.shape[-1])
        given.append(vector)
    return kernel.call(_layer_norm, x, *given, eps=float(eps))


def _layer_norm(x: Array, weight: Array | None, bias: Array | None, *, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def softmax(x: ArrayLike) -> Array:
    """``exp(x - max) / sum(exp(x - max))`` of each row, in float32, rounded once.

    Args:
      x: floats [..., d]. A row of -inf alone, or with a NaN in it, gives NaN.

    Returns:
      Floats [..., d], of x's dtype.

    Raises:
      TypeError, ValueError: `x` is no array of floats, or a scalar.
    """
    x = jnp.asarray(x)
    checks.floating("x", x)
    checks.at_least("x", x, 1)
    return kernel.call(_softmax, x)


def _softmax(x: Array) -> Array:
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def argmax(x: ArrayLike) -> Array:
    """The place of each row's largest element: the first of several, or of the first NaN.

    Args:
      x: numbers [..., d], d at least 1.

    Returns:
      int32 [...].

    Raises:
      ValueError: `x` is a scalar, or its rows are empty.
    """
    x = jnp.asarray(x)
    checks.at_least("x", x, 1)
    if x.shape[-1] == 0:
        raise ValueError("x must have rows of one element or more: an empty one has no largest")
    return kernel.call(_argmax, x)


def _argmax(x: Array) -> Array:
    return lax.argmax(x, x.ndim - 1, jnp.int32)
