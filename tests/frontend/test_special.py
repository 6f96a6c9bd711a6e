"""Gamma and Bessel functions, and total orders, against XLA's; exclusive or of a row."""

import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

STRICT = jaxgraph.Options(strict=True)
FLOATS = [jnp.float64] if jax.config.jax_enable_x64 else [jnp.float32, jnp.bfloat16, jnp.float16]
FUNCTIONS = ["lgamma", "digamma", "bessel_i0e", "bessel_i1e"]


def arguments(dtype):
    rng = np.random.default_rng(0)
    powers = 10.0 ** np.arange(-4, 5)
    values = np.concatenate([np.linspace(-20, 20, 801), rng.standard_normal(200), powers, -powers])
    edges = [np.inf, -np.inf, np.nan, 0.0, -0.0, 8.0, -8.0, 7.9999, 8.0001, 0.5, 0.4999]
    return jnp.asarray(np.concatenate([values, edges]).astype(dtype))


def native(fun, *args):
    step = jaxgraph.wrap(fun, options=STRICT)
    explanation = step.explain(*args)
    assert [s.backend for s in explanation.splits] == ["native"], explanation
    return [np.asarray(step(*args), np.float64) for _ in range(3)][-1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_series(name, dtype):
    fun = getattr(lax, name)
    x = arguments(dtype)
    got, want = native(fun, x), np.asarray(jax.jit(fun)(x), np.float64)
    if name == "digamma":  # a pole of both signs, which is -inf or NaN in versions of XLA
        got, want = (np.where(np.asarray(x) == 0, 0, values) for values in (got, want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    at = np.array(x, np.float64)
    at[~np.isfinite(at)] = 0
    # Near a root or a pole what is left of the argument's digits decides.
    eps = float(jnp.finfo(dtype).eps)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= 64 * eps * (1 + np.abs(at) + np.abs(want))
    same = (got == want) | np.isnan(want)
    pole = (at < 0) & (np.abs(at - np.round(at)) < 1e-2)
    far = ~(near | same | pole)
    assert not far.any(), (at[far], got[far], want[far])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_known_values(name):
    """Not against XLA, but against what the functions are."""
    known = {
        "lgamma": [(1.0, 0.0), (5.0, np.log(24.0)), (0.5, np.log(np.pi) / 2)],
        "digamma": [(1.0, -0.5772156649), (2.0, 0.4227843351), (0.5, -1.9635100260)],
        "bessel_i0e": [(0.0, 1.0), (1.0, 0.4657596077), (20.0, 0.0897803118)],
        "bessel_i1e": [(0.0, 0.0), (1.0, 0.2079104154), (-20.0, -0.0875062222)],
    }[name]
    x, want = (jnp.asarray(np.array(column, np.float32)) for column in zip(*known, strict=True))
    np.testing.assert_allclose(native(getattr(lax, name), x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.int8, jnp.uint8])
@pytest.mark.parametrize("name", ["eq_to", "lt_to", "le_to"])
def test_total_orders(name, dtype):
    numbers = [0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, -np.nan, 1e-3]
    if not jnp.issubdtype(dtype, jnp.floating):
        numbers = [0, 1, 2, 127, 128, 255]
    line = jnp.asarray(np.array(numbers).astype(dtype))
    x, y = (jnp.ravel(v) for v in jnp.meshgrid(line, line))
    fun = getattr(primitives, f"{name}_p").bind
    np.testing.assert_array_equal(native(fun, x, y), jax.jit(fun)(x, y))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int8, jnp.uint32, jnp.bool_])
@pytest.mark.parametrize("n", [1, 3, 700, 5000])
def test_exclusive_or_of_a_row(dtype, n):
    x = np.random.default_rng(n).integers(0, 1 << 31, (2, n, 3)).astype(dtype)
    fun = lambda x: lax.reduce_xor(x, axes=(1,))  # noqa: E731
    np.testing.assert_array_equal(native(fun, jnp.asarray(x)), np.bitwise_xor.reduce(x, axis=1))
