"""Loops and branches stay in XLA; a decode step inside of them is native all the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

WIDTH, CONTEXT, VOCAB, LAYERS, STOP = 16, 24, 50, 2, 7


def parameters():
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, jnp.float32)

    layers = [{name: matrix(WIDTH, WIDTH) for name in "qkvo"} for _ in range(LAYERS)]
    return {"embed": matrix(VOCAB, WIDTH) * 7, "layers": layers, "head": matrix(WIDTH, VOCAB)}


def empty_cache():
    return [(jnp.zeros((CONTEXT, WIDTH)), jnp.zeros((CONTEXT, WIDTH))) for _ in range(LAYERS)]


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


def decode_step(params, cache, token, position):
    x = params["embed"][token]
    new_cache = []
    for p, (keys, values) in zip(params["layers"], cache, strict=True):
        h = norm(x)
        keys = lax.dynamic_update_slice(keys, (h @ p["k"])[None], (position, 0))
        values = lax.dynamic_update_slice(values, (h @ p["v"])[None], (position, 0))
        scores = jnp.where(jnp.arange(CONTEXT) <= position, keys @ (h @ p["q"]), -jnp.inf)
        x = x + (jax.nn.softmax(scores) @ values) @ p["o"]
        new_cache.append((keys, values))
    return jnp.argmax(norm(x) @ params["head"]).astype(jnp.int32), new_cache


def until_stop(params, cache, token, length):
    """A loop of unknown length."""

    def body(state):
        i, token, cache, out = state
        token, cache = decode_step(params, cache, token, i)
        return i + 1, token, cache, out.at[i].set(token)

    def goes_on(state):
        return (state[0] < length) & (state[1] != STOP)

    return lax.while_loop(goes_on, body, (0, token, cache, jnp.zeros(CONTEXT, jnp.int32)))


def scanned(params, cache, token, length):
    """A scan that is too long to unroll (the tests say so)."""

    def body(state, position):
        token, cache = decode_step(params, state[1], state[0], position)
        return (token, cache), token

    return lax.scan(body, (token, cache), jnp.arange(CONTEXT))


def counted(params, cache, token, length):
    def body(i, state):
        token, cache = state
        return decode_step(params, cache, token, i)

    return lax.fori_loop(0, length, body, (token, cache))


def chosen(params, cache, token, length):
    return lax.cond(
        length > 3,
        lambda cache: decode_step(params, cache, token, length),
        lambda cache: (token, cache),
        cache,
    )


def switched(params, cache, token, length):
    def at(position):
        return lambda cache: decode_step(params, cache, token, position)

    return lax.switch(length % 3, [at(0), at(5), lambda cache: (token + 1, cache)], cache)


def nested(params, cache, token, length):
    return lax.cond(
        length > 3, lambda c: counted(params, c, token, length), lambda c: (token, c), cache
    )


CASES = [until_stop, scanned, counted, chosen, switched, nested]


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def wrap(fun, **options):
    return jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True, max_unroll=4, **options))


def innermost(split):
    """The splits of the bodies at the bottom."""
    for body in split.bodies:
        if body.bodies:
            yield from innermost(body)
        else:
            yield body


@pytest.mark.parametrize("fun", CASES, ids=lambda f: f.__name__)
def test_bodies_compute_what_jit_computes(fun):
    step, plain = wrap(fun), jax.jit(fun)
    params, token = parameters(), jnp.int32(1)
    for length in (9, 2, 20, 9, 4):
        args = (params, empty_cache(), token, jnp.int32(length))
        assert_equal(step(*args), plain(*args))
    assert step.stats().failures == 0


@pytest.mark.parametrize("fun", CASES, ids=lambda f: f.__name__)
def test_the_whole_step_in_a_body_is_one_native_split(fun):
    explanation = wrap(fun).explain(parameters(), empty_cache(), jnp.int32(1), jnp.int32(9))
    assert explanation.splits[-1].backend == "xla"
    backends = [split.backend for split in innermost(explanation.splits[-1])]
    assert backends == ["native"] * (2 if fun is switched else 1), explanation
    assert re.search(r"in a body: split \d+: native", str(explanation))


def test_a_loop_replays_its_body_at_every_turn():
    step = wrap(scanned)
    args = (parameters(), empty_cache(), jnp.int32(1), jnp.int32(0))
    step(*args), step(*args)
    stats = step.stats()
    assert (stats.calls, stats.executions) == (2, 2 * CONTEXT)
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 2 * CONTEXT - 2)


def test_splits_of_a_step_and_of_bodies_have_numbers_of_their_own():
    def fun(params, cache, token, length):
        token, cache = decode_step(params, cache, token, 0)
        token, cache = counted(params, cache, token, length)
        return decode_step(params, cache, token, length)

    step = wrap(fun)
    args = (parameters(), empty_cache(), jnp.int32(1), jnp.int32(5))
    for _ in range(3):
        assert_equal(step(*args), jax.jit(fun)(*args))
    splits = step.explain(*args).splits
    assert [(s.number, s.backend) for s in splits] == [(0, "native"), (1, "xla"), (2, "native")]
    assert [(s.number, s.backend) for s in splits[1].bodies] == [(3, "native")]
    for split in (splits[0], *splits[1].bodies, splits[2]):
        assert [v.stage for v in split.variants] == ["captured"]


def test_derivatives_and_batches_take_the_plain_function():
    def fun(params, x):
        return lax.fori_loop(
            0, 5, lambda _, x: jnp.tanh(norm(x @ params["head"] @ params["back"])), x
        )

    rng = np.random.default_rng(1)
    params = {"head": jnp.asarray(rng.standard_normal((8, 12)) / 3, jnp.float32)}
    params["back"] = params["head"].T
    x = jnp.ones(8)
    step = wrap(fun)
    np.testing.assert_allclose(
        jax.jvp(lambda x: step(params, x), (x,), (x,))[1],
        jax.jvp(lambda x: fun(params, x), (x,), (x,))[1],
        rtol=1e-4,
        atol=1e-5,
    )
    xs = jnp.stack([x, 2 * x])
    got = jax.vmap(lambda x: step(params, x))(xs)
    np.testing.assert_allclose(got, jax.vmap(lambda x: fun(params, x))(xs), rtol=1e-4, atol=1e-5)


def layers_by_scan(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(norm(x @ w)) @ w.T + x, None), x, params)[0]


def short_body(params, x):
    return lax.fori_loop(0, 5, lambda _, x: x @ params[0], x)


def body_without_products(params, x):
    def body(_, x):
        for _ in range(20):
            x = jnp.sin(x) + 1
        return x

    return lax.fori_loop(0, 5, body, x)


def body_with_an_effect(params, x):
    def body(_, x):
        jax.debug.callback(lambda: None)
        for w in params:
            x = jnp.tanh(norm(x @ w))
        return x

    return lax.fori_loop(0, 5, body, x)


@pytest.mark.parametrize(
    "fun", [layers_by_scan, short_body, body_without_products, body_with_an_effect]
)
def test_bodies_that_do_not_pay_stay_as_they_are(fun):
    """A layer's weights would be copied out of their stack; and what is small is XLA's."""
    params = jnp.asarray(np.random.default_rng(2).standard_normal((6, 150, 150)) / 12, jnp.float32)
    x = jnp.ones(150)
    step = wrap(fun)
    assert not any(split.bodies for split in step.explain(params, x).splits)
    for _ in range(2):
        np.testing.assert_allclose(step(params, x), jax.jit(fun)(params, x), rtol=1e-3, atol=1e-4)
