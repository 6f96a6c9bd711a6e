"""Observed: the methods by which a wrapped function tells what it did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jaxgraph.observe.counters import Stats, new_tally
from jaxgraph.observe.events import Event, Execution, events, executions
from jaxgraph.observe.history import history_of
from jaxgraph.runtime import native

if TYPE_CHECKING:
    from jaxgraph.plan.step import StepPlan
    from jaxgraph.runtime.primitive import Planned
    from jaxgraph.wrap import GraphedFunction


class Observed:
    """What a wrapped function counts and remembers.

    Attributes:
      name: the function's qualified name.
      function_id: its number in the executors.
    """

    name: str
    function_id: int
    _last: Planned | None  # what the last call that was traced came to

    def __init__(self) -> None:
        self._tally = new_tally()

    def stats(self) -> Stats:
        """Counters since the function was wrapped, cleared or reset."""
        return Stats(**self._tally.as_dict(), **native.stats(self.function_id))

    def reset_stats(self) -> None:
        """Zeroes the counters and forgets events and executions; captured graphs stay."""
        self._tally.zero()
        native.reset_stats(self.function_id)

    def events(self) -> list[Event]:
        """What happened last in the executors, oldest first: up to 1024 events a device."""
        return events(self.function_id)

    def executions(self) -> list[Execution]:
        """The last executions of its native splits: up to 4096 for each stream."""
        return executions(self.function_id)

    def history(self) -> str:
        """Why the last execution was not a replay, in one sentence; or that it was one."""
        return history_of(self.function_id)

    def plot(self) -> Any:
        """Draws latency by what happened, and the splits and chunks: a `matplotlib` figure.

        See `jaxgraph.observe.plot.plot`; `step.plot().savefig("step.png")` writes it to a file.
        """
        from jaxgraph.observe.plot import plot

        return plot(cast("GraphedFunction", self))

    def last_plan(self) -> StepPlan | None:
        """The plan of the last call that was traced; None: there was none, or it stays in XLA."""
        return None if self._last is None else self._last.plan

    def clear(self) -> None:
        """Destroys the captured graphs and zeroes all counters; compiled code stays."""
        self._tally.zero()
        native.clear(self.function_id)
