"""Options: the settings of one wrapped function, and the environment variables behind them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_ADDRESS_POLICIES = ("update", "rewarm")


def _env_bool(variable: str, default: bool) -> bool:
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


def _env_word(variable: str, default: str) -> str:
    return os.environ.get(variable, "").strip().lower() or default


def _switch(variable: str, default: bool, *, inverted: bool = False) -> Any:
    """A boolean field whose default is read from the environment when the Options are made."""

    def read() -> bool:
        return _env_bool(variable, default != inverted) != inverted

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
      max_unroll: the longest `scan` that is unrolled (JAXGRAPH_MAX_UNROLL, default 256).
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
    max_unroll: int = _from_environment(lambda: _env_int("JAXGRAPH_MAX_UNROLL", 256))

    def __post_init__(self) -> None:
        _check_at_least(self, "chunk_size", 0)
        _check_at_least(self, "warmup_calls", 1)
        _check_at_least(self, "max_variants", 1)
        _check_at_least(self, "max_failures", 0)
        _check_at_least(self, "max_unroll", 0)
        if self.on_address_change not in _ADDRESS_POLICIES:
            raise ValueError(
                f"on_address_change={self.on_address_change!r} "
                "(JAXGRAPH_ON_ADDRESS_CHANGE): use 'update' or 'rewarm'"
            )

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
        }


def _check_at_least(options: Options, field: str, least: int) -> None:
    value = getattr(options, field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{field}={value!r} must be an integer")
    if not least <= value < 2**32:
        raise ValueError(f"{field}={value} (JAXGRAPH_{field.upper()}) must lie in [{least}, 2**32)")
