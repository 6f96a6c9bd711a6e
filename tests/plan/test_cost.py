"""What planning a step does without: compilations by XLA, and the garbage collector."""

import functools
import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import llama

import jaxgraph
from jaxgraph.plan.step import plan_step


def step_of_30_layers():
    config = replace(llama.SHAPES["15m"], layers=30)
    make = functools.partial(llama.random_params, config, jnp.bfloat16, stacked=True)
    params = jax.eval_shape(make, jax.random.key(0))
    cache = jax.eval_shape(lambda: llama.empty_cache(config, 1, 64, jnp.bfloat16, stacked=True))
    args = (
        params,
        cache,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return functools.partial(llama.decode_step, config=config), args


def test_no_part_of_a_plan_is_compiled_by_xla(caplog):
    """Numbers known beforehand, such as a layer's, are computed without JAX."""
    step, args = step_of_30_layers()
    closed = jax.make_jaxpr(step)(*args)
    labels = [f"argument {i}" for i in range(len(closed.jaxpr.invars))]
    jax.clear_caches()
    with jax.log_compiles():
        plan_step(closed, name="step", function_id=1, options=jaxgraph.Options(), arg_labels=labels)
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x + 1)(1)
        assert "ompil" in caplog.text
    assert gc.isenabled()
