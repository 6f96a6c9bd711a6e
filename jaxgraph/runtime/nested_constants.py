"""Arrays that jits nested in a function close over, as if the function itself closed over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.extend as jex

_JITS = ("jit", "pjit")


def lift(closed: Any, worth: Callable[[Any], bool]) -> Any:
    """A closed jaxpr that computes the same, with consts of nested jits among its own.

    Jits inside loops, branches and functions with derivatives of their own keep theirs.

    Args:
      closed: the jaxpr.
      worth: which arrays to lift.
    """
    lifted: dict[Any, Any] = {}
    jaxpr = _without_consts(closed.jaxpr, worth, lifted)
    if not lifted:
        return closed
    jaxpr = jaxpr.replace(constvars=[*jaxpr.constvars, *lifted])
    return jex.core.ClosedJaxpr(jaxpr, [*closed.consts, *lifted.values()])


def _without_consts(jaxpr: Any, worth: Callable[[Any], bool], lifted: dict[Any, Any]) -> Any:
    """``jaxpr`` with the worthy consts of its jits as free variables, which ``lifted`` collects."""
    eqns = [_with_operands(eqn, worth, lifted) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _with_operands(eqn: Any, worth: Callable[[Any], bool], lifted: dict[Any, Any]) -> Any:
    params = eqn.params
    if eqn.primitive.name not in _JITS or not hasattr(params.get("jaxpr"), "consts"):
        return eqn
    # What JAX says of each operand; a new one is as unspecified as the others are.
    shardings, layouts = params.get("in_shardings"), params.get("in_layouts")
    if not shardings or len(set(map(id, shardings))) != 1 or not layouts or any(layouts):
        return eqn
    inner: dict[Any, Any] = {}
    body = _without_consts(params["jaxpr"].jaxpr, worth, inner)
    kept = []
    # A variable is one of the inner jaxpr and the outer one at once: each has its own scope, and a
    # jit that is called twice lifts the same variable.
    for variable, array in zip(
        params["jaxpr"].jaxpr.constvars, params["jaxpr"].consts, strict=True
    ):
        if worth(array):
            inner[variable] = array
        else:
            kept.append((variable, array))
    if not inner:
        return eqn
    lifted.update(inner)
    body = body.replace(constvars=[v for v, _ in kept], invars=[*inner, *body.invars])
    new = {
        "jaxpr": jex.core.ClosedJaxpr(body, [a for _, a in kept]),
        "in_shardings": (shardings[0],) * len(inner) + tuple(shardings),
        "in_layouts": (None,) * len(inner) + tuple(layouts),
        "donated_invars": (False,) * len(inner) + tuple(params["donated_invars"]),
    }
    return eqn.replace(invars=[*inner, *eqn.invars], params=params | new)
