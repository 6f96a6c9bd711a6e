"""Rows in order of their groups, each times the matrix of its group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

ROWS, GROUPS, K, N = 5, 6, 16, 24
SIZES = [[0, 2, 0, 2, 1, 0], [5, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 5], [1, 1, 1, 1, 1, 0]]
SHORT = [[0, 2, 0, 1, 0, 0], [0] * 6]  # rows of no group
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def operands(dtype=jnp.float32, rows=ROWS, groups=GROUPS):
    x = jax.random.normal(jax.random.key(0), (rows, K), dtype)
    return x, jax.random.normal(jax.random.key(1), (groups, K, N), dtype)


def one_by_one(x, table, sizes):
    """In f32, of no group: zero."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    product = np.zeros((x.shape[0], table.shape[2]), np.float32)
    for row, group in enumerate(groups):
        product[row] = np.asarray(x[row], np.float32) @ np.asarray(table[group], np.float32)
    return product


def wrapped(fun):
    return jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))


def with_columns_first(x, table, sizes):
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    return lax.ragged_dot_general(x, table.swapaxes(1, 2), sizes, dims)


def with_two_matrices_in_one(x, table, sizes):
    halves = table.reshape(GROUPS, K, 2, N // 2).transpose(0, 2, 1, 3)  # [group, half, k, n]
    return lax.ragged_dot(x, halves.transpose(0, 2, 1, 3).reshape(GROUPS, K, N), sizes)


SPELLINGS = [lax.ragged_dot, with_columns_first, with_two_matrices_in_one]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fun", SPELLINGS, ids=lambda f: f.__name__)
def test_each_row_has_the_matrix_of_its_group(fun, dtype):
    x, table = operands(dtype)
    step = wrapped(fun)
    assert [s.backend for s in step.explain(x, table, jnp.array(SIZES[0])).splits] == ["native"]
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for sizes in SIZES + SHORT:
        got = step(x, table, jnp.array(sizes))
        assert got.dtype == dtype
        expected = one_by_one(x, table, sizes)
        np.testing.assert_allclose(
            got.astype(jnp.float32), expected, rtol=tolerance, atol=tolerance
        )


def test_no_matrix_is_read_that_no_row_asks_for():
    x, table = operands()
    (split,) = wrapped(lax.ragged_dot).explain(x, table, jnp.array(SIZES[0])).splits
    assert split.ops["MATMUL"] == 1
    assert "GATHER" not in split.ops
    read = ROWS * K * N * 4
    assert read < split.bytes_read < read + 2000


def test_more_sizes_than_rows_and_one_group_alone():
    x, table = operands(rows=1, groups=1)
    for sizes in ([1], [0], [7]):
        got = wrapped(lax.ragged_dot)(x, table, jnp.array(sizes))
        expected = one_by_one(x, table, [min(sizes[0], 1)])
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    x, table = operands()
    sizes = [2, 9, 1, 0, 0, 0]
    expected = one_by_one(x, table, [2, 3, 0, 0, 0, 0])
    np.testing.assert_allclose(
        wrapped(lax.ragged_dot)(x, table, jnp.array(sizes)), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_sizes_of_any_integer(dtype):
    x, table = operands()
    got = wrapped(lax.ragged_dot)(x, table, jnp.array(SIZES[0], dtype))
    np.testing.assert_allclose(got, one_by_one(x, table, SIZES[0]), rtol=1e-5, atol=1e-5)


def more_rows_than_groups():
    x, table = operands(rows=GROUPS + 1)
    return (
        lax.ragged_dot,
        (x, table, jnp.array([2, 0, 3, 0, 0, 2])),
        "7 rows by 6 matrices",
    )


def integers():
    x, table = (t.astype(jnp.int8) for t in operands())
    fun = lambda *a: lax.ragged_dot(*a, preferred_element_type=jnp.int32)  # noqa: E731
    return fun, (x, table, jnp.array(SIZES[0])), "multiplies int8 by int8 in groups"


def groups_of_terms():
    """The contracted dimension is ragged: a product for each group, of its terms."""
    x, y = operands()[0].T, jax.random.normal(jax.random.key(2), (ROWS, N))
    dims = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
    fun = lambda *a: lax.ragged_dot_general(*a, dims)  # noqa: E731
    return fun, (x, y, jnp.array(SIZES[0])), "is no product of rows by a matrix for each group"


@pytest.mark.parametrize("case", [more_rows_than_groups, integers, groups_of_terms])
def test_others_stay_in_xla_and_are_right(case):
    fun, args, reason = case()
    step = wrapped(fun)
    explanation = step.explain(*args)
    assert [s.backend for s in explanation.splits] == ["xla"]
    assert reason in str(explanation)
    np.testing.assert_allclose(step(*args), jax.jit(fun)(*args), rtol=1e-5, atol=1e-5)
