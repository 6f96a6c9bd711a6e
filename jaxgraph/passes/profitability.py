"""Profitability: what is better left to XLA although the kernels could do it.

Two rules, both here and both overridable by an option: products of many rows are bound by
arithmetic, where XLA's library kernels are the better choice; and a native split costs the host
something at every call, which a short one does not give back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxgraph.frontend import contraction
from jaxgraph.frontend.flatten import FlatEqn


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the rules go by; see `Options`.

    Attributes:
      max_rows: of a native product; 0: any number.
      min_equations: of a native run beside XLA's.
    """

    max_rows: int = 64
    min_equations: int = 4


DEFAULT = Limits()


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a rule decided about a step.

    Attributes:
      rule: "rows" or "short runs".
      left_in_xla: whether it left anything to XLA.
      text: one sentence, with the option that overrides the rule.
    """

    rule: str
    left_in_xla: bool
    text: str

    def __str__(self) -> str:
        return self.text


def judge_step(eqns: Sequence[FlatEqn], limits: Limits) -> Decision:
    """Whether the whole step is better left to XLA, for the sake of its widest product."""
    widest, rows = None, 0
    for eqn in eqns:
        if eqn.primitive.name == "dot_general" and contraction.rows(eqn) > rows:
            widest, rows = eqn, contraction.rows(eqn)
    if widest is None:
        return Decision("rows", False, "nothing is multiplied")
    where = f"dot_general at {widest.source} multiplies {_rows(rows)} at once"
    if limits.max_rows == 0:
        return Decision("rows", False, f"{where}; Options(max_rows=0) sets no bound")
    bound = f"Options(max_rows={limits.max_rows})"
    if rows <= limits.max_rows:
        return Decision("rows", False, f"{where}, within the bound of native products, {bound}")
    why = f"all in XLA: {where}, which XLA's own kernels do best; the bound is {bound}"
    return Decision("rows", True, why)


def pays(eqns: Sequence[Any], limits: Limits) -> bool:
    """Is a native run of these equations, between runs of XLA, worth a split?"""
    return len(eqns) >= limits.min_equations


def judge_runs(short: Sequence[Sequence[Any]], limits: Limits) -> Decision:
    """What became of the runs that do not pay."""
    bound = f"Options(min_equations={limits.min_equations})"
    if not short:
        return Decision("short runs", False, f"no native run is too short to pay, {bound}")
    count = sum(map(len, short))
    runs = "1 native run" if len(short) == 1 else f"{len(short)} native runs"
    text = f"{runs} ({count} equations) too short to pay stayed in XLA; the bound is {bound}"
    return Decision("short runs", True, text)


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"
