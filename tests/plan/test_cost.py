"""What planning a step does without: compilations by XLA, and the garbage collector."""

import gc
from pathlib import Path

import jax

import jaxgraph
from jaxgraph.plan.step import plan_step

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_no_part_of_a_plan_is_compiled_by_xla(caplog, monkeypatch):
    """Numbers known beforehand, such as a layer's, are computed without JAX."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from planning import step_of

    step, args = step_of(30, stacked=True)
    closed = jax.make_jaxpr(step)(*args)
    labels = [f"argument {i}" for i in range(len(closed.jaxpr.invars))]
    jax.clear_caches()
    with jax.log_compiles():
        plan_step(closed, name="step", function_id=1, options=jaxgraph.Options(), arg_labels=labels)
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x + 1)(1)
        assert "ompil" in caplog.text
    assert gc.isenabled()
