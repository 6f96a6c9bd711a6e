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
from jaxgraph.passes.profitability import (
    BodySummary,
    Decision,
    Limits,
    judge_body,
    judge_slices,
)

if TYPE_CHECKING:
    from jaxgraph.plan.step import StepPlan

_PRODUCTS = frozenset({"MATMUL", "ATTENTION"})

# Plans a closed jaxpr whose arguments are these values of the step around it.
Plan = Callable[[Any, Sequence[Value]], "StepPlan"]


def plan_bodies(
    eqn: FlatEqn, plan: Plan, limits: Limits
) -> tuple[FlatEqn, list[StepPlan], list[Decision]]:
    """The equation with planned bodies, their plans, and what was decided about them.

    Args:
      eqn: an equation that stays in XLA; it comes back as it is where nothing in it pays.
      plan: plans a body.
      limits: what the rules of profitability go by.
    """
    params, plans, decisions = dict(eqn.params), [], []
    for key, at, inputs in () if eqn.effects else _bodies(eqn):
        what = f"a body of {eqn.primitive.name} at {eqn.source}"
        if (sliced := judge_slices(what, _slice_bytes(eqn), limits)) is not None:
            decisions.append(sliced)
            continue
        body = params[key] if at is None else params[key][at]
        planned = plan(body, inputs)
        if not planned.has_native:
            continue
        decisions.append(judge_body(what, _summary(planned), limits))
        if decisions[-1].left_in_xla:
            continue
        plans.append(planned)
        traced = _traced(planned, body)
        if at is None:
            params[key] = traced
        else:
            params[key] = tuple(traced if i == at else b for i, b in enumerate(params[key]))
    return (dataclasses.replace(eqn, params=params) if plans else eqn), plans, decisions


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


def _slice_bytes(eqn: FlatEqn) -> int:
    """Bytes of stacked arrays that a scan hands to each turn."""
    if eqn.primitive.name != "scan":
        return 0
    num_consts, num_carry = scan_arity(eqn.params)
    slices = eqn.params["jaxpr"].in_avals[num_consts + num_carry :]
    return sum(a.size * a.dtype.itemsize for a in slices)


def _summary(plan: StepPlan) -> BodySummary:
    native = [s for s in plan.splits if s.native is not None]
    return BodySummary(
        equations=len(plan.step.eqns),
        native_runs=tuple(s.num_eqns for s in native),
        multiplies=any(_PRODUCTS & set(s.native.ops) for s in native),
        has_bodies=any(s.bodies for s in plan.splits),
    )


def _traced(plan: StepPlan, body: Any) -> Any:
    """The planned body as a closed jaxpr of one equation, with the types of the original."""
    from jaxgraph.runtime.primitive import Planned, graphed_call_p

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals]
    planned = Planned(plan, jax.make_jaxpr(plan.run)(*avals))
    return jax.make_jaxpr(lambda *args: graphed_call_p.bind(*args, jaxpr=body, planned=planned))(
        *avals
    )
