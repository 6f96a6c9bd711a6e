"""Graph keys: a split is known by its first node, wherever it stands and however large it is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxgraph
from jaxgraph.plan.step import plan_step

X = jnp.ones((4, 8))


def keys(fun, *args, function_id=1):
    """The graph keys of the native splits of a function, as if it were always the same one."""
    plan = plan_step(
        jax.make_jaxpr(fun)(*args),
        name="step",
        function_id=function_id,
        options=jaxgraph.Options(min_equations=0),
        arg_labels=[f"argument {i}" for i in range(len(args))],
        donated=[False] * len(args),
    )
    return [split.key for split in plan.native_splits()]


def chain(x, splits_in_front=0):
    for _ in range(splits_in_front):
        x = lax.cumlogsumexp(jnp.exp(x) * 2)
    x = lax.cumlogsumexp(jnp.sin(x) * 2)
    x = lax.cumlogsumexp(x * x + 1)
    return jnp.tanh(x) * 3


def test_it_stays_when_splits_shift():
    plain, shifted = keys(chain, X), keys(lambda x: chain(x, 1), X)
    assert (len(plain), len(shifted)) == (3, 4)
    assert shifted[2:] == plain[1:]  # what comes first reads another array now
    assert len({*plain, *shifted}) == 5


def test_it_stays_when_a_batch_grows():
    assert keys(chain, X) == keys(chain, jnp.ones((2, 8))) == keys(chain, jnp.ones((4, 16)))


def test_a_batch_that_grows_is_a_variant_of_the_same_entry():
    step = jaxgraph.wrap(lambda x: jnp.sin(x) * 2 + x, options=jaxgraph.Options(strict=True))
    for rows in (4, 2, 4, 2, 4, 2):
        step(jnp.ones((rows, 8))).block_until_ready()
    stats = step.stats()
    assert (stats.warmups_first, stats.warmups_variant) == (1, 1)
    assert (stats.eager, stats.captures, stats.replays) == (2, 2, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y, i: jnp.cos(x) + 1,  # another operation, in a node of the same last one
        lambda x, y, i: jnp.sin(y) + 1,  # of another argument
        lambda x, y, i: (jnp.sin(x) + 1).sum(1),  # another kind of node
        lambda x, y, i: lax.top_k(x, 2)[0],
    ],
)
def test_another_first_node_is_another_key(other):
    assert keys(other, X, X, 0) != keys(lambda x, y, i: jnp.sin(x) + 1, X, X, 0)


def test_parameters_of_the_first_node_count():
    rows = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )

    def gather(**how):
        def fun(x, i):
            return lax.gather(x, i, rows, slice_sizes=(1, 8), **how) @ x.T

        return keys(fun, X, jnp.zeros((3, 1), jnp.int32))[0]

    assert len({gather(mode="clip"), gather(mode="fill", fill_value=1),
                gather(mode="fill", fill_value=2)}) == 3  # fmt: skip


def test_wrapped_functions_have_their_own():
    assert not {*keys(chain, X)} & {*keys(chain, X, function_id=2)}
