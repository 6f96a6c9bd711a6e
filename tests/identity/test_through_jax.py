"""Programs written by hand, called through JAX on its default device, with regions among them."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axpy_programs import BASES, WIDTH, encode, random_steps, spec

from jaxgraph.runtime import native
from jaxgraph.runtime.ffi_call import native_call

_ids = itertools.count(0x1DE7_0000)


@dataclasses.dataclass(frozen=True)
class Split:
    program: bytes
    result_avals: tuple = tuple(
        jax.ShapeDtypeStruct((BASES[name][2] // 4,), jnp.float32)
        for name in ("new_cache", "logits")
    )

    @property
    def aliases(self):
        return {3: 0}


def expected(steps, token, weight, large, cache):
    names = {"token": token, "weight": weight, "large": large, "cache": cache}
    # A slice is another buffer: numpy's view of a donated one would keep it from being donated.
    values = {(name, 0): np.asarray(x[:WIDTH]) for name, x in names.items()}
    for s in steps:
        if not s.view:
            values[s.out] = values[s.a] * np.float32(s.k) + values[s.b]
    return values.get(("new_cache", 0), values[("cache", 0)]), values[("logits", 0)]


@pytest.mark.parametrize("concurrency", [False, True])
@pytest.mark.parametrize("chunk_size", [0, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_programs_with_regions(concurrency, chunk_size, depth):
    for seed in range(6):
        rng = random.Random(seed)
        steps = random_steps(rng, 24)
        number = next(_ids)
        program = encode(
            spec(steps, function_id=number, key=number.to_bytes(16, "little"),
                 concurrency=concurrency, chunk_size=chunk_size, update_depth=depth)
        )  # fmt: skip
        call = jax.jit(lambda *a, p=program: native_call(Split(p), a), donate_argnums=(3,))
        random_array = np.random.default_rng(seed)

        def fresh(name, source=random_array):
            floats = BASES[name][2] // 4
            return jnp.asarray(source.integers(-4, 5, floats).astype(np.float32))

        weight, large, cache = fresh("weight"), fresh("large"), fresh("cache")
        kept = []
        for step in range(10):
            token = fresh("token")
            if step == 5:
                kept.append(cache)
                cache = jnp.copy(cache)
            if step == 7:
                kept.append(large)
                large = jnp.copy(large)
            want_cache, want_logits = expected(steps, token, weight, large, cache)
            cache, logits = call(token, weight, large, cache)
            np.testing.assert_array_equal(np.asarray(logits), want_logits)
            np.testing.assert_array_equal(np.asarray(cache[:WIDTH]), want_cache)
        stats = native.stats(number)
        assert stats["executions"] == 10
        assert stats["eager"] == 1
        assert stats["failures"] == 0
        assert depth == 0 or stats["patches"] == 0
        native.clear(number)
