"""Complaints: what JAX raises about an argument, said with the function's and argument's name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgraph.runtime.arguments import Parameters, labelled_leaves


def clearer(
    error: Exception,
    fun: Callable[..., Any],
    name: str,
    parameters: Parameters,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    closed_over: Sequence[Any],
) -> Exception | None:
    """An error of the same type as `error` that says more, or None: JAX's own says enough.

    Args:
      error: what a call raised.
      fun: the user's function.
      name: its qualified name.
      parameters: its parameters.
      args: the call's positional arguments.
      kwargs: its keyword arguments.
      closed_over: arrays that the function was seen to close over; those that its own code names
        are found without.
    """
    arguments = [*enumerate(args), *kwargs.items()]
    static = parameters.keys(parameters.static, len(args))
    if isinstance(error, ValueError):
        for key, value in arguments:
            if key in static and (reason := _why_not_hashable(value)) is not None:
                return ValueError(
                    f"{name}: argument {parameters.name(key)!r} is static, so it must be hashable, "
                    f"which a {type(value).__name__} is not ({reason}): give a tuple, a frozen "
                    "dataclass or the like, or take it out of static_argnums"
                )
    # A call that fails for another reason has consumed what was donated to it all the same.
    if "has been deleted" not in str(error):
        return None
    kind = RuntimeError if isinstance(error, RuntimeError) else ValueError  # JAX raises either
    for key, value in arguments:
        if key in static:
            continue
        for label, leaf in labelled_leaves(parameters.name(key), value):
            if _is_deleted(leaf):
                return kind(_deleted_argument(name, label, leaf, key, parameters, args))
    named = _closed_over_leaves(fun)
    for label, array in [*named, *(("", array) for array in closed_over)]:
        if _is_deleted(array):
            return kind(_deleted_closure(name, label, array))
    return None


def _why_not_hashable(value: Any) -> str | None:
    try:
        hash(value)
    except TypeError as error:
        return str(error)
    return None


def _is_deleted(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.is_deleted()


def _form(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _deleted_argument(
    name: str,
    label: str,
    leaf: Any,
    key: int | str,
    parameters: Parameters,
    args: Sequence[Any],
) -> str:
    text = f"{name}: argument {label} ({_form(leaf)}) has been deleted"
    if key in parameters.keys(parameters.donated, len(args)):
        return (
            f"{text}: {parameters.name(key)!r} is in donate_argnums, so a call consumes it; pass "
            "on what the last call returned in its place"
        )
    return f"{text}, by a call that it was donated to or by delete(); pass an array that is alive"


def _deleted_closure(name: str, label: str, array: Any) -> str:
    called = f"the array {label}" if label else "an array"
    return (
        f"{name} closes over {called} ({_form(array)}), which has been deleted, by a call that it "
        "was donated to or by delete(): make it an argument, or close over a copy of it "
        "(jnp.copy)"
    )


def _closed_over_leaves(fun: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The leaves of what the function's own code closes over, with the names that it uses."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    try:
        variables = inspect.getclosurevars(inspect.unwrap(fun))
    except (TypeError, ValueError):  # not a Python function, or a cell that is still empty
        return []
    found = []
    for name, value in {**variables.nonlocals, **variables.globals}.items():
        try:
            found += labelled_leaves(name, value)
        except ValueError:  # not a tree that JAX can sort
            continue
    return found
