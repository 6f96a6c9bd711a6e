import jax
import jax.numpy as jnp
import pytest

import jaxgraph
from jaxgraph.observe.events import Event, Execution
from jaxgraph.observe.history import _ADVICE, history

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


def test_the_reason_is_the_last_executions_own():
    """Not that of most executions, nor of another variant's."""

    def execution(variant, outcome, reason=""):
        return Execution(0.0, 0, 0, 0, variant, outcome, reason, "host", 0)

    def event(variant, what, why):
        return Event(1, 0.0, 0, "f", 0, "", variant, what, why)

    stats = jaxgraph.Stats(executions=9, eager_warmup=5, eager_failures=1, replays=3)
    seen = [
        event(1, "eager", "the first call"),
        event(1, "eager", "too many failures: no memory"),
        event(2, "eager", "a new variant: structure"),
        event(2, "capture", "1 chunks after 2 identical calls"),
    ]
    told = history(stats, seen, [execution(1, "eager", "eager_failures")])
    assert "ran eagerly: too many failures: no memory (captures or launches failed" in told
    told = history(stats, seen, [execution(0, "eager", "eager_outside")])
    assert "ran eagerly: the event is not remembered any more (somebody else was" in told


def test_programs_that_push_each_other_out_say_so():
    options = jaxgraph.Options(max_executables=1)
    steps = [
        jaxgraph.wrap(lambda x, by=by: jnp.sin(x) * by + x, options=options) for by in (2.0, 3.0)
    ]
    x = jnp.ones(64)
    for step in 10 * steps:
        for _ in range(3):
            run(step, x)
    why = "no room: its 1 executables were pushed out 3 times"
    (waiting,) = [step for step in steps if why in step.history()]
    told = waiting.history()
    assert "max_executables" in told
    assert waiting.stats().eager_crowded > 0
    assert told in str(waiting.explain(x))
