"""Decodes with a model twice, under `jax.jit` and wrapped, and compares all that can be seen."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxgraph

STEPS = 32
# Two engines may break a tie between logits this close differently.
TIE = 1e-4
# XLA keeps more bits between bf16 operations than bf16 has, and so do fused kernels, elsewhere.
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-2}

DTYPES = [jnp.float32, jnp.bfloat16]


class Weights:
    """Makes small random weights, one array after the other."""

    def __init__(self, dtype: Any, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype

    def matrix(self, *shape: int, fan_in: int | None = None) -> jax.Array:
        values = self.rng.standard_normal(shape) * (fan_in or shape[-2]) ** -0.5
        return jnp.asarray(values, self.dtype)

    def vector(self, *shape: int, around: float = 0.0) -> jax.Array:
        return jnp.asarray(around + 0.2 * self.rng.standard_normal(shape), self.dtype)


def check_decoding(
    step: Callable,
    params: Any,
    cache: Any,
    *,
    splits: Sequence[str] = ("native",),
    batch: int = 2,
    position: Any = 0,
    in_place: bool = True,
    steps: int = STEPS,
) -> jaxgraph.Explanation:
    """Decodes `steps` tokens and checks tokens, logits, cache, splits, counters and addresses.

    Both decoders are fed the tokens that `jax.jit` chose, so that each step is compared by itself.

    Args:
      step: (params, cache, token [batch], position) -> (token, logits [batch, vocab], cache).
      params: its parameters.
      cache: its empty cache, of the parameters' dtype; it is donated.
      splits: the backends of the wrapped step's splits, in order.
      batch: rows.
      position: the first position, or one for each row.
      in_place: every array of the cache keeps its address.
      steps: how many tokens.

    Returns:
      What `explain` says of the step.
    """
    plain = jax.jit(step)
    wrapped = jaxgraph.wrap(step, donate_argnums=1, options=jaxgraph.Options(strict=True))
    plain_cache, cache = cache, jax.tree.map(jnp.copy, cache)
    token = jnp.arange(3, 3 + batch, dtype=jnp.int32)
    position = jnp.asarray(position, jnp.int32)
    explanation = wrapped.explain(params, cache, token, position)
    found = [split.backend for split in explanation.splits]
    assert found == list(splits), f"{found}\n{explanation}"
    if in_place:
        assert not explanation.copies, explanation

    dtype = jax.tree.leaves(params)[0].dtype
    for _ in range(steps):
        expected, logits, plain_cache = plain(params, plain_cache, token, position)
        before = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(cache)]
        got, got_logits, cache = wrapped(params, cache, token, position)
        if in_place:
            after = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(cache)]
            assert before == after, "an array of the cache moved"
        assert (got.dtype, got_logits.dtype) == (expected.dtype, logits.dtype)
        _assert_close(got_logits, logits, dtype)
        _assert_same_choice(got, got_logits, expected, logits, dtype)
        token, position = expected, position + 1
    jax.tree.map(lambda a, b: _assert_close(a, b, dtype), cache, plain_cache)

    stats, native = wrapped.stats(), found.count("native")
    assert (stats.calls, stats.executions) == (steps, native * steps)
    assert (stats.eager, stats.captures) == (native, native), stats
    assert stats.replays == native * (steps - 2), stats
    assert (stats.resets, stats.failures, stats.exec_updates) == (0, 0, 0), stats
    return explanation


def _assert_close(got: jax.Array, expected: jax.Array, dtype: Any) -> None:
    a, b = (np.asarray(x, np.float32) for x in (got, expected))
    scale = 1 + np.abs(b).max()
    np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype.name] * scale, rtol=0)


def _assert_same_choice(got, got_logits, expected, logits, dtype) -> None:
    """Both chose their best token, and the same one unless it is a tie."""
    got_logits, logits = (np.asarray(x, np.float32) for x in (got_logits, logits))
    got, expected = np.asarray(got), np.asarray(expected)
    rows = np.arange(len(got))
    np.testing.assert_array_equal(got, got_logits.argmax(-1))
    lost = logits[rows, expected] - logits[rows, got]
    tie = TIE if dtype == jnp.float32 else 2 * TOLERANCE[dtype.name] * (1 + np.abs(logits).max())
    assert (lost <= tie).all(), (got, expected, lost)
