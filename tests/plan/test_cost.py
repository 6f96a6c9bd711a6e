"""What planning a step does without: compilations by XLA, and the garbage collector."""

import functools
import gc
from pathlib import Path

import jax
import pytest

import jaxgraph
from jaxgraph.plan.step import plan_step

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def plan(monkeypatch):
    """Plans a scan over 30 layers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from planning import step_of

    step, args = step_of(30, stacked=True)
    closed = jax.make_jaxpr(step)(*args)
    labels = [f"argument {i}" for i in range(len(closed.jaxpr.invars))]
    options = jaxgraph.Options()
    return functools.partial(
        plan_step, closed, name="step", function_id=1, options=options, arg_labels=labels
    )


def test_no_part_of_a_plan_is_compiled_by_xla(caplog, plan):
    """Numbers known beforehand, such as a layer's, are computed without JAX."""
    jax.clear_caches()
    with jax.log_compiles():
        plan()
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x + 1)(1)
        assert "ompil" in caplog.text
    assert gc.isenabled()


def test_planning_leaves_the_garbage_collector_nothing_to_do(plan):
    plan()  # what is loaded on first use
    gc.collect()
    gc.disable()
    try:
        kept = plan()
        assert gc.collect() < 1000  # of some hundred thousand objects
    finally:
        gc.enable()
    assert kept.has_native
