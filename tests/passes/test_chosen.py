"""Products of matrices that an index chooses from a table read the table itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

BATCH, CHOSEN, EXPERTS, WIDTH, FFN = 2, 3, 5, 16, 24
STRICT = jaxgraph.Options(strict=True)


def array(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X = array(BATCH, WIDTH)
UP = array(EXPERTS, WIDTH, FFN, seed=1)
DOWN = array(EXPERTS, FFN, WIDTH, seed=2)
INDEX = jnp.array([[4, 0, 3], [2, 2, 1]])


def check(fun, *args, tolerance=2e-5, **ops):
    """Three calls equal those of jax.jit, and the one native split has these nodes."""
    step = jaxgraph.wrap(fun, options=STRICT)
    (split,) = step.explain(*args).splits
    assert split.backend == "native"
    assert split.ops == ops
    want = np.asarray(jax.jit(fun)(*args), np.float64)
    for _ in range(3):
        got = np.asarray(step(*args), np.float64)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.sqrt(WIDTH))
    return split


# Indices are wrapped by an EXPR where JAX lets negative ones count from the end.

SPELLINGS = {
    "einsum": lambda x, w, i: jnp.einsum("bd,bkdf->bkf", x, w[i]),
    "einsum, other order": lambda x, w, i: jnp.einsum("bkdf,bd->kfb", w[i], x),
    "matmul": lambda x, w, i: x[:, None, None, :] @ w[i],
    "per row": lambda x, w, i: jax.vmap(lambda x, i: jnp.einsum("d,kdf->kf", x, w[i]))(x, i),
    "per row and expert": lambda x, w, i: jax.vmap(lambda x, i: jax.vmap(lambda i: x @ w[i])(i))(
        x, i
    ),
    "flat index": lambda x, w, i: jnp.einsum(
        "bd,bkdf->bkf", x, w[i.reshape(-1)].reshape(BATCH, CHOSEN, WIDTH, FFN)
    ),
    "row by row": lambda x, w, i: jnp.stack(
        [jnp.einsum("bd,bdf->bf", x, w[i[:, k]]) for k in range(CHOSEN)]
    ),
    "turned table": lambda x, w, i: jnp.einsum("bd,bkfd->bkf", x, w.swapaxes(1, 2)[i]),
    "table along another axis": lambda x, w, i: jnp.einsum(
        "bd,dbkf->bkf", x, jnp.moveaxis(w, 0, 1)[:, i]
    ),
    "a part of each": lambda x, w, i: jnp.einsum("bd,bkdf->bkf", x, w[i][..., 8:16]),
    "rows of each": lambda x, w, i: jnp.einsum("bd,bkdf->bkf", x[:, :4], w[i][:, :, 4:8]),
    "clipped": lambda x, w, i: jnp.einsum(
        "bd,bkdf->bkf", x, w.at[i].get(mode="clip", wrap_negative_indices=False)
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    products = CHOSEN if name == "row by row" else 1
    step = jaxgraph.wrap(SPELLINGS[name], options=STRICT)
    (split,) = step.explain(X, UP, INDEX).splits
    ops = dict(split.ops)
    assert ops.pop("MATMUL") == products
    # The index made fit, the output turned: nothing gathers, and nothing as large as a matrix lies
    # in the arena.
    assert set(ops) <= {"EXPR", "COPY"} and sum(ops.values()) <= products + 1
    assert split.arena_bytes <= WIDTH * FFN * 4
    want = jax.jit(SPELLINGS[name])(X, UP, INDEX)
    for _ in range(3):
        np.testing.assert_allclose(step(X, UP, INDEX), want, rtol=2e-5, atol=1e-4)


def test_contracted_over_the_chosen():
    """One product for each, and their sum."""
    h = array(BATCH, CHOSEN, FFN, seed=3)
    fun = lambda h, w, i: jnp.einsum("bkf,bkfd->bd", h, w[i])  # noqa: E731
    split = check(fun, h, DOWN, INDEX, tolerance=1e-4, MATMUL=1, EXPR=1, ROW=1)
    assert split.arena_bytes < DOWN[0].nbytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_experts_of_wide_rows(dtype):
    fun = lambda x, w, i: jnp.einsum("bd,bkdf->bkf", x, w[i].astype(jnp.float32))  # noqa: E731
    check(fun, X, UP.astype(dtype), INDEX, MATMUL=1, EXPR=1)


def test_one_expert_chosen_by_a_scalar():
    check(lambda x, w, i: x @ w[i], X, UP, jnp.int32(3), MATMUL=1, EXPR=1)
    fun = lambda x, w, i: x @ lax.dynamic_index_in_dim(w, i, keepdims=False)  # noqa: E731
    check(fun, X, UP, jnp.uint8(2), MATMUL=1)


@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_top_k_routing(batch):
    """A layer of experts: the router, top_k and softmax, three products, and what is between."""

    def fun(x, router, up, gate, down):
        scores, chosen = lax.top_k(x @ router, 2)
        scores = jax.nn.softmax(scores, axis=-1)
        h = jax.nn.silu(jnp.einsum("bd,bkdf->bkf", x, gate[chosen]))
        h = h * jnp.einsum("bd,bkdf->bkf", x, up[chosen])
        return jnp.einsum("bkf,bkfd,bk->bd", h, down[chosen], scores)

    args = array(batch, WIDTH), array(WIDTH, EXPERTS, seed=4), UP, array(*UP.shape, seed=5), DOWN
    # EXPR: the indices, and silu(..) * .. * score; ROW: the softmax, the sum over the chosen.
    split = check(fun, *args, tolerance=1e-4, MATMUL=4, SORT=1, EXPR=2, ROW=2)
    small = sum(a.nbytes for a in args[:2])
    matrices = 2 * batch * 3 * UP[0].nbytes
    assert small + matrices <= split.bytes_read <= 2 * small + matrices


@pytest.mark.parametrize(("rows", "gathers"), [(8, 0), (9, 1)])
def test_many_rows_of_one_expert_gather_it(rows, gathers):
    step = jaxgraph.wrap(lambda x, w, i: x @ w[i], options=STRICT)
    args = array(rows, WIDTH), UP, jnp.int32(-2)
    (split,) = step.explain(*args).splits
    assert split.ops.get("GATHER", 0) == gathers and split.ops["MATMUL"] == 1
    for _ in range(3):
        np.testing.assert_allclose(step(*args), args[0] @ UP[3], rtol=2e-5, atol=1e-4)


OUTSIDE = jnp.array([[-1, 0, 5], [-6, 100, -100]])


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("wrap", [False, True])
def test_indices_outside(mode, wrap):
    def fun(x, w, i):
        rows = w.at[i].get(mode=mode, wrap_negative_indices=wrap)
        return jnp.einsum("bd,bkdf->bkf", x, rows)

    exprs = (mode == "fill") + wrap
    check(fun, X, UP, OUTSIDE, MATMUL=1, **{"EXPR": exprs} if exprs else {})
    assert np.isnan(jax.jit(fun)(X, UP, OUTSIDE)).any() == (mode == "fill")


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_narrow_indices_of_a_large_table(dtype):
    """An int8 never reaches beyond 200 rows, and every uint8 is at least zero."""
    table = array(200, 8, 8)
    at = jnp.array([[127, -1, 5, 199 - 256]], jnp.int8).astype(dtype)
    numbers = lax.GatherDimensionNumbers((2, 3), (0,), (0,))

    def fun(x, w, i):
        rows = lax.gather(w, i[..., None], numbers, (1, 8, 8), mode="fill", fill_value=jnp.nan)
        return jnp.einsum("bd,bkdf->bkf", x, rows)

    check(fun, array(1, 8), table, at, MATMUL=1, EXPR=1)


NEAR_MISSES = {
    "filled with zeros": lambda x, w, i: jnp.einsum(
        "bd,bkdf->bkf", x, w.at[i].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    ),
    "scaled": lambda x, w, i: jnp.einsum("bd,bkdf->bkf", x, w[i] * w[i].max((2, 3), keepdims=True)),
    "rows of matrices": lambda x, w, i: jnp.einsum(
        "bd,bkcd->bkc", x, w.reshape(EXPERTS * FFN, WIDTH)[i[..., None] * 2 + jnp.arange(2)]
    ),
    "two indices": lambda x, w, i: jnp.einsum("bd,bkdf->bkf", x, w[None][i * 0, i]),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_gathered_and_right(name):
    fun = NEAR_MISSES[name]
    step = jaxgraph.wrap(fun, options=STRICT)
    index = OUTSIDE if name == "filled with zeros" else INDEX
    (split,) = step.explain(X, UP, index).splits
    if name == "two indices":  # one of which has no choice
        assert "GATHER" not in split.ops
    else:
        assert split.ops["GATHER"] == 1
    for _ in range(3):
        np.testing.assert_allclose(
            step(X, UP, index), jax.jit(fun)(X, UP, index), rtol=2e-4, atol=2e-4
        )


def test_a_table_that_is_updated_is_read_before_or_behind_it():
    def fun(x, w, i, new):
        old = jnp.einsum("bd,bkdf->bkf", x, w[i])
        w = lax.dynamic_update_index_in_dim(w, new, 2, 0)
        return w, old, jnp.einsum("bd,bkdf->bkf", x, w[i])

    step = jaxgraph.wrap(fun, donate_argnums=1, options=STRICT)
    new = array(WIDTH, FFN, seed=9)
    for _ in range(3):
        want = jax.jit(fun)(X, UP, INDEX, new)
        got = step(X, jnp.array(UP), INDEX, new)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4)


def test_gathered_rows_that_are_also_results():
    fun = lambda x, w, i: (w[i], jnp.einsum("bd,bkdf->bkf", x, w[i]))  # noqa: E731
    step = jaxgraph.wrap(fun, options=STRICT)
    for _ in range(3):
        for got, want in zip(step(X, UP, INDEX), jax.jit(fun)(X, UP, INDEX), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)
