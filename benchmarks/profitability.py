"""What the rules of jaxgraph/passes/profitability.py go by: where kernels here beat XLA's.

    python benchmarks/profitability.py rows|pieces|prefill [--json FILE]

- rows: layers `x + tanh(x @ up) @ down` by their number of rows, all native against `jax.jit`.
- pieces: a step of several pieces of N such layers each, with a line between them that only XLA
  runs, all pieces native against `jax.jit`. What a call of a split costs, in layers.
- prefill: a whole prompt through examples/llama.py, under the rules as they are, against `jax.jit`.

Every figure is the median of rounds that end when the device is done; both ways take turns.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

import jaxgraph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama import SHAPES, empty_cache, prefill, random_params

TABLES = ("rows", "pieces", "prefill")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("table", choices=TABLES)
    add("--shape", choices=SHAPES, default="1b", help="widths of a layer (default: %(default)s)")
    add("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 24, 32, 64], metavar="N")
    add("--layers", type=int, default=8, metavar="N", help="of `rows` (default: %(default)s)")
    add("--pieces", type=int, nargs="+", default=[1, 4], metavar="N")
    add("--of", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="layers of a piece")
    add("--lengths", type=int, nargs="+", default=[512, 2048], metavar="N", help="of `prefill`")
    add("--rounds", type=int, default=20, metavar="N", help="timed ones (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {jnp.dtype(dtype).name}\n")
    head, cases = {"rows": rows, "pieces": pieces, "prefill": prefills}[arguments.table](
        arguments, dtype
    )
    print(f"| {head} | XLA, µs | jaxgraph, µs | XLA over jaxgraph |\n| --- | ---: | ---: | ---: |")
    figures = []
    for name, times in cases:
        xla, ours = times
        figures.append({"case": name, "xla_us": xla, "jaxgraph_us": ours})
        print(f"| {name} | {xla:.1f} | {ours:.1f} | {xla / ours:.2f} |", flush=True)
    if arguments.json is not None:
        settings = {k: v for k, v in vars(arguments).items() if k != "json"}
        text = json.dumps({"settings": settings, "head": head, "rows": figures}, indent=1)
        arguments.json.write_text(text + "\n")
    return 0


def layers(count, shape, dtype, key):
    """`count` pairs of weights of a feed-forward layer, each pair in memory of its own."""
    config = SHAPES[shape]
    sizes = ((config.width, config.ffn), (config.ffn, config.width))
    keys = iter(jax.random.split(key, 2 * count))
    return [
        [jax.random.normal(next(keys), s, dtype) * s[0] ** -0.5 for s in sizes]
        for _ in range(count)
    ]


def run_layers(x, weights):
    for up, down in weights:
        x = (x + jnp.tanh(x @ up) @ down).astype(x.dtype)
    return x


def rows(arguments, dtype):
    weights = layers(arguments.layers, arguments.shape, dtype, jax.random.key(0))
    options = jaxgraph.Options(max_rows=0, strict=True)

    def cases():
        for count in arguments.rows:
            x = jnp.ones((count, SHAPES[arguments.shape].width), dtype)
            yield count, compare(run_layers, options, (x, weights), arguments.rounds)

    return f"rows, {arguments.layers} layers of {arguments.shape}", cases()


def pieces(arguments, dtype):
    """Narrow layers, so that it is kernels that count and not what they read."""
    options = jaxgraph.Options(min_equations=0, strict=True)

    def step(x, weights, *, number):
        each = len(weights) // number
        for i in range(number):
            x = run_layers(x, weights[i * each : (i + 1) * each])
            x = lax.reduce_precision(x, 5, 3)  # a precision of no dtype: XLA's
        return x

    def cases():
        for number in arguments.pieces:
            for of in arguments.of:
                weights = layers(number * of, "15m", dtype, jax.random.key(0))
                x = jnp.ones((1, SHAPES["15m"].width), dtype)
                fun = partial(step, number=number)
                times = compare(fun, options, (x, weights), arguments.rounds, calls=50)
                yield f"{number} of {of}", times

    return "pieces, each of layers", cases()


def prefills(arguments, dtype):
    config = SHAPES[arguments.shape]
    params = random_params(config, dtype, jax.random.key(0), stacked=True)
    step = partial(prefill, config=config)

    def cases():
        for length in arguments.lengths:
            cache = empty_cache(config, 1, length, dtype, stacked=True)
            tokens = jnp.ones((1, length), jnp.int32)
            options = jaxgraph.Options(strict=True)
            call = (params, cache, tokens, jnp.int32(length))
            yield length, compare(step, options, call, arguments.rounds, calls=1)

    return f"tokens, prefill of {arguments.shape}", cases()


def compare(fun, options, arguments, rounds, calls=10):
    """Microseconds a call of (`jax.jit`, `jaxgraph.wrap`), whose results must agree."""
    ways = jax.jit(fun), jaxgraph.wrap(fun, options=options)
    results = [jax.tree.leaves(way(*arguments)) for way in ways]
    for theirs, ours in zip(*results, strict=True):
        a, b = (x.astype(jnp.float32) for x in (theirs, ours))
        difference, size = float(jnp.abs(a - b).max()), float(jnp.abs(a).max())
        assert difference <= 0.1 * size, f"they differ by {difference} of {size}"
    times = [], []
    for number in range(3 + rounds):
        for way, seconds in zip(ways, times, strict=True):
            begin = time.perf_counter()
            for _ in range(calls):
                result = way(*arguments)
            jax.block_until_ready(result)
            if number >= 3:
                seconds.append((time.perf_counter() - begin) / calls)
    return [statistics.median(t) * 1e6 for t in times]


if __name__ == "__main__":
    sys.exit(main())
