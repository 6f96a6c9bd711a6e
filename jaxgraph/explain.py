"""Explanation: how a wrapped function is run, and why, for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. Prints as text.

    Attributes:
      function: the wrapped function's qualified name.
      platform: where its arguments live: "cpu", "cuda", ...
      native: whether native splits run there.
      notes: why the plain function runs, or what costs something: sentences.
      plan: the plan's description: splits, backends, what stayed in XLA and why.
      splits: the planned splits themselves.
      runtime: what executors know: chunks, launches, placements.
    """

    function: str
    platform: str
    native: bool
    notes: Sequence[str]
    plan: Sequence[str]
    splits: Sequence[Any]
    runtime: Sequence[str]

    def __str__(self) -> str:
        how = "native splits" if self.native else "the plain function"
        lines = [f"{self.function} on {self.platform}: {how}"]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {line}" for line in self.plan]
        if self.runtime:
            lines += ["executed so far:", *(f"  {line}" for line in self.runtime)]
        return "\n".join(lines)
