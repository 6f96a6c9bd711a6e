import jax
import jax.numpy as jnp
import pytest

import jaxgraph
from jaxgraph.observe.history import _ADVICE

LARGE = 1 << 19


@pytest.fixture
def step():
    return jaxgraph.wrap(lambda x, y: jnp.sin(x) * 2 + y)


def run(step, *arrays):
    jax.block_until_ready(step(*arrays))


def test_before_the_first_call(step):
    assert step.history().startswith("No native split has run yet")


def test_the_life_of_a_step(step):
    x = jnp.ones(64)
    run(step, x, x)
    assert "ran eagerly: the first call (its variant was not warm yet" in step.history()
    run(step, x, x)
    assert "captured its graphs: 1 chunks after 2 identical calls" in step.history()
    run(step, x, x)
    assert step.history() == ("The last execution was a replay; 1 of 3 executions were replays.")


def test_an_update_names_the_node(step):
    arrays = [jnp.ones(LARGE) * i for i in range(4)]
    for _ in range(3):
        run(step, arrays[0], arrays[1])
    run(step, arrays[2], arrays[1])
    assert "updated its graphs" in step.history()
    assert "address 0x" in step.history()


def test_every_reason_has_advice():
    reasons = {name for name in dict(jaxgraph.Stats()) if name.startswith("eager_")}
    assert reasons - {"eager_ns"} == set(_ADVICE)


def test_explain_tells_it(step):
    x = jnp.ones(64)
    for _ in range(3):
        run(step, x, x)
    assert step.explain().history == step.history()
    assert step.history() in str(step.explain())
