"""Counters: what was counted of one wrapped function, or of the process; they print well."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

from jaxgraph.runtime import native


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since a function was wrapped, cleared or reset: integers, exact and monotone.

    `calls`, `signatures` and `planning_ns` are counted in Python. All others count executions of
    native splits on all devices, also those inside another jit or scan. `dict(stats)` gives them
    all; `print(stats)` gives a table. Times are nanoseconds of the host.

    Attributes:
      calls: calls of the wrapped function from Python (also those that another trace inlined).
      signatures: times that it was traced: one for each combination of shapes, dtypes, tree
        structure and static arguments, unless JAX's cache forgot one.
      planning_ns: time spent on planning what was traced.
      executions: native splits executed: eager + captures + replays.
      eager: executions that launched their kernels one by one; the sum of the next seven.
      eager_warmup: because the variant was not warm yet.
      eager_not_capturable: because a node forbids a capture.
      eager_failures: because captures or launches of it have failed too often.
      eager_memory: because its executables alone exceed the memory budget.
      eager_crowded: because there is no room for its executables: they alone are more than
        `max_executables`, or they and others pushed each other out again and again.
      eager_outside: because somebody else is capturing the stream, or its state is unknown.
      eager_recovered: because a chunk failed in this very execution; the rest ran eagerly.
      captures: executions that captured graphs, and ran what they captured.
      replays: executions that launched existing executables, patched or not.
      patches: nodes whose parameters were set in an executable.
      exec_updates: chunks whose executable was updated in place from a new capture.
      updates_refused: chunks that had another topology, so that they were instantiated anew.
      instantiations: chunks instantiated.
      uid_hits: executions in which nothing could have changed, so no node was looked at.
      property_compares: executions in which node properties were compared.
      nodes_compared: nodes looked at in those.
      warmups: variants that began to warm up; the sum of the next two.
      warmups_first: the first under its graph key.
      warmups_variant: beside others under the same key (another batch size, another address set).
      resets: variants sent back to warmup; the sum of the next three.
      resets_address: because an address moved, and `on_address_change` is "rewarm".
      resets_arena: because the arena moved, and `on_address_change` is "rewarm".
      resets_failure: because a chunk failed.
      evictions: variants, or the recording of one alone, dropped; the sum of the next four.
      evictions_variants: because there were more than `max_variants` under one key.
      evictions_idle: because nobody called them for `idle_seconds`.
      evictions_count: because the device held more than `max_executables`.
      evictions_memory: because of `memory_budget`.
      failures: device calls that failed and were survived; the sum of the next seven.
      failures_query: asking whether a stream is being captured.
      failures_fork: forking a branch onto a side stream.
      failures_capture: capturing a chunk.
      failures_instantiate: instantiating a chunk.
      failures_update: updating an executable, other than by refusing another topology.
      failures_patch: setting a node's parameters.
      failures_launch: launching an executable.
      chunk_launches: executables launched.
      arena_moves_same_size: times the arena moved although it did not grow: suspicious, please
        report it.
      arena_moves_resized: times it moved because it grew.
      arena_growths: times it grew in place.
      decide_ns: until it was known what may run; executions that hit the uid take less for it than
        a clock could tell, and are not counted here.
      eager_ns: the rest of eager executions.
      record_ns: the rest of executions that captured, or updated what was captured.
      replay_ns: the rest of replays: patching and launching.
      plan_ns: making the launches of a split; part of eager_ns and record_ns.
      capture_ns: capturing; part of record_ns.
      instantiate_ns: instantiating; part of record_ns.
      update_ns: updating executables from new captures; part of record_ns.
      live_execs: executables alive now (a gauge: no reset touches it).
      live_exec_nodes: nodes in them now.
      exec_bytes: what they take of the device's memory now, by an estimate that is calibrated when
        the first is made.
      arena_bytes: size of the largest arena that ran this function.
    """

    calls: int = 0
    signatures: int = 0
    planning_ns: int = 0
    executions: int = 0
    eager: int = 0
    eager_warmup: int = 0
    eager_not_capturable: int = 0
    eager_failures: int = 0
    eager_memory: int = 0
    eager_crowded: int = 0
    eager_outside: int = 0
    eager_recovered: int = 0
    captures: int = 0
    replays: int = 0
    patches: int = 0
    exec_updates: int = 0
    updates_refused: int = 0
    instantiations: int = 0
    uid_hits: int = 0
    property_compares: int = 0
    nodes_compared: int = 0
    warmups: int = 0
    warmups_first: int = 0
    warmups_variant: int = 0
    resets: int = 0
    resets_address: int = 0
    resets_arena: int = 0
    resets_failure: int = 0
    evictions: int = 0
    evictions_variants: int = 0
    evictions_idle: int = 0
    evictions_count: int = 0
    evictions_memory: int = 0
    failures: int = 0
    failures_query: int = 0
    failures_fork: int = 0
    failures_capture: int = 0
    failures_instantiate: int = 0
    failures_update: int = 0
    failures_patch: int = 0
    failures_launch: int = 0
    chunk_launches: int = 0
    arena_moves_same_size: int = 0
    arena_moves_resized: int = 0
    arena_growths: int = 0
    decide_ns: int = 0
    eager_ns: int = 0
    record_ns: int = 0
    replay_ns: int = 0
    plan_ns: int = 0
    capture_ns: int = 0
    instantiate_ns: int = 0
    update_ns: int = 0
    live_execs: int = 0
    live_exec_nodes: int = 0
    exec_bytes: int = 0
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
        """A table: every counter, and of the parts of one those that are not zero."""
        rows = []
        for name in self.keys():
            part = is_part(name)
            if part and not self[name]:
                continue
            label = f"  {name}" if part else name
            rows.append((label, _readable(name, self[name])))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value:>14}" for label, value in rows)


_SUMS = ("eager", "warmups", "resets", "evictions", "failures")
_PARTS_OF_TIMES = ("plan_ns", "capture_ns", "instantiate_ns", "update_ns")


def is_part(name: str) -> bool:
    """Does another counter hold this one already?"""
    if name.endswith("_ns"):
        return name in _PARTS_OF_TIMES
    return name.startswith(tuple(f"{total}_" for total in _SUMS))


def _readable(name: str, value: int) -> str:
    return f"{value / 1e3:,.1f} µs" if name.endswith("_ns") else f"{value:,}"


class Tally:
    """What is counted in Python of one wrapped function. Thread-safe.

    Attributes:
      add_call: counts one call from Python. It takes a ticket, since a lock would cost every
        call 150 ns more.
    """

    add_call: Callable[[], int]

    def __init__(self) -> None:
        self.add_call = itertools.count().__next__
        self._lock = threading.Lock()  # guards what follows
        self._looks = 0  # tickets that were taken to look at them
        self.zero()

    def _calls(self) -> int:
        """Calls since it was made. A ticket can only be looked at by taking one."""
        calls = self.add_call() - self._looks
        self._looks += 1
        return calls

    def zero(self) -> None:
        """Starts anew."""
        with self._lock:
            self._calls_before = self._calls()
            self._signatures = self._planning_ns = 0

    def add_plan(self, nanoseconds: int) -> None:
        """Counts one signature that was traced and planned."""
        with self._lock:
            self._signatures += 1
            self._planning_ns += nanoseconds

    def as_dict(self) -> dict[str, int]:
        """The counters under the names that `Stats` has for them."""
        with self._lock:
            return {
                "calls": self._calls() - self._calls_before,
                "signatures": self._signatures,
                "planning_ns": self._planning_ns,
            }


# Of every function that was wrapped, for the process's counters do not forget those that are gone.
_tallies: list[Tally] = []


def new_tally() -> Tally:
    """A tally that the process's counters include."""
    tally = Tally()
    _tallies.append(tally)
    return tally


def stats() -> Stats:
    """Counters of the process: all wrapped functions on all devices."""
    ours = [tally.as_dict() for tally in list(_tallies)]
    sums = {name: sum(t[name] for t in ours) for name in Tally().as_dict()}
    return Stats(**sums, **native.stats(0))


def reset_stats() -> None:
    """Zeroes the counters of all functions and forgets their events; executables stay."""
    for tally in list(_tallies):
        tally.zero()
    native.reset_stats(0)
