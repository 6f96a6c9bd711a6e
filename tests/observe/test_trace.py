import json

import jax
import jax.numpy as jnp
import pytest

import jaxgraph
from jaxgraph.observe.trace import chrome_trace


def run(step, calls):
    x, w = jnp.ones((4, 64)), jnp.ones((64, 64))  # they stay where they are: no update is needed
    for _ in range(calls):
        jax.block_until_ready(step(x, w))


@pytest.fixture
def step():
    return jaxgraph.wrap(
        lambda x, w: jnp.tanh(x @ w) + 1, options=jaxgraph.Options(chunk_size=1, fusion=False)
    )


def traced(path, name=None):
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    return [e for e in spans if name is None or e["name"].startswith(name)]


def test_executions_phases_and_launches_are_spans(step, tmp_path):
    path = tmp_path / "out.json"
    with jaxgraph.trace(path):
        run(step, 4)
    executions = [e for e in traced(path, step.name) if e["cat"] == "execution"]
    assert [e["name"].rpartition(" ")[2] for e in executions] == [
        "eager",
        "capture",
        "replay",
        "replay",
    ]
    phases = {e["name"] for e in traced(path) if e["cat"] == "phase"}
    assert {"decide", "plan", "capture", "instantiate"} <= phases
    launches = [e for e in traced(path, step.name) if e["cat"] == "launch"]
    assert len(launches) == step.stats().chunk_launches >= 3
    assert {e["name"].rpartition("chunk ")[2] for e in launches} >= {"0", "1"}


def test_spans_of_a_thread_nest(step, tmp_path):
    path = tmp_path / "out.json"
    with jaxgraph.trace(path):
        run(step, 3)
    spans = sorted(traced(path), key=lambda e: (e["ts"], -e["dur"]))
    assert len({e["tid"] for e in spans}) >= 1
    open_until: dict[int, list[float]] = {}
    for e in spans:
        ends = open_until.setdefault(e["tid"], [])
        while ends and ends[-1] <= e["ts"]:
            ends.pop()
        end = e["ts"] + e["dur"]
        assert not ends or end <= ends[-1] + 1e-3, e
        ends.append(end)


def test_nothing_is_gathered_outside(step, tmp_path):
    run(step, 3)
    with jaxgraph.trace(tmp_path / "out.json"):
        pass
    run(step, 1)
    assert traced(tmp_path / "out.json") == []


def test_one_trace_at_a_time(tmp_path, step):
    with jaxgraph.trace(tmp_path / "outer.json"):
        with pytest.raises(RuntimeError, match="running already"), jaxgraph.trace(tmp_path / "b"):
            pass
        run(step, 1)
    assert traced(tmp_path / "outer.json", step.name)
    with jaxgraph.trace(tmp_path / "again.json"):
        run(step, 1)
    assert traced(tmp_path / "again.json", step.name)


def test_a_failure_inside_still_writes_the_trace(tmp_path, step):
    with pytest.raises(ZeroDivisionError), jaxgraph.trace(tmp_path / "out.json"):
        run(step, 1)
        raise ZeroDivisionError
    assert traced(tmp_path / "out.json", step.name)


def test_unwritable_path_is_known_before(tmp_path, step):
    with pytest.raises(OSError), jaxgraph.trace(tmp_path / "no folder" / "out.json"):
        raise AssertionError("not reached")
    with jaxgraph.trace(tmp_path / "out.json"):
        run(step, 1)


def test_device_spans_get_tracks_of_their_own():
    spans = [
        ("f split 0 chunk 0", "launch", 1.0, 1.5, 1 << 60, 0),
        ("f split 0 chunk 0", "device", 1.2, 2.0, 1 << 50, 1),
        ("f split 0 chunk 1", "device", 2.0, 2.5, 1 << 51, 1),
    ]
    events = chrome_trace(spans, 7)["traceEvents"]
    host, first, second = (e for e in events if e["ph"] == "X")
    assert (first["ts"], first["dur"]) == (1.2e6, pytest.approx(0.8e6))
    assert host["pid"] != first["pid"] == second["pid"]
    assert first["tid"] != second["tid"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {host["pid"]: "host", first["pid"]: "CUDA device 1"}
    assert chrome_trace(spans, 7)["otherData"] == {"spans_dropped": 7}


@pytest.mark.gpu
def test_chunks_are_timed_on_the_device(tmp_path):
    step = jaxgraph.wrap(
        lambda x, w: jnp.tanh(x @ w) + 1, options=jaxgraph.Options(chunk_size=1, fusion=False)
    )
    x, w = jnp.ones((4, 4096)), jnp.ones((4096, 4096))
    for _ in range(3):
        jax.block_until_ready(step(x, w))
    path = tmp_path / "out.json"
    with jaxgraph.trace(path):
        for _ in range(5):
            out = step(x, w)
        jax.block_until_ready(out)
    device = [e for e in traced(path, step.name) if e["cat"] == "device"]
    launches = [e for e in traced(path, step.name) if e["cat"] == "launch"]
    assert len(device) == len(launches) == 5 * step.stats().live_execs
    assert all(0 < e["dur"] < 1e6 for e in device)
    begin = min(e["ts"] for e in launches)
    assert all(begin - 1e3 < e["ts"] < begin + 1e6 for e in device)


def test_splits_have_names_in_xla_programs(step):
    lowered = step.lower(jnp.ones((4, 64)), jnp.ones((64, 64)))
    assert "jaxgraph_split_0" in lowered.as_text(debug_info=True)
