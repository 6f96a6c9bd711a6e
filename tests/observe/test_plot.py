import sys

import jax
import jax.numpy as jnp
import pytest

import jaxgraph
from jaxgraph.observe.plot import COLOURS

pytest.importorskip("matplotlib")


@pytest.fixture
def step():
    def layer(x, w):
        return jnp.tanh(x @ w) + 1

    return jaxgraph.wrap(layer, options=jaxgraph.Options(chunk_size=1, fusion=False))


def run(step, calls=6):
    x, w = jnp.ones((4, 64)), jnp.ones((64, 64))
    for _ in range(calls):
        jax.block_until_ready(step(x, w))


def test_every_execution_is_a_point_in_the_colour_of_what_happened(step):
    run(step)
    figure = step.plot()
    latency, splits = figure.axes
    points = {c.get_label().split(" ")[0]: len(c.get_offsets()) for c in latency.collections}
    assert points == {"eager": 1, "capture": 1, "replay": 4}
    assert set(points) <= set(COLOURS)
    assert [line.get_text() for line in splits.texts][0] == "0: native"
    chunks = step.explain().splits[0].chunks
    assert len(splits.patches) == 1 + len(chunks) >= 3


def test_it_can_be_saved(step, tmp_path):
    run(step)
    step.plot().savefig(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_an_error(step):
    with pytest.raises(ValueError, match="call it first"):
        step.plot()


def test_without_matplotlib_the_extra_is_named(step, monkeypatch):
    run(step)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"jaxgraph\[plot\]"):
        step.plot()
