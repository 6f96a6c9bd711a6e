import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import jaxgraph


@pytest.fixture
def step():
    def one_layer(x, w, cache, at):
        cache = jax.lax.dynamic_update_slice(cache, x[None], (at, 0, 0))
        return jnp.tanh(x @ w) + cache.sum(0), cache

    return jaxgraph.wrap(
        one_layer, donate_argnums=(2,), options=jaxgraph.Options(chunk_size=2, fusion=False)
    )


def run(step, calls=3):
    x, w, cache = jnp.ones((4, 64)), jnp.ones((64, 64)), jnp.zeros((3, 4, 64))
    for i in range(calls):
        out, cache = step(x, w, cache, jnp.int32(i))
    jax.block_until_ready(out)


def test_files_say_what_the_plan_says(step, tmp_path):
    run(step)
    files = {path.name: path for path in jaxgraph.dump(step, tmp_path / "new")}
    assert all(path.is_file() and path.stat().st_size > 0 for path in files.values())
    (native,) = [s.native for s in step.last_plan().splits if s.native]
    program = json.loads(files["split0.json"].read_text())
    assert len(program["nodes"]) == native.num_nodes
    assert program["key"] == native.key.hex()
    assert {node["op"].upper() for node in program["nodes"]} == set(native.ops)
    assert any("test_dump.py:" in node["label"] for node in program["nodes"])
    assert step.name in files["plan.txt"].read_text()
    assert json.loads(files["stats.json"].read_text()) == dict(step.stats())
    history = json.loads(files["events.json"].read_text())
    assert [e["outcome"] for e in history["executions"]] == ["eager", "capture", "replay"]


def test_node_graph_has_every_node_and_its_sources(step, tmp_path):
    run(step)
    jaxgraph.dump(step, tmp_path)
    program = json.loads((tmp_path / "split0.json").read_text())
    text = (tmp_path / "split0.dot").read_text()
    for number, node in enumerate(program["nodes"]):
        assert f'  n{number} [label="{number} {node["op"]}' in text
        assert len(re.findall(rf"-> n{number};", text)) == len(node["srcs"])
    assert re.search(r"n\d+ -> n\d+;", text), "nodes read what nodes wrote"


def test_captured_chunks_are_drawn(step, tmp_path):
    run(step)
    jaxgraph.dump(step, tmp_path)
    chunks = sorted(tmp_path.glob("*_split0_variant*_chunk*.dot"))
    assert len(chunks) == step.stats().live_execs >= 2
    drawn = sum(len(re.findall(r"^  n\d+ \[label", c.read_text(), re.M)) for c in chunks)
    if jax.default_backend() == "cpu":
        assert drawn == step.stats().live_exec_nodes
    if shutil.which("dot"):
        for file in [*chunks, tmp_path / "split0.dot"]:
            subprocess.run(["dot", "-Tsvg", file], check=True, capture_output=True)


def test_nothing_to_dump_is_an_error(step, tmp_path):
    with pytest.raises(ValueError, match="call it first"):
        jaxgraph.dump(step, tmp_path / "never")
    assert not (tmp_path / "never").exists()
