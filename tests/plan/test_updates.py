"""Updates that share an array: every result has its own update, and only that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

CACHE = jnp.arange(2 * 8 * 4, dtype=jnp.float32).reshape(2, 8, 4)
X, Y = -jnp.ones(4), -2 * jnp.ones(4)
FIRST, SECOND = jnp.int32(1), jnp.int32(5)
OPTIONS = jaxgraph.Options(strict=True)


def equal_jit(fun, *args, donate_argnums=()):
    step = jaxgraph.wrap(fun, donate_argnums=donate_argnums, options=OPTIONS)
    plain = jax.jit(fun)
    for _ in range(4):
        mine = [jnp.copy(a) for a in args]
        got, expected = step(*mine), plain(*args)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        for i, (before, after) in enumerate(zip(args, mine, strict=True)):
            if i not in (
                donate_argnums if isinstance(donate_argnums, tuple) else (donate_argnums,)
            ):
                np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_two_updates_of_one_old_array(donated):
    def fun(c, x, y, i, j):
        return c.at[0, i].set(x), c.at[0, j].set(y)

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=donated)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_two_stacks_of_updates_of_one_array(donated):
    def fun(c, x, y, i, j):
        def stack(row, at):
            layers = [lax.dynamic_update_slice(c[n], row[None], (at, 0)) for n in range(2)]
            return jnp.stack(layers)

        return stack(x, i), stack(y, j)

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=donated)


def test_two_scans_that_each_update_the_layers():
    def fun(c, x, y, i, j):
        def scan(row, at):
            return lax.scan(
                lambda s, c: (s, lax.dynamic_update_slice(c, row[None], (at, 0))), 0.0, c
            )[1]

        return scan(x, i), scan(y, j)

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=(0,))


def test_an_update_from_its_own_old_value():
    """The rows overlap the place they are written to: each must be read before it is written."""

    def fun(c, at):
        return lax.dynamic_update_slice(c, c[:, :6], (0, at, 0))

    equal_jit(fun, CACHE, jnp.int32(1), donate_argnums=(0,))
    equal_jit(fun, CACHE, jnp.int32(2), donate_argnums=(0,))


def test_an_update_of_what_a_later_kernel_also_computes_with():
    def fun(c, c2, x, i):
        b = jnp.where(c2 > c, c, c2)
        return b.at[0, i].set(x), b + c

    equal_jit(fun, CACHE, CACHE[::-1], X, FIRST)


def test_three_branches_and_a_reader():
    def fun(c, x, y, i, j):
        a = c.at[0, i].set(x)
        b = a.at[1, j].set(y)
        other = c.at[1, i].set(y)
        return b, other, a.sum(), c.sum()

    equal_jit(fun, CACHE, X, Y, FIRST, SECOND, donate_argnums=(0,))


def test_many_dimensions_stay_right():
    x = jnp.arange(2.0**7 * 3).reshape(2, 2, 2, 3, 2, 2, 2, 2)
    step = jaxgraph.wrap(lambda a: a.transpose(7, 6, 5, 4, 3, 2, 1, 0) * 2 + 1, options=OPTIONS)
    for _ in range(3):
        np.testing.assert_array_equal(step(x), x.T * 2 + 1)
    assert "dimensions larger than one" in str(step.explain(x))


@pytest.mark.parametrize("n", [100, 400, 1000])
def test_very_long_chains_are_cut(n):
    args = [jnp.full(3, float(i % 7)) for i in range(n)]
    step = jaxgraph.wrap(lambda *a: sum(a), options=OPTIONS)
    for _ in range(3):
        np.testing.assert_array_equal(step(*args), np.full(3, sum(i % 7 for i in range(n))))
    assert step.stats().replays == 1


# A cache [batch, layer, keys or values, position, width], and a row for each of its parts.
PAIRS = jnp.arange(2 * 3 * 2 * 5 * 4, dtype=jnp.float32).reshape(2, 3, 2, 5, 4)
ROWS = -jnp.arange(3 * 2 * 2 * 4, dtype=jnp.float32).reshape(3, 2, 2, 1, 4)


def updated(part, row, at):
    return lax.dynamic_update_slice(part, row, (0, at, 0))


def apart(c, rows, at):
    return [[updated(c[:, i, j], rows[i, j], at) for j in range(2)] for i in range(3)]


def together(parts):
    return jnp.stack([jnp.stack(pair, 1) for pair in parts], 1)


def all_parts(c, rows, at):
    return together(apart(c, rows, at))


def stacked_along_the_other_axis_first(c, rows, at):
    return jnp.stack([jnp.stack(of, 1) for of in zip(*apart(c, rows, at), strict=True)], 2)


def scattered(c, rows, at):
    rows = rows[:, :, :, 0]
    return together([[c[:, i, j].at[:, at].set(rows[i, j]) for j in range(2)] for i in range(3)])


def two_parts_stay(c, rows, at):
    (a, b), (d, e), _ = apart(c, rows, at)
    return together([(a, b), (d, e), (c[:, 2, 0], c[:, 2, 1])])


def a_layer_stays_as_it_is(c, rows, at):
    a, _, d = apart(c, rows, at)
    return jnp.stack([jnp.stack(a, 1), c[:, 1], jnp.stack(d, 1)], 1)


def keys_and_values_are_read_together(c, rows, at):
    parts = apart(c, rows, at)
    return together(parts), [k @ v.swapaxes(-1, -2) for k, v in parts]


def rows_come_from_the_layer_before(c, rows, at):
    pairs, row = [], rows[0]
    for i in range(3):
        pairs.append([updated(c[:, i, j], row[j], at) for j in range(2)])
        k, v = pairs[-1]
        row = row + k[:, :1] - v[:, 1:2]
    return together(pairs), row


def put_back(c, rows, at):
    for i in range(3):
        for j in range(2):
            c = c.at[:, i, j].set(updated(c[:, i, j], rows[i, j], at))
    return c


def put_back_by_index(c, rows, at):
    for i in range(3):
        layer = c[:, i].at[:, :, at].set(rows[i, :, :, 0].swapaxes(0, 1))
        c = lax.dynamic_update_index_in_dim(c, layer, i, 1)
    return c


def put_back_in_a_loop(c, rows, at):
    def body(i, carry):
        c, total = carry
        layer = c[:, i].at[:, :, at].set(rows[i, :, :, 0].swapaxes(0, 1))
        return c.at[:, i].set(layer), total + layer[:, 0] - layer[:, 1]

    return lax.fori_loop(0, 3, body, (c, jnp.zeros((2, 5, 4))))


def put_back_and_read_together(c, rows, at):
    out, row = [], rows[0]
    for i in range(3):
        k = updated(c[:, i, 0], row[0] + rows[i, 0], at)
        c = c.at[:, i, 0].set(k)
        v = updated(c[:, i, 1], row[1], at)
        c = c.at[:, i, 1].set(v)
        row = row + k[:, :1] - v[:, 1:2]
        out.append(k - v)
    return c, out


STACKS = [
    put_back,
    put_back_by_index,
    put_back_in_a_loop,
    put_back_and_read_together,
    all_parts,
    stacked_along_the_other_axis_first,
    scattered,
    two_parts_stay,
    a_layer_stays_as_it_is,
    keys_and_values_are_read_together,
    rows_come_from_the_layer_before,
]


def layers_change_places(c, rows, at):
    a, b, d = apart(c, rows, at)
    return together([a, d, b])


def keys_and_values_change_places(c, rows, at):
    return together([pair[::-1] for pair in apart(c, rows, at)])


def a_layer_is_there_twice(c, rows, at):
    a, b, _ = apart(c, rows, at)
    return together([a, b, b])


def another_order_of_axes(c, rows, at):
    return jnp.stack([jnp.stack(pair, 2) for pair in apart(c, rows, at)], 1).swapaxes(2, 3)[::-1]


def axes_change_places(c, rows, at):
    c = c[:, :2]
    return jnp.stack([jnp.stack(pair, 1) for pair in apart_two(c, rows, at)], 2)


def apart_two(c, rows, at):
    return [[updated(c[:, i, j], rows[i, j], at) for j in range(2)] for i in range(2)]


def layers_of_another_array(c, rows, at):
    a, b, _ = apart(c, rows, at)
    _, _, d = apart(c + 1, rows, at)
    return together([a, b, d])


def a_layer_updated_twice(c, rows, at):
    a, b, (k, v) = apart(c, rows, at)
    return together([a, b, (updated(k, rows[0, 0], at - 1), v)]), k


def fewer_layers(c, rows, at):
    return together(apart(c, rows, at)[:2])


def more_layers(c, rows, at):
    parts = apart(c, rows, at)
    return together([*parts, parts[0]])


def old_values_are_read_afterwards(c, rows, at):
    parts = apart(c, rows, at)
    return together(parts), parts[2][0] @ c[:, 0, 1].swapaxes(-1, -2)


def a_drop_along_a_dimension_of_one(c, rows, at):
    """`.at[at - 1]` of the only position there is hits it or nothing."""
    return jnp.stack([r.at[:, :, at - 1].set(c[0, 0, 0, 0], mode="drop") for r in rows])


def put_back_elsewhere(c, rows, at):
    for i in range(3):
        c = c.at[:, (i + 1) % 3].set(c[:, i].at[:, :, at].set(rows[i, :, :, 0].swapaxes(0, 1)))
    return c


def put_back_into_a_newer_version(c, rows, at):
    first = c.at[:, 0].set(c[:, 0].at[:, :, at].set(rows[0, 0, 0, 0]))
    return first.at[:, 0].set(c[:, 0].at[:, :, at - 1].set(rows[0, 0, 0, 0]))


def put_back_twice_from_one_version(c, rows, at):
    first = c.at[:, 0].set(c[:, 0].at[:, :, at].set(rows[0, 0, 0, 0]))
    second = c.at[:, 1].set(c[:, 1].at[:, :, at].set(rows[1, 0, 0, 0]))
    return first, second


def put_back_twice_and_read_before(c, rows, at):
    k = updated(c[:, 0, 0], rows[0, 0], at)
    c = c.at[:, 0, 0].set(k)
    again = updated(c[:, 0, 0], rows[1, 0], at)
    return c.at[:, 0, 0].set(again), k * 2, again * 3


def put_back_and_the_version_between_returned(c, rows, at):
    versions = [c]
    for i in range(2):
        c = c.at[:, i].set(c[:, i].at[:, :, at].set(rows[i, 0, 0, 0]))
        versions.append(c)
    return versions


def put_back_in_part(c, rows, at):
    layer = c[:, 1].at[:, :, at].set(rows[0, 0, 0, 0])
    return c.at[:, 1, :1].set(layer[:, :1])


def put_back_where_an_index_says(c, rows, at):
    return c.at[:, at % 3].set(c[:, 1].at[:, :, at].set(rows[0, 0, 0, 0]))


def put_back_and_stacked(c, rows, at):
    parts = apart(c, rows, at)
    return c.at[:, 1, 0].set(parts[1][0]), together(parts)


NO_STACKS = [
    put_back_elsewhere,
    put_back_into_a_newer_version,
    put_back_twice_from_one_version,
    put_back_twice_and_read_before,
    put_back_and_the_version_between_returned,
    put_back_in_part,
    put_back_where_an_index_says,
    put_back_and_stacked,
    layers_change_places,
    keys_and_values_change_places,
    a_layer_is_there_twice,
    another_order_of_axes,
    axes_change_places,
    layers_of_another_array,
    a_layer_updated_twice,
    fewer_layers,
    more_layers,
    old_values_are_read_afterwards,
    a_drop_along_a_dimension_of_one,
]


@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize("fun", STACKS + NO_STACKS, ids=lambda f: f.__name__)
def test_arrays_put_together_from_their_updated_parts(fun, donated):
    for at in (0, 1, 4, 7):
        equal_jit(fun, PAIRS, ROWS, jnp.int32(at), donate_argnums=donated)


@pytest.mark.parametrize("fun", STACKS, ids=lambda f: f.__name__)
def test_an_array_put_together_from_its_updated_parts_is_updated_where_it_lies(fun):
    step = jaxgraph.wrap(fun, donate_argnums=0, options=OPTIONS)
    explanation = step.explain(PAIRS, ROWS, jnp.int32(1))
    assert not explanation.copies, explanation
    assert "COPY" not in explanation.splits[0].ops


@pytest.mark.parametrize("donated", [(), (0,), (0, 1)])
def test_an_updated_part_is_the_rows_of_another_array_as_it_is(donated):
    """A scatter of which no dimension is inserted takes its rows without a view before them."""
    window = lax.ScatterDimensionNumbers((1,), (), (0,))

    def fun(a, b, at, where):
        rows = [lax.dynamic_update_slice(a[n], -a[n, :1], (at, 0)) for n in range(2)]
        others = [lax.scatter(b[n], where, rows[n], window) for n in range(2)]
        return jnp.stack(others), jnp.stack(rows)

    a = jnp.arange(1.0, 7).reshape(2, 3, 1)
    where = jnp.array([[0], [2], [3]])
    equal_jit(fun, a, CACHE[0, :2], FIRST, where, donate_argnums=donated)


def of_an_argument(c):
    return c.T


def of_a_value(c):
    return (c * 2).T


def with_a_row_of_its_own(c):
    return c.T.at[0].set(-1.0)


def turned_twice(c):
    return c.reshape(4, 3, 2).transpose(2, 1, 0).transpose(0, 2, 1).reshape(2, 12)


@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize(
    "turned",
    [of_an_argument, of_a_value, with_a_row_of_its_own, turned_twice],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("returned", [True, False])
def test_a_turned_array_is_updated_and_also_read_where_it_has_to_be_copied(
    turned, returned, donated
):
    """The copy is what is updated then, and another update of it lies like the copy, too."""

    def fun(c, i):
        old = turned(c)
        new = old.at[i].set(0.0)
        newer = new.at[i - 1].add(1.0)
        flat = jnp.sin(old.reshape(3, 8))
        return (new, newer, flat) if returned else (new.sum(), newer * 2, flat)

    c = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    equal_jit(fun, c, FIRST, donate_argnums=donated)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_an_updated_turned_array_is_seen_in_a_shape_that_only_a_copy_has(donated):
    """Such an update lies row-major, as no strides show it so where its array lies."""

    def fun(c, i):
        new = c.T.at[i].set(-1.0).at[i + 1].add(c[:, 0])
        return new, new.reshape(3, 8), new.reshape(3, 8) @ jnp.ones((8, 2))

    c = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    equal_jit(fun, c, FIRST, donate_argnums=donated)
    equal_jit(lambda c, i: fun(c, i)[1], c, FIRST, donate_argnums=donated)
