"""wrap: it computes what jax.jit does, for every form of argument, and counts what it did."""

import functools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
import jaxgraph.plan
from jaxgraph import Options

STRICT = Options(strict=True)


def decode_step(params, cache, x, position):
    cache = jax.lax.dynamic_update_slice(cache, x[None], (position, 0))
    x = jnp.tanh(cache.sum(0) * params["scale"] + x * params["w"])
    return x, position + 1, cache


def decode_arguments():
    params = {"scale": jnp.float32(0.25), "w": jnp.linspace(0.0, 1.0, 8)}
    return params, jnp.zeros((16, 8)), jnp.ones(8), jnp.int32(0)


def assert_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-6)


def check(fun, *args, static_argnums=(), **kwargs):
    """Three calls (eager, captured, replayed) against jax.jit."""
    step = jaxgraph.wrap(fun, static_argnums=static_argnums, options=STRICT)
    expected = jax.jit(fun, static_argnums=static_argnums)(*args, **kwargs)
    for _ in range(3):
        assert_equal(step(*args, **kwargs), expected)
    return step


def test_a_decode_loop_and_its_counters():
    step = jaxgraph.wrap(decode_step, donate_argnums=(1,), options=STRICT)
    plain = jax.jit(decode_step)
    params, cache, x, position = decode_arguments()
    other = (cache + 0, x, position)
    for i in range(10):
        address = cache.unsafe_buffer_pointer()
        x, position, cache = step(params, cache, x, position)
        assert cache.unsafe_buffer_pointer() == address, "the cache was copied"
        other = plain(params, other[0], *other[1:])
        other = (other[2], other[0], other[1])
        assert_equal((cache, x, position), other)
        assert step.stats().calls == i + 1
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 8)
    assert (stats.exec_updates, stats.instantiations) == (0, 1)
    assert dict(stats)["replays"] == 8
    assert stats["calls"] == 10
    assert "replays" in str(stats)
    with pytest.raises(KeyError):
        stats["walks"]


def test_clear_starts_again():
    step = jaxgraph.wrap(decode_step, options=STRICT)
    for _ in range(4):
        step(*decode_arguments())
    step.clear()
    assert set(dict(step.stats()).values()) == {0}
    assert step.events() == []
    for _ in range(3):
        step(*decode_arguments())
    stats = step.stats()
    assert (stats.calls, stats.eager, stats.captures, stats.replays) == (3, 1, 1, 1)


def test_arguments_by_keyword():
    params, cache, x, position = decode_arguments()
    check(decode_step, params, cache, position=position, x=x)


def test_keyword_only_and_default_arguments():
    def fun(x, y=2.0, *rest, scale, bias=None):
        return x * y + sum(rest) * scale + (0.0 if bias is None else bias)

    check(fun, jnp.arange(3.0), scale=jnp.float32(2))
    check(fun, jnp.arange(3.0), 3.0, jnp.ones(3), jnp.ones(3), scale=2, bias=jnp.ones(3))


def test_static_arguments():
    def fun(x, how, n):
        return {"sum": x + n, "scaled": x * n}[how]

    step = check(fun, jnp.arange(3.0), "sum", 2, static_argnums=(1, 2))
    assert_equal(step(jnp.arange(3.0), "scaled", 2), jnp.arange(3.0) * 2)
    assert_equal(step(jnp.arange(3.0), n=5, how="sum"), jnp.arange(3.0) + 5)
    check(fun, jnp.arange(3.0), "sum", 2, static_argnums=(-2, -1))


def test_static_argument_that_is_a_pytree():
    check(lambda x, sizes: x + sizes[0] * sizes[1], jnp.ones(2), (3, 4), static_argnums=1)


def test_pytrees_with_none_and_empty_containers():
    def fun(tree):
        return {"x": tree["x"] + 1, "none": None, "empty": (), "nested": [None, tree["x"] * 2]}

    check(fun, {"x": jnp.ones(3), "none": None, "empty": {}})


def test_weak_types_are_kept():
    step = check(lambda x, y: (x + y, y * 2), jnp.ones(3, jnp.bfloat16), 2.0)
    assert_equal(
        step(jnp.ones(3, jnp.bfloat16), jnp.float32(2.0)),
        jax.jit(lambda x, y: (x + y, y * 2))(jnp.ones(3, jnp.bfloat16), jnp.float32(2.0)),
    )


def test_numpy_and_python_scalar_arguments():
    check(lambda x, n, b: jnp.where(b, x * n, x), np.arange(4.0), 3, True)


def test_x64_mode_is_another_plan():
    step = jaxgraph.wrap(lambda x: x * 2 + 1, options=STRICT)
    assert step(np.arange(3.0)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert step(np.arange(3.0)).dtype == jnp.float64
    assert step(np.arange(3.0)).dtype == jnp.float32


def test_zero_size_arrays():
    check(lambda x: (x * 2, x.sum(), jnp.concatenate([x, x])), jnp.zeros((0, 3)))


def test_an_argument_returned_as_it_is_and_a_constant_result():
    check(lambda x, y: (y, jnp.zeros(3), x + 1, y), jnp.ones(2), jnp.arange(2))


def test_several_shapes_each_have_their_plan():
    step = jaxgraph.wrap(lambda x: x + 1, options=STRICT)
    for _ in range(3):
        for n in (1, 4, 9):
            assert_equal(step(jnp.zeros(n)), jnp.ones(n))
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (3, 3, 3)


def test_two_wraps_of_one_function_share_nothing():
    def fun(x):
        return x + 1

    first, second = jaxgraph.wrap(fun, options=STRICT), jaxgraph.wrap(fun, options=STRICT)
    assert first.function_id != second.function_id
    for _ in range(3):
        first(jnp.ones(4))
    assert (second.stats().calls, second.stats().executions) == (0, 0)


def test_function_ids_are_the_same_in_every_process():
    from jaxgraph.wrap import _function_id

    assert _function_id("models.step", 0) == 0x92CEA84C9A2B99E5
    assert _function_id("models.step", 0) != _function_id("models.step", 1)
    assert _function_id("models.step", 1) != _function_id("models.ste", 1)


def test_a_jitted_function_is_taken_apart():
    big = jnp.arange(4000.0)
    step = check(jax.jit(lambda x: x + big), jnp.ones(4000))
    assert "closed-over" in str(step.explain(jnp.ones(4000))) or step.stats().executions == 3


def test_a_jitted_function_with_static_and_donated_arguments():
    jitted = jax.jit(lambda cache, n: cache + n, static_argnums=1, donate_argnums=0)
    step = jaxgraph.wrap(jitted, static_argnums=1, donate_argnums=0, options=STRICT)
    x = jnp.zeros(4)
    for _ in range(4):
        x = step(x, 2)
    assert_equal(x, jnp.full(4, 8.0, jnp.float32))


def test_methods_partials_and_callable_objects():
    class Model:
        def __init__(self, w):
            self.w = w
            self.options = self.name = "its own"

        def __call__(self, x):
            return x * self.w

        def step(self, x):
            return x + self.w

    model = Model(jnp.float32(3))
    check(model, jnp.ones(3))
    check(model.step, jnp.ones(3))
    check(functools.partial(model.step), jnp.ones(3))
    check(functools.partial(lambda x, y: x * y, y=jnp.float32(2)), jnp.ones(3))


def test_closed_over_arrays_are_operands_once_each():
    big, table = jnp.arange(3000.0), np.arange(3000, dtype=np.float32)
    calls = []

    def fun(x):
        calls.append(1)
        return x * big + table + big

    step = jaxgraph.wrap(fun, options=STRICT)
    for _ in range(4):
        assert_equal(step(jnp.ones(3000)), big * 2 + table)
    assert len(calls) == 2, "traced once to find the arrays, once with them"
    program = step.explain().splits[0].program
    bases = jaxgraph.runtime.native.describe_program(program)["bases"]
    labels = sorted(b["label"] for b in bases if b["kind"] == "operand")
    assert len(labels) == 3
    assert labels[0].startswith("closed-over array")
    assert labels[1].startswith("closed-over array")
    assert labels[2] == "x"
    assert_equal(step.lower(jnp.ones(3000)).compile()(jnp.ones(3000)), big * 2 + table)


def test_closed_over_arrays_beside_static_and_donated_arguments():
    big = jnp.arange(2000.0)

    def fun(x, n, cache):
        return x * n + big, cache + 1

    step = jaxgraph.wrap(fun, static_argnums=1, donate_argnums=2, options=STRICT)
    for _ in range(3):
        out, cache = step(jnp.ones(2000), 2, cache=jnp.zeros(2000))
        assert_equal(out, big + 2)
        assert_equal(cache, jnp.ones(2000))


def test_disabled_it_is_the_plain_function(monkeypatch):
    monkeypatch.setenv("JAXGRAPH_DISABLE", "1")
    step = jaxgraph.wrap(lambda x: x + 1)
    for _ in range(3):
        assert_equal(step(jnp.ones(3)), jnp.full(3, 2.0, jnp.float32))
    assert (step.stats().calls, step.stats().executions) == (3, 0)
    assert "disabled" in str(step.explain(jnp.ones(3)))
    assert not step.explain(jnp.ones(3)).native


def test_disable_0_means_enabled(monkeypatch):
    monkeypatch.setenv("JAXGRAPH_DISABLE", "0")
    step = jaxgraph.wrap(lambda x: x + 1)
    step(jnp.ones(3))
    assert step.stats().executions == 1


def test_explain_without_and_with_arguments():
    step = jaxgraph.wrap(decode_step, options=STRICT)
    assert "not planned yet" in str(step.explain())
    explanation = step.explain(*decode_arguments())
    assert explanation.native
    assert explanation.splits
    assert step.stats().calls == 0, "explain runs nothing"
    assert "decode_step" in str(explanation)
    assert jax.devices()[0].platform in ("cpu", "gpu")
    assert explanation.platform in ("cpu", "cuda")
    for _ in range(2):
        step(*decode_arguments())
    assert step.explain().splits[0].variants[0].stage == "captured"


def test_explain_speaks_of_the_call_it_was_asked_about():
    step = jaxgraph.wrap(
        lambda x: jax.lax.cumlogsumexp(x) if x.ndim == 2 else x + 1, options=STRICT
    )
    flat, square = jnp.ones(4), jnp.ones((2, 2))
    step(flat), step(square)
    assert [e.primitive for e in step.explain(square).left_in_xla] == ["cumlogsumexp"]
    assert step.explain(flat).left_in_xla == ()


def test_small_results_of_a_warmup_move_as_in_a_loop(monkeypatch):
    """So their slots are part of what is captured. Large ones are not kept: memory may be short.
    Nor are those in donated buffers, which stay where they are in a loop."""

    def fun(x, cache):
        return x * 2 + 1, x[0, 0] * 2 + 1, {"cache": cache * 2 + 1}

    step = jaxgraph.wrap(fun, donate_argnums=(1,), options=STRICT)
    call, made, alive = type(step).__call__, [], []

    def noting(self, *args):
        alive.append([result() is not None for result in made])
        results = call(self, *args)
        made.extend(map(weakref.ref, jax.tree.leaves(results)))
        return results

    monkeypatch.setattr(type(step), "__call__", noting)
    step.warmup(jnp.ones((1024, 1024)), jnp.ones((4, 8)))
    assert alive == [[], [False, True, False]]


def test_warmup_captures_without_consuming_what_is_donated():
    step = jaxgraph.wrap(decode_step, donate_argnums=(1,), options=STRICT)
    arguments = decode_arguments()
    step.warmup(*arguments)
    assert not arguments[1].is_deleted()
    assert step.stats().captures == 1
    step(*arguments)
    assert arguments[1].is_deleted()


def test_reserve_plans_without_running():
    step = jaxgraph.wrap(decode_step, donate_argnums=(1,), options=STRICT)
    arguments = decode_arguments()
    assert step.reserve(*arguments) > 0
    assert step.stats().executions == 0
    assert not arguments[1].is_deleted()


def test_reserve_asks_for_what_the_calls_then_need_and_no_more():
    """Also where arguments wander and get slots: those that never want one have none."""

    def fun(params, x, position):
        for w in params:
            x = jnp.tanh(x @ w + position.astype(jnp.float32))
        return x, position + 1

    params = [jnp.ones((32, 32)) for _ in range(8)]
    x, position = jnp.ones((2, 32)), jnp.arange(2)[:, None]
    step = jaxgraph.wrap(fun, options=STRICT)
    reserved = step.reserve(params, x, position)
    # Three intermediates, slots for the arguments and results that are no weights, and where these
    # results go.
    assert reserved == 3 * 256 + 4 * 256 + 256
    kept = []
    for _ in range(20):
        kept.append((x, position))
        x, position = step(params, x, position)
        position = position + 0
    (variant,) = step.explain().splits[0].variants
    assert variant.arena_bytes == reserved


def test_lower_and_compile():
    step = jaxgraph.wrap(decode_step, options=STRICT)
    compiled = step.lower(*decode_arguments()).compile()
    assert_equal(compiled(*decode_arguments()), jax.jit(decode_step)(*decode_arguments()))
    assert step.stats().executions == 1


def test_trouble_in_planning_falls_back_with_one_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise AssertionError("a bug in planning")

    monkeypatch.setattr(jaxgraph.plan, "plan_step", broken)
    step = jaxgraph.wrap(lambda x: x + 1)
    with pytest.warns(RuntimeWarning, match=r"a bug in planning.*Please report") as caught:
        assert_equal(step(jnp.ones(3)), jnp.full(3, 2.0, jnp.float32))
        step(jnp.ones(4))
    assert len(caught) == 1
    assert "a bug in planning" in str(step.explain(jnp.ones(3)))
    with pytest.raises(AssertionError, match="a bug in planning"):
        jaxgraph.wrap(lambda x: x + 1, options=STRICT)(jnp.ones(3))


def test_a_plan_that_returns_something_else_is_not_run(monkeypatch):
    class Wrong:
        has_native = True

        def run(self, x):
            return [x[:2]]

    monkeypatch.setattr(jaxgraph.plan, "plan_step", lambda *args, **kwargs: Wrong())
    step = jaxgraph.wrap(lambda x: x + 1)
    with pytest.warns(RuntimeWarning, match="the plan returns"):
        assert_equal(step(jnp.ones(3)), jnp.full(3, 2.0, jnp.float32))


def test_mutable_arrays_run_the_plain_function():
    if not hasattr(jax, "new_ref"):
        pytest.skip("this JAX has no mutable arrays")
    ref = jax.new_ref(jnp.zeros(3))

    def fun(ref, x):
        ref[...] = ref[...] + x
        return x * 2

    step = jaxgraph.wrap(fun)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(ref, jnp.ones(3))
    np.testing.assert_array_equal(ref[...], np.full(3, 3.0))
    assert "jax.Ref" in str(step.explain())


def test_concurrent_first_calls_from_many_threads():
    import concurrent.futures

    big = jnp.arange(2000.0)
    step = jaxgraph.wrap(lambda x: x + big, options=STRICT)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, out in enumerate(pool.map(step, [jnp.full(2000, float(i)) for i in range(32)])):
            np.testing.assert_array_equal(out, np.arange(2000.0) + i)
    assert step.stats().calls == 32
    assert step.stats().executions == 32


def test_numpy_arrays_made_inside_the_function_end_the_tracing():
    """A mask or a table made in the body is a new array in each trace, but the same constant."""

    def fun(x):
        mask = np.tril(np.ones((64, 64), np.float32))
        return x * mask, x @ mask

    x = jnp.arange(64.0 * 64).reshape(64, 64) / 64
    step = jaxgraph.wrap(fun, options=Options(max_rows=0))
    for _ in range(4):
        for got, expected in zip(step(x), jax.jit(fun)(x), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert step.stats().replays == 2


def test_arrays_that_differ_at_every_trace_do_not_keep_it_from_ending():
    counter = iter(range(10**9))

    def fun(x):
        return x + np.full((64, 64), next(counter), np.float32)

    jaxgraph.wrap(fun)(jnp.ones((64, 64)))


def test_a_wrapped_method_binds_its_instance():
    class Model:
        scale = 3.0

        @functools.partial(jaxgraph.wrap, static_argnums=0)
        def step(self, x):
            return x * self.scale

    np.testing.assert_array_equal(Model().step(jnp.ones(3)), np.full(3, 3.0))
    assert Model.step.stats().calls == 1


def test_a_parameter_may_be_called_self():
    step = jaxgraph.wrap(lambda self, x: x - self)
    np.testing.assert_array_equal(step(x=jnp.ones(3), self=jnp.zeros(3)), np.ones(3))
