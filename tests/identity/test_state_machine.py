"""The executor against a plain model, step by step; and that everything ends in replays."""

import random

import pytest
from axpy_programs import Caller, Step, close, examples, load, random_steps, testing
from hypothesis import given
from hypothesis import strategies as st
from ledger_model import COUNTERS, Model

PROGRAMS = 5
CALLERS = 3


def steps_of(program):
    return [
        Step(("arena", 0), ("token", 0), 1 + program, ("weight", 0)),
        Step(("arena", 1), ("arena", 0), 1, ("large", 0)),
        Step(("new_cache", 0), ("cache", 0), 0.5, ("arena", 1)),
        Step(("logits", 0), ("new_cache", 0), 1, ("token", 0)),
    ]


calls = st.tuples(
    st.just("call"), st.integers(0, PROGRAMS - 1), st.integers(0, CALLERS - 1), st.booleans()
)
same_again = st.tuples(st.just("again"), st.integers(1, 4))
moves = st.tuples(
    st.just("move"),
    st.integers(0, CALLERS - 1),
    st.sampled_from(["token", "weight", "large", "cache", "logits"]),
)
waits = st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 11.0]))
clears = st.tuples(st.just("clear"))
operations = st.lists(
    st.one_of(calls, calls, calls, same_again, same_again, moves, waits, clears),
    min_size=1,
    max_size=40,
)


@given(
    operations=operations,
    warmup_calls=st.integers(1, 3),
    max_variants=st.integers(1, 6),
    max_failures=st.integers(0, 3),
    rewarm=st.booleans(),
    chunk_size=st.sampled_from([0, 1, 2, 512]),
)
@examples(300)
def test_every_step_is_as_the_model_says(
    operations, warmup_calls, max_variants, max_failures, rewarm, chunk_size
):
    machine = testing.Machine()
    model = Model(warmup_calls, max_variants, max_failures, rewarm, idle=10, sweep=5)
    programs = [
        load(
            steps_of(p),
            warmup_calls=warmup_calls,
            max_variants=max_variants,
            max_failures=max_failures,
            rewarm_on_address_change=rewarm,
            chunk_size=chunk_size,
            idle_ms=10_000,
            sweep_ms=5_000,
        )
        for p in range(PROGRAMS)
    ]
    callers = [Caller(seed) for seed in range(CALLERS)]
    last = (0, 0)

    def call(program, caller, fault):
        addresses = {n: b.ctypes.data for n, b in callers[caller].buffers.items()}
        model.call(program, addresses, fault)
        if fault:
            machine.fail("LaunchGraph")
        callers[caller].call(machine, programs[program], steps_of(program))
        machine.heal()

    for operation, *args in operations:
        if operation == "call":
            last = tuple(args[:2])
            call(*args)
        elif operation == "again":
            for _ in range(args[0]):
                call(*last, False)
        elif operation == "move":
            callers[args[0]].move(args[1])
        elif operation == "wait":
            machine.advance(args[0])
            model.now += args[0]
        else:
            machine.clear()
            model.clear()
        stats = machine.stats()
        assert {name: stats[name] for name in COUNTERS} == model.count, operation
    close(machine)


@given(seed=st.integers(0, 10**6), variants=st.integers(1, 5))
@examples(40)
def test_any_interleaving_of_up_to_five_variants_ends_in_replays(seed, variants):
    rng = random.Random(seed)
    machine = testing.Machine()
    callers = [Caller(i) for i in range(CALLERS)]
    bodies = [random_steps(rng, 10) for _ in range(3)]
    programs = [load(body) for body in bodies]
    pairs = [(p, c) for p in range(len(bodies)) for c in range(CALLERS)]
    chosen = rng.sample(pairs, variants)
    # Alternating, in runs, or at random, until each has been called at least four times.
    order = [rng.choice(chosen) for _ in range(20)] + 4 * chosen
    if rng.random() < 0.5:
        rng.shuffle(order)
    for p, c in order + 2 * chosen:
        callers[c].call(machine, programs[p], bodies[p])
    before = machine.stats()
    for p, c in rng.sample(3 * chosen, 3 * variants):
        callers[c].call(machine, programs[p], bodies[p])
    after = machine.stats()
    assert after["replays"] - before["replays"] == 3 * variants
    for name in ("eager", "captures", "instantiations", "exec_updates", "resets", "evictions"):
        assert after[name] == before[name], name
    close(machine)


def test_a_variant_that_is_warmed_up_again_in_one_call_is_captured_again():
    machine, callers = testing.Machine(), [Caller(0), Caller(1)]
    program = load(steps_of(0), warmup_calls=1, rewarm_on_address_change=True)
    for caller in callers:
        caller.call(machine, program, steps_of(0))
    stats = machine.stats()
    assert (stats["captures"], stats["replays"], stats["resets"]) == (2, 0, 1)
    callers[1].call(machine, program, steps_of(0))
    assert machine.stats()["replays"] == 1
    close(machine)


@pytest.mark.parametrize("depth", [0, 1, 2])
@given(seed=st.integers(0, 10**6))
@examples(25)
def test_every_depth_of_update_gives_the_same_values(depth, seed):
    rng = random.Random(seed)
    machine, caller = testing.Machine(), Caller(seed)
    body = random_steps(rng, rng.randint(1, 14))
    program = load(body, update_depth=depth, chunk_size=rng.choice([0, 1, 3]))
    for _ in range(12):
        for name in ("token", "weight", "large", "cache", "logits"):
            if rng.random() < 0.3:
                caller.move(name)
        machine.shuffle(rng.randrange(1 << 30))
        caller.call(machine, program, body)
    stats = machine.stats()
    assert stats["executions"] == stats["eager"] + stats["captures"] + stats["replays"] == 12
    assert depth == 0 or stats["patches"] == 0
    assert depth != 2 or stats["exec_updates"] == 0
    close(machine)


@given(seed=st.integers(0, 10**6))
@examples(40)
def test_concurrency_fusion_and_chunks_change_no_bit(seed):
    body = random_steps(random.Random(seed), 14)
    for concurrency in (False, True):
        for fusion in (False, True):
            for chunk_size in (0, 1, 4):
                machine, caller = testing.Machine(), Caller(seed)
                program = load(body, concurrency=concurrency, fusion=fusion, chunk_size=chunk_size)
                for call in range(5):
                    machine.shuffle(call)
                    caller.call(machine, program, body)  # holds it against numpy, bit for bit
                assert machine.stats()["replays"] == 3
                close(machine)


def test_a_plain_decode_loop_is_one_eager_one_capture_and_replays():
    """Where the allocator gives the first calls the same buffers, there is one more capture: of the
    launch that takes results out of slots."""
    body = random_steps(random.Random(3), 20)
    for first_move in range(1, 6):
        machine, caller = testing.Machine(), Caller()
        program = load(body)
        for call in range(40):
            if call >= first_move:
                caller.move("token")
                caller.move("logits")
            caller.call(machine, program, body)
        stats = machine.stats()
        captures = 1 if first_move == 1 else 2
        assert (stats["eager"], stats["captures"], stats["replays"]) == (1, captures, 39 - captures)
        assert (stats["exec_updates"], stats["instantiations"]) == (0, captures)
        assert stats["nodes_compared"] == 0
        close(machine)
