"""Eight threads, three functions, two devices: nothing of theirs mixes."""

import os
import subprocess
import sys
import textwrap

CALLS = os.environ.get("JAXGRAPH_THREAD_CALLS", "1000")

# In a process of its own: what devices there are is fixed when JAX starts.
SCRIPT = textwrap.dedent(
    """
    import concurrent.futures, sys
    import jax, jax.numpy as jnp, numpy as np
    import jaxgraph

    calls, devices = int(sys.argv[1]), jax.devices()[:2]
    assert len(devices) == 2

    def make(scale):
        def step(cache, x, position):
            cache = jax.lax.dynamic_update_slice(cache, x[None] * scale, (position, 0))
            return cache, cache.sum(axis=0) + scale
        return jaxgraph.wrap(step, donate_argnums=(0,)), jax.jit(step, donate_argnums=(0,))

    functions = [make(float(f + 1)) for f in range(3)]

    def work(thread):
        device = devices[thread % 2]
        put = lambda v: jax.device_put(v, device)
        states = [[put(np.zeros((4, 16), np.float32)) for _ in range(2)] for _ in functions]
        for i in range(calls):
            f = (i + thread) % 3
            x = put(np.full(16, float(thread * calls + i) % 97, np.float32))
            position = put(np.int32(i % 4))
            for engine in (0, 1):
                states[f][engine], out = functions[f][engine](states[f][engine], x, position)
                if engine == 0:
                    ours = out
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(out))
            assert out.devices() == {device}
        return thread

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == list(range(8))
    stats = [ours.stats() for ours, _ in functions]
    assert sum(s.calls for s in stats) == 8 * calls
    for s in stats:
        assert s.executions == s.eager + s.captures + s.replays
        assert s.failures == 0
        assert s.replays > 0.5 * s.executions or calls < 100, s
    print("ok")
    """
)


def test_threads_functions_devices(two_devices):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, CALLS],
        env=two_devices,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.endswith("ok\n"), done.stderr[-4000:]
