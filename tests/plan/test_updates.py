"""Updates that share an array: every result has its own update, and only that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

CACHE = jnp.arange(2 * 8 * 4, dtype=jnp.float32).reshape(2, 8, 4)
X, Y = -jnp.ones(4), -2 * jnp.ones(4)
FIRST, SECOND = jnp.int32(1), jnp.int32(5)
OPTIONS = jaxgraph.Options(strict=True)


def equal_jit(fun, *args, donate_argnums=()):
    step = jaxgraph.wrap(fun, donate_argnums=donate_argnums, options=OPTIONS)
    plain = jax.jit(fun)
    for _ in range(4):
        mine = [jnp.copy(a) for a in args]
        got, expected = step(*mine), plain(*args)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        for i, (before, after) in enumerate(zip(args, mine, strict=True)):
            if i not in (
                donate_argnums if isinstance(donate_argnums, tuple) else (donate_argnums,)
            ):
                np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_two_updates_of_one_old_array(donated):
    def fun(c, x, y, i, j):
        return c.at[0, i].set(x), c.at[0, j].set(y)

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=donated)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_two_stacks_of_updates_of_one_array(donated):
    def fun(c, x, y, i, j):
        def stack(row, at):
            layers = [lax.dynamic_update_slice(c[n], row[None], (at, 0)) for n in range(2)]
            return jnp.stack(layers)

        return stack(x, i), stack(y, j)

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=donated)


def test_two_scans_that_each_update_the_layers():
    def fun(c, x, y, i, j):
        def scan(row, at):
            return lax.scan(
                lambda s, c: (s, lax.dynamic_update_slice(c, row[None], (at, 0))), 0.0, c
            )[1]

        return scan(x, i), scan(y, j)

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=(0,))


def test_an_update_from_its_own_old_value():
    """The rows overlap the place they are written to: each must be read before it is written."""

    def fun(c, at):
        return lax.dynamic_update_slice(c, c[:, :6], (0, at, 0))

    equal_jit(fun, CACHE, jnp.int32(1), donate_argnums=(0,))
    equal_jit(fun, CACHE, jnp.int32(2), donate_argnums=(0,))


def test_an_update_of_what_a_later_kernel_also_computes_with():
    def fun(c, c2, x, i):
        b = jnp.where(c2 > c, c, c2)
        return b.at[0, i].set(x), b + c

    equal_jit(fun, CACHE, CACHE[::-1], X, FIRST)


def test_three_branches_and_a_reader():
    def fun(c, x, y, i, j):
        a = c.at[0, i].set(x)
        b = a.at[1, j].set(y)
        other = c.at[1, i].set(y)
        return b, other, a.sum(), c.sum()

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=(0,))


def test_many_dimensions_stay_right():
    x = jnp.arange(2.0**7 * 3).reshape(2, 2, 2, 3, 2, 2, 2, 2)
    step = jaxgraph.wrap(lambda a: a.transpose(7, 6, 5, 4, 3, 2, 1, 0) * 2 + 1, options=OPTIONS)
    for _ in range(3):
        np.testing.assert_array_equal(step(x), x.T * 2 + 1)
    assert "dimensions larger than one" in str(step.explain(x))


@pytest.mark.parametrize("n", [100, 400, 1000])
def test_very_long_chains_are_cut(n):
    args = [jnp.full(3, float(i % 7)) for i in range(n)]
    step = jaxgraph.wrap(lambda *a: sum(a), options=OPTIONS)
    for _ in range(3):
        np.testing.assert_array_equal(step(*args), np.full(3, sum(i % 7 for i in range(n))))
    assert step.stats().replays == 1
