"""Random programs for the identity layer: small enough to check against numpy, bit for bit.

Every node computes ``out = a * k + b`` over eight floats. The operands are one of each kind that
the executor treats in its own way, see ``BASES``.
"""

import dataclasses
import os
import struct

import numpy as np
from hypothesis import settings

from jaxgraph import Options, _native

encode = _native.encode_program
testing = _native.testing

WIDTH = 8
SLICE = 4 * WIDTH
LARGE = (1 << 20) + 64  # bytes: too large to follow, so its addresses make address sets
CACHE = 8192  # bytes: a donated base of this size is a cache, a smaller one a counter
F32, EXPR, VIEW = 11, 1, 0
LOAD, CONST, STORE, ADD, MUL = 0, 2, 3, 64, 66

# name: (kind, index, bytes, hinted to wander, written, alias)
BASES = {
    "arena": (0, 0, None, False, True, -1),
    "token": (1, 0, SLICE, True, False, -1),
    "weight": (1, 1, SLICE, False, False, -1),
    "large": (1, 2, LARGE, False, False, -1),
    "cache": (1, 3, CACHE, False, True, -1),
    "new_cache": (2, 0, CACHE, False, False, 3),
    "logits": (2, 1, SLICE, True, True, -1),
}
NUMBER = {name: i for i, name in enumerate(BASES)}


def examples(number):
    """Settings of a property test; JAXGRAPH_FUZZ=100 tries a hundred times as much, at random.

    Less than that, as in CI, is the same at each run.
    """
    more = int(os.environ.get("JAXGRAPH_FUZZ", "1"))
    return settings(max_examples=number * more, deadline=None, derandomize=more < 100)


def axpy_params(k, shape=(WIDTH,)):
    def instruction(op, dst=0, a=0, b=0, aux=0):
        return struct.pack("<BBBBBBH", op, F32, dst, a, b, 0, aux)

    code = [
        instruction(LOAD, dst=0, aux=0),
        instruction(LOAD, dst=1, aux=1),
        instruction(CONST, dst=2, aux=0),
        instruction(MUL, dst=3, a=0, b=2),
        instruction(ADD, dst=4, a=3, b=1),
        instruction(STORE, a=4, aux=0),
    ]
    header = struct.pack("<BBBBBBH", len(shape), 1, 2, 1, 0, 1, len(code))
    stage = struct.pack("<4H", 0, 0, 0, len(code))
    constant = struct.pack("<fI", k, 0)
    return header + struct.pack(f"<{len(shape)}q", *shape) + stage + b"".join(code) + constant


@dataclasses.dataclass(frozen=True)
class Step:
    """One node: out and its two sources are (base name, slice number)."""

    out: tuple[str, int]
    a: tuple[str, int]
    k: float
    b: tuple[str, int]
    region: int = 0
    branch: int = 0
    view: bool = False


def tensor(where):
    name, number = where
    return (F32, NUMBER[name], number * SLICE, (WIDTH,), (1,))


def spec(steps, *, function_id=1, key=bytes(16), options=None, **exec_options):
    """The program that does these steps in order."""
    settings = (options or Options(idle_seconds=0)).exec_options() | exec_options
    arena = SLICE * (1 + max([s.out[1] for s in steps if s.out[0] == "arena"], default=0))
    bases = [
        dict(kind=kind, index=index, nbytes=nbytes or arena, hint=int(hinted), written=written,
             alias=alias, label=name)
        for name, (kind, index, nbytes, hinted, written, alias) in BASES.items()
    ]  # fmt: skip
    nodes = []
    for s in steps:
        if s.view:
            here = tensor(s.a)
            nodes.append((VIEW, 0, s.region, s.branch, b"", [here], [here], "view"))
            continue
        sources = [tensor(s.a), tensor(s.b)]
        node = (EXPR, 0, s.region, s.branch, axpy_params(s.k), [tensor(s.out)], sources, "axpy")
        nodes.append(node)
    return {
        "function": "tests.identity",
        "function_id": function_id,
        "split": 0,
        "key": key,
        "arena_bytes": arena,
        "options": settings,
        "bases": bases,
        "nodes": nodes,
    }


def load(steps, **kwargs):
    return testing.load(encode(spec(steps, **kwargs)))


def random_steps(random, nodes=12, *, regions=True):
    """A random legal program; it updates the cache in place once and writes the logits last."""
    values = [("token", 0), ("weight", 0), ("large", 0)]  # what may be read
    steps, slices, region = [], 0, 0
    cache_at = random.randrange(max(nodes - 1, 1))

    def node(readable, region=0, branch=0):
        nonlocal slices
        out = ("arena", slices)
        slices += 1
        a, b = random.choice(readable), random.choice(readable)
        view = random.random() < 0.15 and region == 0
        steps.append(Step(a if view else out, a, random.choice((1, 2, 0.5)), b, region, branch,
                          view))  # fmt: skip
        return None if view else out

    while len(steps) < nodes - 1:
        if len(steps) == cache_at:
            steps.append(Step(("new_cache", 0), ("cache", 0), 0.5, random.choice(values)))
            values.append(("new_cache", 0))
        elif regions and random.random() < 0.3:
            region += 1
            made = []
            for branch in range(random.randint(2, 3)):
                own = list(values)
                for _ in range(random.randint(1, 3)):
                    own.append(node(own, region, branch))
                made += own[len(values) :]
            values += made
        elif (out := node(values)) is not None:
            values.append(out)
    steps.append(Step(("logits", 0), values[-1], 1, random.choice(values)))
    return steps


class Caller:
    """Owns the buffers of a call, and knows what the call should give.

    A buffer that is given up is poisoned, and kept, so that an address of an earlier call shows.
    """

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.graveyard = []
        self.buffers = {}
        for name in ("token", "weight", "large", "cache", "logits"):
            self.move(name)

    def move(self, name):
        nbytes = BASES[name][2]
        fresh = np.empty(nbytes // 4 + 16, np.float32)
        at = (-fresh.ctypes.data // 4) % 16  # in floats: aligned to 64 bytes, as JAX's buffers are
        fresh = fresh[at : at + nbytes // 4]
        old = self.buffers.get(name)
        if old is None:
            fresh[:WIDTH] = self.random.integers(-4, 5, WIDTH)
        else:
            fresh[:WIDTH] = old[:WIDTH]
            self.bury(old)
        self.buffers[name] = fresh

    def bury(self, buffer):
        buffer[:WIDTH] = np.nan
        self.graveyard.append(buffer)
        if len(self.graveyard) > 64:
            self.graveyard.pop(0)

    def swap(self, other, name):
        """Takes another caller's buffer, with this one's values in it."""
        mine, theirs = self.buffers[name], other.buffers[name]
        both = mine[:WIDTH].copy(), theirs[:WIDTH].copy()
        self.buffers[name], other.buffers[name] = theirs, mine
        theirs[:WIDTH], mine[:WIDTH] = both

    def addresses(self):
        at = {name: buffer.ctypes.data for name, buffer in self.buffers.items()}
        operands = [at["token"], at["weight"], at["large"], at["cache"]]
        return operands, [at["cache"], at["logits"]]

    def expected(self, steps):
        values = {(name, 0): b[:WIDTH].copy() for name, b in self.buffers.items()}
        for s in steps:
            if s.view:
                continue
            values[s.out] = values[s.a] * np.float32(s.k) + values[s.b]
        return values[("logits", 0)], values.get(("new_cache", 0), values[("cache", 0)])

    def call(self, machine, program, steps):
        """Runs the program once and checks every value. A new token is there at every call."""
        self.buffers["token"][:WIDTH] = self.random.integers(-4, 5, WIDTH)
        self.buffers["logits"][:WIDTH] = np.nan
        logits, cache = self.expected(steps)
        machine.execute(program, *self.addresses())
        np.testing.assert_array_equal(self.buffers["logits"][:WIDTH], logits)
        np.testing.assert_array_equal(self.buffers["cache"][:WIDTH], cache)


def close(machine):
    """Destroys the machine's executor and checks that nothing of it is left."""
    left = machine.close()
    assert not any(left.values()), left
