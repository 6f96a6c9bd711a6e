"""StepPlan: a whole step as a sequence of splits, and the JAX function that runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxgraph.errors import PlanError
from jaxgraph.frontend import contraction
from jaxgraph.frontend.flatten import FlatEqn, FlatStep, Value, flatten
from jaxgraph.passes.splits import NATIVE, Cut, LeftInXla, cut
from jaxgraph.plan.program import NativeSplit, plan_native

if TYPE_CHECKING:
    from jaxgraph.options import Options

# Above this many rows a product is bound by arithmetic, and XLA's library kernels are the better
# choice; decode has one row a sequence.
MAX_DECODE_ROWS = 64


@dataclasses.dataclass(eq=False)
class Split:
    """One split of a step.

    Attributes:
      backend: "native" or "xla".
      num_eqns: equations of the user's function in it.
      native: the planned program of a native split.
    """

    backend: str
    num_eqns: int
    native: NativeSplit | None
    cut: Cut


@dataclasses.dataclass(eq=False)
class StepPlan:
    """A planned step.

    Attributes:
      splits: in execution order.
      left_in_xla: equations without a native form, why, and their source lines.
      notes: sentences for ``explain``: copies that missing donation or order cost, and the like.
    """

    step: FlatStep
    splits: list[Split]
    left_in_xla: list[LeftInXla]
    notes: list[str]

    def run(self, *args: Any) -> list[Any]:
        """Evaluates the step on flat arguments; traceable by JAX."""
        from jaxgraph.runtime.ffi_call import native_call

        env: dict[int, Any] = {}
        for value, arg in zip(self.step.inputs, args, strict=True):
            env[id(value)] = arg
        for value, array in self.step.consts:
            env[id(value)] = array
        for split in self.splits:
            if split.native is not None:
                operands = [_read(env, v) for v in split.cut.inputs]
                results = native_call(split.native, operands)
                env.update({id(v): r for v, r in zip(split.cut.outputs, results, strict=True)})
            else:
                for eqn in split.cut.eqns:
                    _evaluate(eqn, env)
        return [_read(env, v) for v in self.step.outputs]

    def describe(self) -> list[str]:
        """Lines for a person: every split, what stays in XLA and why, and what costs copies."""
        lines = []
        for number, split in enumerate(self.splits):
            if split.native is None:
                lines.append(f"split {number}: xla, {split.num_eqns} equations")
                continue
            n = split.native
            kinds = ", ".join(f"{count} {op}" for op, count in sorted(n.ops.items()))
            lines.append(
                f"split {number}: native, {split.num_eqns} equations in {n.num_nodes} nodes "
                f"({kinds}), arena {n.arena_bytes:,} bytes, "
                f"key {n.key.hex()[:12]} at {n.first_node}"
            )
        seen: dict[tuple[str, str, str], int] = {}
        for e in self.left_in_xla:
            seen[(e.primitive, e.reason, e.source)] = (
                seen.get((e.primitive, e.reason, e.source), 0) + 1
            )
        for (primitive, reason, source), times in seen.items():
            often = f" ({times} times)" if times > 1 else ""
            lines.append(f"in XLA: {primitive} {reason}, {source}{often}")
        return lines + self.notes


def plan_step(
    closed_jaxpr: Any,
    *,
    name: str,
    function_id: int,
    options: Options,
    arg_labels: Sequence[str],
    donated: Sequence[bool] | None = None,
) -> StepPlan:
    """Plans a traced step.

    Args:
      closed_jaxpr: what the user's function was traced to.
      name: its qualified name.
      function_id: owner of the statistics.
      options: the wrapped function's settings.
      arg_labels: what a person would call each flat argument.
      donated: for each flat argument whether its buffer may be reused; None where nobody knows
        (under an outer jit).

    Raises:
      PlanError: the step cannot be planned.
    """
    step = flatten(closed_jaxpr, options.max_unroll)
    rows = _most_rows(step.eqns)
    if rows > MAX_DECODE_ROWS:
        return _all_in_xla(step, f"multiplies {rows} rows at once, which XLA's own kernels do best")
    labels = {id(v): label for v, label in zip(step.inputs, arg_labels, strict=True)}
    labels |= {id(v): f"closed-over array {i}" for i, (v, _) in enumerate(step.consts)}
    cuts, left = cut(step)
    splits = []
    for number, run in enumerate(cuts):
        native = None
        if run.backend == NATIVE:
            native = plan_native(
                run,
                name=name,
                function_id=function_id,
                split=number,
                exec_options=options.exec_options(),
                labels=labels,
                guard_bytes=options.guard_bytes,
            )
            for j, value in enumerate(run.outputs):
                labels[id(value)] = f"result[{j}] of split {number}"
        splits.append(Split(run.backend, len(run.eqns), native, run))
    notes = _copy_notes(step, splits, labels, donated) + _packed_notes(splits, labels)
    return StepPlan(step, splits, left, notes)


def _most_rows(eqns: Sequence[FlatEqn]) -> int:
    return max((contraction.rows(e) for e in eqns if e.primitive.name == "dot_general"), default=0)


def _all_in_xla(step: FlatStep, reason: str) -> StepPlan:
    run = Cut("xla", list(step.eqns))
    notes = [f"all in XLA: the step {reason}"]
    return StepPlan(step, [Split("xla", len(step.eqns), None, run)], [], notes)


def _copy_notes(step, splits, labels, donated) -> list[str]:
    """What updates cost a copy, because of the order of results or a missing donation."""
    notes = []
    argument = {id(v): i for i, v in enumerate(step.inputs)}
    for split in splits:
        if split.native is None:
            continue
        for where, nbytes, why in split.native.copied_updates:
            notes.append(f"copies {nbytes:,} bytes at {where}: {why}")
        for i in split.native.aliases:
            value = split.cut.inputs[i]
            at = argument.get(id(value))
            if at is None:
                continue
            nbytes = value.aval.size * value.aval.dtype.itemsize
            if donated is None:
                notes.append(
                    f"whether {labels[id(value)]} ({nbytes:,} bytes) is copied before its update "
                    "is unknown: an outer jit decides about donation"
                )
            elif not donated[at]:
                notes.append(
                    f"copies {nbytes:,} bytes a call: {labels[id(value)]} is updated but not "
                    "donated; name its argument in donate_argnums"
                )
    return notes


def _packed_notes(splits: Sequence[Split], labels: dict[int, str]) -> list[str]:
    """Leaves of packed arguments that XLA reads: its kernels want them in buffers of their own."""
    notes = []
    for split in splits:
        if split.native is not None:
            continue
        made_by = {id(v): e for e in split.cut.eqns for v in e.outputs}
        for eqn in split.cut.eqns:
            source = eqn.inputs[0] if eqn.inputs else None
            if eqn.primitive.name != "bitcast_convert_type" or source.aval.dtype != np.uint8:
                continue
            while id(source) in made_by:
                source = made_by[id(source)].inputs[0]
            out = eqn.outputs[0].aval
            notes.append(
                f"copies up to {out.size * out.dtype.itemsize:,} bytes a call at {eqn.source}: XLA "
                f"reads a leaf of {labels.get(id(source), 'a packed argument')} through a slice"
            )
    return notes


def _read(env: dict[int, Any], value: Value) -> Any:
    if id(value) in env:
        return env[id(value)]
    if value.known is None:
        raise PlanError("a value is used before it is made")
    return jnp.asarray(value.known, dtype=value.aval.dtype)


def _evaluate(eqn: FlatEqn, env: dict[int, Any]) -> None:
    """Applies an equation that stays in XLA, as JAX's own evaluator would."""
    inputs = [_read(env, v) for v in eqn.inputs]
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair before jax 0.10
    out = eqn.primitive.bind(*subfuns, *inputs, **params)
    outs = out if eqn.primitive.multiple_results else [out]
    env.update({id(v): o for v, o in zip(eqn.outputs, outs, strict=True)})
