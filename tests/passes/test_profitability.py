"""Profitability: what is left to XLA for speed alone, by which rule, and how to overrule it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph
from jaxgraph import Options
from jaxgraph.passes.profitability import DEFAULT
from jaxgraph.runtime import native

W = jnp.ones((8, 12))


def product(x, w):
    return jnp.tanh(x @ w)


def explained(fun, *args, **options):
    return jaxgraph.wrap(fun, options=Options(strict=True, **options)).explain(*args)


def backends(explanation):
    return [split.backend for split in explanation.splits]


def test_a_product_of_many_rows_leaves_the_step_to_xla():
    prompt = jnp.ones((DEFAULT.max_rows + 1, 8))
    wide = jnp.ones((8, DEFAULT.max_rows + 1))
    explanation = explained(product, prompt, wide)
    assert backends(explanation) == ["xla"] and not explanation.native
    rows, *_ = explanation.decisions
    assert rows.rule == "rows" and rows.left_in_xla
    assert f"{DEFAULT.max_rows + 1} rows" in str(rows) and "test_profitability.py" in str(rows)
    assert f"max_rows={DEFAULT.max_rows}" in str(explanation)


def test_as_many_rows_as_allowed_are_native():
    explanation = explained(product, jnp.ones((DEFAULT.max_rows, 8)), jnp.ones((8, 99)))
    assert backends(explanation) == ["native"] and explanation.native
    assert not any(decision.left_in_xla for decision in explanation.decisions)


def test_the_smaller_side_of_a_product_has_its_rows():
    """A weight on the left, or one with few columns, is multiplied by few vectors all the same."""
    assert explained(product, jnp.ones((500, 8)), jnp.ones((8, 3))).native


def test_heads_that_share_one_cache_are_no_rows_of_a_weight():
    """Multi-query attention: thirty heads read the same keys, and are taken at once."""

    def attend(w, cache, x, at):
        q = (x @ w).reshape(30, 8)
        cache = lax.dynamic_update_slice(cache, x[None, :8], (at, 0))
        scores = jnp.where(jnp.arange(40) <= at, q @ cache.T, -jnp.inf)
        return jax.nn.softmax(scores) @ cache, cache

    args = jnp.ones((240, 240)), jnp.ones((40, 8)), jnp.ones(240), jnp.int32(3)
    explanation = explained(attend, *args)
    assert backends(explanation) == ["native"]
    assert "30 rows" in str(explanation.decisions[0])
    assert not explained(lambda x, w: (x @ w) @ w.T, jnp.ones((30, 40)), jnp.ones((40, 50))).native


def test_layers_of_a_stack_and_packed_or_converted_weights_are_weights():
    def layers(stack, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    def converted(w, scale, x):
        return x @ (w.astype(jnp.float32) * scale).T

    rows = DEFAULT.max_rows + 1
    x = jnp.ones((rows, 40))
    assert not explained(layers, jnp.ones((3, 40, 40)), x).native
    assert not explained(converted, jnp.ones((50, 40), jnp.int8), jnp.ones((50, 1)), x).native
    step = jaxgraph.wrap(lambda params, x: x @ params["w"], options=Options(strict=True))
    assert not step.explain(step.pack({"w": np.ones((40, 40), np.float32)}), x).native


def test_a_device_that_streams_16_bit_weights_takes_more_rows_of_them(monkeypatch):
    def of(rows, rows_dtype=jnp.bfloat16, stored=jnp.bfloat16):
        def step(x, w):
            return x @ w.astype(rows_dtype)

        return explained(step, jnp.ones((rows, 80), rows_dtype), jnp.ones((80, 800), stored)).native

    most = DEFAULT.max_rows
    monkeypatch.setattr(native, "streams_many_rows", lambda: False)
    assert of(most) and not of(most + 1)
    monkeypatch.setattr(native, "streams_many_rows", lambda: True)
    assert of(4 * most) and not of(4 * most + 1)
    assert of(4 * most, jnp.float16, jnp.float16)
    assert not of(most + 1, jnp.float32, jnp.float32)
    assert not of(most + 1, jnp.bfloat16, jnp.int8)  # other kernels read what is converted first


@pytest.mark.parametrize("way", ["option", "environment", "no bound"])
def test_the_bound_on_rows_can_be_set(way, monkeypatch):
    prompt, wide = jnp.ones((200, 8)), jnp.ones((8, 200))
    if way == "environment":
        monkeypatch.setenv("JAXGRAPH_MAX_ROWS", "200")
    options = {"option": {"max_rows": 200}, "environment": {}, "no bound": {"max_rows": 0}}[way]
    step = jaxgraph.wrap(product, options=Options(strict=True, **options))
    for _ in range(3):
        np.testing.assert_allclose(step(prompt, wide), jax.jit(product)(prompt, wide), rtol=1e-6)
    assert step.stats().replays == 1
    assert explained(product, prompt, wide, max_rows=199).native is False


def test_a_step_left_to_xla_is_the_users_function_to_the_letter(without_folder):
    """Loops stay loops, nested jits stay nested: XLA sees what `jax.jit` would show it."""

    def prefill(x, layers):
        def layer(x, w):
            return jax.nn.silu(x @ w), x.sum()

        return lax.scan(layer, x, layers)

    args = jnp.ones((100, 100)), jnp.ones((5, 100, 100))
    step = jaxgraph.wrap(prefill, options=Options(strict=True))
    compiled, plain = step.lower(*args).compile(), jax.jit(prefill).lower(*args).compile()
    text = without_folder(compiled.as_text())
    assert "while" in text and "jaxgraph" not in text
    assert compiled.cost_analysis() == plain.cost_analysis()
    ours, theirs = compiled.memory_analysis(), plain.memory_analysis()
    assert ours.temp_size_in_bytes == theirs.temp_size_in_bytes
    assert step.explain(*args).native is False


def between(x):
    """Runs of two and of eight equations between XLA's."""
    x = lax.cumlogsumexp(x) + 1
    x = lax.cumlogsumexp(x * 2)
    for _ in range(4):
        x = jnp.sin(x) * 2
    return lax.cumlogsumexp(x)


def test_short_runs_between_xlas_join_them():
    explanation = explained(between, jnp.ones(3))
    assert backends(explanation) == ["xla", "native", "xla"]
    decision = explanation.decisions[-1]
    assert decision.rule == "short runs" and decision.left_in_xla
    assert "1 native run (2 equations)" in str(decision)
    reasons = {e.primitive: e.reason for e in explanation.left_in_xla}
    assert "too short to pay" in reasons["add"] and "too short to pay" in reasons["mul"]


def test_the_bound_on_short_runs_can_be_set(monkeypatch):
    x = jnp.linspace(2, 3, 5)
    assert backends(explained(between, x, min_equations=0)) == ["xla", "native"] * 2 + ["xla"]
    assert backends(explained(between, x, min_equations=9)) == ["xla"]
    monkeypatch.setenv("JAXGRAPH_MIN_EQUATIONS", "2")
    step = jaxgraph.wrap(between, options=Options(strict=True))
    assert backends(step.explain(x)) == ["xla", "native"] * 2 + ["xla"]
    for _ in range(3):
        np.testing.assert_allclose(step(x), jax.jit(between)(x), rtol=1e-4)
    assert step.stats().replays == 2


def layers_with(work, count):
    """A step with something that stays in XLA in every layer."""

    def fun(x, w):
        for _ in range(count):
            x = lax.cumlogsumexp(work(x, w) + 3)
        return x

    return fun


def elementwise(x, w):
    for _ in range(8):
        x = jnp.sin(x) * 2
    return x


def products(x, w, count=8):
    for _ in range(count):
        x = jnp.tanh(x @ w)
    return x


def test_a_step_in_many_pieces_keeps_those_that_save_enough():
    """One call of ours for one kernel of XLA's is a loss, and many of them add up."""
    args = jnp.ones((1, 8)) / 8, jnp.ones((8, 8)) / 8
    for count in (1, 3):
        assert backends(explained(layers_with(elementwise, count), *args)).count("native") == count
    many = explained(layers_with(elementwise, 6), *args)
    assert backends(many) == ["xla"] and not many.native
    assert "6 native runs" in str(many.decisions[-1])
    overruled = explained(layers_with(elementwise, 6), *args, min_equations=0)
    assert backends(overruled).count("native") == 6
    assert backends(explained(layers_with(products, 6), *args)).count("native") == 6
    few = functools.partial(products, count=4)  # five kernels of XLA's
    assert backends(explained(layers_with(few, 6), *args)) == ["xla"]


def test_a_step_in_many_pieces_computes_the_same():
    def mixed(x, w):
        for i in range(8):
            x = lax.cumlogsumexp((products if i % 2 else elementwise)(x, w) + 3)
        return x

    args = jnp.ones((1, 8)) / 8, jnp.ones((8, 8)) / 8
    step = jaxgraph.wrap(mixed, options=Options(strict=True))
    assert backends(step.explain(*args)).count("native") == 4
    # XLA may put what lies between two pieces somewhere else in each of the first calls, and then
    # their warmup takes longer.
    for _ in range(8):
        np.testing.assert_allclose(step(*args), jax.jit(mixed)(*args), rtol=1e-4)
    assert step.stats().replays >= 4


def test_a_step_that_is_all_native_is_never_too_short():
    assert explained(lambda x: x + 1, jnp.ones(3), min_equations=1000).native


@pytest.mark.parametrize("field", ["max_rows", "min_equations"])
def test_bounds_are_checked(field):
    with pytest.raises(ValueError, match=f"JAXGRAPH_{field.upper()}"):
        Options(**{field: -1})
    with pytest.raises(TypeError, match=field):
        Options(**{field: 1.5})
