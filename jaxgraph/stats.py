"""Stats and events: what happened, as plain data that prints well."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of one wrapped function since it was made or cleared.

    `calls` counts calls from Python. The others count executions of native splits on all devices,
    also those inside another jit or scan. Attributes are integers; `dict(stats)` gives them all.

    Attributes:
      calls: calls of the wrapped function from Python (also those that another trace inlined).
      executions: native splits executed.
      eager: executions that launched their kernels one by one.
      captures: executions that captured graphs, and ran what they captured.
      replays: executions that launched existing executables, patched or not.
      patches: nodes whose parameters were set in an executable.
      exec_updates: chunks whose executable was updated in place from a new capture.
      instantiations: chunks instantiated.
      uid_hits: executions in which nothing could have changed, so no node was looked at.
      property_compares: executions in which node properties were compared.
      nodes_compared: nodes looked at in those.
      resets: variants sent back to warmup.
      evictions: variants dropped.
      failures: device calls that failed and were survived.
      chunk_launches: executables launched.
      live_execs: executables alive now.
      arena_bytes: size now of the largest arena that ran this function.
    """

    calls: int = 0
    executions: int = 0
    eager: int = 0
    captures: int = 0
    replays: int = 0
    patches: int = 0
    exec_updates: int = 0
    instantiations: int = 0
    uid_hits: int = 0
    property_compares: int = 0
    nodes_compared: int = 0
    resets: int = 0
    evictions: int = 0
    failures: int = 0
    chunk_launches: int = 0
    live_execs: int = 0
    arena_bytes: int = 0

    def keys(self) -> list[str]:
        """The counters' names, so that `dict(stats)` works."""
        return [field.name for field in dataclasses.fields(self)]

    def __getitem__(self, name: str) -> int:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __str__(self) -> str:
        width = max(map(len, self.keys()))
        return "\n".join(f"{name:<{width}}  {self[name]:>14,}" for name in self.keys())


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened in an executor.

    Attributes:
      sequence: order within its device.
      time_s: seconds since the epoch.
      device: ordinal of the device.
      split: which native split of the step.
      what: "eager", "capture", "replay" (first of a run), "update", "instantiate", "reset",
        "evict", "failure" or "placement".
      why: one sentence.
    """

    sequence: int
    time_s: float
    device: int
    split: int
    what: str
    why: str

    def __str__(self) -> str:
        time = datetime.datetime.fromtimestamp(self.time_s).strftime("%H:%M:%S.%f")[:-3]
        return f"{time}  device {self.device}  split {self.split}  {self.what}: {self.why}"
