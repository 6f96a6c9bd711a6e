"""Every function of jaxgraph.ops against its plain definition, and in JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph import ops
from jaxgraph.ops import attention, products, rows

LENGTH = 21


def arrays(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.standard_normal(s) / (s[0] ** 0.5 if len(s) == 2 else 1), dtype)
        for s in shapes
    ]


def cases(dtype):
    """(name, operation, its definition, arrays, settings): sizes that divide by nothing, too."""
    x, weight, bias = arrays(dtype, (3, 77), (77,), (77,))
    w, w2, b, r = arrays(dtype, (77, 50), (77, 50), (50,), (3, 50))
    q, k, v, new = arrays(dtype, (3, 6, 14), (3, 2, LENGTH, 14), (3, 2, LENGTH, 10), (3, 2, 14))
    ids = jnp.asarray([5, 76, 400, -3])
    each, one = jnp.asarray([0, 7, 20], jnp.int32), jnp.int32(9)
    none = {"bias": None, "residual": None}
    plain = {"activation": None, "out_in": False}
    shown = {"scale": 14**-0.5, "window": None, "soft_cap": None}
    yield "rms_norm", ops.rms_norm, rows._rms_norm, (x, weight), {"eps": 1e-6}
    yield "layer_norm", ops.layer_norm, rows._layer_norm, (x, weight, bias), {"eps": 1e-5}
    yield "softmax", ops.softmax, rows._softmax, (x,), {}
    yield "argmax", ops.argmax, rows._argmax, (x,), {}
    yield "linear", ops.linear, functools.partial(products._linear, **none), (x, w), plain
    out_in = plain | {"out_in": True}
    yield "linear_t", ops.linear, functools.partial(products._linear, **none), (x, w.T), out_in
    for activation in ("relu", "relu2", "silu", "gelu", "gelu_tanh"):
        settings = plain | {"activation": activation}
        with_residual = functools.partial(_linear_with_residual, ops.linear)
        definition = functools.partial(_linear_with_residual, products._linear)
        yield f"linear_{activation}", with_residual, definition, (x, w, b, r), settings
        yield f"glu_{activation}", ops.glu, products._glu, (x, w, w2), settings
    yield "embedding", ops.embedding, products._embedding, (x.T, ids), {}
    for at, position in (("one", one), ("each", each)):
        for interleaved in (False, True):
            settings = {"base": 10000.0, "interleaved": interleaved}
            name = f"rope_{at}_{interleaved}"
            yield name, ops.rope, attention._rope, (q, position), settings
        update = (k, new, position)
        yield f"update_cache_{at}", ops.update_cache, attention._update_cache, update, {}
        for name, settings in (
            ("plain", shown),
            ("window", shown | {"window": 4}),
            ("soft_cap", shown | {"soft_cap": 3.0, "scale": 1.0}),
        ):
            call = (q, k, v, position)
            definition = attention._attention_decode
            yield f"attention_{name}_{at}", ops.attention_decode, definition, call, settings
        with_sinks = functools.partial(_attention_with_sinks, ops.attention_decode)
        definition = functools.partial(_attention_with_sinks, attention._attention_decode)
        yield f"attention_sinks_{at}", with_sinks, definition, (q, k, v, position, r[0, :6]), shown


def _attention_with_sinks(function, q, k, v, position, sinks, **settings):
    return function(q, k, v, position, sinks=sinks, **settings)


def _linear_with_residual(function, x, w, b, r, **settings):
    return function(x, w, bias=b, residual=r, **settings)


CASES = [
    pytest.param(*case, id=f"{case[0]}-{jnp.dtype(dtype).name}")
    for dtype in (jnp.float32, jnp.bfloat16)
    for case in cases(dtype)
]
parametrize = pytest.mark.parametrize("name, operation, definition, arguments, settings", CASES)


def close(got, wanted):
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    bf16 = got.dtype == jnp.bfloat16
    a, b = (np.asarray(x, np.float64) for x in (got, wanted))
    norm = np.linalg.norm(b)
    assert np.linalg.norm(a - b) <= (1e-2 if bf16 else 1e-5) * norm, np.abs(a - b).max()


def calls_of(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text().count("@jaxgraph_launch")


@parametrize
def test_it_is_one_kernel_call_and_computes_its_definition(
    name, operation, definition, arguments, settings
):
    def run(*a):
        return operation(*a, **settings)

    assert calls_of(run, *arguments) == 1
    wanted = jax.jit(functools.partial(definition, **settings))(*arguments)
    first = run(*arguments)
    close(first, wanted)
    for _ in range(3):  # the same bits again, and inside another function
        np.testing.assert_array_equal(np.asarray(jax.jit(run)(*arguments)), np.asarray(first))


@parametrize
def test_inside_a_wrapped_function_it_is_nodes(name, operation, definition, arguments, settings):
    def step(*a):
        return jnp.tanh(operation(*a, **settings).astype(jnp.float32)) + 1

    step_ = jaxgraph.wrap(step, options=jaxgraph.Options(strict=True))
    for _ in range(3):
        close(step_(*arguments), jax.jit(step)(*arguments))
    assert step_.stats().replays == 1
    assert [split.backend for split in step_.explain().splits] == ["native"]


def test_gradient_and_batching_are_the_definitions():
    x, weight = arrays(jnp.float32, (5, 16), (16,))

    def of(norm):
        return lambda x, w: jnp.sum(jnp.sin(norm(x, w)))

    definition = functools.partial(rows._rms_norm, eps=1e-6)
    got = jax.grad(of(ops.rms_norm), (0, 1))(x, weight)
    wanted = jax.grad(of(definition), (0, 1))(x, weight)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    mapped = jax.vmap(ops.rms_norm, (0, None))(x, weight)
    np.testing.assert_allclose(mapped, definition(x, weight), rtol=1e-5, atol=1e-6)
    tangent = jax.jvp(ops.softmax, (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(tangent, jnp.zeros_like(x), atol=1e-6)


def test_a_decode_loop_in_scan_updates_a_donated_cache_in_place():
    k, new, q = arrays(jnp.float32, (2, 2, LENGTH, 8), (2, 2, 8), (2, 4, 8))

    def loop(cache, new, q):
        def body(cache, position):
            cache = ops.update_cache(cache, new * position, position)
            return cache, ops.attention_decode(q, cache, cache, position)

        return jax.lax.scan(body, cache, jnp.arange(LENGTH))

    def plainly(cache, new, q):
        def body(cache, position):
            cache = attention._update_cache(cache, new * position, position)
            seen = {"scale": 8**-0.5, "window": None, "soft_cap": None}
            return cache, attention._attention_decode(q, cache, cache, position, **seen)

        return jax.lax.scan(body, cache, jnp.arange(LENGTH))

    wanted = jax.jit(plainly)(k, new, q)
    before = k.unsafe_buffer_pointer()
    got = jax.jit(loop, donate_argnums=0)(k, new, q)
    assert got[0].unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(got[0], wanted[0])
    close(got[1], wanted[1])


def test_many_rows_are_left_to_xla():
    x, w = arrays(jnp.float32, (17, 16), (16, 80))
    assert calls_of(ops.linear, x, w) == 0
    assert calls_of(ops.linear, x[:16], w) == 1
    np.testing.assert_allclose(ops.linear(x, w), x @ w, rtol=1e-5, atol=1e-5)


def test_elsewhere_it_is_its_definition():
    x = jnp.ones((2, 8))
    traced = jax.jit(ops.softmax).trace(x)
    assert "jaxgraph" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    with jax.disable_jit():
        np.testing.assert_allclose(ops.softmax(x), np.full((2, 8), 1 / 8))


X, W, Q = jnp.ones((2, 8)), jnp.ones((8, 4)), jnp.ones((2, 4, 6))
CACHE = jnp.ones((2, 2, 5, 6))


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: ops.rms_norm(X, jnp.ones(7)), ValueError, r"weight .* \(8\), not \(7,\)"),
        (lambda: ops.rms_norm(jnp.ones((2, 8), jnp.int32)), TypeError, "x must be .* floats"),
        (lambda: ops.layer_norm(X, None, jnp.ones((1, 8))), ValueError, "bias must have"),
        (lambda: ops.softmax(jnp.float32(1)), ValueError, "x must have 1 axes"),
        (lambda: ops.argmax(jnp.ones((2, 0))), ValueError, "rows of one element"),
        (lambda: ops.linear(X, W.T), ValueError, r"weight must have the shape \(8, any\)"),
        (lambda: ops.linear(X, W, activation="tanh"), ValueError, "activation='tanh': use one of"),
        (lambda: ops.linear(X, W, residual=X), ValueError, r"residual must .* \(2, 4\)"),
        (lambda: ops.glu(X, W, W[:, :3]), ValueError, r"up must have the shape \(8, 4\)"),
        (lambda: ops.embedding(W, jnp.ones(2)), TypeError, "ids must be an array of integers"),
        (lambda: ops.rope(Q[..., :5], jnp.int32(0)), ValueError, "heads of an even size"),
        (lambda: ops.rope(Q, jnp.arange(3)), ValueError, r"position must .* \(2,\)"),
        (lambda: ops.update_cache(CACHE, Q, jnp.int32(0)), ValueError, r"new must .* \(2, 2, 6\)"),
        (
            lambda: ops.update_cache(CACHE, Q[:, :2].astype(jnp.bfloat16), jnp.int32(0)),
            TypeError,
            "new must have the cache's dtype float32",
        ),
        (
            lambda: ops.attention_decode(Q[:, :3], CACHE, CACHE, jnp.int32(0)),
            ValueError,
            "q has 3 heads, no multiple of the cache's 2",
        ),
        (
            lambda: ops.attention_decode(Q, CACHE, CACHE, jnp.int32(0), window=0),
            ValueError,
            "window=0 must be 1 or more",
        ),
        (
            lambda: ops.attention_decode(Q, CACHE, CACHE, jnp.int32(0), sinks=jnp.ones(2)),
            ValueError,
            r"sinks must have the shape \(4\)",
        ),
        (
            lambda: ops.attention_decode(Q, CACHE, CACHE, jnp.int32(0), sinks=jnp.arange(4)),
            TypeError,
            "sinks must be an array of floats",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, said):
    with pytest.raises(error, match=said):
        call()
