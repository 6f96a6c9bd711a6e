"""Profitability: what is better left to XLA although the kernels could do it.

The rules are all here, and an option overrides each: products of many rows are bound by arithmetic,
where XLA's library kernels are the better choice; a native split costs the host something at every
call, which a short one does not give back; and in the body of a loop it does so at every turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgraph.frontend.flatten import FlatEqn, FlatStep


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the rules go by; see `Options`.

    Attributes:
      max_rows: of a native product with a weight; 0: any number.
      min_equations: of a native run beside XLA's.
      streams: whether the devices multiply rows by 16-bit weights at the speed of memory.
    """

    # Up to 16 rows the kernels stream the weights once, at the speed of memory; with more they read
    # them again, or do without the tensor cores.
    max_rows: int = 16
    min_equations: int = 4
    streams: bool = False


DEFAULT = Limits()

# Between activations a product may have so many times as many rows: those of attention are heads
# that share keys and values, which a kernel of its own takes at once.
TIMES_BETWEEN_ACTIVATIONS = 4

# So may a product with a weight of 16-bit floats where devices stream those: with 64 rows, reading
# the weight still takes longer than multiplying.
_TIMES_OF_STREAMED = 4

# What makes a weight another weight: views leave it in memory as it is.
_VIEWS = frozenset(
    [
        "bitcast_convert_type",
        "dynamic_slice",
        "expand_dims",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    ]
)
_KEEP_WEIGHTS = _VIEWS | {"broadcast_in_dim", "convert_element_type", "mul", "sub"}

# The call of a native split costs the host 10 to 20 us, in which XLA launches several kernels: so
# many must a run save where calls add up. A step of four runs takes XLA 0.72 of our time where each
# saves five, and 1.06 where nine (benchmarks/profitability.py pieces, H200).
_FEW_RUNS = 3
_KERNELS_OF_A_CALL = 8

# How the names of primitives begin that XLA launches a kernel of its own for.
_NOT_FUSED = (
    "approx_top_k",
    "arg",
    "cum",
    "dot_general",
    "dynamic_update_slice",
    "gather",
    "ragged_dot",
    "reduce_",
    "scatter",
    "sort",
    "top_k",
)

# In a body a native run must be so many times as long as elsewhere: it is called at every turn.
_TIMES_IN_A_BODY = 4

# What a scan hands to each turn is a slice of a stacked array, which XLA copies for a native split
# and reads in place in kernels of its own.
_MAX_SLICE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a rule decided about a step.

    Attributes:
      rule: "rows", "short runs" or "bodies".
      left_in_xla: whether it left anything to XLA.
      text: one sentence, with the option that overrides the rule.
    """

    rule: str
    left_in_xla: bool
    text: str

    def __str__(self) -> str:
        return self.text


def judge_step(step: FlatStep, limits: Limits) -> Decision:
    """Whether the whole step is better left to XLA, for the sake of its widest product."""
    # Here, for Options needs the limits alone, and `import jaxgraph` is to be quick.
    from jaxgraph.frontend import contraction

    weights, as_stored = _weights(step, _KEEP_WEIGHTS), _weights(step, _VIEWS)
    widest, rows, excess = None, 0, 0.0
    for eqn in step.eqns:
        if eqn.primitive.name != "dot_general":
            continue
        times = TIMES_BETWEEN_ACTIVATIONS
        if any(id(v) in weights for v in eqn.inputs):
            larger = max(eqn.inputs, key=lambda v: v.aval.size)
            times = times_of_weight(eqn, limits) if id(larger) in as_stored else 1
        if contraction.rows(eqn) / times > excess:
            widest, rows, excess = eqn, contraction.rows(eqn), contraction.rows(eqn) / times
    if widest is None:
        return Decision("rows", False, "nothing is multiplied")
    where = f"dot_general at {widest.source} multiplies {_rows(rows)} at once"
    if limits.max_rows == 0:
        return Decision("rows", False, f"{where}; Options(max_rows=0) sets no bound")
    bound = f"Options(max_rows={limits.max_rows})"
    if excess <= limits.max_rows:
        return Decision("rows", False, f"{where}, within the bound of native products, {bound}")
    why = f"all in XLA: {where}, which XLA's own kernels do best; the bound is {bound}"
    return Decision("rows", True, why)


def times_of_weight(eqn: FlatEqn, limits: Limits) -> int:
    """How many times `max_rows` a product may have with a weight that is stored as it is used."""
    dtypes = {v.aval.dtype.name for v in eqn.inputs}
    streamed = limits.streams and dtypes in ({"bfloat16"}, {"float16"})
    return _TIMES_OF_STREAMED if streamed else 1


def _weights(step: FlatStep, made_by: frozenset[str]) -> set[int]:
    """Ids of values that are arguments, or made of nothing but those, by such primitives.

    A cache that was written to is none: attention reads it for as many rows as heads share it.
    """
    weights = {id(v) for v in step.given}
    for eqn in step.eqns:
        if eqn.primitive.name not in made_by:
            continue
        if all(id(v) in weights or v.known is not None for v in eqn.inputs):
            weights.update(id(v) for v in eqn.outputs)
    return weights


def short_runs(runs: Sequence[Sequence[Any]], limits: Limits) -> list[Sequence[Any]]:
    """Those native runs, beside runs of XLA, that are not worth a split.

    In a step that is cut into many, what splits cost adds up: there each must save XLA so many
    kernels of its own as its call costs.
    """
    short = [run for run in runs if len(run) < limits.min_equations]
    if not short and len(runs) > _FEW_RUNS and limits.min_equations > 0:
        short = [run for run in runs if _kernels_of_xla(run) < _KERNELS_OF_A_CALL]
    return short


def _kernels_of_xla(run: Sequence[Any]) -> int:
    """How many kernels XLA would launch for these equations: what it cannot fuse, and the rest."""
    apart = sum(e.primitive.name.startswith(_NOT_FUSED) for e in run)
    return apart + (apart < len(run))


def judge_runs(short: Sequence[Sequence[Any]], limits: Limits) -> Decision:
    """What became of the runs that do not pay."""
    bound = f"Options(min_equations={limits.min_equations})"
    if not short:
        return Decision("short runs", False, f"no native run is too short to pay, {bound}")
    count = sum(map(len, short))
    runs = "1 native run" if len(short) == 1 else f"{len(short)} native runs"
    text = f"{runs} ({count} equations) too short to pay stayed in XLA; the bound is {bound}"
    return Decision("short runs", True, text)


@dataclasses.dataclass(frozen=True)
class BodySummary:
    """What a plan makes of the body of a loop, or of a branch.

    Attributes:
      equations: in all.
      native_runs: the numbers of equations of its native runs.
      multiplies: whether one of them multiplies matrices.
      has_bodies: whether a body inside of it is planned.
    """

    equations: int
    native_runs: tuple[int, ...]
    multiplies: bool
    has_bodies: bool


def judge_slices(what: str, nbytes: int, limits: Limits) -> Decision | None:
    """Whether a scan hands too much to each turn for a native body; None: it does not."""
    if limits.min_equations == 0 or nbytes <= _MAX_SLICE_BYTES:
        return None
    why = f"each turn takes {nbytes:,} bytes of stacked arrays, which XLA reads in place"
    return _on_body(what, True, why, limits)


def judge_body(what: str, body: BodySummary, limits: Limits) -> Decision:
    """Is most of a body native, and some of that worth a call at every turn?"""
    least = _TIMES_IN_A_BODY * limits.min_equations
    eqns = sum(body.native_runs)
    if limits.min_equations == 0 or body.has_bodies:
        return _on_body(what, False, f"{eqns} of its {body.equations} equations are", limits)
    if not body.multiplies:
        return _on_body(what, True, "it multiplies no matrices", limits)
    if eqns < least * len(body.native_runs):
        return _on_body(what, True, f"its native runs have fewer than {least} equations", limits)
    if 2 * eqns < body.equations:
        return _on_body(what, True, "less than half of it is native", limits)
    return _on_body(what, False, f"{eqns} of its {body.equations} equations are", limits)


def _on_body(what: str, left_in_xla: bool, why: str, limits: Limits) -> Decision:
    verdict = "stays in XLA" if left_in_xla else "is native"
    bound = f"Options(min_equations={limits.min_equations})"
    return Decision("bodies", left_in_xla, f"{what} {verdict}: {why}; the bound is {bound}")


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"
