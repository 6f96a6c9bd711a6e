"""Every device call fails in turn: the values stay right, nothing leaks, nothing fails for ever."""

import random

import pytest
from axpy_programs import Caller, close, examples, load, random_steps, testing
from hypothesis import example, given
from hypothesis import strategies as st

# Without these there is no way on: their failures are the caller's. (A join: where branches really
# run, nothing else orders what comes after them.)
FATAL = {"EnterDevice", "LaunchKernel", "ArenaReserve", "Join"}
CALLS = 14


def scenario(machine, program, body, rng):
    """Calls that warm up, capture, wander, update and replay; returns how many were refused."""
    caller, refused = Caller(rng.randrange(100)), 0
    for call in range(CALLS):
        if call > 2:
            for name in ("token", "weight", "large", "cache", "logits"):
                if rng.random() < 0.3:
                    caller.move(name)
        cache = caller.buffers["cache"][:8].copy()
        try:
            caller.call(machine, program, body)
        except (RuntimeError, MemoryError) as error:
            assert "injected fault" in str(error)
            caller.buffers["cache"][:8] = cache  # the caller starts this step again
            refused += 1
    return refused


@pytest.mark.parametrize("call", testing.device_calls())
@given(
    seed=st.integers(0, 10**6),
    skip=st.integers(0, 40),
    times=st.sampled_from([1, 1, 2, 5, 1000]),
    depth=st.integers(0, 2),
    out_of_memory=st.booleans(),
)
@examples(40)
def test_every_call_in_turn(call, seed, skip, times, depth, out_of_memory):
    rng = random.Random(seed)
    body = random_steps(rng, rng.randint(4, 16))
    machine = testing.Machine()
    machine.fail(call, skip=skip, times=times, out_of_memory=out_of_memory)
    program = load(body, chunk_size=rng.choice([0, 2, 5]), update_depth=depth)
    refused = scenario(machine, program, body, rng)
    stats = machine.stats()
    if call in FATAL:
        assert refused <= machine.failures()
    else:
        assert refused == 0
        assert stats["executions"] == CALLS
        # What a node costs is asked beside the call, and again later.
        assert stats["failures"] == (0 if call == "FreeMemory" else machine.failures())
        if call not in ("IsCapturing", "Fork", "CreateStream"):
            assert stats["failures"] <= 2, "then it stays eager"
    assert stats["executions"] == stats["eager"] + stats["captures"] + stats["replays"]
    if machine.failures() and refused == 0 and call != "FreeMemory":
        assert any("injected fault" in e["why"] or "unknown" in e["why"] for e in machine.events())
    close(machine)


@given(seed=st.integers(0, 10**6), chunk=st.integers(0, 20))
@example(seed=10364, chunk=18)
@examples(60)
def test_a_launch_that_fails_at_a_later_chunk_updates_the_cache_once(seed, chunk):
    rng = random.Random(seed)
    body = random_steps(rng, 12, regions=False)
    machine, caller = testing.Machine(), Caller(seed)
    program = load(body, chunk_size=1)
    for _ in range(4):
        caller.call(machine, program, body)
    machine.fail("LaunchGraph", skip=chunk)
    for _ in range(4):
        caller.call(machine, program, body)  # holds the cache against numpy
    if machine.failures():  # maybe in the last of these calls, where chunks are few
        caller.call(machine, program, body)
    stats = machine.stats()
    assert stats["failures"] == machine.failures() <= 1
    assert stats["captures"] == 1 + stats["failures"], "tried again, once"
    close(machine)


def test_an_arena_that_cannot_grow_names_the_sizes_and_still_works():
    small, large = random_steps(random.Random(1), 4), random_steps(random.Random(2), 40)
    machine, caller = testing.Machine(), Caller()
    first, second = load(small), load(large)
    for _ in range(3):
        caller.call(machine, first, small)
    machine.fail("ArenaReserve", out_of_memory=True)
    with pytest.raises(MemoryError, match=r"arena cannot grow from \d+ to \d+ bytes"):
        machine.execute(second, *caller.addresses())
    caller.call(machine, first, small)
    assert machine.stats()["replays"] == 2
    caller.call(machine, second, large)
    close(machine)


def test_a_reserved_arena_does_not_grow():
    machine, caller = testing.Machine(), Caller()
    machine.reserve(1 << 16)
    for nodes in (4, 20, 40, 4):
        body = random_steps(random.Random(nodes), nodes)
        program = load(body, key=bytes([nodes] * 16))
        for _ in range(3):
            caller.call(machine, program, body)
    assert machine.calls("ArenaReserve") == 1
    close(machine)
