"""One array given twice, updated and read, donated or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph


def update_and_read(cache, other, at):
    cache = cache.at[at].set(1.0)
    return cache, cache.sum() + other.sum(), other * 2


def wrap(fun, **kwargs):
    return jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True), **kwargs)


def test_an_array_given_twice_is_updated_in_a_copy():
    step = wrap(update_and_read)
    x = jnp.arange(8.0)
    for at in range(5):
        got = step(x, x, jnp.int32(at))
        for a, b in zip(got, jax.jit(update_and_read)(x, x, jnp.int32(at)), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(x, np.arange(8.0))


def test_the_results_of_one_call_are_the_arguments_of_the_next():
    def fun(tree):
        return {"a": tree["b"] + 1, "b": tree["a"].at[0].add(1), "c": tree["a"]}

    step, plain = wrap(fun), jax.jit(fun)
    x = jnp.arange(4.0)
    got = want = {"a": x, "b": x, "c": x}
    for _ in range(6):
        got, want = step(got), plain(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        got["b"], want["b"] = got["c"], want["c"]


@pytest.mark.parametrize("donated", [0, (0, 1)])
def test_donating_what_is_given_twice_fails_as_in_jit(donated):
    step = wrap(update_and_read, donate_argnums=donated)
    plain = jax.jit(update_and_read, donate_argnums=donated)
    for fun in (plain, step, step):
        x = jnp.arange(8.0)
        with pytest.raises(jax.errors.JaxRuntimeError, match="buffer"):
            fun(x, x, jnp.int32(2))
    cache, _, other = step(jnp.arange(8.0), jnp.arange(8.0), jnp.int32(2))
    np.testing.assert_array_equal(cache, [0, 1, 1, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(other, 2 * np.arange(8.0))
