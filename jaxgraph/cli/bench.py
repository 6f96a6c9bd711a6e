"""Times a function with jax.jit and with jaxgraph, and compares what they return."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgraph.cli import target
from jaxgraph.cli.terminal import Terminal
from jaxgraph.wrap import GraphedFunction

_OK, _FAILED, _PLAIN = 0, 1, 3

# Largest difference that rounding explains, as a part of the largest value.
_TOLERANCE = {1: 0.25, 2: 4e-2, 4: 1e-4, 8: 1e-10}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    target.add_arguments(parser)
    parser.add_argument("--calls", type=int, default=100, help="timed calls each (default 100)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[Terminal], None], int]:
    """Times both, one call at a time and each waited for."""
    if args.calls < 1:
        raise target.TargetError("--calls must be at least 1")
    step, example = target.load(args)
    plain = step.plain()
    native = step.explain(*example).native
    expected, plain_us = _time(plain, step, example, args.calls)
    step.warmup(*example)
    step.reset_stats()
    got, ours_us = _time(step, step, example, args.calls)
    worst = _worst(expected, got)
    found = {
        "function": step.name,
        "platform": jax.default_backend(),
        "native": native,
        "calls": args.calls,
        "jit_us": _summary(plain_us),
        "jaxgraph_us": _summary(ours_us),
        "largest_difference": worst,
        "same": worst is not None and worst <= 1,
        "stats": dict(step.stats()),
    }

    def show(out: Terminal) -> None:
        out.head(f"{step.name} on {found['platform']}, {args.calls} calls, µs a call")
        for name, key in (("jax.jit", "jit_us"), ("jaxgraph", "jaxgraph_us")):
            s = found[key]
            out.line(f"  {name:<9} median {s['median']:>10,.1f}   p99 {s['p99']:>10,.1f}")
        out.line(f"  jaxgraph takes {_ratio(found):.2f} of jax.jit's time")
        if not native:
            out.line(out.paint("  the plain function runs: see explain", "warn"))
        if not found["same"]:
            out.line(out.paint("  THE RESULTS DIFFER by more than rounding", "bad"))

    code = _FAILED if not found["same"] else _OK if native else _PLAIN
    return found, show, code


def _ratio(found: dict[str, Any]) -> float:
    return found["jaxgraph_us"]["median"] / found["jit_us"]["median"]


def _time(
    function: Callable[..., Any], step: GraphedFunction, example: tuple[Any, ...], calls: int
) -> tuple[Any, list[float]]:
    """Result of a call, and µs of each; donated arguments are copied before it."""
    times = []
    out = None
    for i in range(calls + 2):  # the first compile and warm up
        args, kwargs = step.with_copies(example, {})
        jax.block_until_ready(args)
        begin = time.perf_counter()
        out = jax.block_until_ready(function(*args, **kwargs))
        if i >= 2:
            times.append((time.perf_counter() - begin) * 1e6)
    return out, times


def _summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
        "least": ordered[0],
    }


def _worst(expected: Any, got: Any) -> float | None:
    """The largest difference, 1 being what rounding explains; None: not even the same shapes."""
    ours, theirs = jax.tree.leaves(got), jax.tree.leaves(expected)
    if jax.tree.structure(got) != jax.tree.structure(expected):
        return None
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return None
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            worst = max(worst, 0.0 if bool((a == b).all()) else float("inf"))
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            return None
        scale = max(float(np.nanmax(np.abs(y), initial=0)), 1e-30)
        difference = float(np.nanmax(np.abs(x - y), initial=0)) / scale
        worst = max(worst, difference / _TOLERANCE[a.dtype.itemsize])
    return worst
