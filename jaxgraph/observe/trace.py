"""trace: what the executors did and when, as a file that Perfetto and Chrome show."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxgraph.runtime import native

# Tracks of the host and of each device, as the format's "processes".
_HOST = 1
_FIRST_DEVICE = 2


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes what the executors do meanwhile as Chrome trace events (open it in ui.perfetto.dev).

    On the host there are spans of executions (named by function, split and what they came to), of
    their phases (decide, plan, capture, instantiate, update) and of the launches of chunks; on each
    CUDA device, the chunks themselves, timed by events on their stream. On leaving, the device is
    waited for. Times are those of `time.perf_counter()`. A traced launch costs some microseconds
    more.

    Args:
      path: the file to write, usually "….json".

    Raises:
      RuntimeError: there is a trace in this process already.
      OSError: the file cannot be written; known before anything is traced.
    """
    with open(path, "w") as file:
        native.begin_trace()
        try:
            yield
        finally:
            spans, dropped = native.end_trace()
            json.dump(chrome_trace(spans, dropped), file)


def chrome_trace(
    spans: Sequence[tuple[str, str, float, float, int, int]], dropped: int
) -> dict[str, Any]:
    """Spans (name, category, begin s, end s, track, device) in Chrome's trace event format."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], int] = {}
    processes = {_HOST: "host"}
    for name, category, begin, end, track, device in spans:
        process = _FIRST_DEVICE + device if category == "device" else _HOST
        if process != _HOST:
            processes[process] = f"CUDA device {device}"
        # The format's thread ids are small; ours are hashes and pointers.
        thread = threads.setdefault((process, track), len(threads) + 1)
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "ts": begin * 1e6,
                "dur": (end - begin) * 1e6,
                "pid": process,
                "tid": thread,
            }
        )
    for process, name in processes.items():
        events.append(_named("process_name", name, process))
    for (process, _), thread in threads.items():
        kind = "thread" if process == _HOST else "stream"
        events.append(_named("thread_name", f"{kind} {thread}", process, thread))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"spans_dropped": dropped}}


def _named(what: str, name: str, process: int, thread: int | None = None) -> dict[str, Any]:
    event = {"ph": "M", "name": what, "pid": process, "args": {"name": name}}
    return event if thread is None else event | {"tid": thread}
