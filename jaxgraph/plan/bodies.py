"""Loops and branches that stay in XLA, with planned functions for bodies.

A loop whose length is not known, or too long to unroll, and a choice stay XLA's. What happens
inside of them may be a whole decode step, though: it is planned like a step of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxgraph.frontend.flatten import FlatEqn, Value, scan_arity

if TYPE_CHECKING:
    from jaxgraph.plan.step import StepPlan

# A native split in a body costs what one outside costs, at every turn. It is worth that where it
# multiplies matrices, among other things.
_MIN_NATIVE_EQNS = 16
_PRODUCTS = frozenset({"MATMUL", "ATTENTION"})

# What a scan hands to each turn is a slice of a stacked array, which XLA copies for a native split
# and reads in place in kernels of its own.
_MAX_SLICE_BYTES = 1 << 16

# Plans a closed jaxpr whose arguments are these values of the step around it.
Plan = Callable[[Any, Sequence[Value]], "StepPlan"]


def plan_bodies(eqn: FlatEqn, plan: Plan) -> tuple[FlatEqn, list[StepPlan]]:
    """The equation with planned bodies, and their plans; itself and none where it does not pay.

    Args:
      eqn: an equation that stays in XLA.
      plan: plans a body.
    """
    if eqn.effects or not _slices_are_small(eqn):
        return eqn, []
    params, plans = dict(eqn.params), []
    for key, at, inputs in _bodies(eqn):
        body = params[key] if at is None else params[key][at]
        planned = plan(body, inputs)
        if not _pays(planned):
            continue
        plans.append(planned)
        traced = _traced(planned, body)
        if at is None:
            params[key] = traced
        else:
            params[key] = tuple(traced if i == at else b for i, b in enumerate(params[key]))
    return (dataclasses.replace(eqn, params=params), plans) if plans else (eqn, [])


def _bodies(eqn: FlatEqn) -> Iterator[tuple[str, int | None, Sequence[Value]]]:
    """Where the equation's bodies stand, and their arguments at the first turn.

    Yields (parameter, index in it where it is a tuple, values).
    """
    name = eqn.primitive.name
    if name == "while":
        yield "body_jaxpr", None, eqn.inputs[eqn.params["cond_nconsts"] :]
    elif name == "scan":
        yield "jaxpr", None, eqn.inputs
    elif name == "cond":
        for i in range(len(eqn.params["branches"])):
            yield "branches", i, eqn.inputs[1:]


def _slices_are_small(eqn: FlatEqn) -> bool:
    if eqn.primitive.name != "scan":
        return True
    num_consts, num_carry = scan_arity(eqn.params)
    slices = eqn.params["jaxpr"].in_avals[num_consts + num_carry :]
    return sum(a.size * a.dtype.itemsize for a in slices) <= _MAX_SLICE_BYTES


def _pays(plan: StepPlan) -> bool:
    """Is most of the body native, and some of that worth a call?"""
    native = [s for s in plan.splits if s.native is not None]
    eqns = sum(s.num_eqns for s in native)
    products = any(_PRODUCTS & set(s.native.ops) for s in native)
    inside = any(s.bodies for s in plan.splits)
    return inside or (
        products and eqns >= _MIN_NATIVE_EQNS * len(native) and 2 * eqns >= len(plan.step.eqns)
    )


def _traced(plan: StepPlan, body: Any) -> Any:
    """The planned body as a closed jaxpr of one equation, with the types of the original."""
    from jaxgraph.runtime.primitive import Planned, graphed_call_p

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals]
    planned = Planned(plan, jax.make_jaxpr(plan.run)(*avals))
    return jax.make_jaxpr(lambda *args: graphed_call_p.bind(*args, jaxpr=body, planned=planned))(
        *avals
    )
