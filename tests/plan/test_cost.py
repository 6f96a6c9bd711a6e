"""Tracing and planning a step cost no more than XLA's compilation of it."""

import functools
import gc
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import llama
import pytest

import jaxgraph
from jaxgraph.plan.step import plan_step


def step_of(stacked):
    config = replace(llama.SHAPES["15m"], layers=30 if stacked else 10)
    make = functools.partial(llama.random_params, config, jnp.bfloat16, stacked=stacked)
    params = jax.eval_shape(make, jax.random.key(0))
    cache = jax.eval_shape(lambda: llama.empty_cache(config, 1, 64, jnp.bfloat16, stacked=stacked))
    args = (
        params,
        cache,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return functools.partial(llama.decode_step, config=config), args


def seconds(function, *args):
    """Of the processor's, so that what else runs on the machine does not count."""
    jax.clear_caches()
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
def test_a_plan_costs_less_than_a_compilation(stacked):
    """Also where XLA compiles one layer of thirty, which are planned all."""
    step, args = step_of(stacked)
    explain = functools.partial(jaxgraph.explain, step)
    ours = min(seconds(explain, *args) for _ in range(3))
    xla = min(seconds(lambda *a: jax.jit(step).lower(*a).compile(), *args) for _ in range(2))
    assert ours <= xla


def test_no_part_of_a_plan_is_compiled_by_xla(caplog):
    """Numbers known beforehand, such as a layer's, are computed without JAX."""
    step, args = step_of(stacked=True)
    closed = jax.make_jaxpr(step)(*args)
    labels = [f"argument {i}" for i in range(len(closed.jaxpr.invars))]
    jax.clear_caches()
    with jax.log_compiles():
        plan_step(closed, name="step", function_id=1, options=jaxgraph.Options(), arg_labels=labels)
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x + 1)(1)
        assert "ompil" in caplog.text
    assert gc.isenabled()
