"""Options: the settings of one wrapped function, and the environment variables behind them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from jaxgraph.passes.profitability import DEFAULT, Limits
from jaxgraph.runtime import native

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_ADDRESS_POLICIES = ("update", "rewarm")
_UPDATE_DEPTHS = ("patch", "recapture", "instantiate")  # in the order of UpdateDepth


def env_bool(variable: str, default: bool) -> bool:
    """Reads a switch: JAXGRAPH_X=0 is off. That a mere presence counts is a trap, not a feature."""
    text = os.environ.get(variable)
    if text is None:
        return default
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(
        f"{variable}={text!r} is not a boolean: use 1, true, yes, on, or 0, false, no, off"
    )


def _env_int(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None or not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not an integer") from None


def _env_float(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None or not text.strip():
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not a number") from None


def _env_word(variable: str, default: str) -> str:
    return os.environ.get(variable, "").strip().lower() or default


def _switch(variable: str, default: bool, *, inverted: bool = False) -> Any:
    """A boolean field whose default is read from the environment when the Options are made."""

    def read() -> bool:
        return env_bool(variable, default != inverted) != inverted

    return _from_environment(read)


def _from_environment(read: Callable[[], Any]) -> Any:
    return dataclasses.field(default_factory=read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a wrapped function is planned and run.

    A field that is given wins over its environment variable, which wins over the default. The
    environment is read when the object is made.

    Attributes:
      disable: run the plain function (JAXGRAPH_DISABLE, default false).
      strict: raise where planning fails, instead of running the plain function with a warning
        (JAXGRAPH_STRICT, default false).
      chunk_size: nodes captured as one graph; 0 captures each split whole (JAXGRAPH_CHUNK_SIZE,
        default 512).
      warmup_calls: the identical call on which a variant is captured (JAXGRAPH_WARMUP_CALLS,
        default 2: one eager call, then the capture).
      max_variants: variants kept under one graph key, least recently used first out
        (JAXGRAPH_MAX_VARIANTS, default 8).
      max_failures: failed captures or launches after which a variant stays eager
        (JAXGRAPH_MAX_FAILURES, default 2).
      fusion: let one kernel cover several nodes (JAXGRAPH_DISABLE_FUSION turns it off).
      concurrency: run independent branches on side streams (JAXGRAPH_DISABLE_CONCURRENCY turns it
        off).
      on_address_change: what a captured variant does when an address moved: "update" its
        executables, or "rewarm" (JAXGRAPH_ON_ADDRESS_CHANGE, default "update").
      update_depth: the cheapest way that may be taken to bring an executable up to date: "patch"
        the nodes that changed, "recapture" the chunk and update its executable in place, or
        "instantiate" a new one. For tests and for finding out which of them misbehaves
        (JAXGRAPH_UPDATE_DEPTH, default "patch").
      idle_seconds: a recording that nobody replayed for so long is destroyed; 0 keeps it for ever
        (JAXGRAPH_IDLE_SECONDS, default 10).
      sweep_seconds: how often idle recordings are looked for, in calls that come anyway
        (JAXGRAPH_SWEEP_SECONDS, default 5).
      max_executables: executables alive on a device, those of the least recently used variant
        destroyed first; 0 sets no bound (JAXGRAPH_MAX_EXECUTABLES, default 1024).
      memory_budget: bytes that a device's executables may take, by an estimate that is calibrated
        when the first is made; 0 sets no bound (JAXGRAPH_MEMORY_BUDGET, default 1 GiB).
      max_unroll: the longest `scan` that is unrolled (JAXGRAPH_MAX_UNROLL, default 256).
      max_rows: rows that a native product with a weight may have; a step with a wider one, such as
        the prefill of a prompt, is left to XLA, whose library kernels are made for it. Products
        between activations, such as attention's, may have four times as many, and so may those with
        a weight of 16-bit floats on Hopper. 0 sets no bound (JAXGRAPH_MAX_ROWS, default 16).
      min_equations: equations that a native split beside splits of XLA's must have to pay for
        itself; shorter runs are left to XLA (JAXGRAPH_MIN_EQUATIONS, default 4).
      guard_bytes: bytes kept free behind every intermediate in the arena, so that a test can fill
        them and see whether a kernel wrote there (JAXGRAPH_GUARD_BYTES, default 0).
    """

    disable: bool = _switch("JAXGRAPH_DISABLE", False)
    strict: bool = _switch("JAXGRAPH_STRICT", False)
    chunk_size: int = _from_environment(lambda: _env_int("JAXGRAPH_CHUNK_SIZE", 512))
    warmup_calls: int = _from_environment(lambda: _env_int("JAXGRAPH_WARMUP_CALLS", 2))
    max_variants: int = _from_environment(lambda: _env_int("JAXGRAPH_MAX_VARIANTS", 8))
    max_failures: int = _from_environment(lambda: _env_int("JAXGRAPH_MAX_FAILURES", 2))
    fusion: bool = _switch("JAXGRAPH_DISABLE_FUSION", True, inverted=True)
    concurrency: bool = _switch("JAXGRAPH_DISABLE_CONCURRENCY", True, inverted=True)
    on_address_change: str = _from_environment(
        lambda: _env_word("JAXGRAPH_ON_ADDRESS_CHANGE", "update")
    )
    update_depth: str = _from_environment(lambda: _env_word("JAXGRAPH_UPDATE_DEPTH", "patch"))
    idle_seconds: float = _from_environment(lambda: _env_float("JAXGRAPH_IDLE_SECONDS", 10.0))
    sweep_seconds: float = _from_environment(lambda: _env_float("JAXGRAPH_SWEEP_SECONDS", 5.0))
    max_executables: int = _from_environment(lambda: _env_int("JAXGRAPH_MAX_EXECUTABLES", 1024))
    memory_budget: int = _from_environment(lambda: _env_int("JAXGRAPH_MEMORY_BUDGET", 1 << 30))
    max_unroll: int = _from_environment(lambda: _env_int("JAXGRAPH_MAX_UNROLL", 256))
    max_rows: int = _from_environment(lambda: _env_int("JAXGRAPH_MAX_ROWS", DEFAULT.max_rows))
    min_equations: int = _from_environment(
        lambda: _env_int("JAXGRAPH_MIN_EQUATIONS", DEFAULT.min_equations)
    )
    guard_bytes: int = _from_environment(lambda: _env_int("JAXGRAPH_GUARD_BYTES", 0))

    def __post_init__(self) -> None:
        _check_at_least(self, "chunk_size", 0)
        _check_at_least(self, "warmup_calls", 1)
        _check_at_least(self, "max_variants", 1)
        _check_at_least(self, "max_failures", 0)
        _check_at_least(self, "max_executables", 0)
        _check_at_least(self, "memory_budget", 0, below=2**64)
        _check_at_least(self, "max_unroll", 0)
        _check_at_least(self, "max_rows", 0)
        _check_at_least(self, "min_equations", 0)
        _check_at_least(self, "guard_bytes", 0)
        _check_seconds(self, "idle_seconds")
        _check_seconds(self, "sweep_seconds")
        if self.on_address_change not in _ADDRESS_POLICIES:
            raise ValueError(
                f"on_address_change={self.on_address_change!r} "
                "(JAXGRAPH_ON_ADDRESS_CHANGE): use 'update' or 'rewarm'"
            )
        if self.update_depth not in _UPDATE_DEPTHS:
            raise ValueError(
                f"update_depth={self.update_depth!r} "
                "(JAXGRAPH_UPDATE_DEPTH): use 'patch', 'recapture' or 'instantiate'"
            )

    def limits(self) -> Limits:
        """What the rules of profitability go by."""
        return Limits(self.max_rows, self.min_equations, native.streams_many_rows())

    def exec_options(self) -> dict[str, int | bool]:
        """The settings that travel inside a program, in the core's names."""
        return {
            "chunk_size": self.chunk_size,
            "warmup_calls": self.warmup_calls,
            "max_variants": self.max_variants,
            "max_failures": self.max_failures,
            "disabled": False,  # Options(disable=True) plans no program at all
            "fusion": self.fusion,
            "concurrency": self.concurrency,
            "rewarm_on_address_change": self.on_address_change == "rewarm",
            "update_depth": _UPDATE_DEPTHS.index(self.update_depth),
            # Rounded up: 0 would mean for ever.
            "idle_ms": math.ceil(self.idle_seconds * 1000),
            "sweep_ms": math.ceil(self.sweep_seconds * 1000),
            "max_executables": self.max_executables,
            "memory_budget": self.memory_budget,
        }


def _check_at_least(options: Options, field: str, least: int, below: int = 2**32) -> None:
    value = getattr(options, field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{field}={value!r} must be an integer")
    if not least <= value < below:
        raise ValueError(
            f"{field}={value} (JAXGRAPH_{field.upper()}) must lie in [{least}, "
            f"2**{below.bit_length() - 1})"
        )


def _check_seconds(options: Options, field: str) -> None:
    value = getattr(options, field)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{field}={value!r} must be a number of seconds")
    if not 0 <= value <= 1e6:  # also refuses NaN
        raise ValueError(f"{field}={value} (JAXGRAPH_{field.upper()}) must lie in [0, 1e6]")
