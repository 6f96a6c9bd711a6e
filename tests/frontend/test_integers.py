"""Integers: what wraps, divides by zero, or is shifted too far, bit for bit as XLA has it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph

X64 = jax.config.jax_enable_x64
NARROW = [jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32]
INTS = [jnp.int64, jnp.uint64, jnp.int32] if X64 else NARROW
FLOATS = [jnp.float64] if X64 else [jnp.float32, jnp.bfloat16, jnp.float16]
TYPES = [*INTS, *FLOATS, jnp.bool_]

BINARY = {
    name: getattr(lax, name)
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
} | {
    "floor_divide": jnp.floor_divide,
    "mod": jnp.mod,
    "clamp": lambda x, y: lax.clamp(x, x[::-1], y),
    "select": lambda x, y: lax.select_n(x < y, x, y),
}
UNARY = {
    name: getattr(lax, name)
    for name in ["neg", "sign", "bitwise_not", "population_count", "clz", "square"]
} | {f"to the power {n}": lambda x, n=n: lax.integer_pow(x, n) for n in (0, 1, 2, 3, 7, 20)}
REDUCTIONS = {
    "sum": lambda x: jnp.sum(x, 1, dtype=x.dtype),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
    "argmax": lambda x: jnp.argmax(x, 1),
    "argmin": lambda x: jnp.argmin(x, 1),
    "any": lambda x: jnp.any(x != 0, 1),
    "all": lambda x: jnp.all(x != 0, 1),
    "sum of all": lambda x: jnp.sum(x),
    "product": lambda x: jnp.prod(x, 1, dtype=x.dtype),
    "common bits": lambda x: lax.reduce(x, _ones(x), lax.bitwise_and, (1,)),
    "bits of any": lambda x: lax.reduce(x, x.dtype.type(0), lax.bitwise_or, (0,)),
    "dot": lambda x: lax.dot(x, x.T, preferred_element_type=x.dtype),
}


def _ones(x):
    return np.array(-1).astype(x.dtype)


def edges(dtype):
    """Values at the ends of the type, small ones, and shift amounts around widths."""
    info = np.iinfo(dtype)
    numbers = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, -1, -2, -3, -7]
    numbers += [info.max, info.max - 1, info.min, info.min + 1, info.min // 2, info.max // 2]
    return np.array(sorted({n for n in numbers if info.min <= n <= info.max}), dtype)


def check(functions, *args):
    """All of them as one native split, equal to what jax.jit computes, in three calls."""

    def fun(*args):
        return {name: f(*args) for name, f in functions.items()}

    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True, max_rows=0))
    explanation = step.explain(*args)
    assert [s.backend for s in explanation.splits] == ["native"], explanation
    expected = jax.jit(fun)(*args)
    for _ in range(3):
        got = step(*args)
        for name, want in expected.items():
            assert got[name].dtype == want.dtype, name
            np.testing.assert_array_equal(got[name], want, err_msg=name)


def pairs(dtype):
    return (jnp.asarray(x.ravel()) for x in np.meshgrid(edges(dtype), edges(dtype)))


@pytest.mark.parametrize("dtype", INTS)
def test_operations_on_two_integers(dtype):
    check(BINARY, *pairs(dtype))


@pytest.mark.parametrize("dtype", INTS)
def test_operations_on_one_integer(dtype):
    functions = UNARY | ({"abs": jnp.abs} if jnp.issubdtype(dtype, jnp.signedinteger) else {})
    check(functions, jnp.asarray(edges(dtype)))


@pytest.mark.parametrize("dtype", INTS)
def test_reductions_of_integers(dtype):
    x, _ = pairs(dtype)
    check(REDUCTIONS, x.reshape(len(edges(dtype)), -1))


@pytest.mark.parametrize("dtype", INTS)
def test_conversions_of_integers(dtype):
    check({t.__name__: lambda x, t=t: x.astype(t) for t in TYPES}, jnp.asarray(edges(dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_conversions_of_floats_beyond_the_integers(dtype):
    """Towards zero, to the nearest end of the type; NaN is zero."""
    info = jnp.finfo(dtype)
    numbers = [0, -0.0, 0.5, -0.5, 0.99, -0.99, 1.5, -1.5, 2.5, 127, 127.9, 128, -128, -128.9, -129]
    numbers += [255, 255.9, 256, -1, 32767.9, 32768, -32769, 65535.9, 65536, 2.0**31, -(2.0**31)]
    numbers += [2.0**32, 2.0**33, -(2.0**40), 2.0**63, -(2.0**63), 2.0**64, np.inf, -np.inf, np.nan]
    numbers += [float(info.max), float(info.min), float(info.tiny)]
    with np.errstate(over="ignore"):  # to infinity, in f16
        x = jnp.asarray(np.array(numbers, np.float64).astype(dtype))
    check({t.__name__: lambda x, t=t: x.astype(t) for t in [*INTS, jnp.bool_]}, x)


def test_booleans():
    a, b = jnp.array([True, False, True, False]), jnp.array([True, True, False, False])
    functions = {name: BINARY[name] for name in ["max", "min", "eq", "ne", "lt", "le", "gt", "ge"]}
    functions |= {name: BINARY[f"bitwise_{name}"] for name in ("and", "or", "xor")}
    functions |= {"not": lambda a, b: ~a, "sum": lambda a, b: jnp.sum(a & b)}
    functions |= {t.__name__: lambda a, b, t=t: a.astype(t) for t in [*INTS, *FLOATS]}
    check(functions, a, b)


@pytest.mark.skipif(X64, reason="this is that run")
def test_wide_integers():
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
