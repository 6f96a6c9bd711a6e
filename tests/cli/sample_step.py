"""A step for the command line's tests."""

import jax
import jax.numpy as jnp

import jaxgraph


def example_args():
    return jnp.ones((4, 64)), jnp.ones((64, 64)), jnp.zeros((8, 4, 64))


def step(x, w, cache):
    cache = jax.lax.dynamic_update_slice(cache, x[None], (2, 0, 0))
    return jnp.tanh(x @ w) + cache.sum(0), cache


def other_args():
    return jnp.ones((2, 64)), jnp.ones((64, 64)), jnp.zeros((8, 2, 64))


wrapped = jaxgraph.wrap(step, donate_argnums=(2,))


def prefill(x, w):
    return x @ w


not_a_function = 3


class Holder:
    step = staticmethod(step)


def wrong(x, w, cache):
    """Gives another result at every trace: what `bench` must notice."""
    wrong.traces += 1
    return x * wrong.traces


wrong.traces = 0
