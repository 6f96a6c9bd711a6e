"""Batches on a CUDA device, through JAX: native up to the rows that its kernels stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph import Options
from jaxgraph.passes.profitability import DEFAULT
from jaxgraph.runtime import native

pytestmark = pytest.mark.gpu

WIDTH, HIDDEN, LAYERS = 192, 640, 3


def norm(x, scale):
    f = x.astype(jnp.float32)
    f = f * jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + 1e-5)
    return f.astype(x.dtype) * scale


def step(layers, x):
    for w in layers:
        h = norm(x, w["scale"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return x


def weights(dtype):
    def draw(key, k, n):
        return (jax.random.normal(key, (k, n)) / np.sqrt(k)).astype(dtype)

    layers = []
    for key in jax.random.split(jax.random.key(0), LAYERS):
        gate, up, down = jax.random.split(key, 3)
        layers.append(
            {
                "scale": jnp.linspace(0.5, 1.5, WIDTH).astype(dtype),
                "gate": draw(gate, WIDTH, HIDDEN),
                "up": draw(up, WIDTH, HIDDEN),
                "down": draw(down, HIDDEN, WIDTH),
            }
        )
    return layers


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(8, "bfloat16"), (16, "float16"), (40, "bfloat16"), (64, "float16"), (65, "bfloat16")],
)
def test_a_step_of_many_rows(rows, dtype):
    layers = weights(dtype)
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH)).astype(dtype)
    wrapped = jaxgraph.wrap(step, options=Options(strict=True))
    most = (4 if native.streams_many_rows() else 1) * DEFAULT.max_rows
    assert wrapped.explain(layers, x).native == (rows <= most)
    results = [np.asarray(wrapped(layers, x).astype(jnp.float32)) for _ in range(4)]
    for again in results[1:]:
        np.testing.assert_array_equal(again, results[0])
    exact = jax.jit(step)(
        jax.tree.map(lambda w: w.astype(jnp.float32), layers), x.astype(jnp.float32)
    )
    error = np.linalg.norm(results[0] - exact) / np.linalg.norm(exact)
    assert error < (2e-2 if dtype == "bfloat16" else 3e-3)
