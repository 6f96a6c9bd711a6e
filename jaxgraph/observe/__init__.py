"""What a step does, for people and for machines: counters, events, executions."""

from jaxgraph.observe.counters import Stats, Tally, reset_stats, stats
from jaxgraph.observe.dump import dump
from jaxgraph.observe.events import Event, Execution, NodeChange, events
from jaxgraph.observe.observed import Observed
from jaxgraph.observe.report import report
from jaxgraph.observe.trace import trace

__all__ = [
    "Event",
    "Execution",
    "NodeChange",
    "Observed",
    "Stats",
    "Tally",
    "dump",
    "events",
    "report",
    "reset_stats",
    "stats",
    "trace",
]
