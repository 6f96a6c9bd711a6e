import functools
import logging
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph.observe.events import EventLogger

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "host"
LARGE = 1 << 19  # elements: too many for a slot, so that a move is an update


def scaled_sum(x, y):
    return jnp.sin(x) * 2 + y


@pytest.fixture
def step():
    return jaxgraph.wrap(scaled_sum)


@functools.cache
def ones(size):
    """Arrays that stay where they are from call to call: no update is ever needed."""
    return jnp.ones(size), jnp.ones(size)


def run(step, calls=4, size=64):
    for _ in range(calls):
        jax.block_until_ready(step(*ones(size)))


def test_life_of_a_step_in_order(step):
    run(step)
    what = [event.what for event in step.events() if event.what != "placement"]
    assert what == ["eager", "capture", "replay"]
    sequences = [event.sequence for event in step.events()]
    assert sequences == sorted(set(sequences))
    assert abs(step.events()[0].time_s - time.time()) < 60
    assert {event.function for event in step.events()} == {step.name}
    (key,), (variant,) = ({getattr(e, n) for e in step.events()} for n in ("key", "variant"))
    assert len(key) == 32 and variant > 0


def test_replays_write_no_events(step):
    run(step)
    before = step.events()
    run(step, calls=50)
    assert step.events() == before


def test_moved_operand_names_node_field_and_source_line(step):
    arrays = [jnp.ones(LARGE) * i for i in range(12)]
    for _ in range(3):
        jax.block_until_ready(step(arrays[0], arrays[1]))
    jax.block_until_ready(step(arrays[2], arrays[1]))
    update = [event for event in step.events() if event.what == "update"][-1]
    assert update.changes_total >= len(update.changes) >= 1
    assert {change.field for change in update.changes} == {"address"}
    (change,) = (change for change in update.changes if change.source)
    assert int(change.after, 16) == arrays[2].unsafe_buffer_pointer()
    assert int(change.before, 16) == arrays[0].unsafe_buffer_pointer()
    assert "test_events.py:" in change.label
    assert change.label in str(update) and change.after in str(update)


def test_process_sees_the_events_of_all(step):
    run(step)
    last = step.events()[-1].sequence
    other = jaxgraph.wrap(lambda x, y: x - y)
    run(other)
    assert {event.function for event in jaxgraph.events(after=last)} == {other.name}
    assert jaxgraph.events(step.function_id) == step.events()


def test_executions_tell_outcome_and_time(step):
    begin = time.perf_counter()
    run(step)
    end = time.perf_counter()
    executions = step.executions()
    assert [e.outcome for e in executions] == ["eager", "capture", "replay", "replay"]
    for e in executions:
        assert begin <= e.start_s <= e.start_s + (e.decide_ns + e.run_ns) * 1e-9 <= end
    assert {(e.platform, e.device, e.split) for e in executions} == {(PLATFORM, 0, 0)}


def test_logger_hands_every_event_on_once(step, caplog):
    caplog.set_level(logging.DEBUG, logger="jaxgraph")
    events = EventLogger()
    run(step)
    events.flush()
    events.close()
    logged = [r.getMessage() for r in caplog.records if r.name == "jaxgraph"]
    ours = [f"{event.function}: {event}" for event in step.events()]
    assert [line for line in logged if line.startswith(step.name)] == ours


def test_a_handler_may_flush_itself(step):
    events, lines = EventLogger(), []

    class Flushing(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            events.flush()

    logger, handler = logging.getLogger("jaxgraph"), Flushing()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        run(step)
        thread = threading.Thread(target=events.flush, daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the logger waits for itself"
        events.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    ours = [line for line in lines if line.startswith(step.name)]
    assert sorted(ours) == sorted(f"{event.function}: {event}" for event in step.events())


def test_debug_variable_logs_to_stderr():
    code = (
        "import jax.numpy as jnp, jaxgraph\n"
        "step = jaxgraph.wrap(lambda x: x * 2 + 1)\n"
        "for _ in range(3): step(jnp.ones(8)).block_until_ready()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"JAXGRAPH_DEBUG": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "eager: the first call" in done.stderr
    assert "capture: 1 chunks" in done.stderr


def test_values_are_right_while_events_are_read(step):
    for i in range(20):
        x = jnp.full(64, float(i))
        np.testing.assert_array_equal(step(x, x), jax.jit(scaled_sum)(x, x))
        step.events(), step.stats(), step.executions()
