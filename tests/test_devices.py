"""Several devices: shard_map, operands that JAX shards by itself, one executor for each device."""

import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def run_on_two_devices(two_devices):
    """Runs a program in a process that sees two devices."""
    return lambda program: run(program, two_devices)


def run(program, environment):
    prelude = """
        import jax, jax.numpy as jnp, numpy as np, jaxgraph
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        assert len(jax.devices()) >= 2
        mesh = Mesh(jax.devices()[:2], "d")
        def fun(x):
            return jnp.sin(x) * 2 + x
        step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(program)
    subprocess.run([sys.executable, "-P", "-c", script], check=True, env=environment)


def test_shard_map_runs_natively_on_each_device(run_on_two_devices):
    run_on_two_devices("""
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        for _ in range(3):
            np.testing.assert_allclose(mapped(x), fun(np.arange(8.0)), rtol=1e-5)
        stats = step.stats()
        assert (stats.eager, stats.captures, stats.replays) == (2, 2, 2), stats
    """)


def test_operands_replicated_over_the_mesh_inside_shard_map(run_on_two_devices):
    run_on_two_devices("""
        def scaled(x, w):
            y = jnp.tanh(x * 2 + 1) * w
            return jax.lax.cumlogsumexp(y) + w, y

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


def test_collectives_inside_shard_map(run_on_two_devices):
    run_on_two_devices("""
        step = jaxgraph.wrap(
            lambda x: jax.lax.psum(x * 2, "d") + x, options=jaxgraph.Options(strict=True))
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        x4 = np.arange(8.0).reshape(2, 4)
        np.testing.assert_allclose(mapped(x), (x4.sum(0) * 2 + x4).ravel(), rtol=1e-5)
    """)


def test_automatically_sharded_operands_run_the_plain_function(run_on_two_devices):
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


def test_two_devices_do_not_mix(run_on_two_devices):
    run_on_two_devices("""
        a, b = (jax.device_put(jnp.full(4, float(i)), d) for i, d in enumerate(jax.devices()[:2]))
        for _ in range(3):
            np.testing.assert_allclose(step(a), fun(np.full(4, 0.0)), rtol=1e-5)
            np.testing.assert_allclose(step(b), fun(np.full(4, 1.0)), rtol=1e-5)
        stats = step.stats()
        assert (stats.eager, stats.captures, stats.replays) == (2, 2, 2), stats
        assert {event.device for event in step.events()} == {0, 1}
    """)


def test_a_part_of_the_mesh_that_is_not_manual_runs_the_plain_function(run_on_two_devices):
    run_on_two_devices("""
        mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("a", "d"))
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
        mapped = jax.jit(jax.shard_map(
            step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"}))
        for _ in range(2):
            np.testing.assert_allclose(mapped(x), fun(np.arange(8.0)), rtol=1e-5)
        assert step.stats().executions == 0
        assert "not manual in this shard_map" in str(step.explain()), step.explain()
    """)


def test_a_decode_step_with_collectives_on_two_devices(run_on_two_devices):
    """Heads are split over the devices, as in tensor parallelism; each keeps its cache in place."""
    run_on_two_devices("""
        def decode(w, cache, x, at):
            cache = jax.lax.dynamic_update_slice(cache, (x @ w["in"])[None], (at, 0))
            seen = jnp.where(jnp.arange(len(cache)) <= at, cache @ (x @ w["in"]), -jnp.inf)
            out = jax.nn.softmax(seen) @ cache @ w["out"]
            x = jax.lax.psum(out, "d") + x
            return cache, jnp.tanh(x) * jax.nn.sigmoid(x) + 0.5 * x, at + 1

        step = jaxgraph.wrap(decode, donate_argnums=1, options=jaxgraph.Options(strict=True))
        specs = dict(
            mesh=mesh,
            in_specs=({"in": P(None, "d"), "out": P("d")}, P(None, "d"), P(), P()),
            out_specs=(P(None, "d"), P(), P()),
        )
        mapped = jax.jit(jax.shard_map(step, **specs), donate_argnums=1)
        plain = jax.jit(jax.shard_map(decode, **specs))
        key = jax.random.key(0)
        w = {"in": jax.random.normal(key, (8, 16)), "out": jax.random.normal(key, (16, 8)) / 4}
        state = other = jnp.zeros((12, 16)), jnp.ones(8), jnp.int32(0)
        sharded = NamedSharding(mesh, P(None, "d"))
        state = jax.device_put(state[0], sharded), *state[1:]
        for _ in range(10):
            addresses = [s.data.unsafe_buffer_pointer() for s in state[0].addressable_shards]
            state, other = mapped(w, *state), plain(w, *other)
            now = [s.data.unsafe_buffer_pointer() for s in state[0].addressable_shards]
            assert now == addresses, "the cache was copied"
            np.testing.assert_allclose(state[1], other[1], rtol=1e-4)
        explanation = step.explain()
        assert [s.backend for s in explanation.splits] == ["native", "xla", "native"], explanation
        (left,) = explanation.left_in_xla
        assert "psum" in left.primitive and "collective" in left.reason, left
        stats = step.stats()
        assert stats.executions == 40 and stats.failures == 0, stats
        for split in explanation.splits[::2]:
            assert sorted(v.device for v in split.variants) == [0, 1]
            assert {v.stage for v in split.variants} == {"captured"}
    """)


def test_arenas_are_reserved_on_the_device_of_the_arguments(run_on_two_devices):
    run_on_two_devices("""
        def chained(x):
            return (x @ x + 1) @ x
        step = jaxgraph.wrap(chained, options=jaxgraph.Options(strict=True))
        x = jax.device_put(jnp.ones((16, 16)), jax.devices()[1])
        assert step.reserve(x) > 0
        for _ in range(3):
            step(x)
        (variant,) = step.explain(x).splits[0].variants
        assert variant.device == 1
    """)
