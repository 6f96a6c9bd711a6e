"""Results of all sizes, through JAX: kept and let go at random, so that they move, rest and come
back; equal to `jax.jit`'s, bit for bit, and nobody writes into one that was returned before."""

import collections
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph

SCALARS = 20  # more than one launch takes out of slots


def step(weights, cache, x, position):
    """Small integers, so that no rounding depends on who computes it."""
    cache = jax.lax.dynamic_update_slice(cache, (x * weights["scale"])[None], (position % 8, 0))
    x = (cache.sum(axis=0) + weights["shift"] + x) % 17
    results = {
        "all": x,
        "twice": (x, x + 0),
        "empty": x[:0] * 2,
        "operand": weights["shift"],
        "bf16": x.astype(jnp.bfloat16),
        "large": jnp.broadcast_to(x, (300_000 // 8, 8)) + position,
        "scalars": [(x[i % 8] + i) * 2 for i in range(SCALARS)],
    }
    return cache, x, position + 1, results


def same(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("chunk_size", [0, 1, 4])
def test_results_arrive_and_stay(chunk_size):
    rng = random.Random(chunk_size)
    options = jaxgraph.Options(strict=True, min_equations=0, chunk_size=chunk_size)
    ours = jaxgraph.wrap(step, donate_argnums=(1,), options=options)
    plain = jax.jit(step)
    weights = {"scale": jnp.arange(8.0), "shift": jnp.arange(8.0)[::-1] - 3}
    cache, x, position = jnp.zeros((8, 8)), jnp.ones(8), jnp.int32(0)
    other = (cache + 0, x + 0, position + 0)
    kept, odds = collections.deque(maxlen=20), 1.0
    for call in range(500):
        if call % 50 == 0:  # at 0, buffers come back and bases rest
            odds = rng.choice([0.0, 0.0, 0.3, 1.0]) if call < 450 else 1.0
            kept.clear()
        if rng.random() < 0.02:
            cache = jnp.copy(cache)
        cache, x, position, results = ours(weights, cache, x, position)
        *other, wanted = plain(weights, *other)
        same((cache, x, position, results), (*other, wanted))
        if rng.random() < odds:
            kept.append((results, wanted))
        if call % 10 == 0:
            for pair in kept:
                same(*pair)
        del results, wanted
    stats = ours.stats()
    assert stats.failures == 0
    assert stats.eager + stats.captures + stats.replays == 500
    assert stats.replays > 400
    split = ours.explain(weights, cache, x, position).splits[0]
    ways = [base.why for base in split.bases if base.place == "slot"]
    assert sum("copied out at the graph's end" in why for why in ways) > SCALARS
