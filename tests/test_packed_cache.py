"""A packed cache: it comes back in its own buffer, and says what the tree would have said."""

import dataclasses
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from llama import Config, decode_logits, decode_step, empty_cache, random_params

import jaxgraph
from jaxgraph import Options, Packed

STRICT = Options(strict=True, min_equations=0)
CONFIG = Config(3, 64, 4, 2, 16, 128, 256)
CONTEXT = 24


def wrapped(fun, donate=(0,), **options):
    return jaxgraph.wrap(fun, donate_argnums=donate, options=dataclasses.replace(STRICT, **options))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(jnp.asarray(x)), np.asarray(jnp.asarray(y))
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))


def tree_of(value):
    """A result with the packed trees in it unpacked."""

    def packed(x):
        return isinstance(x, Packed)

    return jax.tree.map(lambda x: x.unpack() if packed(x) else x, value, is_leaf=packed)


def address(packed):
    return packed.buffer.unsafe_buffer_pointer()


def equals_plain(fun, cache, *args, calls=4, copies=0, **options):
    """Feeds a packed cache through a step that returns (cache, ...), against plain JAX."""
    step, plain = wrapped(fun, **options), jax.jit(fun)
    packed, tree = step.pack(cache), cache
    before = address(packed)
    for _ in range(calls):
        packed, *more = step(packed, *args)
        tree, *more_plain = plain(tree, *args)
        assert isinstance(packed, Packed)
        assert address(packed) == before
        same(tree_of(packed), tree)
        same(tree_of(more), more_plain)
    found = step.explain().copies
    assert len(found) == copies, [str(copy) for copy in found]
    return step


# A decode step.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_decode_step_gives_the_same_bits_and_replays_in_one_buffer(dtype, stacked):
    params = random_params(CONFIG, dtype, jax.random.key(0), stacked=stacked)
    logits = partial(decode_logits, config=CONFIG)
    trees = wrapped(logits, donate=(1,))
    step = wrapped(logits, donate=(1,))
    cache = empty_cache(CONFIG, 1, CONTEXT, dtype, stacked=stacked)
    packed, packed_params = step.pack(cache, argnum=1), step.pack(params)
    before, calls = address(packed), CONTEXT - 1
    # The larger arena of the two, from the start: growing moves it on the host.
    trees.reserve(params, cache, jnp.ones(1, jnp.int32), jnp.int32(0))
    for position in range(calls):
        token, position = jnp.full(1, 7 * position % CONFIG.vocab), jnp.int32(position)
        old = packed
        scores, packed = step(packed_params, packed, token, position)
        expected, cache = trees(params, cache, token, position)
        np.testing.assert_array_equal(scores, expected)
        assert old.buffer.is_deleted()
        assert address(packed) == before
    same(packed.unpack(), cache)

    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, calls - 2)
    assert (stats.uid_hits, stats.property_compares) == (calls - 1, 0)
    assert (stats.calls, stats.signatures) == (calls, 1)
    (mine,), (theirs,) = step.explain().splits, trees.explain().splits
    assert mine.ops == theirs.ops
    assert mine.arena_bytes == theirs.arena_bytes
    assert mine.bytes_read == theirs.bytes_read
    assert len(mine.bases) == 2 + 2 + 2
    assert not step.explain().copies


def test_tokens_of_generation_inside_a_scan():
    params = random_params(CONFIG, "float32", jax.random.key(1))
    fun = partial(decode_step, config=CONFIG)
    step = wrapped(fun, donate=(1,))

    def generate(fun, params, cache):
        def body(state, _):
            token, position, cache = fun(params, state[2], state[0], state[1])
            return (token, position, cache), token

        first = (jnp.ones(1, jnp.int32), jnp.int32(0), cache)
        (_, _, cache), tokens = lax.scan(body, first, length=CONTEXT)
        return tokens, cache

    jitted = jax.jit(partial(generate, step), donate_argnums=1)
    cache = empty_cache(CONFIG, 1, CONTEXT, "float32")
    packed = step.pack(cache, argnum=1)
    before = address(packed)
    tokens, packed = jitted(step.pack(params), packed)
    expected, tree = jax.jit(partial(generate, fun))(params, cache)
    np.testing.assert_array_equal(tokens, expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), packed.unpack(), tree)
    assert address(packed) == before
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, CONTEXT - 2)
    assert (stats.uid_hits, stats.patches) == (CONTEXT - 1, 0)


# Leaves of all kinds, and everything that may become of one.

MIXED = {
    "k": jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 6),
    "v": jnp.arange(24, dtype=jnp.float32).reshape(4, 6),
    "half": jnp.ones((4, 3), jnp.float16),
    "length": jnp.int32(3),
    "seen": jnp.array([True, False, False, True]),
    "quantized": jnp.arange(-8, 8, dtype=jnp.int8).reshape(4, 4),
    "eighth": np.array([0.5, -2.0, 1.0], dtype=ml_dtypes.float8_e4m3fn),
    "empty": jnp.zeros((0, 3)),
    "nothing": None,
    "scale": 0.5,
}


def test_leaves_of_many_types():
    def fun(c, x, at):
        def row(name):
            new = jnp.broadcast_to(x, c[name].shape[1:]).astype(c[name].dtype)
            return c[name].at[at].set(new)

        new = {name: row(name) for name in ("k", "v", "half", "quantized")}
        new["length"] = c["length"] + 1
        new["seen"] = c["seen"].at[at].set(x > 0)
        same = {name: c[name] for name in ("eighth", "empty", "nothing", "scale")}
        return new | same, (c["k"].astype(jnp.float32) @ c["v"].T) * c["scale"]

    equals_plain(fun, MIXED, jnp.float32(2.5), jnp.int32(2), copies=1)  # old "k" and "v" are read


A = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
ROW, AT = -jnp.ones((1, 3)), jnp.int32(2)


def put(x, row, at):
    return lax.dynamic_update_slice(x, row, (at, 0))


def pair():
    return {"a": A, "b": A + 100}


def test_a_leaf_that_stays():
    step = equals_plain(lambda c, r, i: ({"a": c["a"], "b": put(c["b"], r, i)}, i), pair(), ROW, AT)
    assert step.explain().splits[0].ops["SET_ROWS"] == 1
    assert "COPY" not in step.explain().splits[0].ops


def test_all_leaves_stay():
    equals_plain(lambda c, r, i: (c, c["a"] @ r[0] + c["b"][0, 0]), pair(), ROW, AT)


def test_leaves_that_trade_places():
    def fun(c, r, i):
        return {"a": put(c["b"], r, i), "b": c["a"]}, i

    equals_plain(fun, pair(), ROW, AT, copies=3)


def test_a_leaf_that_is_replaced():
    equals_plain(lambda c, r, i: ({"a": c["a"] * 2 + r, "b": c["b"]}, i), pair(), ROW, AT, copies=1)


def test_a_leaf_that_is_replaced_unread_is_made_in_its_place():
    def fun(c, r, i):
        return {"a": jnp.broadcast_to(r * i, (4, 3)) + 1, "b": put(c["b"], r, i)}, i

    step = equals_plain(fun, pair(), ROW, AT)
    assert "COPY" not in step.explain().splits[0].ops


def test_a_leaf_that_is_shifted_or_turned_in_its_own_place():
    def fun(c, r, i):
        return {"a": jnp.concatenate([c["a"][1:], r]), "b": c["b"][::-1]}, i

    equals_plain(fun, pair(), ROW, AT, copies=2)


def test_two_leaves_that_become_one():
    def fun(c, r, i):
        new = put(c["a"], r, i)
        return {"a": new, "b": new}, new.sum()

    equals_plain(fun, pair(), ROW, AT, copies=1)


def test_old_and_new_leaves_that_are_results_too():
    def fun(c, r, i):
        new = {"a": put(c["a"], r, i), "b": put(c["b"], r, i)}
        return new, c["a"], new["b"], c["b"][1:]

    equals_plain(fun, pair(), ROW, AT, copies=4)


def test_a_cache_that_is_returned_twice_is_packed_once():
    step = wrapped(lambda c, r, i: (c := {"a": put(c["a"], r, i), "b": c["b"]}, c))
    first, second = step(step.pack(pair()), ROW, AT)
    assert isinstance(first, Packed) and isinstance(second, dict)
    same(first.unpack(), second)


def test_a_single_array_and_one_object_that_is_returned_twice():
    def fun(c, r, i):
        c = put(c, r, i)
        return c, c

    step = wrapped(fun)
    first, second = step(step.pack(A), ROW, AT)
    assert isinstance(first, Packed) and isinstance(second, jax.Array)
    same(first.unpack(), second)


def test_arguments_and_constants_that_become_leaves():
    def fun(c, r, i):
        return {"a": jnp.full((4, 3), 7.0), "b": r}, c["a"] + c["b"][0]

    equals_plain(fun, {"a": A, "b": A[:1]}, ROW, AT, copies=2)


def test_two_caches_of_one_structure_each_find_their_own():
    def fun(draft, target, r, i):
        return {"t": [put(draft["a"], r, i)], "d": put(target["a"], r, i)}, i

    def swap(draft, target, r, i):
        new = {"a": put(draft["a"], r, i)}, {"a": put(target["a"], 2 * r, i)}
        return (*new, i)

    step = wrapped(swap, donate=(0, 1))
    one, two = step.pack({"a": A}), step.pack({"a": -A}, argnum=1)
    places = address(one), address(two)
    for _ in range(3):
        one, two, _ = step(one, two, ROW, AT)
    assert (address(one), address(two)) == places
    same(one.unpack(), {"a": put(A, ROW, AT)})
    same(two.unpack(), {"a": put(-A, 2 * ROW, AT)})

    # No part of the result has their structure: they are trees, or arrays, like any other.
    step = wrapped(fun, donate=(0, 1))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        out, _ = step(step.pack({"a": A}), step.pack({"a": -A}, argnum=1), ROW, AT)
    same(out, {"t": [put(A, ROW, AT)], "d": put(-A, ROW, AT)})


@pytest.mark.parametrize("change", ["dtype", "shape", "scalar", "structure"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_what_does_not_fit_comes_back_as_a_tree(change):
    def fun(c):
        a, s = c["a"], c["s"]
        if change == "dtype":
            a = a.astype(jnp.bfloat16)
        if change == "shape":
            a = a[1:]
        if change == "scalar":
            s = s + 1
        return {"a": a, "s": s} if change != "structure" else {"a": a, "t": s}

    cache = {"a": A, "s": 2}
    step = wrapped(fun)
    out = step(step.pack(cache))
    assert isinstance(out, dict)
    same(jax.tree.map(jnp.asarray, out), jax.tree.map(jnp.asarray, fun(cache)))


def test_what_is_not_donated_stays_and_comes_back_as_a_tree():
    step = wrapped(lambda c, r, i: {"a": put(c["a"], r, i), "b": c["b"]}, donate=())
    packed = step.pack(pair())
    for _ in range(3):
        out = step(packed, ROW, AT)
        assert isinstance(out, dict)
        same(out, {"a": put(A, ROW, AT), "b": A + 100})
    same(packed.unpack(), pair())


def random_step(seed):
    """A function of a cache in which anything becomes of its leaves, and a cache."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    kinds = random.integers(0, 8, count)
    sources = random.integers(0, count, (count, 2))
    extra = random.integers(0, 4, 3)
    which = random.integers(0, count, 3)

    def fun(cache, row, at):
        new = []
        for n in range(count):
            x, y = cache[sources[n, 0]], cache[sources[n, 1]]
            new.append(
                [
                    cache[n],
                    x,
                    put(cache[n], row, at),
                    put(x, row, at),
                    x + y,
                    put(put(cache[n], row, at), y[:1], at - 1),
                    x[::-1],
                    jnp.broadcast_to(row, x.shape) * 2,
                ][kinds[n]]
            )
        more = [
            (new[w], cache[w], new[w] @ cache[w].T, cache[w][at])[e]
            for e, w in zip(extra, which, strict=True)
        ]
        return new, *more

    return fun, [A + 20.0 * n for n in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_anything_becomes_of_leaves(seed):
    fun, cache = random_step(seed)
    step, plain = wrapped(fun), jax.jit(fun)
    packed, tree = step.pack(cache), cache
    for call in range(3):
        packed, *more = step(packed, ROW, jnp.int32(call + 1))
        tree, *expected = plain(tree, ROW, jnp.int32(call + 1))
        same(packed.unpack(), tree)
        for x, y in zip(more, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)
        tree = jax.tree.map(lambda x: x % 1000, tree)  # sums of sums grow without end
        packed = step.pack(tree)


# Steps in several pieces.


@pytest.mark.parametrize("size", [4, 1100])
def test_a_callback_between_layers_leaves_every_update_in_place(size):
    def fun(c, r, i):
        k = put(c["k"][0], r, i)
        x = jax.pure_callback(lambda x: x * 2, jax.ShapeDtypeStruct((size,), k.dtype), k.sum(1))
        v = put(c["v"], r * x[0], i)
        return {"k": [k], "v": v}, v.sum(0) + k.sum(0)

    cache = {"k": [jnp.ones((size, 3))], "v": jnp.zeros((size, 3))}
    step = equals_plain(fun, cache, ROW, AT)
    assert [s.backend for s in step.explain().splits] == ["native", "callback", "native"]


def test_leaves_that_xla_reads_and_makes():
    def fun(c, r, i):
        k = put(c["k"], r, i)
        order = jnp.fft.fft(c["order"]).real
        return {"k": k, "order": order, "v": c["v"]}, jnp.fft.rfft(k[:, 0]).real

    cache = {"k": A, "order": jnp.arange(1.0, 5), "v": A}
    step = equals_plain(fun, cache, ROW, AT, copies=2)
    texts = [str(copy) for copy in step.explain().copies]
    assert any("XLA reads c['order'] out of a packed tree" in text for text in texts), texts


def test_an_old_leaf_that_is_read_after_another_split_has_its_update():
    """The update must not be made in place: XLA, and a later native split, read the old value."""

    def fun(c, r, i):
        new = put(c["a"], r, i)
        x = jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((3,), A.dtype), new.sum(0))
        return {"a": new, "b": put(c["b"], r, i)}, c["a"] @ x, jnp.fft.rfft(c["a"][:, 0]).real

    equals_plain(fun, pair(), ROW, AT, copies=3)


# Transformations.


def update(c, r, i):
    new = put(c["a"], r, i)
    return {"a": new, "b": c["b"] + 1}, (new @ r[0]).sum()


def test_another_wrapped_function_around_it():
    inner = wrapped(update)

    def outer(c, r, i):
        c, x = inner(c, r, i)
        c, y = inner(c, r * 2, i - 1)
        return c, x + y

    def plain(c, r, i):
        c, x = update(c, r, i)
        c, y = update(c, r * 2, i - 1)
        return c, x + y

    step = wrapped(outer)
    packed, tree = step.pack(pair()), pair()
    before = address(packed)
    for _ in range(3):
        packed, x = step(packed, ROW, AT)
        tree, y = plain(tree, ROW, AT)
        same((packed.unpack(), x), (tree, y))
    assert address(packed) == before
    assert [s.backend for s in step.explain().splits] == ["native"]


def test_calls_in_a_row_inside_one_jit():
    step = wrapped(update)

    @partial(jax.jit, donate_argnums=0)
    def twice(c, r, i):
        c, _ = step(c, r, i)
        kept = c
        c, x = step(c, r * 2, i - 1)
        return c, kept, x

    packed, kept, x = twice(step.pack(pair()), ROW, AT)
    first, _ = update(pair(), ROW, AT)
    second, expected = update(first, ROW * 2, AT - 1)
    same(kept.unpack(), first)  # although the second call updates "in place"
    same((packed.unpack(), x), (second, expected))


def test_loops_and_branches():
    step = wrapped(update)

    def body(state):
        n, c = state
        return n + 1, lax.cond(n % 2 == 0, lambda c: step(c, ROW, n)[0], lambda c: c, c)

    _, packed = lax.while_loop(lambda s: s[0] < 4, body, (jnp.int32(0), step.pack(pair())))
    tree = update(update(pair(), ROW, 0)[0], ROW, 2)[0]
    same(packed.unpack(), tree)

    def loop(c):
        return lax.fori_loop(0, 70, lambda n, c: update(c, ROW, n % 4)[0], c)

    around = wrapped(loop, max_unroll=8)  # the loop's carry is the tree
    same(around(around.pack(pair())).unpack(), jax.jit(loop)(pair()))


def test_a_loop_over_packed_carries_inside_a_wrapped_function():
    inner = wrapped(update)

    def loop(c):
        def body(c, n):
            c, x = inner(c, ROW, n % 4)
            return c, x

        return lax.scan(body, c, jnp.arange(6))

    packed, xs = jax.jit(loop)(inner.pack(pair()))
    tree, expected = lax.scan(lambda c, n: update(c, ROW, n % 4), pair(), jnp.arange(6))
    same((packed.unpack(), xs), (tree, expected))


def test_vmap_over_packed_caches():
    step = wrapped(update)
    caches = [pair(), jax.tree.map(lambda x: -x, pair())]
    packed = jax.tree.map(lambda *x: jnp.stack(x), *[step.pack(c) for c in caches])
    out, x = jax.vmap(step, in_axes=(0, None, None))(packed, ROW, AT)
    for n, cache in enumerate(caches):
        one = jax.tree.map(lambda leaf, n=n: leaf[n], out)
        same((one.unpack(), x[n]), update(cache, ROW, AT))


def test_derivatives_past_a_packed_cache_and_none_through_it():
    step = wrapped(lambda c, r, i: (c, (c["a"] @ (r[0] * 2)).sum()))
    packed = step.pack(pair())
    got = jax.grad(lambda r: step(packed, r, AT)[1])(ROW)
    np.testing.assert_allclose(got, 2 * A.sum(0, keepdims=True))

    step = wrapped(update)
    packed = step.pack(pair())
    with pytest.raises(TypeError, match=r"cannot be differentiated: pass the tree itself"):
        jax.grad(lambda r: step(packed, r, AT)[0].unpack()["a"].sum())(ROW)
    got = jax.grad(lambda r: step(packed.unpack(), r, AT)[0]["a"].sum())(ROW)
    np.testing.assert_allclose(got, jnp.ones((1, 3)))


def test_where_the_plain_function_runs():
    expected = update(pair(), ROW, AT)
    for step in (wrapped(update, disable=True), wrapped(update).plain()):
        packed = jaxgraph.wrap(update).pack(pair())
        before = address(packed)
        packed, x = step(packed, ROW, AT)
        same((packed.unpack(), x), expected)
        assert address(packed) == before  # XLA updates a donated buffer in place, too
    step = wrapped(update)
    packed = step.pack(pair())
    with jax.disable_jit():
        packed, x = step(packed, ROW, AT)
    same((packed.unpack(), x), expected)


def test_ahead_of_time():
    step = wrapped(update)
    expected = update(pair(), ROW, AT)
    packed, x = step.lower(step.pack(pair()), ROW, AT).compile()(step.pack(pair()), ROW, AT)
    same((packed.unpack(), x), expected)
    exported = step.export()(step.pack(pair()), ROW, AT)
    packed, x = exported.call(step.pack(pair()), ROW, AT)
    same((packed.unpack(), x), expected)


def test_by_keyword_inside_a_larger_argument_and_closed_over():
    step = wrapped(update)
    packed, _ = step(r=ROW, i=AT, c=step.pack(pair()))
    same(packed.unpack(), update(pair(), ROW, AT)[0])

    within = wrapped(lambda state: (update(state["kv"], ROW, state["at"])[0], state["at"] + 1))
    packed, at = within({"kv": step.pack(pair()), "at": jnp.copy(AT)})
    same((packed.unpack(), at), (update(pair(), ROW, AT)[0], AT + 1))

    weights = step.pack({"w": jnp.ones((32, 40)), "b": jnp.ones(40)})
    closed = wrapped(lambda x: x @ weights.unpack()["w"] + weights.unpack()["b"], donate=())
    for _ in range(3):
        np.testing.assert_array_equal(closed(jnp.ones((1, 32))), jnp.full((1, 40), 33.0))
    assert [s.backend for s in closed.explain().splits] == ["native"]


def test_warmup_and_with_copies_leave_the_cache_alone():
    step = wrapped(update)
    packed = step.pack(pair())
    step.warmup(packed, ROW, AT)
    same(packed.unpack(), pair())
    before = address(packed)
    packed, _ = step(packed, ROW, AT)
    same(packed.unpack(), update(pair(), ROW, AT)[0])
    assert address(packed) == before


# Packed.repack.


def test_repack_in_plain_jax_updates_in_place():
    packed = wrapped(update).pack(pair())
    before = address(packed)

    @partial(jax.jit, donate_argnums=0)
    def shift(packed):
        return packed.repack(jax.tree.map(lambda x: x + 1, packed.unpack()))

    moved = shift(packed)
    same(moved.unpack(), jax.tree.map(lambda x: x + 1, pair()))
    assert address(moved) == before
    assert moved.spec is packed.spec
    same(moved.repack(pair()).unpack(), pair())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("size", [3, 100, 5000])
def test_repack_of_what_is_made_of_other_places_of_the_buffer(dtype, size):
    """XLA must not take reading and writing into one loop over the buffer."""
    cache = {"a": jnp.arange(size).astype(dtype), "b": jnp.arange(50, size + 50).astype(dtype)}
    for change in (lambda x: x + 1, lambda x: x[::-1], lambda x: jnp.roll(x, 1)):
        packed = wrapped(update).pack(cache)

        def changed(packed, change=change):
            return packed.repack(jax.tree.map(change, packed.unpack()))

        new = jax.jit(changed, donate_argnums=0)(packed)
        same(new.unpack(), jax.tree.map(change, cache))


def test_repack_beyond_32_bits_is_exact():
    spec = wrapped(update).pack(pair()).spec
    leaves = tuple(dataclasses.replace(s, offset=s.offset + 5 * 2**32) for s in spec.leaves)
    far = type(spec)(spec.treedef, leaves, 2**35)
    values = [jax.ShapeDtypeStruct(A.shape, A.dtype)] * 2
    buffer = jax.ShapeDtypeStruct((2**35,), jnp.uint8)
    made = jax.make_jaxpr(lambda b, *v: far.write(b, list(zip(far.arrays, v, strict=True))))
    jaxpr = made(buffer, *values)
    (out,) = jaxpr.out_avals
    assert out.shape == buffer.shape
    slices = [e.params for e in jaxpr.jaxpr.eqns if e.primitive.name == "slice"]
    first, second = (leaf.offset for leaf in far.arrays)
    assert [(s["start_indices"], s["limit_indices"]) for s in slices] == [
        ((0,), (first,)),
        ((first + 48,), (second,)),
        ((second + 48,), (2**35,)),
    ]


def test_repack_keeps_an_order_of_dimensions():
    from jaxgraph import pack

    cache = {"w": jnp.arange(24.0).reshape(2, 3, 4)}
    packed = pack.pack(cache, orders=[(2, 0, 1)])
    same(packed.unpack(), cache)
    new = jax.tree.map(lambda x: x * 2, cache)
    same(jax.jit(lambda p: p.repack(new))(packed).unpack(), new)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": A},
        {"a": A, "b": A[1:]},
        {"a": A, "b": A.astype(jnp.bfloat16)},
        {"a": A, "b": 1.0},
        [A, A],
    ],
)
def test_repack_of_what_does_not_fit(tree):
    with pytest.raises(ValueError, match="cannot take the place of Packed.2 leaves") as error:
        wrapped(update).pack(pair()).repack(tree)
    assert "\n" not in str(error.value)


# Devices.


def test_each_device_has_a_cache_of_its_own(two_devices):
    program = """
        import jax, jax.numpy as jnp, numpy as np, jaxgraph
        from jax.sharding import Mesh, PartitionSpec as P

        def fresh():
            return {"a": jnp.zeros((4, 3)), "b": jnp.ones((3, 3))}

        def update(c, r, i):
            return {"a": jax.lax.dynamic_update_slice(c["a"], r, (i, 0)), "b": c["b"]}, i + 1

        options = jaxgraph.Options(strict=True, min_equations=0)
        step = jaxgraph.wrap(update, donate_argnums=0, options=options)
        for n, device in enumerate(jax.devices()[:2]):
            cache = step.pack(jax.device_put(fresh(), device))
            at = cache.buffer.unsafe_buffer_pointer()
            i = jax.device_put(jnp.int32(0), device)
            for _ in range(4):
                cache, i = step(cache, jax.device_put(jnp.full((1, 3), n + 1.0), device), i)
            assert cache.buffer.unsafe_buffer_pointer() == at
            assert cache.buffer.devices() == {device}
            np.testing.assert_array_equal(cache.unpack()["a"], np.full((4, 3), n + 1.0))
        stats = step.stats()
        assert (stats.eager, stats.captures, stats.replays) == (2, 2, 4), stats

        mesh = Mesh(jax.devices()[:2], "d")
        whole = step.pack(fresh())
        many = jax.tree.map(lambda x: jnp.stack([x, x]), whole)

        def local(c, r):
            c, _ = step(jax.tree.map(lambda x: x[0], c), r, jnp.int32(1))
            return jax.tree.map(lambda x: x[None], c)

        specs = dict(mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
        out = jax.jit(jax.shard_map(local, **specs))(many, jnp.array([[1., 1, 1], [2, 2, 2]]))
        for n in range(2):
            one = jax.tree.map(lambda x: x[n], out).unpack()
            np.testing.assert_array_equal(one["a"][1], np.full(3, n + 1.0))
            np.testing.assert_array_equal(one["b"], np.ones((3, 3)))
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    subprocess.run(command, check=True, env=two_devices)
