"""The FFI call end to end, on a program written by hand: counters, composition, refusals."""

import concurrent.futures
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from add_one import AddOne, spec

from jaxgraph import Options
from jaxgraph.runtime import native
from jaxgraph.runtime.ffi_call import native_call

_ids = itertools.count(0x7E57_0000)


@pytest.fixture
def function_id():
    number = next(_ids)
    yield number
    native.clear(number)


def counters(function_id):
    stats = native.stats(function_id)
    return tuple(stats[name] for name in ("eager", "captures", "replays"))


def add_one(function_id, **settings):
    split = AddOne(function_id, **settings)
    return lambda x: native_call(split, [x])[0]


def test_one_eager_one_capture_then_replays(function_id):
    step = jax.jit(add_one(function_id))
    for i in range(10):
        np.testing.assert_array_equal(step(jnp.full(8, float(i))), np.full(8, i + 1.0))
    assert counters(function_id) == (1, 1, 8)
    stats = native.stats(function_id)
    assert stats["executions"] == 10
    assert stats["instantiations"] == 1
    assert stats["failures"] == 0


def test_warmup_calls_decides_when_it_captures(function_id):
    step = jax.jit(add_one(function_id, options=Options(warmup_calls=4)))
    for _ in range(6):
        step(jnp.ones(8))
    assert counters(function_id) == (3, 1, 2)


def test_inside_scan(function_id):
    step = add_one(function_id)
    out, _ = jax.lax.scan(lambda x, _: (step(x), None), jnp.zeros(8), None, length=20)
    np.testing.assert_array_equal(out, np.full(8, 20.0))
    assert counters(function_id) == (1, 1, 18)


def test_in_place_on_a_donated_operand(function_id):
    step = jax.jit(add_one(function_id, in_place=True), donate_argnums=0)
    x = jnp.zeros(8)
    address = x.unsafe_buffer_pointer()
    for _ in range(5):
        x = step(x)
        assert x.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(x, np.full(8, 5.0))


def test_in_place_without_donation_keeps_the_operand(function_id):
    step = jax.jit(add_one(function_id, in_place=True))
    x = jnp.zeros(8)
    for _ in range(4):
        np.testing.assert_array_equal(step(x), np.full(8, 1.0))
    np.testing.assert_array_equal(x, np.zeros(8))


def test_two_functions_with_equal_code_share_nothing(function_id):
    other = next(_ids)
    first, second = jax.jit(add_one(function_id)), jax.jit(add_one(other))
    for _ in range(3):
        first(jnp.ones(8))
    second(jnp.ones(8))
    assert counters(function_id) == (1, 1, 1)
    assert counters(other) == (1, 0, 0)
    native.clear(other)


def test_clear_forgets_graphs_and_counters(function_id):
    step = jax.jit(add_one(function_id))
    for _ in range(3):
        step(jnp.ones(8))
    native.clear(function_id)
    assert counters(function_id) == (0, 0, 0)
    assert native.stats(function_id)["live_execs"] == 0
    for _ in range(3):
        step(jnp.ones(8))
    assert counters(function_id) == (1, 1, 1)


def test_many_threads_at_once(function_id):
    step = jax.jit(add_one(function_id, shape=(1000,)))

    def work(seed):
        x = jnp.full(1000, float(seed))
        for _ in range(50):
            x = step(x)
        return np.asarray(x)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for seed, result in enumerate(pool.map(work, range(8))):
            np.testing.assert_array_equal(result, np.full(1000, seed + 50.0))
    assert native.stats(function_id)["executions"] == 400
    assert sum(counters(function_id)) == 400


def test_events_and_description_are_plain_data(function_id):
    step = jax.jit(add_one(function_id))
    for _ in range(3):
        step(jnp.ones(8)).block_until_ready()
    events = native.events(function_id)
    assert [e["what"] for e in events if e["what"] in ("eager", "capture", "replay")] == [
        "eager",
        "capture",
        "replay",
    ]
    assert all(event["why"] for event in events)
    (variant,) = native.variants(function_id)
    assert variant["stage"] == "captured"
    assert [chunk["launches"] for chunk in variant["chunks"]] == [1]
    assert [base["label"] for base in variant["bases"]] == ["x", "y"]


def test_describe_program_gives_back_what_was_encoded(function_id):
    given = spec(function_id, (2, 3))
    described = native.describe_program(native.encode_program(given))
    for field in ("function", "function_id", "split", "key", "arena_bytes", "options"):
        assert described[field] == given[field]
    (node,) = described["nodes"]
    assert (node["op"], node["label"], node["params"]) == ("expr", "add", given["nodes"][0][4])
    assert node["outs"] == [
        {"dtype": "f32", "base": 2, "offset": 0, "shape": (2, 3), "strides": (3, 1)}
    ]
    assert [b["kind"] for b in described["bases"]] == ["arena", "operand", "result"]
    assert len(described["id"]) == 16


class NotCapturable(AddOne):
    @property
    def program(self):
        given = spec(self.function_id, self.shape)
        op, _, *rest = given["nodes"][0]
        given["nodes"] = [(op, 1, *rest)]  # kFlagNotCapturable
        return native.encode_program(given)


def test_a_node_that_cannot_be_captured_is_named_and_runs_eagerly(function_id):
    split = NotCapturable(function_id)
    preview = native.preview("cpu", 0, split.program)
    assert (preview["number"], preview["stage"]) == (0, "cold")
    assert preview["not_capturable"] == "node 0 (expr add) cannot be captured"
    step = jax.jit(lambda x: native_call(split, [x])[0])
    for _ in range(4):
        np.testing.assert_array_equal(step(jnp.zeros(8)), np.ones(8))
    assert counters(function_id) == (4, 0, 0)
    (variant,) = native.variants(function_id)
    assert variant["not_capturable"] == preview["not_capturable"]


def test_a_preview_is_what_is_recorded_later(function_id):
    split = AddOne(function_id, (64, 3))
    preview = native.preview("cpu", 0, split.program)
    assert native.variants(function_id) == []
    step = jax.jit(lambda x: native_call(split, [x])[0])
    for _ in range(2):
        step(jnp.zeros((64, 3)))
    (variant,) = native.variants(function_id)
    for field in ("chunks", "arena_bytes", "program_id", "not_capturable", "split"):
        assert variant[field] == preview[field]
    with pytest.raises(ValueError, match="unknown platform"):
        native.preview("tpu", 0, split.program)
    with pytest.raises(ValueError):
        native.preview("cpu", 0, split.program[:-3])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: s.update(key=bytes(3)), ValueError),
        (lambda s: s.pop("nodes"), KeyError),
        (lambda s: s["bases"][1].pop("nbytes"), KeyError),
        (lambda s: s["bases"][1].update(nbytes=4), ValueError),  # the tensor is larger
        (lambda s: s["bases"][1].update(kind=9), ValueError),
        (lambda s: s.update(function_id=-1), (TypeError, ValueError, RuntimeError)),
    ],
)
def test_a_malformed_spec_is_refused(function_id, change, error):
    broken = spec(function_id)
    change(broken)
    with pytest.raises(error):
        native.encode_program(broken)


class Tampered(AddOne):
    @property
    def program(self):
        return super().program[:-3]


def test_malformed_bytes_are_an_exception_of_jax(function_id):
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        jax.jit(lambda x: native_call(Tampered(function_id), [x]))(jnp.ones(8))


def test_an_operand_of_another_size_is_refused_by_name(function_id):
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*'x' has 64 bytes.* expects 32"):
        jax.block_until_ready(jax.jit(add_one(function_id))(jnp.ones(16)))


def test_a_missing_operand_is_refused(function_id):
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*takes 1 operands, the call has 2"):
        jax.block_until_ready(
            jax.jit(lambda x: native_call(AddOne(function_id), [x, x]))(jnp.ones(8))
        )


def test_reserve_sizes_the_arena(function_id):
    native.reserve("cpu", 0, 1 << 20)
    step = jax.jit(add_one(function_id))
    for _ in range(2):
        step(jnp.ones(8))
    assert native.stats(function_id)["arena_bytes"] >= 1 << 20
    with pytest.raises(MemoryError):
        native.reserve("cpu", 0, 1 << 60)
    with pytest.raises(ValueError, match="unknown platform 'tpu'"):
        native.reserve("tpu", 0, 1)
