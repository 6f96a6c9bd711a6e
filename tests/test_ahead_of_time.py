"""Compiled ahead of time: lower and compile, export, other platforms, the persistent cache."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxgraph
from jaxgraph import Options
from jaxgraph.explain import Site, explain_plan

X, W = jnp.linspace(0.0, 1.0, 6), jnp.linspace(1.0, 2.0, 6)
CALL = "jaxgraph_execute"


def fun(x, w):
    return jnp.sin(x) * w + x


@pytest.fixture
def step():
    return jaxgraph.wrap(fun, options=Options(strict=True))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_lower_and_compile_with_donation():
    step = jaxgraph.wrap(lambda cache, x: cache + x, donate_argnums=0, options=Options(strict=True))
    compiled = step.lower(X, W).compile()
    cache = X + 0
    address = cache.unsafe_buffer_pointer()
    for i in range(4):
        cache = compiled(cache, W)
        assert cache.unsafe_buffer_pointer() == address
        close(cache, X + (i + 1) * W)
    assert step.stats().replays == 2


def test_export_has_native_splits(step):
    exported = step.export()(X, W)
    assert CALL in exported.mlir_module()
    for _ in range(3):
        close(exported.call(X, W), fun(X, W))
    assert step.stats().replays == 1


def test_export_knows_closed_over_arrays_and_shapes_alone():
    big = jnp.arange(2000.0)
    step = jaxgraph.wrap(lambda x: x * 2 + big, options=Options(strict=True))
    exported = step.export()(jax.ShapeDtypeStruct((2000,), jnp.float32))
    close(exported.call(jnp.ones(2000)), big + 2)


def test_export_is_read_by_another_process(step, tmp_path):
    pytest.importorskip("flatbuffers")
    file = tmp_path / "step"
    file.write_bytes(step.export()(X, W).serialize())
    program = """
        import sys, jax, jax.numpy as jnp, numpy as np, jaxgraph
        from jax import export
        step = export.deserialize(open(sys.argv[1], "rb").read())
        x, w = jnp.linspace(0.0, 1.0, 6), jnp.linspace(1.0, 2.0, 6)
        for _ in range(3):
            np.testing.assert_allclose(step.call(x, w), jnp.sin(x) * w + x, rtol=2e-6)
        stats = jaxgraph.stats()
        assert (stats.eager, stats.captures, stats.replays) == (1, 1, 1), stats
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(program), str(file)]
    subprocess.run(command, check=True)


def test_jaxs_own_export_refuses_to_serialize_what_it_does_not_know(step):
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        export.export(jax.jit(step))(X, W)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_a_platform_without_a_native_backend_gets_the_plain_function(step, platform):
    traced = jax.jit(step).trace(X, W)
    assert CALL not in traced.lower(lowering_platforms=(platform,)).as_text()
    assert CALL not in step.export(platforms=[platform])(X, W).mlir_module()
    planned = traced.jaxpr.eqns[0].params["jaxpr"].eqns[0].params["planned"]
    explanation = explain_plan(
        planned,
        function="fun",
        function_id=step.function_id,
        options=step.options,
        site=Site(platform, 0, 1),
    )
    assert not explanation.native
    assert any(f"no native backend for platform '{platform}'" in n for n in explanation.notes)
    assert [s.backend for s in explanation.splits] == ["native"], "what it would be elsewhere"


def test_lowering_for_several_platforms_at_once(step):
    traced = jax.jit(step).trace(X, W)
    text = traced.lower(lowering_platforms=("cpu", "tpu")).as_text()
    assert text.count(f"@{CALL}(") == 1 and "stablehlo.case" in text


def test_lowering_for_cuda_needs_no_gpu(step):
    text = step.export(platforms=["cuda"])(X, W).mlir_module()
    assert (CALL in text) == jaxgraph.build_info()["cuda"]


PROGRAM = """
    import sys, jax, jax.numpy as jnp, numpy as np, jaxgraph
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    hits = []
    jax.monitoring.register_event_listener(lambda name, **kw: hits.append(name))
    factor = float(sys.argv[1])
    table = jnp.arange(2000.0)  # closed over, so an operand
    def fun(x):
        return jnp.sin(x) * factor + table
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    x = jax.block_until_ready(jnp.ones(2000))
    hits.clear()
    for _ in range(3):
        np.testing.assert_allclose(step(x), np.sin(1.0) * factor + np.arange(2000.0), 1e-5)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 1), stats
    print("hit" if "/jax/compilation_cache/cache_hits" in hits else "miss")
"""


def test_the_persistent_compilation_cache_serves_a_second_process(tmp_path):
    """And not one whose function is another one."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}

    def run(factor):
        command = [sys.executable, "-P", "-c", textwrap.dedent(PROGRAM), factor]
        ran = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        return ran.stdout.strip()

    assert [run("2"), run("2"), run("3"), run("2")] == ["miss", "hit", "miss", "hit"]
