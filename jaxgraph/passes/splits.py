"""Cuts the flat list of equations into maximal runs that one backend executes.

Host callbacks are runs of their own, which nothing ever captures; what is around them is native.

Equations are scheduled greedily: all that are ready for the present backend before the other one
gets its turn, so that independent work never costs an extra split. Effects keep their order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from jaxgraph.frontend.flatten import FlatEqn, FlatStep, Value, needed_eqns
from jaxgraph.frontend.lowering import why_not_native
from jaxgraph.passes import profitability
from jaxgraph.passes.profitability import Decision, Limits

NATIVE, XLA, CALLBACK = "native", "xla", "callback"

# Primitives that call back into Python.
_CALLBACKS = frozenset(["pure_callback", "io_callback", "debug_callback", "debug_print"])

# How the names of primitives begin that exchange data between devices.
_COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


@dataclasses.dataclass(eq=False)
class Cut:
    """A run of equations for one backend, the values it takes and the values others read."""

    backend: str
    eqns: list[FlatEqn]
    inputs: list[Value] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)

    @property
    def native(self) -> bool:
        return self.backend == NATIVE


@dataclasses.dataclass(frozen=True)
class LeftInXla:
    """An equation that stays in XLA: which, why, and where in the user's code it stands.

    Attributes:
      primitive: its name.
      reason: words that follow "it ...".
      source: file, line and function; empty where JAX knows none.
      times: how many such equations there are.
    """

    primitive: str
    reason: str
    source: str
    times: int = 1

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.primitive} {self.reason}, {self.source or 'of unknown source'}{often}"


@dataclasses.dataclass(eq=False)
class Cuts:
    """How a step is cut.

    Attributes:
      runs: in execution order.
      left: the equations that are not native.
      decision: what became of runs that are too short to pay.
    """

    runs: list[Cut]
    left: list[LeftInXla]
    decision: Decision


def cut(step: FlatStep, limits: Limits = profitability.DEFAULT) -> Cuts:
    """The splits of a step, and the equations that are not native."""
    eqns = needed_eqns(step.eqns, {id(v) for v in step.wanted})
    reasons = {id(e): _why_left(e) for e in eqns}
    left = [
        LeftInXla(e.primitive.name, reason, e.source)
        for e in eqns
        if (reason := reasons[id(e)]) is not None
    ]
    backend = {id(e): NATIVE if reasons[id(e)] is None else XLA for e in eqns}
    short: list[Sequence[FlatEqn]] = []
    while True:
        eqns = _repeat_views(step, eqns, backend)
        runs = _schedule(eqns, backend)
        native = [r.eqns for r in runs if r.backend == NATIVE] if len(runs) > 1 else []
        found = profitability.short_runs(native, limits)
        if not found:
            break
        short += found  # what XLA reads is another set now, and so are the views that it repeats
        for e in itertools.chain(*found):
            backend[id(e)] = XLA
            left.append(LeftInXla(e.primitive.name, "stands in a run too short to pay", e.source))
    runs = [part for run in runs for part in _apart_from_callbacks(run)]
    _find_interfaces(step, runs)
    return Cuts(runs, _counted(left), profitability.judge_runs(short, limits))


def _why_left(eqn: FlatEqn) -> str | None:
    """Why an equation is not native, in words that follow "it ..."; None: it is."""
    if eqn.primitive.name in _CALLBACKS:
        return "calls back into Python, so its split is never captured"
    if eqn.primitive.name.startswith(_COLLECTIVES):
        return "is a collective, which is XLA's to do"
    return why_not_native(eqn)


def _counted(left: Sequence[LeftInXla]) -> list[LeftInXla]:
    """Equal ones once, with their number."""
    return [dataclasses.replace(e, times=n) for e, n in collections.Counter(left).items()]


def _apart_from_callbacks(run: Cut) -> list[Cut]:
    """A run of XLA's as runs with and without callbacks; they are compiled as one all the same."""
    kind = {id(e): CALLBACK if e.primitive.name in _CALLBACKS else XLA for e in run.eqns}
    if run.backend == NATIVE or CALLBACK not in kind.values():
        return [run]
    return _schedule(run.eqns, kind, (XLA, CALLBACK))


_VIEWS = frozenset(
    [
        "slice",
        "squeeze",
        "reshape",
        "expand_dims",
        "transpose",
        "broadcast_in_dim",
        "bitcast_convert_type",
    ]
)


def _repeat_views(
    step: FlatStep, eqns: Sequence[FlatEqn], backend: dict[int, str]
) -> list[FlatEqn]:
    """Lets XLA look at arguments itself.

    A native split would have to copy a view of an argument (a layer of a stack) into a result for
    XLA to read it. So the views are repeated among XLA's equations.
    """
    if XLA not in backend.values():
        return list(eqns)
    made_by = {id(v): e for e in eqns for v in e.outputs}
    given = {id(v) for v in step.given}
    wanted = {id(v) for v in step.wanted}
    repeated: dict[int, Value] = {}
    result: list[FlatEqn] = []

    def is_view_of_argument(value: Value) -> bool:
        eqn = made_by.get(id(value))
        while eqn is not None and eqn.primitive.name in _VIEWS and backend[id(eqn)] == NATIVE:
            if id(eqn.inputs[0]) in given:
                return True
            eqn = made_by.get(id(eqn.inputs[0]))
        return False

    def repeat(value: Value) -> Value:
        if id(value) in given:
            return value
        if id(value) not in repeated:
            eqn = made_by[id(value)]
            repeated[id(value)] = Value(value.aval, value.known)
            copy = FlatEqn(
                eqn.primitive,
                eqn.params,
                [repeat(eqn.inputs[0]), *eqn.inputs[1:]],
                [repeated[id(value)]],
                eqn.source,
            )
            backend[id(copy)] = XLA
            result.append(copy)
        return repeated[id(value)]

    for eqn in eqns:
        if backend[id(eqn)] == XLA:
            eqn.inputs = [repeat(v) if is_view_of_argument(v) else v for v in eqn.inputs]
        result.append(eqn)
    # What only XLA read is not needed in native code any more.
    return needed_eqns(result, wanted)


def _schedule(
    eqns: Sequence[FlatEqn], backend: dict[int, str], backends: tuple[str, str] = (XLA, NATIVE)
) -> list[Cut]:
    """The runs of the better of the two schedules, which begin with one backend or the other."""
    present = {backend[id(e)] for e in eqns}
    if len(present) == 1:
        return [Cut(present.pop(), list(eqns))]
    orders = (backends, backends[::-1])
    return min((_scheduled(order, eqns, backend) for order in orders), key=len)


def _scheduled(
    order: tuple[str, str], eqns: Sequence[FlatEqn], backend: dict[int, str]
) -> list[Cut]:
    """Runs of the two backends in turn."""
    now, then = order
    made_by = {id(v): e for e in eqns for v in e.outputs}
    waits: dict[int, int] = {}
    readers: dict[int, list[FlatEqn]] = {}
    last_effect: FlatEqn | None = None
    for eqn in eqns:
        before = {id(made_by[id(v)]) for v in eqn.inputs if id(v) in made_by}
        if eqn.effects:
            if last_effect is not None:
                before.add(id(last_effect))
            last_effect = eqn
        waits[id(eqn)] = len(before)
        for b in before:
            readers.setdefault(b, []).append(eqn)

    position = {id(e): i for i, e in enumerate(eqns)}
    ready: dict[str, list[FlatEqn]] = {now: [], then: []}
    for eqn in eqns:
        if waits[id(eqn)] == 0:
            ready[backend[id(eqn)]].append(eqn)
    runs = []
    while ready[now] or ready[then]:
        run: list[FlatEqn] = []
        while ready[now]:
            eqn = ready[now].pop(0)
            run.append(eqn)
            for reader in readers.get(id(eqn), ()):
                waits[id(reader)] -= 1
                if waits[id(reader)] == 0:
                    ready[backend[id(reader)]].append(reader)
        if run:
            run.sort(key=lambda e: position[id(e)])
            runs.append(Cut(now, run))
        now, then = then, now
    return runs


def _find_interfaces(step: FlatStep, runs: Sequence[Cut]) -> None:
    """Fills in each run's inputs and outputs."""
    made_in = {id(v): r for r in runs for e in r.eqns for v in e.outputs}
    wanted: dict[int, Value] = {}
    for value in step.wanted:
        wanted[id(value)] = value
    for run in runs:
        seen: dict[int, Value] = {}
        for eqn in run.eqns:
            for value in eqn.inputs:
                outside = made_in.get(id(value)) is not run
                if outside and not (value.known is not None and value.aval.size == 1):
                    seen[id(value)] = value
        run.inputs = list(seen.values())
        wanted.update(seen)
    for run in runs:
        run.outputs = [v for e in run.eqns for v in e.outputs if id(v) in wanted]
