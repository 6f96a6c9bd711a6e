"""Buffers that move at random between calls: an address of an earlier call is never used again.

The host device is driven directly, where buffers that were given up are poisoned and kept; the GPU
through JAX, see `test_on_gpu.py`.
"""

import os
import random

from axpy_programs import Caller, close, load, random_steps, testing

STEPS = int(os.environ.get("JAXGRAPH_GAME_STEPS", "10000"))


def test_ten_thousand_steps():
    rng = random.Random(0)
    machine = testing.Machine()
    callers = [Caller(seed) for seed in range(3)]
    programs = []
    for i in range(6):
        body = random_steps(rng, rng.randint(3, 40))
        key = bytes([i % 4] * 16)  # some share a key
        size = rng.choice([0, 1, 4, 512])
        programs.append((load(body, key=key, chunk_size=size, max_variants=3), body))
    at = 0
    for step in range(STEPS):
        if rng.random() < 0.2:
            at = rng.randrange(len(programs))
        caller = rng.choice(callers)
        for name in ("token", "logits", "weight", "large", "cache"):
            odds = rng.random()
            if odds < (0.5 if name in ("token", "logits") else 0.02):
                caller.move(name)
            elif odds > 0.98:
                caller.swap(rng.choice(callers), name)  # an address that comes back
        if rng.random() < 0.002:  # the arena grows, and what was recorded in it is void
            machine.reserve(machine.stats()["arena_bytes"] + 1)
        if rng.random() < 0.002:
            machine.clear()
        machine.shuffle(step if rng.random() < 0.1 else 0)
        caller.call(machine, *programs[at])
    stats = machine.stats()
    assert stats["replays"] > 0
    assert stats["failures"] == 0
    close(machine)
