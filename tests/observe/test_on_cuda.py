"""What is told of a step on a CUDA device: counters, timelines, files; values, not only shapes."""

import functools
import json
import re
import shutil
import subprocess
import time

import jax
import jax.numpy as jnp
import pytest

import jaxgraph

pytestmark = pytest.mark.gpu

LARGE = 1 << 19  # elements: too many for a slot, so that a move is an update
SIZES = {"exec_bytes", "arena_bytes"}  # differ between devices, as times do


def remember(cache, x):
    row = jnp.tanh(x) * 2 + cache[0]
    return jax.lax.dynamic_update_slice(cache, row[None], (3, 0))


def scenario(device):
    """Counters after calls that update a donated array in place.

    So nothing but what is written here decides where arrays are, and a host and a CUDA device must
    count alike.
    """
    options = jaxgraph.Options(fusion=False, idle_seconds=0)  # one launch a node on both
    step = jaxgraph.wrap(remember, donate_argnums=(0,), options=options)
    x = jax.device_put(jnp.ones(1024), device)
    caches = [jnp.full((LARGE // 1024, 1024), i / 8, jnp.float32) for i in range(3)]
    a, b, c = (jax.device_put(cache, device) for cache in caches)
    for _ in range(5):
        a = jax.block_until_ready(step(a, x))  # eager, captured, three replays
    b = jax.block_until_ready(step(b, x))  # moved: patched
    b = jax.block_until_ready(step(b, x))  # and stayed
    c = jax.block_until_ready(step(c, x))  # moved
    other = jax.device_put(jnp.ones((LARGE // 1024 - 1, 1024)), device)
    for _ in range(2):
        other = jax.block_until_ready(step(other, x))  # another signature and variant
    return dict(step.stats())


def test_counters_are_exact():
    on_cuda = scenario(jax.devices()[0])
    expected = {
        "calls": 10, "executions": 10, "eager": 2, "eager_warmup": 2, "captures": 2, "replays": 6,
        "patches": 4, "instantiations": 2, "uid_hits": 6, "chunk_launches": 8, "live_execs": 2,
        "warmups": 2, "warmups_first": 1, "warmups_variant": 1, "signatures": 2, "failures": 0,
        "evictions": 0, "resets": 0, "exec_updates": 0, "updates_refused": 0,
    }  # fmt: skip
    assert {name: on_cuda[name] for name in expected} == expected
    on_host = scenario(jax.devices("cpu")[0])

    def counts(stats):
        return {k: n for k, n in stats.items() if not k.endswith("_ns") and k not in SIZES}

    assert counts(on_cuda) == counts(on_host)
    assert on_cuda["exec_bytes"] > 0


def products(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.fixture
def products_step():
    """A step of four products of 64 MB each, in two chunks or more: nearly all of it is work."""
    up, down = (jnp.full(n, 1e-3, jnp.bfloat16) for n in ((4096, 8192), (8192, 4096)))
    step = jaxgraph.wrap(products, options=jaxgraph.Options(chunk_size=2))
    run = functools.partial(step, jnp.ones((1, 4096), jnp.bfloat16), up, down, up, down)
    for _ in range(4):
        jax.block_until_ready(run())
    assert step.stats().live_execs >= 2
    return step, run


def spans_of(path):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_device_spans_cover_the_step(products_step, tmp_path):
    step, run = products_step
    calls = 20
    with jaxgraph.trace(tmp_path / "out.json"):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        passed = (time.perf_counter() - begin) * 1e6
    spans = spans_of(tmp_path / "out.json")
    device = [e for e in spans if e["cat"] == "device"]
    chunks = step.stats().live_execs
    assert len(device) == calls * chunks
    names = [f"{step.name} split 0 chunk {c}" for c in range(chunks)] * calls
    assert [e["name"] for e in sorted(device, key=lambda e: e["ts"])] == names
    assert len({(e["pid"], e["tid"]) for e in device}) == 1, "one stream"
    ordered = sorted(device, key=lambda e: e["ts"])
    for e, following in zip(ordered, ordered[1:], strict=False):
        assert e["dur"] > 0
        assert e["ts"] + e["dur"] <= following["ts"] + 1, "a stream does one after the other"
    host = [e for e in spans if e["cat"] == "launch"]
    first, last = ordered[0], ordered[-1]
    assert min(e["ts"] for e in host) - 100 <= first["ts"], "nothing runs before its launch"
    assert first["ts"] >= begin * 1e6 - 100
    assert last["ts"] + last["dur"] <= begin * 1e6 + passed + 100
    busy = sum(e["dur"] for e in device)
    assert 0.2 * passed < busy <= passed
    # It reads 256 MB: no H200 does that in 40 µs, and no GPU of the last years takes 20 ms.
    assert 40 < busy / calls < 20_000


def test_dump_has_what_the_driver_captured(products_step, tmp_path):
    step, _ = products_step
    files = {path.name: path for path in jaxgraph.dump(step, tmp_path)}
    chunks = [path for name, path in files.items() if re.match(r"cuda\d+_split0_variant\d+_", name)]
    assert len(chunks) == step.stats().live_execs
    nodes = 0
    for chunk in chunks:
        text = chunk.read_text()
        assert text.startswith("digraph")
        nodes += len(re.findall(r'^"graph_\d+_node_\d+"\s*\[', text, re.MULTILINE))
        if shutil.which("dot"):
            subprocess.run(["dot", "-Tsvg", chunk], check=True, capture_output=True)
    assert nodes == step.stats().live_exec_nodes
    assert any("jaxgraph" in chunk.read_text() for chunk in chunks), "kernels have names"


def test_explain_counts_launches_as_they_are_captured(products_step):
    step, run = products_step
    arguments = run.args
    (split,) = step.explain(*arguments).splits
    assert sum(chunk.launches for chunk in split.chunks) == split.launches
    # One more takes the result out of its slot, where it has had one.
    assert step.stats().live_exec_nodes - split.launches in (0, 1)
    unrun = jaxgraph.wrap(products, options=jaxgraph.Options(chunk_size=2))
    (preview,) = unrun.explain(*arguments).splits
    assert preview.launches == split.launches, "before a call and after it"
    assert [c.launches for c in preview.chunks] == [c.launches for c in split.chunks]


def test_executions_and_events_name_the_device(products_step):
    step, _ = products_step
    assert {(e.platform, e.device) for e in step.executions()} == {("cuda", 0)}
    assert [e.outcome for e in step.executions()] == ["eager", "capture", "replay", "replay"]
    happened = [e.what for e in step.events() if e.what != "placement"]
    assert happened == ["eager", "capture", "replay"]
    assert step.history().startswith("The last execution was a replay")
