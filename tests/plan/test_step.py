"""Step plans: what `explain` says of copies, and what stays in XLA as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

CACHE, ROW = jnp.zeros((6, 4)), jnp.ones((1, 4))


def update(cache, row, at):
    return lax.dynamic_update_slice(cache, row, (at, 0))


def explained(fun, *args, **kwargs) -> str:
    return str(jaxgraph.wrap(fun, **kwargs).explain(*args))


def test_a_cache_that_is_not_donated_is_named_with_its_cost():
    text = explained(update, CACHE, ROW, jnp.int32(1))
    assert "copies 96 bytes a call" in text and "cache" in text and "donate_argnums" in text


def test_a_donated_cache_has_nothing_to_say():
    text = explained(update, CACHE, ROW, jnp.int32(1), donate_argnums=0)
    assert "copies" not in text


def test_an_update_that_reads_the_old_value_later_says_so():
    def fun(cache, row, at):
        new = update(cache, row, at)
        return jnp.sin(new.sum(-1)) @ cache, new

    text = explained(fun, CACHE, ROW, jnp.int32(1), donate_argnums=0)
    assert "its old value is read after the update" in text


def test_donation_is_unknown_under_an_outer_jit():
    step = jaxgraph.wrap(update, donate_argnums=0)
    jax.jit(lambda *args: step(*args))(CACHE, ROW, jnp.int32(1))
    assert "unknown" in str(step.explain())


def test_a_packed_leaf_that_xla_reads_is_named():
    def fun(params, x):
        y = lax.cumlogsumexp(params["w"])
        for _ in range(4):
            x = jnp.sin(x) * 2
        return x + y

    step = jaxgraph.wrap(fun)
    params = step.pack({"w": np.arange(8, dtype=np.float32)[::-1].copy()})
    expected = lax.cumlogsumexp(jnp.arange(8.0)[::-1])
    np.testing.assert_allclose(step(params, jnp.zeros(8)), expected)
    text = str(step.explain(params, jnp.zeros(8)))
    assert "copies up to 32 bytes a call" in text and "params" in text


def test_a_prompt_of_many_rows_is_left_to_xla():
    x, w = jnp.ones((65, 4)), jnp.ones((4, 128))
    assert "65 rows" in explained(lambda x, w: x @ w, x, w)
    step = jaxgraph.wrap(lambda x, w: x @ w)
    for _ in range(3):
        step(x, w)
    assert step.stats().executions == 0


def test_the_reason_and_the_line_of_what_stays_in_xla():
    def fun(x):
        return lax.cumlogsumexp(jnp.sin(x) * jnp.cos(x) + x * x)

    text = explained(fun, ROW)
    assert "cumlogsumexp" in text and "no native kernel" in text and "test_step.py" in text


@pytest.mark.parametrize("signatures", [1, 2])
def test_many_splits_that_begin_alike_all_replay(signatures):
    """More of them than a key keeps variants, as the layers of a model with a callback in each."""

    def fun(x, w):
        for _ in range(12):
            x = jnp.tanh(jnp.sin(x @ w) * 2 + 1) @ w
            x = jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x

    step = jaxgraph.wrap(
        fun, options=jaxgraph.Options(strict=True, idle_seconds=0, min_equations=0)
    )
    w = jnp.eye(8) / 2
    for _ in range(5):
        for rows in range(1, 1 + signatures):
            x = jnp.ones((rows, 8))
            np.testing.assert_allclose(step(x, w), jax.jit(fun)(x, w), rtol=1e-5)
    stats = step.stats()
    assert stats.evictions == 0
    assert (stats.captures, stats.replays) == (12 * signatures, 3 * 12 * signatures)


def test_many_wrapped_functions_of_one_name_all_replay():
    def layer(scale, x):
        return jnp.sin(x) * scale

    options = jaxgraph.Options(strict=True, idle_seconds=0)
    steps = [jaxgraph.wrap(functools.partial(layer, float(i)), options=options) for i in range(12)]
    for _ in range(5):
        for i, step in enumerate(steps):
            np.testing.assert_allclose(step(ROW), jnp.sin(ROW) * i, rtol=1e-6)
    assert [step.stats().replays for step in steps] == [3] * 12
