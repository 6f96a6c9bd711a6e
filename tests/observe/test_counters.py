import functools
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxgraph
from jaxgraph.observe.counters import is_part

CALLS = 6


@pytest.fixture
def step():
    def double_plus(x, y):
        return jnp.sin(x) * 2 + y

    return jaxgraph.wrap(double_plus)


@functools.cache
def ones(*shape):
    """Arrays that stay where they are from call to call: no update is ever needed."""
    return jnp.ones(shape), jnp.ones(shape)


def run(step, calls=CALLS, rows=4):
    for _ in range(calls):
        jax.block_until_ready(step(*ones(rows, 64)))


def test_every_call_is_counted_once(step):
    run(step)
    stats = step.stats()
    assert (stats.calls, stats.executions) == (CALLS, CALLS)
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, CALLS - 2)
    assert stats.eager_warmup == stats.warmups == stats.warmups_first == 1
    assert (stats.signatures, stats.failures, stats.evictions) == (1, 0, 0)
    assert stats.planning_ns > 0
    assert stats.live_exec_nodes >= stats.live_execs == 1


def test_another_shape_is_another_signature_and_variant(step):
    run(step)
    run(step, rows=2)
    assert step.stats().signatures == 2
    assert step.stats().warmups == 2
    assert step.stats().captures == 2


def test_sums_are_the_sums_of_their_parts(step):
    run(step)
    stats = dict(step.stats())
    for total in ("eager", "warmups", "resets", "evictions", "failures"):
        parts = [v for name, v in stats.items() if name.startswith(f"{total}_") and is_part(name)]
        assert len(parts) >= 2
        assert stats[total] == sum(parts), total
    assert stats["executions"] == stats["eager"] + stats["captures"] + stats["replays"]


def test_times_add_up_to_less_than_what_passed(step):
    import time

    jax.block_until_ready(jnp.ones((4, 64)))
    begin = time.perf_counter_ns()
    run(step)
    passed = time.perf_counter_ns() - begin
    stats = step.stats()
    spent = stats.decide_ns + stats.eager_ns + stats.record_ns + stats.replay_ns
    assert 0 < spent < passed
    assert 0 < stats.capture_ns + stats.instantiate_ns < stats.record_ns


def test_counters_never_fall(step):
    last = dict(step.stats())
    for _ in range(CALLS):
        run(step, calls=1)
        now = dict(step.stats())
        assert all(now[name] >= last[name] for name in now)
        last = now


def test_reset_zeroes_and_keeps_the_graphs(step):
    run(step)
    live = step.stats().live_execs
    step.reset_stats()
    stats = step.stats()
    gauges = {"live_execs", "live_exec_nodes", "exec_bytes"}
    assert {v for name, v in dict(stats).items() if name not in gauges} == {0}
    assert stats.live_execs == live == 1
    assert step.events() == [] and step.executions() == []
    run(step, calls=1)
    assert step.stats().replays == 1, "the graph was kept"


def test_process_counts_all_functions(step):
    other = jaxgraph.wrap(lambda x, y: x * y - 1)
    before = jaxgraph.stats()
    run(step, calls=3)
    run(other, calls=2)
    after = jaxgraph.stats()
    assert after.calls - before.calls == 5
    assert after.executions - before.executions == 5
    assert after.signatures - before.signatures == 2


def test_process_reset():
    step = jaxgraph.wrap(lambda x, y: x + y)
    run(step)
    jaxgraph.reset_stats()
    assert (jaxgraph.stats().calls, jaxgraph.stats().executions) == (0, 0)
    assert step.stats().calls == 0
    assert jaxgraph.events() == []


def test_threads_lose_nothing(step):
    run(step)
    step.reset_stats()
    threads = [threading.Thread(target=run, args=(step, 25)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (step.stats().calls, step.stats().executions) == (100, 100)


def test_table_shows_what_matters(step):
    run(step)
    text = str(step.stats())
    lines = dict(line.split()[:2] for line in text.splitlines())
    assert lines["replays"] == str(CALLS - 2)
    assert lines["eager_warmup"] == "1"
    assert "failures" in lines, "also where there are none"
    assert "failures_patch" not in lines, "parts that are zero are noise"
    with pytest.raises(KeyError):
        step.stats()["no such counter"]
