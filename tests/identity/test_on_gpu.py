"""The identity layer on a CUDA device, through JAX: addresses that move, a soak, a lost context.

JAXGRAPH_GPU_STEPS scales the length: 1 is the whole of it.
"""

import functools
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph import _native

pytestmark = pytest.mark.gpu

SCALE = float(os.environ.get("JAXGRAPH_GPU_STEPS", "1"))
# Free memory is the whole device's: what others take beside us counts, too.
ALONE = "PYTEST_XDIST_WORKER" not in os.environ
GAME_STEPS = int(10_000 * SCALE)
SOAK_STEPS = int(20_000 * SCALE)


def small_step(params, cache, token, position):
    """A decode step in little: a gather, products, a cache that is written in place, an argmax."""
    x = params["embed"][token]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    cache = jax.lax.dynamic_update_slice(cache, x[None], (position, 0))
    logits = (cache.sum(axis=0) + x) @ params["embed"].T
    return jnp.argmax(logits).astype(jnp.int32), logits, cache


def small_params(seed, width=64, layers=6, vocabulary=128):
    keys = jax.random.split(jax.random.key(seed), layers + 1)
    return {
        "embed": jax.random.normal(keys[0], (vocabulary, width), jnp.float32),
        "layers": [0.1 * jax.random.normal(k, (width, width), jnp.float32) for k in keys[1:]],
    }


def poisoned(x):
    """The same shape full of what must never be read: written where the old values were."""
    return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0)


def test_address_games():
    """Any argument may be somewhere else at any call; what it leaves is poisoned and kept."""
    rng = random.Random(0)
    # The eager run of the same kernels is what the replay must equal, bit for bit.
    replayed = jaxgraph.wrap(small_step, donate_argnums=(1,))
    eager = jaxgraph.wrap(
        small_step, donate_argnums=(1,), options=jaxgraph.Options(warmup_calls=2**31)
    )
    params = small_params(0)
    length = 32
    caches = [jnp.zeros((length, 64), jnp.float32) for _ in range(2)]
    token = jnp.int32(1)
    overwrite = jax.jit(poisoned, donate_argnums=(0,))
    graveyard = []

    def move(x):
        fresh = jnp.copy(x)
        fresh.block_until_ready()
        graveyard.append(overwrite(x))
        return fresh

    for step in range(GAME_STEPS):
        if rng.random() < 0.02:
            caches = [move(c) for c in caches]
        if rng.random() < 0.02:
            which = rng.randrange(len(params["layers"]))
            params["layers"][which] = move(params["layers"][which])
        if rng.random() < 0.005:
            params["embed"] = move(params["embed"])
        if rng.random() < 0.1:
            graveyard.append(jnp.full(rng.randrange(1, 4000), jnp.nan))  # others move the allocator
        if len(graveyard) > 50:
            del graveyard[: rng.randrange(50)]
        if rng.random() < 0.001:
            _native.reserve("CUDA", 0, replayed.stats().arena_bytes + (2 << 20))
        position = jnp.int32(step % length)
        ours, theirs = (
            f(params, c, token, position) for f, c in zip((replayed, eager), caches, strict=True)
        )
        caches = [ours[2], theirs[2]]
        if rng.random() < 0.05:
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        token = ours[0] if rng.random() < 0.5 else jnp.int32(rng.randrange(128))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert replayed.stats().failures == 0
    assert replayed.stats().replays > 0.9 * GAME_STEPS - 10
    assert eager.stats().replays == 0


def test_soak():
    """A random variant at every step: device memory and the number of executables stay flat."""
    from llama import SHAPES, decode_step, empty_cache, random_params

    rng = random.Random(0)
    config = SHAPES["135m"]
    # Fewer variants than batch sizes times address sets, so that some are always pushed out.
    options = jaxgraph.Options(idle_seconds=2, sweep_seconds=0.5, max_executables=12)
    step = jaxgraph.wrap(
        functools.partial(decode_step, config=config), donate_argnums=(1,), options=options
    )
    params = step.pack(random_params(config, jnp.bfloat16, jax.random.key(0)))
    batches = (1, 1, 1, 2, 3, 4)
    caches = [empty_cache(config, b, 128, jnp.bfloat16) for b in batches]
    tokens = [jnp.zeros((b,), jnp.int32) for b in batches]
    gauge = _native.testing.Machine("CUDA")

    def run(steps):
        for i in range(steps):
            which = rng.randrange(len(batches))
            position = jnp.int32(i % 128)
            token, _, caches[which] = step(params, caches[which], tokens[which], position)
            if i % 50 == 0:
                token.block_until_ready()
        token.block_until_ready()

    run(SOAK_STEPS // 4)
    before = gauge.free_memory()
    run(SOAK_STEPS - SOAK_STEPS // 4)
    lost = before - gauge.free_memory()
    stats = step.stats()
    assert stats.live_execs <= 12
    assert not ALONE or lost < 64 << 20, f"{lost >> 20} MiB lost"
    assert stats.failures == 0
    assert stats.executions == stats.eager + stats.captures + stats.replays


LOST = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    import jax, jax.numpy as jnp, jaxgraph
    from axpy_programs import Step, load, testing

    step = jaxgraph.wrap(lambda x: jnp.tanh(x) * 2 + 1)
    x = jnp.ones((64, 64))
    for _ in range(4):
        step(x).block_until_ready()
    # A kernel that reads and writes where nothing is.
    program = load([Step(("logits", 0), ("token", 0), 1, ("weight", 0))])
    nowhere = [1 << 20] * 4
    testing.Machine("CUDA").execute(program, nowhere, [1 << 20] * 2)
    try:
        for _ in range(3):
            step(x).block_until_ready()
    except Exception as error:
        print(type(error).__name__, str(error)[:1000])
        print("raised", flush=True)
    import os
    os._exit(0)  # nothing that is destroyed now can succeed
    """
)


def test_a_lost_context_is_an_exception_that_says_so():
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOST, here], capture_output=True, text=True, timeout=300
    )
    assert "raised" in done.stdout, done.stdout + done.stderr[-3000:]
    # Ours, or XLA's own where it met the error first.
    assert "is lost" in done.stdout or "ILLEGAL_ADDRESS" in done.stdout.upper(), done.stdout


RESERVED = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, jaxgraph
    from jaxgraph import _native

    def fun(x):
        return (x @ x + 1) @ x

    step, x = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True)), jnp.ones((8, 8))
    # What JAX takes for itself (hundreds of MB for cuBLAS) is taken before memory is counted.
    expected = fun(x)
    assert jnp.allclose(expected, fun(x))
    gauge = _native.testing.Machine("CUDA")
    try:
        _native.reserve("CUDA", 0, 1 << 46)
    except MemoryError as error:
        assert str(1 << 46) in str(error), error
    else:
        raise AssertionError("there cannot be so much memory")
    before = gauge.free_memory()
    assert step.reserve(x) > 0
    _native.reserve("CUDA", 0, 256 << 20)
    taken = before - gauge.free_memory()
    assert taken >= 256 << 20, taken
    for _ in range(4):
        out = step(x)
    assert jnp.allclose(out, expected)
    stats = step.stats()
    assert (stats.replays, stats.arena_bytes >= 256 << 20) == (2, True), stats
    more = before - gauge.free_memory() - taken
    print("reserved", more >> 20, flush=True)
    """
)


def test_what_is_reserved_before_any_call_is_there():
    """In a fresh process: memory is taken, or its absence told, before a stream is known."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", RESERVED], capture_output=True, text=True, timeout=300
    )
    assert "reserved" in done.stdout, done.stdout + done.stderr[-3000:]
    if ALONE:
        assert int(done.stdout.split()[-1]) < 192, "a second arena"
