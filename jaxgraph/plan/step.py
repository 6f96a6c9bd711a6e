"""StepPlan: a whole step as a sequence of splits, and the JAX function that runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxgraph.errors import PlanError
from jaxgraph.frontend.flatten import FlatEqn, FlatStep, Value, flatten
from jaxgraph.frontend.packs import Pack, PackedLeaf, leaf_labels, leaves_of, storable
from jaxgraph.passes.profitability import Decision, judge_step
from jaxgraph.passes.splits import NATIVE, XLA, Cut, LeftInXla, cut
from jaxgraph.plan.bodies import plan_bodies
from jaxgraph.plan.program import NativeSplit, plan_native

if TYPE_CHECKING:
    from jaxgraph.options import Options


@dataclasses.dataclass(eq=False)
class Split:
    """One split of a step.

    Attributes:
      backend: "native", "xla" or "callback".
      num_eqns: equations of the user's function in it.
      native: the planned program of a native split.
      number: its ordinal among the step's splits; those in bodies count on.
      bodies: plans of loops' and branches' bodies in an XLA split.
      decisions: which bodies are planned, and why others are not.
    """

    backend: str
    num_eqns: int
    native: NativeSplit | None
    cut: Cut
    number: int
    bodies: list[StepPlan] = dataclasses.field(default_factory=list)
    decisions: list[Decision] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy that a call makes, or may make, although the step could do without.

    Attributes:
      what: which array, in the user's words: "cache[0]['k']".
      nbytes: how much is copied a call.
      certain: False where it depends on what nobody knows here, such as an outer jit.
      why: one sentence, with the remedy.
    """

    what: str
    nbytes: int
    certain: bool
    why: str

    def __str__(self) -> str:
        return self.why


@dataclasses.dataclass(eq=False)
class StepPlan:
    """A planned step.

    Attributes:
      splits: in execution order.
      left_in_xla: equations without a native form, why, and their source lines.
      decisions: what the rules of profitability said.
      copies: what a missing donation, the order of results, or packing makes a call copy.
    """

    step: FlatStep
    splits: list[Split]
    left_in_xla: list[LeftInXla]
    decisions: list[Decision]
    copies: list[Copy]

    @property
    def has_native(self) -> bool:
        return any(True for _ in self.native_splits())

    def with_bodies(self) -> Iterator[StepPlan]:
        """The plan, and those of the bodies in it."""
        yield self
        for split in self.splits:
            for body in split.bodies:
                yield from body.with_bodies()

    def native_splits(self) -> Iterator[NativeSplit]:
        """Of the step and of bodies in it."""
        for plan in self.with_bodies():
            yield from (split.native for split in plan.splits if split.native is not None)

    def run(self, *args: Any) -> list[Any]:
        """Evaluates the step on flat arguments; traceable by JAX."""
        return evaluate(self.step, self.splits, args, _call_split)


def evaluate(
    step: FlatStep,
    splits: Sequence[Split],
    args: Sequence[Any],
    call: Callable[[Split, list[Any]], list[Any]],
) -> list[Any]:
    """Evaluates splits on the step's arguments; traceable by JAX.

    Args:
      step: whose arguments and results they are.
      splits: in execution order.
      args: the step's flat arguments.
      call: runs a native split on its operands.
    """
    env = _Environment(step, args)
    for split in splits:
        if split.native is not None:
            results = call(split, [env.operand(v) for v in split.native.operands])
            for value, result in zip(split.native.results, results, strict=True):
                env.take_result(value, result)
            env.stored.update(split.native.stored)
        else:
            for eqn in split.cut.eqns:
                _evaluate(eqn, env)
    return [env.read(v) for v in step.outputs]


class _Environment:
    """The arrays of a step that is evaluated, by value; packed leaves are read where they lie.

    Attributes:
      stored: by id of a value: the packed leaf in whose place it lies.
    """

    def __init__(self, step: FlatStep, args: Sequence[Any]):
        self._arrays: dict[int, Any] = {}
        for value, arg in zip(step.inputs, args, strict=True):
            self._arrays[id(value)] = arg
        for value, array in step.consts:
            self._arrays[id(value)] = array
        self._packs = {id(p.new_buffer): p for p in step.packs if p.new_buffer is not None}
        self._buffers = {id(p): self._arrays[id(p.buffer)] for p in step.packs}  # newest versions
        self.stored: dict[int, PackedLeaf] = {}
        for pack in step.packs:
            self.stored.update(leaves_of(pack))

    def operand(self, of: Value | Pack) -> Any:
        return self._buffers[id(of)] if isinstance(of, Pack) else self.read(of)

    def take_result(self, of: Value | Pack, array: Any) -> None:
        (self._buffers if isinstance(of, Pack) else self._arrays)[id(of)] = array

    def write(self, value: Value, array: Any) -> None:
        self._arrays[id(value)] = array

    def read(self, value: Value) -> Any:
        if id(value) in self._arrays:
            return self._arrays[id(value)]
        if id(value) in self.stored:
            leaf = self.stored[id(value)]
            return leaf.spec.read(self._buffers[id(leaf.pack)])
        if id(value) in self._packs:
            return self._whole(self._packs[id(value)])
        if value.known is None:
            raise PlanError("a value is used before it is made")
        return jnp.asarray(value.known, dtype=value.aval.dtype)

    def _whole(self, pack: Pack) -> Any:
        """The pack's new buffer; leaves that no native split has put there are written now."""
        missing = [
            (at.spec, self.read(value))
            for at, value in zip(leaves_of(pack).values(), pack.new_leaves, strict=True)
            if self.stored.get(id(value)) != at
        ]
        return pack.spec.write(self._buffers[id(pack)], missing)


def _call_split(split: Split, operands: list[Any]) -> list[Any]:
    from jaxgraph.runtime.ffi_call import native_call

    with jax.named_scope(f"jaxgraph_split_{split.number}"):  # for JAX's profiler
        return native_call(split.native, operands)


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
    planner = _Planner(name, function_id, options)
    with _without_garbage_collection():
        return planner.plan(closed_jaxpr, arg_labels, donated)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A plan makes many objects and drops few: looking for cycles is a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclasses.dataclass(eq=False)
class _Planner:
    """Plans a step and the bodies of its loops and branches, whose splits are numbered together."""

    name: str
    function_id: int
    options: Options
    ordinals: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    begun: Counter[tuple[str, ...]] = dataclasses.field(default_factory=Counter)

    def plan(
        self, closed_jaxpr: Any, arg_labels: Sequence[str], donated: Sequence[bool] | None
    ) -> StepPlan:
        step = flatten(closed_jaxpr, self.options.max_unroll)
        limits = self.options.limits()
        whole = judge_step(step, limits)
        labels = {id(v): label for v, label in zip(step.inputs, arg_labels, strict=True)}
        labels |= {id(v): f"closed-over array {i}" for i, (v, _) in enumerate(step.consts)}
        for pack in step.packs:
            labels |= leaf_labels(pack, labels[id(pack.buffer)])
        if whole.left_in_xla:
            cut_whole = Cut(XLA, list(step.eqns))
            everything = Split(XLA, len(step.eqns), None, cut_whole, number=next(self.ordinals))
            copies = _update_copies(step, [everything], labels, donated)
            return StepPlan(step, [everything], [], [whole], copies)
        cuts = cut(step, limits)
        numbers = [next(self.ordinals) for _ in cuts.runs]  # before those of bodies
        places = storable(step, cuts.runs)
        for pack in step.packs:
            places |= leaves_of(pack)
        splits = [
            self.plan_split(run, number, labels, places)
            for number, run in zip(numbers, cuts.runs, strict=True)
        ]
        copies = _update_copies(step, splits, labels, donated)
        copies += _packed_copies(step, splits, labels, places)
        decisions = [whole, cuts.decision, *(d for s in splits for d in s.decisions)]
        return StepPlan(step, splits, cuts.left, decisions, copies)

    def plan_split(
        self, run: Cut, number: int, labels: dict[int, str], places: Mapping[int, PackedLeaf]
    ) -> Split:
        """The split of a run; adds what its results are called to ``labels``."""
        native, bodies, decisions = None, [], []
        if run.backend == NATIVE:
            native = plan_native(
                run,
                name=self.name,
                function_id=self.function_id,
                split=number,
                exec_options=self.options.exec_options(),
                labels=labels,
                places=places,
                begun=self.begun,
                guard_bytes=self.options.guard_bytes,
            )
        else:
            plan = functools.partial(self.plan_body, labels=labels)
            for i, eqn in enumerate(run.eqns):
                run.eqns[i], plans, judged = plan_bodies(eqn, plan, self.options.limits())
                bodies += plans
                decisions += judged
        labels |= _labels_of_results(run)
        return Split(run.backend, len(run.eqns), native, run, number, bodies, decisions)

    def plan_body(
        self, closed_jaxpr: Any, values: Sequence[Value], labels: Mapping[int, str]
    ) -> StepPlan:
        """Nobody donates a body's arguments: XLA knows what it may overwrite."""
        own = [labels.get(id(v), f"argument {i} of a body") for i, v in enumerate(values)]
        return self.plan(closed_jaxpr, own, [True] * len(own))


def _labels_of_results(run: Cut) -> dict[int, str]:
    """What a person, and the key of a later split, call the results of a run: by what made them.

    No ordinals: when splits shift, the labels stay.
    """
    made_by = {id(v): eqn for eqn in run.eqns for v in eqn.outputs}
    return {id(v): f"{made_by[id(v)].primitive.name}@{made_by[id(v)].source}" for v in run.outputs}


def _update_copies(step, splits, labels, donated) -> list[Copy]:
    """What updates cost a copy, because of the order of results or a missing donation."""
    copies = []
    argument = {id(v): i for i, v in enumerate(step.inputs)}
    for pack in step.packs:
        argument |= {id(v): argument.get(id(pack.buffer)) for v in pack.leaves}
    for split in splits:
        if split.native is None:
            updated = _updated_by_xla(split.cut.eqns)
        else:
            for where, nbytes, why in split.native.copied_updates:
                why = f"copies {nbytes:,} bytes at {where}: {why}"
                copies.append(Copy(where, nbytes, True, why))
            operands = [split.native.operands[i] for i in split.native.aliases]
            updated = [of.buffer if isinstance(of, Pack) else of for of in operands]
        for value in updated:
            at = argument.get(id(value))
            if at is None or (donated is not None and donated[at]):
                continue
            what = labels[id(value)]
            nbytes = value.aval.size * value.aval.dtype.itemsize
            if donated is None:
                why = (
                    f"whether {what} ({nbytes:,} bytes) is copied before its update is unknown: "
                    "an outer jit decides about donation"
                )
            else:
                why = (
                    f"copies {nbytes:,} bytes a call: {what} is updated but not donated; name its "
                    "argument in donate_argnums"
                )
            copies.append(Copy(what, nbytes, donated is not None, why))
    return copies


def _updated_by_xla(eqns: Sequence[FlatEqn]) -> list[Value]:
    """What equations left in XLA take a new version of, which XLA makes in place if it may."""
    updates = [e for e in eqns if e.primitive.name.startswith(("scatter", "dynamic_update_slice"))]
    return list({id(e.inputs[0]): e.inputs[0] for e in updates}.values())


def _packed_copies(
    step: FlatStep, splits: Sequence[Split], labels: dict[int, str], places: Mapping[int, Any]
) -> list[Copy]:
    """Leaves of packed arguments that XLA reads or makes: in buffers of their own."""
    copies = []
    for split in splits:
        if split.native is not None:
            continue
        for value in {id(v): v for e in split.cut.eqns for v in e.inputs}.values():
            if id(value) not in places:
                continue
            eqn = next(e for e in split.cut.eqns if value in e.inputs)
            nbytes = value.aval.size * value.aval.dtype.itemsize
            what = labels.get(id(value), "a packed argument")
            why = (
                f"copies up to {nbytes:,} bytes a call at {eqn.source}: XLA reads {what} out of a "
                "packed tree"
            )
            copies.append(Copy(what, nbytes, False, why))
    for pack in step.packs:
        for n, value in enumerate(pack.new_leaves):
            if places.get(id(value)) == PackedLeaf(pack, n):
                continue
            nbytes, what = pack.spec.arrays[n].nbytes, labels[id(pack.leaves[n])]
            why = (
                f"copies {nbytes:,} bytes a call: what {what} of the packed result is to be is not "
                "made in its place"
            )
            copies.append(Copy(what, nbytes, True, why))
    return copies


def _evaluate(eqn: FlatEqn, env: _Environment) -> None:
    """Applies an equation that stays in XLA, as JAX's own evaluator would."""
    inputs = [env.read(v) for v in eqn.inputs]
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair before jax 0.10
    out = eqn.primitive.bind(*subfuns, *inputs, **params)
    outs = out if eqn.primitive.multiple_results else [out]
    for value, array in zip(eqn.outputs, outs, strict=True):
        env.write(value, array)
