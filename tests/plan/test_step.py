"""Step plans: what `explain` says of copies, and what stays in XLA as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
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
        y = lax.lgamma(params["w"])
        for _ in range(4):
            x = jnp.sin(x) * 2
        return x + y

    step = jaxgraph.wrap(fun)
    params = step.pack({"w": np.arange(8, dtype=np.float32)[::-1].copy()})
    expected = lax.lgamma(jnp.arange(8.0)[::-1])
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
        return lax.lgamma(jnp.sin(x) * jnp.cos(x) + x * x)

    text = explained(fun, ROW)
    assert "lgamma" in text and "no native kernel" in text and "test_step.py" in text
