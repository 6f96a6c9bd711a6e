"""Events and executions: what happened and why, as plain data; and the way to `logging`."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from jaxgraph.runtime import native

logger: logging.Logger = logging.getLogger("jaxgraph")

# How long an event may wait until it is logged.
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class NodeChange:
    """One property of a node that differs from the recording's.

    Attributes:
      node: the node's number in its split.
      op: its kind: "EXPR", "ROW", "MATMUL", ...
      label: primitives and the source line they come from: "mul@model.py:88".
      field: what differs: "address", "shape", "strides", "dtype", "params", "op", ...
      source: whether it is about one of the node's sources, else about an output.
      tensor: which source or output.
      before: the value that was recorded.
      after: the value now.
    """

    node: int
    op: str
    label: str
    field: str
    source: bool
    tensor: int
    before: str
    after: str

    def __str__(self) -> str:
        if not self.op:
            return f"{self.field} {self.before} → {self.after}"
        what = f"node {self.node} {self.label or self.op}"
        if self.field in ("address", "shape", "strides", "dtype"):
            what += f", {'source' if self.source else 'output'} {self.tensor}"
        return f"{what} {self.field} {self.before} → {self.after}"


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened in an executor.

    Attributes:
      sequence: number in the process; ascending.
      time_s: seconds since the epoch.
      device: ordinal of the device.
      function: qualified name of the wrapped function.
      split: which native split of the step.
      key: the split's graph key, 32 hexadecimal digits.
      variant: number of the variant in its executor; 0: none.
      what: "eager", "capture", "replay" (first of a run), "update", "instantiate", "reset",
        "evict", "failure" or "placement".
      why: one sentence.
      changes: the first node properties that differ from what was recorded, if any do.
      changes_total: how many differ.
    """

    sequence: int
    time_s: float
    device: int
    function: str
    split: int
    key: str
    variant: int
    what: str
    why: str
    changes: tuple[NodeChange, ...] = ()
    changes_total: int = 0

    def __str__(self) -> str:
        time = datetime.datetime.fromtimestamp(self.time_s).strftime("%H:%M:%S.%f")[:-3]
        lines = [f"{time}  device {self.device}  split {self.split}  {self.what}: {self.why}"]
        lines += [f"    {change}" for change in self.changes]
        if self.changes and self.changes_total > len(self.changes):
            lines.append(f"    and {self.changes_total - len(self.changes):,} more")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Execution:
    """One execution of a native split, as the host saw it.

    Attributes:
      start_s: when it began, on the clock of `time.perf_counter()`.
      decide_ns: until it was known what may run; 0 where the uid was the same as last time.
      run_ns: from then until everything was enqueued (on a CPU: computed).
      split: which native split of the step.
      variant: number of the variant in its executor; 0: none.
      outcome: "eager", "capture", "update" or "replay".
      reason: of an eager one the counter that says why ("eager_warmup", ...); else empty.
      platform: "host" or "cuda".
      device: ordinal of the device.
    """

    start_s: float
    decide_ns: int
    run_ns: int
    split: int
    variant: int
    outcome: str
    reason: str
    platform: str
    device: int


def events(function_id: int = 0, after: int = 0) -> list[Event]:
    """What happened last in the executors, oldest first: up to 1024 events a device.

    Args:
      function_id: of one wrapped function (`GraphedFunction.function_id`); 0: of all.
      after: only events with a larger `sequence`.
    """
    return [_event(found) for found in native.events(function_id, after)]


def executions(function_id: int) -> list[Execution]:
    """The last executions of a function's splits (0: of all), in order of their beginning."""
    names = [field.name for field in dataclasses.fields(Execution)]
    return [Execution(**{n: found[n] for n in names}) for found in native.executions(function_id)]


def _event(found: Mapping[str, Any]) -> Event:
    values = {field.name: found[field.name] for field in dataclasses.fields(Event)}
    values["key"] = found["key"].hex()
    values["changes"] = tuple(NodeChange(**change) for change in found["changes"])
    return Event(**values)


class EventLogger:
    """Hands events to `logging` from a thread of its own, so that no executor waits for the GIL."""

    def __init__(self) -> None:
        self._last = native.last_event()
        self._stop = threading.Event()
        self._lock = threading.RLock()  # a handler may flush, too
        self._thread = threading.Thread(target=self._poll, name="jaxgraph events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def flush(self) -> None:
        """Logs what has not been logged yet."""
        with self._lock:
            if native.last_event() == self._last:
                return
            self._log(events(0, self._last))

    def close(self) -> None:
        """Logs the rest, and ends the thread."""
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join()
        self.flush()

    def _log(self, found: Iterable[Event]) -> None:
        for event in found:
            if event.sequence <= self._last:
                continue  # logged by a flush from within a handler
            self._last = event.sequence
            level = logging.WARNING if event.what == "failure" else logging.DEBUG
            logger.log(level, "%s: %s", event.function, event)

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self.flush()


def log_events() -> EventLogger:
    """Sends events to the logger "jaxgraph"; failures as warnings, all else as debug messages.

    `JAXGRAPH_DEBUG=1` does this at import. Where the logger has no handler, they go to the standard
    error.
    """
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("jaxgraph %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    return EventLogger()
