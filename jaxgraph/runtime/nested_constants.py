"""Arrays that jits nested in a function close over, as if the function itself closed over them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax.extend as jex

_JITS = ("jit", "pjit")


def lift(closed: Any, worth: Callable[[Any], bool]) -> Any:
    """A closed jaxpr that computes the same, with consts of nested jits among its own.

    Those in loops and branches, too. Jits inside of functions with derivatives of their own keep
    theirs.

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
    name = eqn.primitive.name
    if name in _JITS:
        return _jit_with_operands(eqn, worth, lifted)
    if name == "while":
        eqn = _loop_with_operands(eqn, "cond", 0, worth, lifted)
        return _loop_with_operands(eqn, "body", eqn.params["cond_nconsts"], worth, lifted)
    if name == "scan":
        return _scan_with_operands(eqn, worth, lifted)
    if name == "cond":
        return _branches_with_operands(eqn, worth, lifted)
    return eqn


def _loop_with_operands(
    eqn: Any, part: str, at: int, worth: Callable[[Any], bool], lifted: dict[Any, Any]
) -> Any:
    """A while loop whose condition or body takes what its jits close over as consts of the loop."""
    closed, count = eqn.params[f"{part}_jaxpr"], eqn.params[f"{part}_nconsts"]
    inner: dict[Any, Any] = {}
    body = _without_consts(closed.jaxpr, worth, inner)
    if not inner:
        return eqn
    lifted.update(inner)
    body = body.replace(invars=[*inner, *body.invars])
    new = {
        f"{part}_jaxpr": jex.core.ClosedJaxpr(body, closed.consts),
        f"{part}_nconsts": count + len(inner),
    }
    invars = [*eqn.invars[:at], *inner, *eqn.invars[at:]]
    return eqn.replace(invars=invars, params=eqn.params | new)


def _scan_with_operands(eqn: Any, worth: Callable[[Any], bool], lifted: dict[Any, Any]) -> Any:
    """A scan that takes what jits in its body close over as its own consts."""
    closed = eqn.params["jaxpr"]
    inner: dict[Any, Any] = {}
    body = _without_consts(closed.jaxpr, worth, inner)
    arity = _more_consts(eqn.params, len(inner)) if inner else None
    if arity is None:
        return eqn
    lifted.update(inner)
    body = body.replace(invars=[*inner, *body.invars])
    new = {"jaxpr": jex.core.ClosedJaxpr(body, closed.consts), **arity}
    return eqn.replace(invars=[*inner, *eqn.invars], params=eqn.params | new)


def _more_consts(params: dict[str, Any], count: int) -> dict[str, Any] | None:
    """The parameters of a scan with so many more consts; None: this JAX has another way to say it.

    JAX 0.11 says it by a flat tree, which only functions of its own module make.
    """
    if "num_consts" in params:
        return {"num_consts": params["num_consts"] + count}
    flat = params.get("ft_in")
    module = sys.modules.get(type(flat).__module__)
    if not (hasattr(module, "pack") and hasattr(module, "nones") and hasattr(flat, "unpack")):
        return None
    consts, carry, xs = flat.unpack()
    return {"ft_in": module.pack((module.nones(len(consts) + count), carry, xs))}


def _branches_with_operands(eqn: Any, worth: Callable[[Any], bool], lifted: dict[Any, Any]) -> Any:
    """A choice whose branches all take what jits in any of them close over."""
    inner: dict[Any, Any] = {}
    bodies = [_without_consts(branch.jaxpr, worth, inner) for branch in eqn.params["branches"]]
    if not inner:
        return eqn
    lifted.update(inner)
    branches = tuple(
        jex.core.ClosedJaxpr(body.replace(invars=[*inner, *body.invars]), branch.consts)
        for body, branch in zip(bodies, eqn.params["branches"], strict=True)
    )
    which, *operands = eqn.invars
    return eqn.replace(
        invars=[which, *inner, *operands], params=eqn.params | {"branches": branches}
    )


def _jit_with_operands(eqn: Any, worth: Callable[[Any], bool], lifted: dict[Any, Any]) -> Any:
    params = eqn.params
    if not hasattr(params.get("jaxpr"), "consts"):
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
