"""history: why the last step was not a replay, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgraph.observe.counters import Stats
from jaxgraph.observe.events import Event, Execution, events, executions
from jaxgraph.runtime import native

# By the counter that says why an execution ran eagerly: what can be done about it.
_ADVICE = {
    "eager_warmup": (
        "its variant was not warm yet: after Options.warmup_calls identical calls it is captured"
    ),
    "eager_not_capturable": "a node needs the host, see never_captured of step.explain()",
    "eager_failures": "captures or launches failed too often; step.clear() tries again",
    "eager_memory": "its executables alone exceed Options.memory_budget",
    "eager_crowded": (
        "its executables and others do not fit into Options.max_executables and memory_budget "
        "together, and one replay of them is not worth a capture of the others"
    ),
    "eager_outside": "somebody else was capturing the stream, so kernels went into their graph",
    "eager_recovered": "a device call failed, and the rest of the step ran kernel by kernel",
}


def history_of(function_id: int) -> str:
    """One sentence on a function's last execution: a replay, or why it was none."""
    stats = Stats(**native.stats(function_id))
    return history(stats, events(function_id), executions(function_id))


def history(stats: Stats, seen: Sequence[Event], ran: Sequence[Execution]) -> str:
    """One sentence on the last execution: a replay, or why it was none."""
    if not ran:
        if stats.executions:
            return f"{_how_often(stats)}; the executions themselves are not remembered any more."
        return (
            "No native split has run yet: call the step, or see step.explain() for why it cannot."
        )
    last = ran[-1]
    if last.outcome == "replay":
        return f"The last execution was a replay; {_how_often(stats)}."
    cause = _cause(seen, last)
    if last.outcome == "update":
        return (
            f"The last execution updated its graphs before the replay, for what it had recorded "
            f"was of another call: {cause}; {_how_often(stats)}."
        )
    if last.outcome == "capture":
        return f"The last execution captured its graphs: {cause}; {_how_often(stats)}."
    return f"The last execution ran eagerly: {cause} ({_ADVICE[last.reason]}); {_how_often(stats)}."


def _how_often(stats: Stats) -> str:
    return f"{stats.replays:,} of {stats.executions:,} executions were replays"


def _cause(seen: Sequence[Event], last: Execution) -> str:
    """Why the execution was no replay: only the first of a run of like ones has an event."""
    names = ("failure",) if last.reason == "eager_recovered" else (last.outcome,)
    for event in reversed(seen):
        same = (event.device, event.split, event.variant) == (last.device, last.split, last.variant)
        if same and event.what in names:
            return event.why
    return "the event is not remembered any more"
