"""Complex numbers whose parts are all that is read: computed as pairs of real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

X = jax.random.normal(jax.random.key(0), (3, 4, 8))
Y = jax.random.normal(jax.random.key(1), (3, 4, 8))
POSITION = jnp.array([5, 0, 2])
ANGLES = np.outer(np.arange(7), 10.0 ** -np.arange(4)).astype(np.float32)
TABLE = jnp.asarray(np.exp(1j * ANGLES), jnp.complex64)


def pairs(x):
    x = x.reshape(*x.shape[:-1], -1, 2)
    return lax.complex(x[..., 0], x[..., 1])


def flat(z):
    return jnp.stack((jnp.real(z), jnp.imag(z)), axis=-1).reshape(*z.shape[:-1], -1)


def turned(x, turn):
    return flat(pairs(x) * turn[:, None])


def by_an_exponential(x, y, at):
    turn = jnp.exp(1j * (at[:, None] * jnp.asarray(ANGLES[1])))
    return turned(x, turn), turned(y, turn)


def by_cosine_and_sine(x, y, at):
    angles = at[:, None] * jnp.asarray(ANGLES[1])
    return turned(x, lax.complex(jnp.cos(angles), -jnp.sin(angles)))


def sums_and_differences(x, y, at):
    a, b = pairs(x), pairs(y)
    return flat(a + b - 2 * a), flat(-a), jnp.conj(a).imag, (a * b).real


def real_beside_complex(x, y, at):
    return flat(pairs(x) * y[..., :4]), flat(jnp.where(y[..., :4] > 0, pairs(x), 0.5))


def moved(x, y, at):
    a, b = pairs(x), pairs(y)
    both = jnp.concatenate([a, b], axis=1).transpose(1, 0, 2)[::-1, 1:]
    return flat(both), flat(jnp.split(a, 2, axis=2)[1]), flat(a[:, at]), flat(jnp.take(b, at, 1))


def out_of_bounds(x, y, at):
    rows = [pairs(x).at[at - 1].get(mode=mode) for mode in ("fill", "clip")]
    rows.append(pairs(y).at[at].get(mode="fill", fill_value=2 - 3j))
    return [flat(z) for z in rows]


def in_a_scan(x, y, at):
    turn = jnp.exp(1j * (at[:, None] * jnp.asarray(ANGLES[1])))[:, None]
    last, all_of_them = lax.scan(lambda z, x: (z * turn, (z * pairs(x)).real), pairs(x), y[:, None])
    return flat(last), all_of_them


NATIVE = [
    by_an_exponential,
    by_cosine_and_sine,
    sums_and_differences,
    real_beside_complex,
    moved,
    out_of_bounds,
    in_a_scan,
]


def equal_jit(fun, *args):
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    expected = jax.tree.leaves(jax.jit(fun)(*args))
    explanation = step.explain(*args)
    for _ in range(3):
        for got, want in zip(jax.tree.leaves(step(*args)), expected, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return explanation


@pytest.mark.parametrize("fun", NATIVE, ids=lambda f: f.__name__)
def test_what_only_the_parts_are_read_of_is_one_native_split(fun):
    explanation = equal_jit(fun, X, Y, POSITION)
    assert [s.backend for s in explanation.splits] == ["native"], explanation


@pytest.mark.parametrize("closed_over", [True, False])
def test_a_complex_table_is_taken_apart_in_front(closed_over):
    """An argument of kernels it cannot be; what follows is one split, however many layers."""

    def layers(x, y, at, table):
        for _ in range(5):
            turn = jnp.take(table, at, axis=0)
            x, y = turned(x, turn) @ jnp.ones((8, 8)), turned(y, turn) + x
        return x, y

    def closes_over(x, y, at):
        return layers(x, y, at, TABLE)

    args = (X, Y, POSITION)
    explanation = equal_jit(closes_over, *args) if closed_over else equal_jit(layers, *args, TABLE)
    assert [s.backend for s in explanation.splits] == ["xla", "native"], explanation
    assert {e.primitive for e in explanation.left_in_xla} == {"real", "imag"}


def sizes(x, y, at):
    return jnp.abs(pairs(x) * pairs(y)), jnp.angle(pairs(x) + 1)


def quotients(x, y, at):
    return flat(pairs(x) / pairs(y)), flat(pairs(x) ** 2)


def products_of_matrices(x, y, at):
    return flat(jnp.einsum("abc,adc->abd", pairs(x), pairs(y))), flat(pairs(x).sum(0))


def complex_results(x, y, at):
    z = pairs(x) * pairs(y)
    return z, z.real, jnp.fft.fft(z).imag


def complex_conditions(x, y, at):
    a, b = pairs(x), pairs(y)
    return a == b, flat(lax.cond(at[0] > 3, lambda: a, lambda: b * 1j))


@pytest.mark.parametrize(
    "fun",
    [sizes, quotients, products_of_matrices, complex_results, complex_conditions],
    ids=lambda f: f.__name__,
)
def test_what_has_no_rule_stays_in_xla_and_is_right(fun):
    explanation = equal_jit(fun, X, Y, POSITION)
    assert any("handles complex64" in e.reason for e in explanation.left_in_xla)


SPECIAL = [0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 80.0, 90.0, -200.0, 1e-40]


@pytest.mark.parametrize(
    "fun", [jnp.exp, jnp.negative, jnp.conj, lambda z: z - z.T, lambda z: z + 2.0]
)
def test_special_values(fun):
    real, imaginary = map(jnp.asarray, np.meshgrid(*[np.float32(SPECIAL)] * 2))

    def parts(real, imaginary):
        z = fun(lax.complex(real, imaginary))
        return jnp.real(z), jnp.imag(z)

    step = jaxgraph.wrap(parts, options=jaxgraph.Options(strict=True))
    assert [s.backend for s in step.explain(real, imaginary).splits] == ["native"]
    expected = jax.jit(parts)(real, imaginary)
    for a, b in zip(step(real, imaginary), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-37)


def test_wide_and_narrow_complex_numbers():
    with jax.enable_x64(True):
        x, y = (jnp.asarray(t, jnp.float64) for t in (X, Y))

        def fun(x, y):
            z = (pairs(x) * (2 - 1j)).astype(jnp.complex64)
            return flat(z), flat(pairs(y) * z.astype(jnp.complex128) * jnp.conj(y[..., :4]))

        explanation = equal_jit(fun, x, y)
        assert [s.backend for s in explanation.splits] == ["native"], explanation


def test_gradients_and_maps_are_those_of_the_function():
    def loss(x):
        return by_cosine_and_sine(x, Y, POSITION).sum()

    step = jaxgraph.wrap(loss)
    np.testing.assert_allclose(jax.grad(step)(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-6)
    mapped = jax.vmap(step)(jnp.stack([X, Y]))
    np.testing.assert_allclose(mapped, jax.vmap(loss)(jnp.stack([X, Y])), rtol=1e-5)
