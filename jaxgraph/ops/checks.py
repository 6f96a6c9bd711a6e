"""Argument checks of the functions in `jaxgraph.ops`: one clear error that names the argument."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def floating(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an array of floats."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be an array of floats, not of {x.dtype}; convert it first")


def integer(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an array of integers."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be an array of integers, not of {x.dtype}")


def shape(name: str, x: Any, *expected: int | None) -> None:
    """Raises ValueError unless `x` has this shape; None: any size."""
    fits = len(x.shape) == len(expected) and all(
        e is None or e == n for e, n in zip(expected, x.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name} must have the shape ({wanted}), not {tuple(x.shape)}")


def at_least(name: str, x: Any, rank: int) -> None:
    """Raises ValueError unless `x` has so many axes."""
    if len(x.shape) < rank:
        raise ValueError(f"{name} must have {rank} axes or more, not the shape {tuple(x.shape)}")


def one_of(name: str, value: Any, allowed: Any) -> None:
    """Raises ValueError unless `value` is one of the words."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}")
