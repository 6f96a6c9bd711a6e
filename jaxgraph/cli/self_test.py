"""A short test of capture, update and replay on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgraph.options import Options
from jaxgraph.wrap import wrap

_ROWS, _WIDTH = 4, 1024
_CONTEXT = 160  # times _WIDTH floats: too large for a slot, so that a move is an update


def _step(x: jax.Array, w: jax.Array, cache: jax.Array, at: jax.Array) -> tuple[Any, Any]:
    cache = jax.lax.dynamic_update_slice(cache, (x * 2)[:1, None], (at, 0, 0))
    return jnp.tanh(x * w + cache.sum((0, 1))), cache


def self_test(device: Any) -> list[dict[str, Any]]:
    """Runs a small step through every way of being run.

    Returns:
      For each test its name, how long it took (`ms`), and what was wrong (`error`; empty: nothing).
    """
    platform = "cuda" if device.platform == "gpu" else device.platform
    tests: list[tuple[str, Callable[[Any], str]]] = [
        ("capture and replay", _captured),
        ("update by patching", lambda d: _updated(d, "patch", "patches")),
        ("update by re-capture", lambda d: _updated(d, "recapture", "exec_updates")),
        ("update by instantiation", lambda d: _updated(d, "instantiate", "instantiations")),
    ]
    results = []
    for name, test in tests:
        begin = time.perf_counter()
        try:
            error = test(device)
        except Exception as raised:  # a self-test reports whatever happens
            error = f"{type(raised).__name__}: {raised}"
        took = (time.perf_counter() - begin) * 1e3
        results.append({"name": f"{platform}: {name}", "ms": took, "error": error})
    return results


def _arguments(device: Any) -> tuple[jax.Array, ...]:
    x = np.linspace(-1, 1, _ROWS * _WIDTH, dtype=np.float32).reshape(_ROWS, _WIDTH)
    w = np.cos(np.arange(_WIDTH, dtype=np.float32))
    cache = np.zeros((_CONTEXT, 2, _WIDTH), np.float32)
    return tuple(jax.device_put(a, device) for a in (x, w, cache, np.int32(3)))


def _difference(got: Any, expected: Any) -> str:
    for a, b in zip(got, expected, strict=True):
        worst = float(np.abs(np.asarray(a) - np.asarray(b)).max())
        if not worst <= 1e-4:  # also where it is not a number
            return f"results differ from jax.jit's by {worst:g}"
    return ""


def _captured(device: Any) -> str:
    step = wrap(_step, donate_argnums=(2,), options=Options(disable=False, strict=True))
    x, w, cache, at = _arguments(device)
    for _ in range(5):  # the cache is handed on, as a decode loop does
        expected = jax.jit(_step)(x, w, cache, at)
        out, cache = step(x, w, cache, at)
        if error := _difference((out, cache), expected):
            return error
    stats = step.stats()
    if stats.failures:
        return f"a device call failed: {step.events()[-1].why}"
    if not (stats.captures and stats.replays):
        return f"{stats.captures} captures and {stats.replays} replays in {stats.calls} calls"
    return ""


def _updated(device: Any, depth: str, counter: str) -> str:
    options = Options(disable=False, strict=True, update_depth=depth)
    step = wrap(_step, donate_argnums=(2,), options=options)
    x, w, cache, at = _arguments(device)
    # Every call's cache lies where none did before: all are made first, and all results are kept.
    results = []
    for i, mine in enumerate([jnp.copy(cache) for _ in range(6)]):
        expected = jax.jit(_step)(x * i, w, mine, at)
        results.append(step(x * i, w, mine, at))
        if error := _difference(results[-1], expected):
            return f"call {i}: {error}"
    stats = step.stats()
    if stats.failures:
        return f"a device call failed: {step.events()[-1].why}"
    least = 2 if counter == "instantiations" else 1
    if stats[counter] < least:
        return f"{stats[counter]} {counter}"
    return ""
