"""Spellings of the same layer come to the same kernels, and compute what jax.jit computes.

Norms, softmaxes, gated units and rotary embeddings need no recogniser: they are rows and
elementwise work, and fusion makes one kernel of any spelling. What each table asserts is that
number. Only attention is recognised (test_attention.py), and, on CUDA, what an RMS norm's row
program computes (tests/ffi/cuda/stream_group_test.cpp).
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph
from jaxgraph.frontend.flatten import flatten
from jaxgraph.frontend.lowering import build_graph
from jaxgraph.passes.attention import find_attention
from jaxgraph.passes.concat import push_through_concat
from jaxgraph.passes.fuse import fuse
from jaxgraph.passes.in_place import chain_stacked_updates
from jaxgraph.passes.splits import cut
from jaxgraph.plan import units as un
from jaxgraph.plan.storage import plan_storage

DTYPES = [jnp.float32, jnp.bfloat16]
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 4e-2}
WIDTH, HEADS, SIZE, CONTEXT = 16, 2, 8, 32
EPS = 1e-5


def launches(fun, *args) -> Counter:
    """Nodes that launch a kernel, by kind."""
    step = flatten(jax.make_jaxpr(fun)(*args), 64)
    runs = cut(step).runs
    assert [r.backend for r in runs] == ["native"]
    graph = build_graph(runs[0].inputs, runs[0].eqns, runs[0].outputs, {})
    graph = find_attention(chain_stacked_updates(push_through_concat(graph)))
    units = plan_storage(fuse(graph)).units
    return Counter(un.OP_NAMES[u.op] for u in units if u.op != un.VIEW)


def assert_equals_jit(fun, *args):
    """Against jit in f32: in bf16 XLA rounds at other places than a fused kernel."""
    dtype = args[0].dtype.type
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    wide = [a.astype(jnp.float32) if a.dtype == dtype else a for a in args]
    want = np.asarray(jax.jit(fun)(*wide), np.float64)
    scale = 1 + np.abs(want).max()
    for _ in range(3):
        got = np.asarray(step(*args), np.float64)
        np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype] * scale, rtol=0)


def array(dtype, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def between_products(layer):
    """The layer where it stands in a model, so that each kernel of its own is one more launch."""
    return lambda x, w, *rest: layer(x @ w, *rest) @ w


def by_name(functions):
    return pytest.mark.parametrize("form", functions, ids=lambda f: f.__name__)


# RMS norm.


def rms_by_rsqrt(x, w, b):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + EPS) * w


def rms_by_division(x, w, b):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS) * w


def rms_in_f32(x, w, b):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS)).astype(x.dtype) * w


def rms_with_weight_in_f32(x, w, b):
    y = x.astype(jnp.float32)
    mean = jnp.sum(y * y, -1, keepdims=True) / x.shape[-1]
    return (y * lax.rsqrt(mean + EPS) * w.astype(jnp.float32)).astype(x.dtype)


def rms_by_power_and_one_plus_weight(x, w, b):
    mean = jnp.mean(lax.square(x.astype(jnp.float32)), axis=-1)
    return (x * jnp.power(mean + EPS, -0.5)[:, None]).astype(x.dtype) * (1 + w)


def rms_by_einsum(x, w, b):
    mean = jnp.einsum("bd,bd->b", x, x) / WIDTH
    return jnp.einsum("bd,b->bd", x, lax.rsqrt(mean + EPS)) * w


def rms_by_vmap_of_dot(x, w, b):
    return jax.vmap(lambda r: r * lax.rsqrt(jnp.dot(r, r) / WIDTH + EPS) * w)(x)


def rms_by_norm(x, w, b):
    return x / jnp.sqrt(jnp.linalg.norm(x, axis=-1, keepdims=True) ** 2 / WIDTH + EPS) * w


def rms_by_reciprocal(x, w, b):
    return x * jnp.reciprocal(jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)) * w


# Layer norm.


def layer_norm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + EPS) * w + b


def layer_norm_of_centered(x, w, b):
    centered = x - jnp.mean(x, -1, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + EPS) * w + b


def layer_norm_by_moments(x, w, b):
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = (y * y).mean(-1, keepdims=True) - mean * mean
    return ((y - mean) * lax.rsqrt(variance + EPS)).astype(x.dtype) * w + b


def layer_norm_by_standardize(x, w, b):
    return jax.nn.standardize(x, axis=-1, epsilon=EPS) * w + b


def layer_norm_by_vmap_of_std(x, w, b):
    return jax.vmap(lambda r: (r - r.mean()) / (r.std() + EPS) * w + b)(x)


# What is nearly a norm is as right as what is one.


def eps_outside_of_the_root(x, w, b):
    return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + EPS) * w


def mean_without_the_square(x, w, b):
    return x * lax.rsqrt(jnp.abs(jnp.mean(x, -1, keepdims=True)) + 1) * w


def mean_of_cubes(x, w, b):
    return x * lax.rsqrt(jnp.abs(jnp.mean(x**3, -1, keepdims=True)) + 1) * w


def mean_of_another_row(x, w, b):
    return x * lax.rsqrt(jnp.mean(x[::-1] ** 2, -1, keepdims=True) + 1) * w


RMS = [
    rms_by_rsqrt,
    rms_by_division,
    rms_in_f32,
    rms_with_weight_in_f32,
    rms_by_power_and_one_plus_weight,
    rms_by_einsum,
    rms_by_vmap_of_dot,
    rms_by_norm,
    rms_by_reciprocal,
]
LAYER = [
    layer_norm,
    layer_norm_of_centered,
    layer_norm_by_moments,
    layer_norm_by_standardize,
    layer_norm_by_vmap_of_std,
]
NEARLY = [
    eps_outside_of_the_root,
    mean_without_the_square,
    mean_of_cubes,
    mean_of_another_row,
]


def norm_arguments(dtype):
    return (
        array(dtype, 2, WIDTH),
        array(dtype, WIDTH, WIDTH, seed=1) / 4,
        1 + array(dtype, WIDTH, seed=2) / 4,
        array(dtype, WIDTH, seed=3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@by_name([*RMS, *LAYER])
def test_a_norm_is_one_kernel(form, dtype):
    assert launches(between_products(form), *norm_arguments(dtype)) == {"MATMUL": 2, "ROW": 1}


@pytest.mark.parametrize("dtype", DTYPES)
@by_name([*RMS, *LAYER, *NEARLY])
def test_norms_compute_what_jit_computes(form, dtype):
    x, _, w, b = norm_arguments(dtype)
    assert_equals_jit(form, x, w, b)


@pytest.mark.parametrize("dtype", DTYPES)
@by_name(RMS)
def test_a_residual_belongs_to_the_norm(form, dtype):
    def fun(x, w, scale, bias):
        x = x + x @ w
        return form(x, scale, bias) @ w, x

    assert launches(fun, *norm_arguments(dtype)) == {"MATMUL": 2, "ROW": 1}


# Softmax: by itself, not between the two products of an attention.


def softmax(s, mask):
    return jax.nn.softmax(s, -1)


def softmax_of_visible(s, mask):
    return jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1)


def softmax_with_added_mask(s, mask):
    return jax.nn.softmax(s + jnp.where(mask, 0.0, -1e9).astype(s.dtype), -1)


def softmax_where(s, mask):
    return jax.nn.softmax(s, -1, where=mask)


def softmax_by_logsumexp(s, mask):
    return jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))


def softmax_by_log_softmax(s, mask):
    return jnp.exp(jax.nn.log_softmax(jnp.where(mask, s, -jnp.inf)))


def softmax_by_hand(s, mask):
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def softmax_without_shift(s, mask):
    return jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)


def softmax_in_f32(s, mask):
    return jax.vmap(jax.nn.softmax)(s.astype(jnp.float32)).astype(s.dtype)


def softmax_with_a_sink(s, mask):
    sink = jnp.ones((s.shape[0], 1), s.dtype)
    return jax.nn.softmax(jnp.concatenate([s, sink], -1), -1)[:, :-1]


SOFTMAXES = [
    softmax,
    softmax_of_visible,
    softmax_with_added_mask,
    softmax_where,
    softmax_by_logsumexp,
    softmax_by_log_softmax,
    softmax_by_hand,
    softmax_without_shift,
    softmax_in_f32,
]


@pytest.mark.parametrize("dtype", DTYPES)
@by_name([*SOFTMAXES, softmax_with_a_sink])
def test_a_softmax_is_one_kernel_and_right(form, dtype):
    s, mask = array(dtype, 3, WIDTH), jnp.asarray(np.arange(WIDTH) % 3 != 1)
    kinds = launches(form, s, mask)
    if form is softmax_with_a_sink:  # put together, then summed, then a part of it is a result
        assert kinds["ROW"] == 1
    else:
        assert kinds == {"ROW": 1}
    assert_equals_jit(form, s, mask)


# Gated units.

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": lambda x: x * jax.nn.sigmoid(x),
    "silu by exp": lambda x: x / (1 + jnp.exp(-x)),
    "silu by tanh": lambda x: x * 0.5 * (1 + jnp.tanh(x * 0.5)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu by hand": lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "gelu by erf": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu by erfc": lambda x: 0.5 * x * lax.erfc(-x * np.float32(0.5**0.5).astype(x.dtype)),
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared relu": lambda x: jnp.square(jax.nn.relu(x)),
    "squared relu by power": lambda x: jnp.maximum(x, 0) ** 2,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_unit_is_its_products_and_one_kernel(name, dtype):
    activation = ACTIVATIONS[name]
    x, gate = array(dtype, 2, WIDTH), array(dtype, WIDTH, WIDTH, seed=1) / 4
    both, up = array(dtype, WIDTH, 2 * WIDTH, seed=2) / 4, array(dtype, WIDTH, WIDTH, seed=3) / 4

    def apart(x, gate, up):
        return (activation(x @ gate) * (x @ up)) @ gate

    def by_split(x, both, gate):
        a, b = jnp.split(x @ both, 2, -1)
        return (activation(a) * b) @ gate

    def by_reshape(x, both, gate):
        h = (x @ both).reshape(2, 2, WIDTH)
        return (h[:, 1] * activation(h[:, 0])) @ gate

    def without_gate(x, gate):
        return activation(x @ gate) @ gate

    for fun, args, products in (
        (apart, (x, gate, up), 3),
        (by_split, (x, both, gate), 2),
        (by_reshape, (x, both, gate), 2),
        (without_gate, (x, gate), 2),
    ):
        assert launches(fun, *args) == {"MATMUL": products, "EXPR": 1}, fun.__name__
        assert_equals_jit(fun, *args)


# Rotary embeddings of q [batch, heads, size] at one position.


def angles(position):
    return position / 10000.0 ** (jnp.arange(0, SIZE, 2) / SIZE)


def waves(position, dtype=jnp.float32):
    return jnp.cos(angles(position)).astype(dtype), jnp.sin(angles(position)).astype(dtype)


def halves(q, position, table):
    c, s = waves(position, q.dtype)
    a, b = jnp.split(q, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def halves_by_slices_in_f32(q, position, table):
    c, s = (x[None, None] for x in waves(position))
    a, b = q[..., : SIZE // 2], q[..., SIZE // 2 :]
    return jnp.concatenate((a * c - b * s, a * s + b * c), axis=-1).astype(q.dtype)


def halves_by_turning(q, position, table):
    c, s = (jnp.concatenate([x, x], -1) for x in waves(position, q.dtype))
    turned = jnp.concatenate([-q[..., SIZE // 2 :], q[..., : SIZE // 2]], -1)
    return q * c + turned * s


def halves_by_stack(q, position, table):
    c, s = waves(position)
    z = q.reshape(*q.shape[:-1], 2, SIZE // 2)
    a, b = z[..., 0, :], z[..., 1, :]
    return jnp.stack([a * c - b * s, b * c + a * s], -2).reshape(q.shape).astype(q.dtype)


def halves_from_a_table(q, position, table):
    c, s = table[0][position], table[1][position]
    a, b = jnp.split(q.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(q.dtype)


def halves_from_a_sliced_table(q, position, table):
    c, s = lax.dynamic_slice_in_dim(table, position, 1, 1)
    a, b = jnp.split(q, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(q.dtype)


def pairs(q, position, table):
    c, s = waves(position)
    a, b = q[..., ::2], q[..., 1::2]
    return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(q.shape).astype(q.dtype)


def pairs_by_reshape(q, position, table):
    c, s = waves(position)
    z = q.astype(jnp.float32).reshape(*q.shape[:-1], -1, 2)
    a, b = z[..., 0], z[..., 1]
    return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(q.shape).astype(q.dtype)


def pairs_by_turning(q, position, table):
    c, s = (jnp.repeat(x, 2, -1) for x in waves(position))
    turned = jnp.stack([-q[..., 1::2], q[..., ::2]], -1).reshape(q.shape)
    return (q * c + turned * s).astype(q.dtype)


def pairs_from_a_table(q, position, table):
    c, s = table[0][position], table[1][position]
    a, b = q[..., ::2], q[..., 1::2]
    return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(q.shape).astype(q.dtype)


# Kernels of one layer, and those more that a step of any number of layers has: the waves are
# computed, or the position made an index and the table's rows taken, once for all of them.
ROTARY = {
    halves: (1, 1),
    halves_by_slices_in_f32: (1, 1),
    halves_by_turning: (1, 1),
    halves_by_stack: (1, 1),
    halves_from_a_table: (1, 3),
    halves_from_a_sliced_table: (1, 2),
    pairs: (1, 1),
    pairs_by_reshape: (1, 1),
    pairs_by_turning: (2, 3),
    pairs_from_a_table: (1, 3),
}


def rotary_arguments(dtype):
    q, position = array(dtype, 2, HEADS, SIZE), jnp.int32(5)
    turns = np.arange(CONTEXT)[:, None] / 10000.0 ** (np.arange(0, SIZE, 2) / SIZE)
    return q, position, jnp.asarray(np.stack([np.cos(turns), np.sin(turns)]), jnp.float32)


@by_name(ROTARY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotary_embedding_computes_what_jit_computes(form, dtype):
    assert_equals_jit(form, *rotary_arguments(dtype))


@by_name(ROTARY)
def test_a_rotary_embedding_is_one_kernel_a_layer(form):
    q, position, table = rotary_arguments(jnp.float32)
    w = array(jnp.float32, WIDTH, WIDTH)

    def layers(count):
        def fun(x, w, position, table):
            for _ in range(count):
                x = form((x @ w).reshape(q.shape), position, table).reshape(x.shape)
            return x

        kinds = launches(fun, q.reshape(2, WIDTH), w, position, table)
        assert kinds.pop("MATMUL") == count
        return sum(kinds.values())

    each, once = ROTARY[form]
    assert (layers(2) - layers(1), 2 * layers(1) - layers(2)) == (each, once)
