"""The order in which weights should lie, by what reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph
from jaxgraph.frontend.flatten import flatten
from jaxgraph.passes.weight_order import weight_orders

X = jnp.ones((1, 16), jnp.bfloat16)


def weight(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def order(fun, *shape, x=X, dtype=jnp.bfloat16):
    """What `fun(w, x)` asks for its weight."""
    closed = jax.make_jaxpr(fun)(jnp.ones(shape, dtype), x)
    return weight_orders(flatten(closed, 64))[0]


@pytest.mark.parametrize(
    ("fun", "shape", "expected"),
    [
        (lambda w, x: x @ w, (16, 24), (1, 0)),
        (lambda w, x: x[0] @ w, (16, 24), (1, 0)),
        (lambda w, x: w.T @ x[0], (16, 24), (1, 0)),
        (lambda w, x: jnp.einsum("bi,ihd->bhd", x, w), (16, 3, 4), (1, 2, 0)),
        (lambda w, x: jnp.einsum("bi,hid->bhd", x, w), (3, 16, 4), (0, 2, 1)),
        (lambda w, x: jnp.einsum("bhd,hdo->bo", x.reshape(1, 4, 4), w), (4, 4, 9), (2, 0, 1)),
        # Already so.
        (lambda w, x: jnp.einsum("bi,oi->bo", x, w), (24, 16), None),
        (lambda w, x: x @ w.T, (24, 16), None),
        (lambda w, x: jnp.einsum("bi,hdi->bhd", x, w), (3, 4, 16), None),
        # Two readers that agree, and slice by slice.
        (lambda w, x: (x @ w, (x + 1) @ w), (16, 24), (1, 0)),
        (lambda w, x: (x @ w[0], x @ w[1]), (2, 16, 24), (0, 2, 1)),
        (lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w), (3, 16, 16), (0, 2, 1)),
        (lambda w, x: (x @ w[:, :8], x @ w[:, 8:]), (16, 24), (1, 0)),
        (lambda w, x: [x @ part for part in jnp.split(w, 3, axis=1)], (16, 24), (1, 0)),
        (jax.jit(lambda w, x: x @ w), (16, 24), (1, 0)),
    ],
)
def test_what_products_of_one_row_ask_for(fun, shape, expected):
    assert order(fun, *shape) == expected


def test_only_small_weights_are_laid_otherwise_and_all_of_a_step_or_none():
    """By what a product reads: a stack of layers may be larger."""

    def asked(fun, *shapes):
        weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        closed = jax.make_jaxpr(lambda x, *w: fun(x, *w))(
            jnp.ones((1, 2048), jnp.bfloat16), *weights
        )
        return weight_orders(flatten(closed, 64))[1:]

    def two(x, w, v):
        return x @ w, x @ v

    assert asked(two, (2048, 64), (2048, 2048)) == [(1, 0), (1, 0)]
    assert asked(two, (2048, 64), (2048, 2056)) == [None, None]
    assert asked(lambda x, w: x @ w[3], (8, 2048, 2048)) == [(0, 2, 1)]


@pytest.mark.parametrize(
    ("fun", "shape"),
    [
        (lambda w, x: (x @ w, w), (16, 24)),  # a result
        (lambda w, x: (x @ w, w * 2), (16, 24)),  # another reader
        (lambda w, x: x @ w + w[3, 2], (16, 24)),
        (lambda w, x: (x @ w, x @ w.T), (16, 16)),
        (lambda w, x: (x @ w, jnp.einsum("bi,oi->bo", x, w)), (16, 16)),  # both ways
        (lambda w, x: jnp.concatenate([x, x + 1]) @ w, (16, 24)),  # two rows
        (lambda w, x: jnp.einsum("bi,bio->bo", jnp.concatenate([x, x]), w), (2, 16, 24)),  # batch
        (lambda w, x: jnp.einsum("io,ip->op", w, w), (16, 24)),
        (lambda w, x: x[:, :15] @ w, (15, 24)),  # not in pieces of 16 bytes
        (lambda w, x: x, (16, 24)),  # nobody
        (lambda w, x: x @ w, (16,)),
    ],
)
def test_others_stay_as_they_are(fun, shape):
    assert order(fun, *shape) is None


def test_f32_weights_stay_as_they_are():
    x = jnp.ones((1, 16), jnp.float32)
    assert order(lambda w, x: x @ w, 16, 24, x=x, dtype=jnp.float32) is None
    assert order(lambda w, x: x @ w, 16, 24, x=x.astype(jnp.float16), dtype=jnp.float16) == (1, 0)


def layers(params, x, scale):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"] * scale
    return x @ params["head"].T, params["head"][3] + x[0, 0]


def example():
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape) / 4, jnp.bfloat16)

    params = {
        "layers": [
            {"up": normal(16, 40), "down": normal(40, 16), "bias": normal(16)} for _ in range(2)
        ],
        "head": normal(24, 16),
    }
    return params, normal(1, 16), jnp.bfloat16(0.5)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_packed_tree_in_another_order_is_the_same_tree(wrapped):
    params, x, scale = example()
    step = jaxgraph.wrap(layers)
    packed = step.pack(params, example_args=(None, x, scale))
    orders = {leaf.shape: leaf.order for leaf in packed.spec.leaves}
    assert orders == {(16, 40): (1, 0), (40, 16): (1, 0), (16,): None, (24, 16): None}
    expected = jax.jit(layers)(params, x, scale)
    run = step if wrapped else jax.jit(lambda p, x, s: layers(p.unpack(), x, s))
    for got, want in zip(run(packed, x, scale), expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.05, atol=0.05
        )
    for got, want in zip(jax.tree.leaves(packed.unpack()), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_products_read_it_in_place():
    params, x, scale = example()
    step = jaxgraph.wrap(layers)
    packed = step.pack(params, example_args=(params, x, scale))
    ops = [
        [split.ops for split in step.explain(tree, x, scale).splits] for tree in (params, packed)
    ]
    assert ops[0] == ops[1]


def test_the_leaves_of_a_later_argument():
    params, x, scale = example()
    step = jaxgraph.wrap(lambda x, n, scale, params: layers(params, x, scale)[0], static_argnums=1)
    packed = step.pack(params, argnum=3, example_args=(x, 7, scale, None))
    assert packed.spec is jaxgraph.wrap(layers).pack(params, example_args=(None, x, scale)).spec


def test_donated_trees_stay_as_they_are():
    params, x, scale = example()
    step = jaxgraph.wrap(layers, donate_argnums=(0,))
    packed = step.pack(params, example_args=(None, x, scale))
    assert all(leaf.order is None for leaf in packed.spec.leaves)
