"""explain: an object that says per split what runs, and of everything else why it does not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jaxgraph
from jaxgraph import Options

STRICT = Options(strict=True)


def decode_step(params, cache, token, position):
    x = params["embed"][token]
    cache = lax.dynamic_update_slice(cache, x[None], (position, 0))
    scores = jnp.where(jnp.arange(len(cache)) <= position, cache @ x, -jnp.inf)
    x = jax.nn.softmax(scores) @ cache @ params["w"]
    return jnp.argmax(x @ params["embed"].T), position + 1, cache


def arguments():
    params = {"embed": jnp.ones((50, 16)), "w": jnp.ones((16, 16))}
    return params, jnp.zeros((20, 16)), jnp.int32(3), jnp.int32(0)


def test_a_split_before_it_ran():
    explanation = jaxgraph.wrap(decode_step, donate_argnums=1, options=STRICT).explain(*arguments())
    assert explanation.native and explanation.notes == ()
    (split,) = explanation.splits
    assert (split.number, split.backend, split.never_captured) == (0, "native", "")
    assert "test_explain.py" in split.first_node
    assert len(bytes.fromhex(split.key)) == 16
    assert split.nodes == sum(split.ops.values()) > 0
    assert split.variants == ()
    assert 0 < split.launches <= split.nodes + 4
    assert sum(chunk.nodes for chunk in split.chunks) == split.nodes
    assert 0 < split.arena_bytes <= split.reserved_bytes
    assert {base.label for base in split.bases} > {"params['embed']", "cache", "token", "position"}
    assert {base.label: base.place for base in split.bases}["cache"] == "in place"


def test_what_it_expects_before_the_run_is_what_comes():
    step = jaxgraph.wrap(decode_step, donate_argnums=1, options=Options(strict=True, chunk_size=3))
    (before,) = step.explain(*arguments()).splits
    assert len(before.chunks) > 1
    params, cache, token, position = arguments()
    for _ in range(3):
        token, position, cache = step(params, cache, token, position)
    (after,) = step.explain().splits
    assert [(c.first_node, c.nodes) for c in after.chunks] == [
        (c.first_node, c.nodes) for c in before.chunks
    ]
    (variant,) = after.variants
    assert (variant.stage, variant.chunks, variant.launches) == (
        "captured",
        after.chunks,
        after.launches,
    )
    assert variant.arena_bytes == before.reserved_bytes
    assert {base.label: base.moves for base in after.bases}["params['w']"] == 0


def test_bytes_read_are_those_of_the_operands_once():
    def twice(w, table, i, x):
        return (x @ w) + (x + 1) @ w, table[i]

    w, table = jnp.ones((32, 32)), jnp.ones((1000, 8))
    explanation = jaxgraph.explain(twice, w, table, jnp.int32(3), jnp.ones(32))
    (split,) = explanation.splits
    # The weight once, x once, a row of the table, the index.
    assert split.bytes_read == 4 * (32 * 32 + 32 + 8 + 1)


def test_every_equation_left_in_xla_has_a_reason_and_a_line():
    def fun(x):
        y = jnp.sin(x) * jnp.cos(x) + x * x
        for _ in range(2):
            y = lax.cumlogsumexp(y)
        return jnp.sin(y) * jnp.cos(y) + lax.igamma(y, y)

    explanation = jaxgraph.explain(fun, jnp.ones(3))
    found = {(e.primitive, e.times) for e in explanation.left_in_xla}
    assert found >= {("cumlogsumexp", 2), ("igamma", 1)}
    line = fun.__code__.co_firstlineno + 3
    (running,) = (e for e in explanation.left_in_xla if e.primitive == "cumlogsumexp")
    assert "no native kernel" in running.reason
    assert f"test_explain.py:{line}" in running.source and "fun" in running.source
    assert str(running) in str(explanation)


def test_lines_are_the_users_also_for_packed_arguments_and_library_functions(without_folder):
    def fun(params, key):
        return lax.cumlogsumexp(params["w"]) + jax.random.normal(key, (8,))

    step = jaxgraph.wrap(fun)
    packed = step.pack({"w": np.ones(8, np.float32)})
    explanation = step.explain(packed, jax.random.key(0))
    assert explanation.left_in_xla
    for equation in explanation.left_in_xla:
        assert "test_explain.py" in equation.source, equation
        assert "jaxgraph/" not in without_folder(equation.source)


def test_a_cache_that_is_not_donated():
    (copy,) = jaxgraph.explain(decode_step, *arguments()).copies
    assert (copy.what, copy.nbytes, copy.certain) == ("cache", 20 * 16 * 4, True)
    assert "donate_argnums" in copy.why
    jitted = jax.jit(decode_step, donate_argnums=1)
    assert jaxgraph.explain(jitted, *arguments()).copies == ()
    step = jaxgraph.wrap(decode_step, donate_argnums=1)
    assert jaxgraph.explain(step, *arguments()).copies == ()
    assert step.stats().calls == 0
    step = jaxgraph.wrap(decode_step, donate_argnums=1)
    jax.jit(lambda *args: step(*args))(*arguments())
    (copy,) = step.explain().copies
    assert not copy.certain and "outer jit" in copy.why


def test_the_last_reset_and_its_difference():
    step = jaxgraph.wrap(lambda x: jnp.sin(x) * 2, options=STRICT)
    for n in (4, 4, 4):
        step(jnp.ones(n))
    assert step.explain().last_reset is None
    step(jnp.ones(5))
    reset = step.explain().last_reset
    assert reset.what == "eager" and "new variant" in reset.why
    assert any((c.field, c.before, c.after) == ("shape", "[4]", "[5]") for c in reset.changes)
    assert "shape [4] → [5]" in str(step.explain())


def test_places_of_bases_follow_what_was_seen():
    step = jaxgraph.wrap(decode_step, donate_argnums=1, options=STRICT)
    params, cache, token, position = arguments()
    kept = []
    for i in range(12):
        position = jnp.int32(i)  # another buffer each time
        kept.append(position)
        token, _, cache = step(params, cache, token, position)
    (split,) = step.explain().splits
    bases = {base.label: base for base in split.bases}
    assert bases["position"].moves > 0
    assert bases["position"].place in ("patched", "slot")
    assert f"position: {bases['position'].place}" in str(split)
    assert bases["params['w']"].place == "in place"


def test_a_callback_is_a_split_of_its_own_and_its_neighbours_are_captured():
    def on_the_host(x):
        return np.asarray(x) * 2

    def fun(x):
        x = jnp.sin(x) * jnp.cos(x) + x * x
        x = jax.pure_callback(on_the_host, x, x)
        return jnp.sin(x) * jnp.cos(x) + x * x

    step = jaxgraph.wrap(fun, options=STRICT)
    x = jnp.linspace(0, 1, 6)
    explanation = step.explain(x)
    assert [s.backend for s in explanation.splits] == ["native", "callback", "native"]
    callback = explanation.splits[1]
    line = fun.__code__.co_firstlineno + 2
    assert "never captured" in callback.never_captured
    assert f"pure_callback at {__file__}:{line}" in callback.never_captured
    (left,) = explanation.left_in_xla
    assert left.primitive == "pure_callback" and "never captured" in left.reason
    for _ in range(4):
        np.testing.assert_allclose(step(x), jax.jit(fun)(x), rtol=1e-5)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (2, 2, 4)
    stages = [v.stage for s in step.explain().splits for v in s.variants]
    assert stages == ["captured", "captured"]


def test_callbacks_with_effects_keep_their_order_beside_xla():
    seen = []

    def fun(x):
        io_callback(lambda v: seen.append("first"), None, x, ordered=True)
        x = lax.cumlogsumexp(jnp.sin(x) * jnp.cos(x) + x * x)
        io_callback(lambda v: seen.append("second"), None, x, ordered=True)
        return x * 2

    step = jaxgraph.wrap(fun, options=STRICT)
    backends = [s.backend for s in step.explain(jnp.ones(3)).splits]
    assert set(backends) == {"callback", "xla", "native"}
    for _ in range(3):
        step(jnp.ones(3))
    jax.effects_barrier()
    assert seen == ["first", "second"] * 3


def test_closed_over_arrays_that_an_outer_jit_bakes():
    big = jnp.ones((600, 600))
    step = jaxgraph.wrap(lambda x: x @ big)
    jax.jit(lambda x: step(x) + 1)(jnp.ones(600))
    (note,) = step.explain().notes
    assert "closes over 1,440,000 bytes" in note and "inside another jit" in note
    assert step.explain().native
    small = jnp.ones((60, 60))
    step = jaxgraph.wrap(lambda x: x @ small)
    jax.jit(lambda x: step(x) + 1)(jnp.ones(60))
    assert step.explain().notes == ()


def test_a_device_that_cannot_be_asked_costs_the_launches_alone(monkeypatch):
    def lost(*_):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("jaxgraph.runtime.native.preview", lost)
    explanation = jaxgraph.explain(decode_step, *arguments())
    assert explanation.notes == ("what split 0 launches is unknown: the device is lost",)
    (split,) = explanation.splits
    assert explanation.native and split.nodes > 0 and split.chunks == () and split.bases == ()
    assert "the device is lost" in str(explanation)


def test_explain_of_plain_jitted_and_wrapped_functions():
    for fun in (decode_step, jax.jit(decode_step), jaxgraph.wrap(decode_step)):
        assert "decode_step" in jaxgraph.explain(fun, *arguments()).function
    with pytest.raises(TypeError, match="expects a function, got str"):
        jaxgraph.explain("text")
    with pytest.raises(TypeError, match="missing 3 required positional arguments"):
        jaxgraph.explain(decode_step, {})


def test_explaining_a_plain_function_changes_nothing_for_functions_wrapped_later():
    """Their numbers are part of what is compiled: else the persistent cache would miss."""
    from jaxgraph.wrap import _function_id

    def fun(x):
        return x + 1

    first = jaxgraph.wrap(fun)
    jaxgraph.explain(fun, jnp.ones(3))
    assert first.function_id == _function_id(first.name, 0)
    assert jaxgraph.wrap(fun).function_id == _function_id(first.name, 1)


def test_bodies_of_loops_are_explained():
    def fun(x, w):
        def turn(state):
            i, x = state
            x = lax.cumlogsumexp(jnp.tanh(x @ w) * jax.nn.sigmoid(x) + x * 0.5 + 3)
            return i + 1, jnp.tanh(x @ w) * jnp.sin(x) + jnp.cos(x) * jnp.exp(-x) + x

        return lax.while_loop(lambda state: state[0] < 3, turn, (0, x))[1]

    args = jnp.ones((2, 8)), jnp.ones((8, 8)) / 8
    explanation = jaxgraph.wrap(fun, options=Options(strict=True, min_equations=1)).explain(*args)
    (split,) = explanation.splits
    assert split.backend == "xla"
    assert [body.backend for body in split.bodies] == ["native", "xla", "native"]
    assert {e.primitive for e in explanation.left_in_xla} == {"while", "cumlogsumexp"}
    (decision,) = (d for d in explanation.decisions if d.rule == "bodies")
    assert not decision.left_in_xla and "body of while at" in decision.text
    explanation = jaxgraph.explain(fun, *args)
    (decision,) = (d for d in explanation.decisions if d.rule == "bodies")
    assert decision.left_in_xla and "fewer than 16 equations" in decision.text
    assert not explanation.native


def test_a_signature_with_mutable_arrays_does_not_speak_of_another():
    step = jaxgraph.wrap(lambda x: x[...] + 1)
    assert step.explain(jnp.ones(3)).native
    ref = jax.new_ref(jnp.ones(4))
    assert "jax.Ref" in str(step.explain(ref))
    assert step.explain(jnp.ones(3)).notes == ()


def test_all_parts_are_frozen_and_print():
    explanation = jaxgraph.explain(decode_step, *arguments())
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.native = False
    text = str(explanation)
    for part in ("split 0: native", "launches in 1 chunk", "reads ", "arena ", "key ", "rule: "):
        assert part in text, text
    assert str(explanation.splits[0].bases[0]) in text


def test_of_many_operands_those_are_printed_that_wander():
    arrays = [jnp.full(4, float(i)) for i in range(40)]
    (split,) = jaxgraph.explain(lambda xs, i: (sum(xs), i + 1), arrays, jnp.int32(0)).splits
    assert len(split.bases) == 43
    text = str(split)
    assert "  i: patched, 4 bytes" in text and "xs[0]" not in text
    assert "in place: 40 more, 640 bytes" in text
