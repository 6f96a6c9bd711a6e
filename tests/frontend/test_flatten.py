"""Flattening: calls inlined, scans unrolled, small integers known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxgraph.frontend.flatten import FlatStep, flatten


def flat(fun, *args, max_unroll: int = 64) -> FlatStep:
    return flatten(jax.make_jaxpr(fun)(*args), max_unroll)


def names(step: FlatStep) -> list[str]:
    return [e.primitive.name for e in step.eqns]


def test_nested_calls_and_custom_derivatives_are_inlined():
    @jax.jit
    def inner(x):
        return jax.nn.relu(x) + jax.checkpoint(jnp.sin)(x)

    step = flat(lambda x: jax.jit(inner)(x) * 2, jnp.ones(3))
    assert names(step) == ["max", "sin", "add", "mul"]


def test_every_equation_knows_its_line():
    step = flat(lambda x: jnp.sin(x), jnp.ones(3))
    assert "test_flatten.py" in step.eqns[0].source


def test_a_scan_becomes_its_iterations():
    def body(carry, x):
        return carry * x, carry

    step = flat(lambda c, xs: lax.scan(body, c, xs), jnp.float32(1), jnp.arange(3.0))
    assert names(step).count("mul") == 3
    assert names(step)[-1] == "concatenate"
    assert "scan" not in names(step)


def test_a_reversed_scan_stacks_in_order():
    """The piece that the last executed iteration made is the first of the stack."""
    step = flat(
        lambda c, xs: lax.scan(lambda c, x: (c + x, x * 2), c, xs, reverse=True),
        jnp.float32(0),
        jnp.arange(3.0),
    )
    stack = next(e for e in step.eqns if e.primitive.name == "concatenate")
    made_by = {id(v): e for e in step.eqns for v in e.outputs}

    def layer(value):
        while made_by[id(value)].primitive.name != "slice":
            value = made_by[id(value)].inputs[0]
        return made_by[id(value)].params["start_indices"][0]

    assert [layer(v) for v in stack.inputs] == [0, 1, 2]


def test_a_long_scan_stays_a_loop():
    step = flat(
        lambda c, xs: lax.scan(lambda c, x: (c + x, None), c, xs)[0],
        jnp.float32(0),
        jnp.arange(65.0),
    )
    assert names(step) == ["scan"]


def test_layer_numbers_of_an_unrolled_scan_are_known():
    def body(carry, layer):
        x, cache = carry
        return (x, lax.dynamic_update_index_in_dim(cache, x, layer, 0)), None

    def fun(x, cache):
        return lax.scan(body, (x, cache), jnp.arange(3))[0]

    step = flat(fun, jnp.ones(4), jnp.zeros((3, 4)))
    updates = [e for e in step.eqns if e.primitive.name == "dynamic_update_slice"]
    assert [int(e.inputs[2].known) for e in updates] == [0, 1, 2]


FOLDED = {
    "arithmetic": lambda x, y: (x + y, x - y, x * y, -x, jnp.maximum(x, y), lax.min(x, y)),
    "remainders": lambda x, y: (lax.rem(x, y), lax.rem(x, y * 0)),
    "comparisons": lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, lax.ne(x, y)),
    "bits": lambda x, y: (x & y, x | y, ~x, (x < y) & (x == x), (x < y) | (x > y), ~(x < y)),
    "selection": lambda x, y: (
        jnp.where(x < y, x, y),
        lax.select_n((x > 0).astype(jnp.int32) + (y > 0), x, y, x + y),
    ),
    "conversions": lambda x, y: (x.astype(jnp.int8), x.astype(jnp.bool_), (x < y).astype(x.dtype)),
    "shapes": lambda x, y: (
        x.reshape(2, 3)[1, None],
        lax.broadcast_in_dim(x, (2, 6, 3), (1,)),
        x[1:6:2],
        jnp.concatenate([x, y[2:4]]),
        lax.squeeze(x[None, :, None], (0, 2)),
        jnp.broadcast_to(jnp.int32(3), (2, 2)),
        jnp.copy(lax.stop_gradient(x)),
        lax.broadcasted_iota(jnp.int32, (2, 3, 4), 1),
    ),
}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8])
@pytest.mark.parametrize("name", FOLDED)
def test_what_is_known_is_what_jax_computes(name, dtype):
    info = np.iinfo(dtype)
    x = jnp.array([info.min, info.max, 0, 3, 7, info.max // 2], dtype)
    y = jnp.array([info.max, info.max, 5, 2, 0, 1], dtype)
    step = flat(lambda: FOLDED[name](x, y))
    for value, want in zip(step.outputs, FOLDED[name](x, y), strict=True):
        assert value.known is not None
        assert value.known.dtype == want.dtype
        np.testing.assert_array_equal(value.known, want)


def test_floats_are_never_folded():
    step = flat(lambda: jnp.float32(1) + jnp.float32(2) * jnp.arange(3, dtype=jnp.float32))
    assert "mul" in names(step)


def test_a_closed_over_array_is_hoisted_once_even_from_inside_a_nested_jit():
    table = jnp.arange(6.0)
    inner = jax.jit(lambda x: x + table)
    step = flat(lambda x: inner(x) * inner(x) + table, jnp.ones(6))
    assert len(step.consts) == 1
    np.testing.assert_array_equal(step.consts[0][1], table)


def test_effects_are_kept():
    def fun(x):
        jax.debug.print("{}", x)
        return x + 1

    step = flat(fun, jnp.ones(()))
    assert [bool(e.effects) for e in step.eqns] == [True, False]


def test_a_scan_with_effects_stays_a_loop():
    def body(c, _):
        jax.debug.print("{}", c)
        return c + 1, None

    step = flat(lambda c: lax.scan(body, c, length=3)[0], jnp.float32(0))
    assert names(step) == ["scan"]


def test_empty_pieces_of_a_concatenation_vanish():
    step = flat(lambda x, y: jnp.concatenate([x[:0], x, y[2:]]), jnp.ones(3), jnp.ones(2))
    assert step.outputs == [step.inputs[0]]
    step = flat(lambda x, y: jnp.concatenate([x, y[2:], y]), jnp.ones(3), jnp.ones(2))
    assert [v.aval.shape for v in step.eqns[-1].inputs] == [(3,), (2,)]
    step = flat(lambda x: jnp.concatenate([x, x]), jnp.ones((0, 2)))
    assert step.eqns[-1].primitive.name == "concatenate"


def test_partial_functions_flatten_too():
    step = flat(functools.partial(lambda x, n: x * n, n=3.0), jnp.ones(2))
    assert names(step) == ["mul"]
