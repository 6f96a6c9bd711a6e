"""Random small programs: what `wrap` returns equals plain `jax.jit`, eager, captured and replayed.

Every example is called four times with fresh inputs, so that all of warmup, capture and replay run.
`JAXGRAPH_FUZZ` multiplies the number of examples.
"""

import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxgraph

EXAMPLES = int(100 * float(os.environ.get("JAXGRAPH_FUZZ", "1")))

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
INTS = [jnp.int32, jnp.uint8, jnp.int8]

# Operations with a bounded derivative near the values that occur, so that two correct roundings of
# the inputs cannot drift apart.
UNARY = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "square": lambda x: jnp.square(jnp.tanh(x)),
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "erf": lax.erf,
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1),
    "floor_of_index": lambda x: x + jnp.arange(x.shape[-1], dtype=x.dtype),
    "relu": jax.nn.relu,
    "where": lambda x: jnp.where(jnp.arange(x.shape[-1]) % 2 == 0, x, -x),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": lambda x, y: jnp.tanh(x) * jnp.tanh(y),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "div": lambda x, y: x / (1 + jnp.abs(y)),
}
ROWS = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "rms_norm": lambda x: (
        x
        * lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-3).astype(
            x.dtype
        )
    ),
    "layer_norm": lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1),
    "sum": lambda x: x.sum(-1, keepdims=True) + jnp.zeros_like(x),
    "max": lambda x: x - x.max(-1, keepdims=True),
    "sum_of_first_axis": lambda x: x + x.sum(0),
}
SHAPING = {
    "transpose": lambda x: x.T.reshape(x.shape),
    "reverse": lambda x: jnp.flip(x, -1),
    "roll": lambda x: jnp.roll(x, 1, axis=-1),
    "concat": lambda x: jnp.concatenate([x[..., 1:], x[..., :1]], -1),
    "halves": lambda x: jnp.concatenate(
        [-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1
    ),
    "stack": lambda x: jnp.stack([x, -x], 0)[1],
    "repeat": lambda x: jnp.repeat(x, 2, axis=0)[: x.shape[0]],
    "slice": lambda x: (
        jnp.pad(x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)]) if x.shape[-1] > 1 else x
    ),
    "pad": lambda x: jnp.pad(x, [(1, 0)] + [(0, 1)] * (x.ndim - 1))[
        tuple(slice(n) for n in x.shape)
    ],
    "pad_inside": lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 1)] * x.ndim)[
        tuple(slice(n) for n in x.shape)
    ],
    "pad_negative": lambda x: (
        lax.pad(x, jnp.ones((), x.dtype), [(2, -2, 0)] + [(0, 0, 0)] * (x.ndim - 1))
        if x.shape[0] > 2
        else x
    ),
    "tile": lambda x: jnp.tile(x, 2)[..., : x.shape[-1]],
    "gather": lambda x: x[jnp.arange(x.shape[0])[::-1]],
    "update": lambda x: x.at[0].set(2 * x[0]),
    "dynamic": lambda x: lax.dynamic_update_slice(
        x, x[:1] * 3, (x.shape[0] // 2,) + (0,) * (x.ndim - 1)
    ),
    "matmul": lambda x: (
        x @ jnp.tanh(x.reshape(x.shape[-1], -1)[:, :1] * jnp.ones((1, x.shape[-1]), x.dtype))
    ),
    "einsum": lambda x: jnp.einsum("...i,...j->...i", x, jnp.tanh(x)),
}
CHOICES: dict[str, tuple[int, Callable]] = {}
for _table, _arity in ((UNARY, 1), (BINARY, 2), (ROWS, 1), (SHAPING, 1)):
    CHOICES |= {f"{name}/{_arity}": (_arity, fun) for name, fun in _table.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """Steps (operation, argument numbers) over two inputs; the last values are the outputs."""

    shape: tuple[int, ...]
    dtype: str
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: int
    chunk_size: int
    fusion: bool

    def fun(self, x, y):
        values = [x, y]
        for name, args in self.steps:
            _, operation = CHOICES[name]
            values.append(operation(*[values[a] for a in args]).astype(x.dtype))
        return values[-self.outputs :]


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 33]), min_size=1, max_size=3)))
    steps = []
    for i in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(CHOICES)))
        if name.startswith("matmul") and len(shape) != 2:
            name = "tanh/1"
        arity, _ = CHOICES[name]
        # Mostly the newest value, so that chains get long; sometimes an old one.
        pick = st.one_of(st.just(i + 1), st.integers(0, i + 1))
        steps.append((name, tuple(draw(pick) for _ in range(arity))))
    return Case(
        shape,
        draw(st.sampled_from(FLOATS)).__name__,
        tuple(steps),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([0, 1, 2, 512])),
        draw(st.booleans()),
    )


def tolerance(dtype) -> float:
    """Room for a few roundings; XLA may keep more bits between operations than the dtype has."""
    return {"float32": 2e-5, "bfloat16": 6e-2, "float16": 8e-3}[np.dtype(dtype).name]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_random_programs_equal_jit(case: Case):
    dtype = jnp.dtype(case.dtype)
    expected_fun = jax.jit(case.fun)
    options = jaxgraph.Options(chunk_size=case.chunk_size, fusion=case.fusion, strict=True)
    wrapped = jaxgraph.wrap(case.fun, options=options)
    rng = np.random.default_rng(0)
    for _ in range(4):
        x, y = (jnp.asarray(rng.standard_normal(case.shape), dtype) for _ in range(2))
        for got, expected in zip(wrapped(x, y), expected_fun(x, y), strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            a, b = np.asarray(got, np.float32), np.asarray(expected, np.float32)
            scale = 1 + np.abs(b).max(initial=0)
            np.testing.assert_allclose(a, b, atol=tolerance(dtype) * scale, rtol=0)
    stats = wrapped.stats()
    assert stats.calls == 4
    assert stats.failures == 0


INTEGER_UNARY = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "not": jnp.bitwise_not,
    "sign": jnp.sign,
    "popcount": lax.population_count,
    "clz": lax.clz,
    "cube": lambda x: lax.integer_pow(x, 3),
}
INTEGER_BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lambda x, y: lax.div(x, jnp.where(y == 0, 1, y).astype(x.dtype)),
    "rem": lambda x, y: lax.rem(x, jnp.where(y == 0, 1, y).astype(x.dtype)),
    "floor_mod": lambda x, y: jnp.mod(x, jnp.where(y == 0, 1, y).astype(x.dtype)),
    "max": jnp.maximum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "shl": lambda x, y: lax.shift_left(x, y),
    "shr": lambda x, y: lax.shift_right_logical(x, y),
    "sar": lambda x, y: lax.shift_right_arithmetic(x, y),
    "select": lambda x, y: jnp.where(x < y, x, y),
    "clamp": lambda x, y: lax.clamp(jnp.minimum(x, y), x, jnp.maximum(x, y)),
}


@st.composite
def integer_cases(draw):
    steps = []
    for i in range(draw(st.integers(1, 6))):
        table, arity = draw(st.sampled_from([(INTEGER_UNARY, 1), (INTEGER_BINARY, 2)]))
        name = draw(st.sampled_from(sorted(table)))
        steps.append((arity, name, tuple(draw(st.integers(0, i + 1)) for _ in range(arity))))
    return draw(st.sampled_from(INTS)).__name__, tuple(steps)


@settings(
    max_examples=EXAMPLES // 2,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(integer_cases(), st.integers(0, 2**31))
def test_random_integer_programs_are_exact(case, seed):
    dtype_name, steps = case
    dtype = jnp.dtype(dtype_name)

    def fun(x, y):
        values = [x, y]
        for arity, name, args in steps:
            table = INTEGER_UNARY if arity == 1 else INTEGER_BINARY
            values.append(table[name](*[values[a] for a in args]).astype(dtype))
        return values[-1], values[-1].max(), jnp.argmax(values[-1])

    wrapped = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        x, y = (
            jnp.asarray(rng.integers(info.min, info.max, 37, dtype=dtype, endpoint=True))
            for _ in range(2)
        )
        for got, expected in zip(wrapped(x, y), jax.jit(fun)(x, y), strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
