"""Packed trees: round trips, structure, what cannot be packed."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxgraph
from jaxgraph import Packed

TREE = {
    "f32": np.arange(12, dtype=np.float32).reshape(3, 4) - 5.5,
    "bf16": jnp.arange(7, dtype=jnp.bfloat16),
    "f16": np.linspace(-1, 1, 5).astype(np.float16),
    "f8": np.array([0.5, -2.0, 1.0], dtype=ml_dtypes.float8_e4m3fn),
    "ints": (np.array([-3, 7], np.int8), jnp.array([1, 2, 2**31], jnp.uint32), np.int16(-2)),
    "bools": np.array([[True, False], [False, True]]),
    "scalar": jnp.float32(2.5),
    "nan": np.array([np.nan, np.inf, -0.0], np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "nothing": None,
    "eps": 1e-5,
}


def equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).dtype == np.asarray(y).dtype
        and np.asarray(x).shape == np.asarray(y).shape
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def identity(tree):
    return tree


def test_round_trip_keeps_every_bit():
    packed = jaxgraph.wrap(identity).pack(TREE)
    assert len(jax.tree.leaves(packed)) == 1
    assert packed.buffer.dtype == jnp.uint8
    assert equal(packed.unpack(), TREE)
    assert equal(jax.jit(lambda p: p.unpack())(packed), jax.tree.map(jnp.asarray, TREE))


def test_leaves_are_aligned():
    packed = jaxgraph.wrap(identity).pack(TREE)
    offsets = [leaf.offset for leaf in packed.spec.leaves if hasattr(leaf, "offset")]
    assert all(offset % 256 == 0 for offset in offsets)
    assert packed.nbytes == packed.buffer.size


def test_64_bit_numpy_leaves_follow_x64_mode():
    step = jaxgraph.wrap(identity)
    assert step.pack(np.arange(3.0)).unpack().dtype == jnp.float32
    with jax.enable_x64(True):
        unpacked = step.pack(np.arange(3.0)).unpack()
    assert unpacked.dtype == jnp.float64


def test_equal_structures_share_one_spec():
    step = jaxgraph.wrap(identity)
    first, second = step.pack(TREE), step.pack(jax.tree.map(lambda x: x, TREE))
    assert first.spec is second.spec
    assert step.pack({"f32": TREE["f32"]}).spec is not first.spec
    assert step.pack({"a": np.ones(1, np.int8), "b": 1}).spec is not (
        step.pack({"a": np.ones(1, np.int8), "b": True}).spec
    )


def test_a_wrapped_function_takes_it_in_the_arguments_place():
    def fun(params, x):
        return x @ params["w"] + params["layers"][1]["b"] * params["scale"]

    params = {
        "w": np.ones((3, 4), np.float32),
        "layers": [{"b": np.float32(1)}, {"b": np.arange(4, dtype=np.float32)}],
        "scale": 0.5,
    }
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    step = jaxgraph.wrap(fun)
    packed = step.pack(params, argnum=0, example_args=(params, x))
    np.testing.assert_array_equal(step(packed, x), jax.jit(fun)(params, x))
    np.testing.assert_array_equal(step(params, x), jax.jit(fun)(params, x))  # and unpacked still


def test_python_scalars_keep_their_weak_type():
    packed = jaxgraph.wrap(identity).pack({"w": jnp.ones(2, jnp.bfloat16), "s": 2.0})
    step = jaxgraph.wrap(lambda p: p["w"] * p["s"])
    assert step(packed).dtype == jnp.bfloat16


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_packed_tree_is_consumed():
    step = jaxgraph.wrap(lambda cache, x: (cache["k"] + x, cache["v"]), donate_argnums=(0,))
    packed = step.pack({"k": jnp.ones(4), "v": jnp.zeros(4)})
    k, v = step(packed, 1.0)
    np.testing.assert_array_equal(k, np.full(4, 2.0))
    np.testing.assert_array_equal(v, np.zeros(4))


def test_offsets_beyond_32_bits_are_exact():
    from jaxgraph.pack import _ArrayLeaf

    leaf = _ArrayLeaf(5 * 2**32, (2, 3), np.dtype(np.float32))
    shape = jax.eval_shape(leaf.read, jax.ShapeDtypeStruct((2**35,), jnp.uint8))
    assert shape.shape == (2, 3)
    text = jax.jit(leaf.read).trace(jax.ShapeDtypeStruct((2**35,), jnp.uint8)).jaxpr
    assert str(5 * 2**32) in str(text)


def test_spec_survives_pickling_as_the_same_object():
    import pickle

    packed = jaxgraph.wrap(identity).pack({"a": np.ones(3, np.float32)})
    leaves, tree = jax.tree.flatten(packed)
    assert pickle.loads(pickle.dumps(packed.spec.leaves)) == packed.spec.leaves
    assert isinstance(jax.tree.unflatten(tree, leaves), Packed)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [np.ones(2), "text"]}, r"tree\['a'\]\[1\] is a str"),
        ({"k": jax.random.key(0)}, r"tree\['k'\] has dtype key.*key_data"),
        ({"a": jnp.ones(3) * 1j}, r"tree\['a'\] has dtype complex64"),
        ({"a": np.ones(3, ml_dtypes.int4)}, r"tree\['a'\] has dtype int4"),
        ({"a": np.array(["x"], dtype=object)}, r"tree\['a'\] has dtype object"),
        ({"a": jnp.full(3, 2.0)}, r"tree\['a'\] is weakly typed.*astype"),
        ({"a": None}, "tree holds no array data"),
        (jnp.zeros((0, 3)), "tree holds no array data"),
    ],
)
def test_what_cannot_be_packed_is_named(tree, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        jaxgraph.wrap(identity).pack(tree)
    assert "\n" not in str(error.value)


def test_a_deleted_leaf_is_named():
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(ValueError, match=r"tree\['a'\] was deleted"):
        jaxgraph.wrap(identity).pack({"a": array})


def test_packing_inside_a_trace_is_refused():
    step = jaxgraph.wrap(identity)
    with pytest.raises(TypeError, match="pack outside of jit"):
        jax.jit(lambda x: step.pack({"a": x}).buffer)(jnp.ones(3))


def test_argnum_must_exist():
    step = jaxgraph.wrap(lambda params, x, n: x, static_argnums=(2,))
    with pytest.raises(ValueError, match=r"argnum=5: .* no such argument .*params, x, n"):
        step.pack({"a": np.ones(3)}, argnum=5)
    with pytest.raises(ValueError, match=r"argnum=2 \('n'\) is static"):
        step.pack({"a": np.ones(3)}, argnum=2)
    with pytest.raises(ValueError, match="example_args has 1 arguments, none for argnum=1"):
        step.pack({"a": np.ones(3)}, argnum=1, example_args=(1,))


def test_arrays_of_several_devices_are_refused():
    program = """
        import jax, numpy as np, jaxgraph
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        a, b = jax.devices()
        step = jaxgraph.wrap(lambda t: t)
        sharded = jax.device_put(np.ones(4), NamedSharding(Mesh([a, b], "d"), P("d")))
        for tree in [sharded, [jax.device_put(np.ones(2), a), jax.device_put(np.ones(2), b)]]:
            try:
                step.pack(tree)
            except ValueError as error:
                assert "device_put" in str(error) and "\\n" not in str(error), error
            else:
                raise AssertionError("packed arrays of two devices")
        packed = step.pack([jax.device_put(np.ones(2), b), np.ones(3)])
        assert packed.buffer.devices() == {b}, packed.buffer.devices()
    """
    subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)],
        check=True,
        env={**__import__("os").environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
    )
