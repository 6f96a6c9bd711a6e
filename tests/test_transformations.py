"""A wrapped function composes: jit, scan, while, cond, grad, vmap, shard_map, export, effects."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph import Options


def fun(x, w):
    return jnp.sin(x) * w + x


@pytest.fixture
def step():
    return jaxgraph.wrap(fun, options=Options(strict=True))


X, W = jnp.linspace(0.0, 1.0, 6), jnp.linspace(1.0, 2.0, 6)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def test_inside_jit(step):
    outer = jax.jit(lambda x, w: step(x * 2, w) + 1)
    for _ in range(4):
        close(outer(X, W), fun(X * 2, W) + 1)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 2)
    assert stats.calls == 1, "Python called it once, while tracing"


def test_inside_scan(step):
    out, _ = jax.lax.scan(lambda x, _: (step(x, W), None), X, None, length=12)
    expected, _ = jax.lax.scan(lambda x, _: (fun(x, W), None), X, None, length=12)
    close(out, expected)
    stats = step.stats()
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 10)


def test_inside_while_and_cond(step):
    def body(state):
        i, x = state
        return i + 1, jax.lax.cond(i % 2 == 0, lambda x: step(x, W), lambda x: x, x)

    _, out = jax.lax.while_loop(lambda s: s[0] < 4, body, (0, X))
    close(out, fun(fun(X, W), W))
    assert step.stats().executions == 2


def test_inside_another_wrapped_function(step):
    outer = jaxgraph.wrap(lambda x, w: step(x, w) * 2, options=Options(strict=True))
    for _ in range(3):
        close(outer(X, W), fun(X, W) * 2)


def test_grad_jvp_and_hessian_are_those_of_the_original(step):
    total = lambda f: lambda x: f(x, W).sum()  # noqa: E731
    close(jax.grad(total(step))(X), jax.grad(total(fun))(X))
    close(jax.jit(jax.grad(total(step)))(X), jax.grad(total(fun))(X))
    close(jax.jvp(step, (X, W), (W, X))[1], jax.jvp(fun, (X, W), (W, X))[1])
    close(jax.hessian(total(step))(X), jax.hessian(total(fun))(X))
    close(jax.grad(jax.checkpoint(total(step)))(X), jax.grad(total(fun))(X))


def test_grad_through_integer_arguments_and_results():
    def pick(x, i):
        return x[i] * 2, i + 1

    step = jaxgraph.wrap(pick, options=Options(strict=True))
    grad, i = jax.grad(lambda x: step(x, jnp.int32(2)), has_aux=True)(X)
    close(grad, np.eye(6)[2] * 2)
    assert i == 3


def test_custom_derivatives_are_kept():
    @jax.custom_jvp
    def clipped(x):
        return jnp.clip(x, 0, 1)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))
    step = jaxgraph.wrap(lambda x: clipped(x * 3).sum(), options=Options(strict=True))
    close(jax.grad(step)(X), np.full(6, 3.0))


def test_linear_transpose():
    step = jaxgraph.wrap(lambda x, w: x * w, options=Options(strict=True))
    (transposed,) = jax.linear_transpose(lambda x: step(x, W), X)(X)
    close(transposed, X * W)


def test_vmap(step):
    xs = jnp.stack([X, X + 1, X + 2])
    close(jax.vmap(step, in_axes=(0, None))(xs, W), jax.vmap(fun, in_axes=(0, None))(xs, W))
    close(
        jax.vmap(step, in_axes=(1, None), out_axes=1)(xs.T, W), jax.vmap(fun, (1, None), 1)(xs.T, W)
    )
    close(jax.jit(jax.vmap(jax.grad(lambda x: step(x, W).sum())))(xs), jnp.cos(xs) * W + 1)


def test_disable_jit_runs_the_original(step):
    with jax.disable_jit():
        close(step(X, W), fun(X, W))
    assert step.stats().executions == 0


def test_outer_disable_jit_of_a_jaxpr(step):
    jaxpr = jax.make_jaxpr(step)(X, W)
    with jax.disable_jit():
        (out,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, X, W)
    close(out, fun(X, W))


def test_closing_over_a_tracer_of_an_outer_trace():
    def outer(x):
        return jaxgraph.wrap(lambda y: y * x + 1, options=Options(strict=True))(x + 1)

    close(jax.jit(outer)(X), (X + 1) * X + 1)
    close(jax.grad(lambda x: outer(x).sum())(X), 2 * X + 1)


def test_export(step):
    pytest.importorskip("flatbuffers")
    from jax import export

    exported = export.export(
        jax.jit(step),
        platforms=[jax.devices()[0].platform.replace("gpu", "cuda")],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("jaxgraph_execute")],
    )(X, W)
    again = export.deserialize(exported.serialize())
    close(again.call(X, W), fun(X, W))
    assert step.stats().executions == 1


def test_a_platform_without_a_native_backend_lowers_the_plain_function(step):
    from jax import export

    exported = export.export(jax.jit(step), platforms=["tpu"])(X, W)
    assert "jaxgraph_execute" not in exported.mlir_module()


def test_lowering_for_cuda_needs_no_gpu(step):
    from jax import export

    text = export.export(
        jax.jit(step),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("jaxgraph_execute")],
    )(X, W).mlir_module()
    assert ("jaxgraph_execute" in text) == jaxgraph.build_info()["cuda"]


def test_debug_print_keeps_its_order(capfd):
    def noisy(x):
        jax.debug.print("first {}", x[0], ordered=True)
        y = x * 2
        jax.debug.print("second {}", y[0], ordered=True)
        return y + 1

    step = jaxgraph.wrap(noisy, options=Options(strict=True))
    for _ in range(3):
        close(step(jnp.ones(3)), np.full(3, 3.0))
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == ["first 1.0", "second 2.0"] * 3


def test_pure_callback_and_random_stay_right():
    def fun(key, x):
        noise = jax.random.normal(key, x.shape)
        return jax.pure_callback(lambda v: np.asarray(v) * 2, x, x + 1) + noise

    step = jaxgraph.wrap(fun, options=Options(strict=True))
    key = jax.random.key(0)
    for _ in range(3):
        close(step(key, X), jax.jit(fun)(key, X))


def run_on_two_devices(program):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    prelude = """
        import jax, jax.numpy as jnp, numpy as np, jaxgraph
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        mesh = Mesh(jax.devices(), "d")
        def fun(x):
            return jnp.sin(x) * 2 + x
        step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(program)
    subprocess.run([sys.executable, "-P", "-c", script], check=True, env=environment)


def test_shard_map_runs_natively_on_each_device():
    run_on_two_devices("""
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        for _ in range(3):
            np.testing.assert_allclose(mapped(x), fun(np.arange(8.0)), rtol=1e-5)
        stats = step.stats()
        assert (stats.eager, stats.captures, stats.replays) == (2, 2, 2), stats
    """)


def test_operands_replicated_over_the_mesh_inside_shard_map():
    run_on_two_devices("""
        def scaled(x, w):
            y = jnp.tanh(x * 2 + 1) * w
            return jax.lax.lgamma(y) + w, y

        step = jaxgraph.wrap(scaled, options=jaxgraph.Options(strict=True))
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        specs = dict(mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        mapped, plain = (jax.jit(jax.shard_map(f, **specs)) for f in (step, scaled))
        for _ in range(3):
            got, expected = mapped(x, jnp.arange(4.0)), plain(x, jnp.arange(4.0))
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)
        assert step.stats().replays == 2, step.stats()
    """)


def test_collectives_inside_shard_map():
    run_on_two_devices("""
        step = jaxgraph.wrap(
            lambda x: jax.lax.psum(x * 2, "d") + x, options=jaxgraph.Options(strict=True))
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        x4 = np.arange(8.0).reshape(2, 4)
        np.testing.assert_allclose(mapped(x), (x4.sum(0) * 2 + x4).ravel(), rtol=1e-5)
    """)


def test_automatically_sharded_operands_run_the_plain_function():
    run_on_two_devices("""
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        for _ in range(2):
            out = step(x)
        np.testing.assert_allclose(out, fun(np.arange(8.0)), rtol=1e-5)
        assert len(out.devices()) == 2, out.devices()
        assert step.stats().executions == 0
        assert "2 devices" in str(step.explain(x)), step.explain(x)
        assert not step.explain(x).native
    """)


def test_two_devices_do_not_mix():
    run_on_two_devices("""
        a, b = (jax.device_put(jnp.full(4, float(i)), d) for i, d in enumerate(jax.devices()))
        for _ in range(3):
            np.testing.assert_allclose(step(a), fun(np.full(4, 0.0)), rtol=1e-5)
            np.testing.assert_allclose(step(b), fun(np.full(4, 1.0)), rtol=1e-5)
        stats = step.stats()
        assert (stats.eager, stats.captures, stats.replays) == (2, 2, 2), stats
        assert {event.device for event in step.events()} == {0, 1}
    """)


def test_the_persistent_compilation_cache_serves_a_second_process(tmp_path):
    program = """
        import jax, jax.numpy as jnp, numpy as np, jaxgraph
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        hits = []
        jax.monitoring.register_event_listener(lambda name, **kw: hits.append(name))
        step = jaxgraph.wrap(lambda x: jnp.sin(x) * 2 + x, options=jaxgraph.Options(strict=True))
        x = jax.block_until_ready(jnp.arange(8.0))
        hits.clear()
        for _ in range(3):
            np.testing.assert_allclose(step(x), np.sin(np.arange(8.0)) * 2 + np.arange(8.0), 1e-5)
        stats = step.stats()
        assert (stats.eager, stats.captures, stats.replays) == (1, 1, 1), stats
        print("hit" if "/jax/compilation_cache/cache_hits" in hits else "miss")
    """
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    outcomes = [
        subprocess.run(
            [sys.executable, "-P", "-c", textwrap.dedent(program)],
            check=True,
            env=environment,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert outcomes == ["miss", "hit"]
