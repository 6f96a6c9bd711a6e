"""A wrapped function composes: jit, scan, while, cond, other wrapped functions, grad, vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph import Options


def fun(x, w):
    return jnp.sin(x) * w + x


@pytest.fixture
def step():
    return jaxgraph.wrap(fun, options=Options(strict=True))


X, W = jnp.linspace(0.0, 1.0, 6), jnp.linspace(1.0, 2.0, 6)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_inside_jit(step):
    outer = jax.jit(lambda x, w: step(x * 2, w) + 1)
    for _ in range(4):
        close(outer(X, W), fun(X * 2, W) + 1)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 2)
    assert stats.calls == 1, "Python called it once, while tracing"


def test_inside_scan(step):
    out, _ = jax.lax.scan(lambda x, _: (step(x, W), None), X, None, length=12)
    expected, _ = jax.lax.scan(lambda x, _: (fun(x, W), None), X, None, length=12)
    close(out, expected)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 10)


def test_inside_while_and_cond(step):
    def body(state):
        i, x = state
        return i + 1, jax.lax.cond(i % 2 == 0, lambda x: step(x, W), lambda x: x, x)

    _, out = jax.lax.while_loop(lambda s: s[0] < 4, body, (0, X))
    close(out, fun(fun(X, W), W))
    assert step.stats().executions == 2


def test_inside_nested_loops(step):
    """The carry keeps its place, so that the inner loop replays across the outer one's turns."""

    def inner(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: step(x, W), x)

    def outer(f):
        return jax.jit(lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=4)[0])

    expected = X
    for _ in range(20):
        expected = fun(expected, W)
    np.testing.assert_allclose(outer(inner)(X), expected, rtol=1e-4)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.executions) == (1, 1, 20)


def test_a_decode_loop_inside_jit_updates_its_cache_in_place():
    """What a generation loop is: `while_loop` around a step with a cache, donated from outside."""

    def decode(cache, x, at):
        cache = jax.lax.dynamic_update_slice(cache, x[None], (at, 0))
        return cache, jnp.tanh(cache.sum(0) * 0.1 + x), at + 1

    def generate(decode, cache, x):
        def go_on(state):
            return state[2] < 9

        return jax.lax.while_loop(go_on, lambda s: decode(*s), (cache, x, jnp.int32(0)))

    step = jaxgraph.wrap(decode, donate_argnums=0, options=Options(strict=True))
    run = jax.jit(lambda cache, x: generate(step, cache, x), donate_argnums=0)
    for got, expected in zip(
        run(jnp.zeros((9, 6)), X), generate(decode, jnp.zeros((9, 6)), X), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 7)


def test_another_wrapped_function_inside_is_one_plan(step):
    """The inner one's equations join the outer's splits; nothing is called in between."""
    outer = jaxgraph.wrap(lambda x, w: step(step(x, w), w) * 2, options=Options(strict=True))
    for _ in range(3):
        close(outer(X, W), fun(fun(X, W), W) * 2)
    assert outer.stats().replays == 1
    assert step.stats().executions == 0
    assert [s.backend for s in outer.explain(X, W).splits] == ["native"]
    out, _ = jax.lax.scan(lambda x, _: (outer(x, W) * 0.1, None), X, None, length=3)
    expected = X
    for _ in range(3):
        expected = fun(fun(expected, W), W) * 2 * 0.1
    np.testing.assert_allclose(out, expected, rtol=1e-4)


def test_inside_another_wrapped_function(step):
    outer = jaxgraph.wrap(lambda x, w: step(x, w) * 2, options=Options(strict=True))
    for _ in range(3):
        close(outer(X, W), fun(X, W) * 2)


def test_grad_jvp_and_hessian_are_those_of_the_original(step):
    total = lambda f: lambda x: f(x, W).sum()  # noqa: E731
    close(jax.grad(total(step))(X), jax.grad(total(fun))(X))
    close(jax.jit(jax.grad(total(step)))(X), jax.grad(total(fun))(X))
    close(jax.jvp(step, (X, W), (W, X))[1], jax.jvp(fun, (X, W), (W, X))[1])
    close(jax.hessian(total(step))(X), jax.hessian(total(fun))(X))
    close(jax.grad(jax.checkpoint(total(step)))(X), jax.grad(total(fun))(X))


def test_grad_through_integer_arguments_and_results():
    def pick(x, i):
        return x[i] * 2, i + 1

    step = jaxgraph.wrap(pick, options=Options(strict=True))
    grad, i = jax.grad(lambda x: step(x, jnp.int32(2)), has_aux=True)(X)
    close(grad, np.eye(6)[2] * 2)
    assert i == 3


def test_custom_derivatives_are_kept():
    @jax.custom_jvp
    def clipped(x):
        return jnp.clip(x, 0, 1)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))
    step = jaxgraph.wrap(lambda x: clipped(x * 3).sum(), options=Options(strict=True))
    close(jax.grad(step)(X), np.full(6, 3.0))


def test_linear_transpose():
    step = jaxgraph.wrap(lambda x, w: x * w, options=Options(strict=True))
    (transposed,) = jax.linear_transpose(lambda x: step(x, W), X)(X)
    close(transposed, X * W)


def test_grad_through_a_scan_of_steps(step):
    def total(f):
        def run(x):
            return jax.lax.scan(lambda x, _: (f(x, W) * 0.3, x), x, None, length=5)[0].sum()

        return run

    np.testing.assert_allclose(jax.grad(total(step))(X), jax.grad(total(fun))(X), rtol=1e-5)
    tangents = jax.jvp(total(step), (X,), (W,)), jax.jvp(total(fun), (X,), (W,))
    np.testing.assert_allclose(*map(jnp.stack, tangents), rtol=1e-5)


def test_vmap_of_grad_of_vmap(step):
    xs = jnp.stack([jnp.stack([X, X + 1]), jnp.stack([X + 2, X - 1])])

    def of(f):
        inner = jax.vmap(f, in_axes=(0, None))
        return jax.vmap(jax.grad(lambda x: inner(x, W).sum()))(xs)

    np.testing.assert_allclose(of(step), of(fun), rtol=1e-5)


def test_vmap(step):
    xs = jnp.stack([X, X + 1, X + 2])
    close(jax.vmap(step, in_axes=(0, None))(xs, W), jax.vmap(fun, in_axes=(0, None))(xs, W))
    close(
        jax.vmap(step, in_axes=(1, None), out_axes=1)(xs.T, W), jax.vmap(fun, (1, None), 1)(xs.T, W)
    )
    close(jax.jit(jax.vmap(jax.grad(lambda x: step(x, W).sum())))(xs), jnp.cos(xs) * W + 1)


def test_disable_jit_runs_the_original(step):
    with jax.disable_jit():
        close(step(X, W), fun(X, W))
    assert step.stats().executions == 0


def test_outer_disable_jit_of_a_jaxpr(step):
    jaxpr = jax.make_jaxpr(step)(X, W)
    with jax.disable_jit():
        (out,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, X, W)
    close(out, fun(X, W))


def test_closing_over_a_tracer_of_an_outer_trace():
    def outer(x):
        return jaxgraph.wrap(lambda y: y * x + 1, options=Options(strict=True))(x + 1)

    close(jax.jit(outer)(X), (X + 1) * X + 1)
    close(jax.grad(lambda x: outer(x).sum())(X), 2 * X + 1)


def test_debug_print_keeps_its_order(capfd):
    def noisy(x):
        jax.debug.print("first {}", x[0], ordered=True)
        y = x * 2
        jax.debug.print("second {}", y[0], ordered=True)
        return y + 1

    step = jaxgraph.wrap(noisy, options=Options(strict=True))
    for _ in range(3):
        close(step(jnp.ones(3)), np.full(3, 3.0))
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == ["first 1.0", "second 2.0"] * 3


def test_pure_callback_and_random_stay_right():
    def fun(key, x):
        noise = jax.random.normal(key, x.shape)
        return jax.pure_callback(lambda v: np.asarray(v) * 2, x, x + 1) + noise

    step = jaxgraph.wrap(fun, options=Options(strict=True))
    key = jax.random.key(0)
    for _ in range(3):
        close(step(key, X), jax.jit(fun)(key, X))
