"""What the identity layer costs: a decision, a comparison, a patch, a re-capture, an instantiation.

    python benchmarks/identity.py [--platform cpu|CUDA] [--json FILE]

Without a GPU the launches do nothing, so that what is measured is the deciding. With one, the
executables are real ones. Prints a table.
"""

import argparse
import json
import statistics
import struct
import sys
import time
import timeit

from jaxgraph import Options, _native
from jaxgraph.observe.counters import Tally

testing = _native.testing
F32, EXPR = 11, 1
WIDTH = 8
ALIGNMENT = 256


def axpy_params(k):
    code = [
        struct.pack("<BBBBBBH", op, F32, dst, a, b, 0, aux)
        for op, dst, a, b, aux in (
            (0, 0, 0, 0, 0),  # load a
            (0, 1, 0, 0, 1),  # load b
            (2, 2, 0, 0, 0),  # constant k
            (66, 3, 0, 2, 0),  # a * k
            (64, 4, 3, 1, 0),  # + b
            (3, 0, 4, 0, 0),  # store
        )
    ]
    header = struct.pack("<BBBBBBH", 1, 1, 2, 1, 0, 1, len(code))
    return header + struct.pack("<q4H", WIDTH, 0, 0, 0, len(code)) + b"".join(code) + struct.pack(
        "<fI", k, 0
    )  # fmt: skip


class Chain:
    """A chain of nodes in the arena; the first `touched` of them also read the operand `moving`,
    which is too large to be followed, so that a move of it is an update.

    `operands`: how many there are, of which nodes read the first two.
    """

    def __init__(self, nodes, *, touched=1, operands=2, **exec_options):
        large = 1 << 21
        self.operands, self.nodes = operands, nodes
        arena = ALIGNMENT * 2
        bases = [self._base(0, 0, arena, "arena", written=True)]
        bases += [
            self._base(1, i, large if i == 0 else 4 * WIDTH, f"operand[{i}]")
            for i in range(operands)
        ]
        body = []
        for n in range(nodes):
            out = (F32, 0, ALIGNMENT * (n % 2), (WIDTH,), (1,))
            source = (F32, 0, ALIGNMENT * ((n + 1) % 2), (WIDTH,), (1,))
            operand = (F32, 1 if n < touched else 2, 0, (WIDTH,), (1,))
            body.append((EXPR, 0, 0, 0, axpy_params(0.5), [out], [source, operand], f"node {n}"))
        spec = {
            "function": "benchmark",
            "function_id": 1,
            "split": 0,
            "key": bytes(16),
            "arena_bytes": arena,
            "options": Options(idle_seconds=0).exec_options() | exec_options,
            "bases": bases,
            "nodes": body,
        }
        self.bytes = _native.encode_program(spec)
        self.program = testing.load(self.bytes)

    @staticmethod
    def _base(kind, index, nbytes, label, *, written=False):
        return dict(kind=kind, index=index, nbytes=nbytes, hint=0, written=written, alias=-1,
                    label=label)  # fmt: skip


class Bench:
    def __init__(self, platform):
        self.platform = platform
        self.memory = None
        if platform == "CUDA":
            import jax
            import jax.numpy as jnp

            self.memory = jax.block_until_ready(jnp.zeros(1 << 24, jnp.float32))

    def addresses(self, operands, moving):
        start = 1 << 33 if self.memory is None else self.memory.unsafe_buffer_pointer()
        rest = [start + (1 << 24) + ALIGNMENT * i for i in range(operands - 1)]
        return [start + (moving << 18), *rest]

    def warm(self, chain):
        machine = testing.Machine(self.platform, dry=True)
        steady = (self.addresses(chain.operands, 0), [])
        for _ in range(3):
            machine.execute(chain.program, *steady)
        return machine, steady

    def time(self, machine, chain, sets, calls):
        """Nanoseconds of the host for a call, the device being idle when it comes."""
        if self.platform != "CUDA":
            return machine.time(chain.program, sets, calls)
        # The launches are real: a device that falls behind makes the host wait for it.
        times = []
        for i in range(min(calls, 24)):
            idle = time.perf_counter() + 1e-3 + 3e-6 * chain.nodes
            while time.perf_counter() < idle:  # not asleep: the host's caches and clock stay warm
                pass
            times.append(machine.time(chain.program, [sets[i % len(sets)]], 1))
        return statistics.median(times)

    def steady(self, chain, calls=2000):
        """Nanoseconds of a call that hits the uid."""
        machine, steady = self.warm(chain)
        return statistics.median(self.time(machine, chain, [steady], calls) for _ in range(5))

    def moving(self, chain, calls=200):
        """Nanoseconds by which a call is dearer whose large operand has moved to a new place."""
        machine, steady = self.warm(chain)
        base = statistics.median(self.time(machine, chain, [steady], calls) for _ in range(3))
        # More places than variants, so that none becomes an address set of its own.
        sets = [(self.addresses(chain.operands, 1 + i), []) for i in range(12)]
        return statistics.median(self.time(machine, chain, sets, calls) for _ in range(3)) - base

    def first(self, chain):
        """Nanoseconds of the call that captures and instantiates."""
        times = []
        for _ in range(5):
            machine = testing.Machine(self.platform, dry=True)
            steady = (self.addresses(chain.operands, 0), [])
            machine.execute(chain.program, *steady)
            times.append(self.time(machine, chain, [steady], 1))
        return statistics.median(times)


def compare(nodes, times):
    chain = Chain(nodes)
    return testing.time_compare(chain.bytes, [1 << 30, 1 << 40, 2 << 40],
                                [1 << 31, 3 << 40, 4 << 40], times)  # fmt: skip


def measure(platform):
    bench, rows = Bench(platform), []

    def row(what, nanoseconds, count, unit):
        rows.append({"what": what, "ns": nanoseconds, "per": nanoseconds / count, "unit": unit})

    few, many = bench.steady(Chain(100, operands=2)), bench.steady(Chain(100, operands=302))
    row("uid hit, 2 operands, 100 nodes", few, 1, "call")
    row("uid hit, 2 operands, 10,000 nodes", bench.steady(Chain(10_000), 200), 1, "call")
    row("uid hit, 300 operands more", many - few, 300, "base")
    for chunks, name in ((1, "1 chunk"), (20, "20 chunks")):
        program = Chain(1).bytes
        observing = min(testing.time_observing(program, chunks, 5_000) for _ in range(50))
        row(f"of a uid hit: being observed, {name}", observing, 1, "call")
    counted = min(timeit.repeat(Tally().add_call, number=5_000, repeat=50)) / 5_000 * 1e9
    row("counting a call in Python", counted, 1, "call")
    for nodes in (100, 1000, 10_000):
        row(f"full compare, {nodes:,} nodes", compare(nodes, 200_000 // nodes), nodes, "node")
    for percent in (1, 10, 100):
        chain = Chain(1000, touched=10 * percent, chunk_size=0)
        row(f"update, {percent} % of 1,000 nodes patched", bench.moving(chain), 10 * percent,
            "patched node")  # fmt: skip
    for depth, name in ((1, "re-capture and update"), (2, "re-capture and instantiate")):
        chain = Chain(1000, touched=10, chunk_size=0, update_depth=depth)
        row(f"{name}, 1,000 nodes", bench.moving(chain, 60), 1000, "node")
    row("first capture and instantiation, 1,000 nodes", bench.first(Chain(1000, chunk_size=0)),
        1000, "node")  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = _native.build_info()["cuda"]
    if cuda:
        import jax

        cuda = jax.default_backend() == "gpu"
    parser.add_argument("--platform", choices=("cpu", "CUDA"), default="CUDA" if cuda else "cpu")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows = measure(args.platform)
    print("| what | µs | ns each |")
    print("| --- | ---: | ---: |")
    for r in rows:
        print(f"| {r['what']} | {r['ns'] / 1e3:,.2f} | {r['per']:,.1f} a {r['unit']} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"platform": args.platform, "rows": rows}, file, indent=1)
    ns = {r["what"]: r["ns"] for r in rows}
    ratio = ns["re-capture and update, 1,000 nodes"] / ns["update, 1 % of 1,000 nodes patched"]
    print(f"\nPatching 1 % of 1,000 nodes is {ratio:.1f} times cheaper than re-capturing them.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
