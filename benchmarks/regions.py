"""Times layers of experts whose branches run at once, and in one chain of dependent launches.

    python benchmarks/regions.py [--json FILE]

Eight layers of `x + tanh(sum over experts of relu(x @ up)² @ down)`, bf16, one row, in a `lax.scan`
of 60 steps; the figure is the median of five rounds, over 60.
"""

import argparse
import json
import statistics
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp

import jaxgraph
from jaxgraph.plan import regions

LAYERS, STEPS, ROUNDS = 8, 60, 5
EXPERTS = (2, 3, 4, 8)
SIZES = ((512, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192))


def mixture(x, layers):
    for experts in layers:
        total = sum(jax.nn.relu(x @ up) ** 2 @ down for up, down in experts)
        x = x + jnp.tanh(total)
    return x


def weights(experts, width, hidden):
    """Of all layers, every expert with arrays of its own."""
    make = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5,
        static_argnums=1,
    )
    keys = iter(jax.random.split(jax.random.key(0), 2 * LAYERS * experts))
    return [
        [(make(next(keys), (width, hidden)), make(next(keys), (hidden, width)))
         for _ in range(experts)]
        for _ in range(LAYERS)
    ]  # fmt: skip


def microseconds(x, layers, *, at_once):
    """Of a step, its regions marked whether they pay or not, or none of them."""
    with mock.patch.object(regions, "pays", lambda branches: at_once):
        step = jaxgraph.wrap(mixture, options=jaxgraph.Options(strict=True))

        @jax.jit
        def run(x, layers):
            return jax.lax.scan(lambda x, _: (step(x, layers), None), x, length=STEPS)[0]

        for _ in range(3):
            run(x, layers).block_until_ready()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run(x, layers).block_until_ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / STEPS * 1e6


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = []
    print("| experts | width × hidden | at once, µs | in one chain, µs |")
    print("| ---: | ---: | ---: | ---: |")
    for experts in EXPERTS:
        for width, hidden in SIZES:
            x, layers = jnp.ones((1, width), jnp.bfloat16), weights(experts, width, hidden)
            row = {"experts": experts, "width": width, "hidden": hidden}
            for name, at_once in (("at_once_us", True), ("chain_us", False)):
                row[name] = microseconds(x, layers, at_once=at_once)
            rows.append(row)
            print(
                f"| {experts} | {width} × {hidden} | {row['at_once_us']:.1f} "
                f"| {row['chain_us']:.1f} |",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
