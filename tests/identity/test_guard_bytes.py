"""Bytes between the intermediates in the arena hold poison: nobody writes or reads there."""

import functools

import device_memory
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axpy_programs import testing
from llama import Config, decode_step, empty_cache, random_params

import jaxgraph
from jaxgraph.plan import storage

GUARD = 256
POISON = 0xFF  # every float of it is a NaN

CONFIG = Config(2, 64, 4, 2, 16, 160, 512)


def arenas():
    """(address, bytes) of the default device's arenas: on the host calls take one of several."""
    return [a for a in testing.arenas(device_memory.platform(), 0) if a[1] > 0]


def between(slots, size):
    """A mask of the arena's bytes that belong to nobody."""
    free = np.ones(size, bool)
    for offset, nbytes in slots:
        free[offset : offset + nbytes] = False
    return free


@pytest.fixture
def slots(monkeypatch):
    """(offset, bytes) of every intermediate of what is planned from here on."""
    found = []

    def plan(*args, **kwargs):
        made = original(*args, **kwargs)
        found.append([(b.offset, b.nbytes) for b in made.arena_buffers])
        return made

    original = storage.plan_storage
    monkeypatch.setattr("jaxgraph.plan.program.plan_storage", plan)
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_stays_within_its_intermediates(dtype, batch, slots):
    step = functools.partial(decode_step, config=CONFIG)
    graphed = jaxgraph.wrap(
        step, donate_argnums=(1,), options=jaxgraph.Options(guard_bytes=GUARD, strict=True)
    )
    plain = jaxgraph.wrap(step, donate_argnums=(1,), options=jaxgraph.Options(strict=True))
    params = random_params(CONFIG, dtype, jax.random.key(0))
    caches = [empty_cache(CONFIG, batch, 32, dtype) for _ in range(2)]
    token = jnp.ones(batch, jnp.int32)
    free = None
    for position in range(6):
        at = jnp.int32(position)
        wanted, _, caches[1] = jax.block_until_ready(plain(params, caches[1], token, at))
        if free is not None:  # the arena holds nothing that a later call may need
            for base, capacity in arenas():
                device_memory.write(base, np.full(capacity, POISON, np.uint8))
        got, _, caches[0] = jax.block_until_ready(graphed(params, caches[0], token, at))
        np.testing.assert_array_equal(got, wanted)
        for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        if free is None:
            planned = slots[-1]
            free = between(planned, max(o + n for o, n in planned) + GUARD)
            assert free.sum() >= GUARD * len({o for o, _ in planned})
        else:
            used = 0
            for base, capacity in arenas():
                size = min(capacity, free.size)
                poisoned = device_memory.read(base, size) == POISON
                assert poisoned[free[:size]].all(), "a kernel wrote between the intermediates"
                used += not poisoned.all()
            assert used == 1
        token = got
    assert graphed.stats().replays == 4


def test_a_write_beyond_an_intermediate_is_seen():
    """The check itself can fail: one byte that somebody changes between two intermediates."""
    jax.block_until_ready(jaxgraph.wrap(lambda x: jnp.tanh(x) @ x.T)(jnp.ones((8, 8))))
    base, capacity = arenas()[0]
    device_memory.write(base, np.full(capacity, POISON, np.uint8))
    device_memory.write(base + 13, np.zeros(1, np.uint8))
    changed = device_memory.read(base, capacity) != POISON
    assert changed.nonzero()[0].tolist() == [13]
