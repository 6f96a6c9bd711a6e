"""Each function of jaxgraph.ops against what XLA makes of its plain definition.

    python benchmarks/ops.py [--batch N] [--json FILE]

One jitted function holds 50 calls on operands of their own (so no cache holds the weights), at the
sizes of Llama-3.2-1B; the figure is the median of 20 runs, over 50. XLA may put either kind of call
into its command buffers.
"""

import argparse
import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from jaxgraph import ops
from jaxgraph.ops import attention, products, rows

CALLS = 50
WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LENGTH, VOCABULARY = 2048, 8192, 32, 8, 64, 1024, 128256


def cases(batch):
    """(name, operation, definition, shapes of floats, position or ids, settings)."""
    x, w = (batch, WIDTH), (WIDTH,)
    q, cache = (batch, HEADS, HEAD_DIM), (batch, KV_HEADS, LENGTH, HEAD_DIM)
    new = (batch, KV_HEADS, HEAD_DIM)
    up = (WIDTH, HIDDEN)
    plain = {"activation": None, "out_in": False}
    none = {"bias": None, "residual": None}
    shown = {"scale": HEAD_DIM**-0.5, "window": None, "soft_cap": None}
    position = jnp.int32(LENGTH // 2)
    yield "rms_norm", ops.rms_norm, rows._rms_norm, [x, w], None, {"eps": 1e-6}
    yield "layer_norm", ops.layer_norm, rows._layer_norm, [x, w, w], None, {"eps": 1e-5}
    yield "softmax", ops.softmax, rows._softmax, [(batch, LENGTH)], None, {}
    yield "argmax, 128256", ops.argmax, rows._argmax, [(batch, VOCABULARY)], None, {}
    yield "rope", ops.rope, attention._rope, [q], position, {"base": 5e5, "interleaved": False}
    yield "update_cache", ops.update_cache, attention._update_cache, [cache, new], position, {}
    attend = ops.attention_decode, attention._attention_decode
    yield "attention_decode", *attend, [q, cache, cache], position, shown
    product = ops.linear, functools.partial(products._linear, **none)
    yield "linear, 2048 to 2048", *product, [x, (WIDTH, WIDTH)], None, plain
    yield "linear, 8192 to 2048", *product, [(batch, HIDDEN), (HIDDEN, WIDTH)], None, plain
    silu = plain | {"activation": "silu"}
    yield "glu, 2048 to 8192", ops.glu, products._glu, [x, up, up], None, silu
    ids = jnp.arange(batch, dtype=jnp.int32)
    yield "embedding", ops.embedding, products._embedding, [(4096, WIDTH)], ids, {}


def microseconds(function, arguments):
    jitted = jax.jit(lambda calls: [function(*c) for c in calls])
    for _ in range(3):
        jax.block_until_ready(jitted(arguments))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        jax.block_until_ready(jitted(arguments))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / CALLS * 1e6


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args(argv)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    figures = []
    print(f"{jax.devices()[0].device_kind}, batch {arguments.batch}, {jnp.dtype(dtype).name}\n")
    print("| function | XLA, µs | jaxgraph.ops, µs |\n| --- | ---: | ---: |")
    for name, operation, definition, shapes, last, settings in cases(arguments.batch):
        key = jax.random.key(0)
        make = jax.jit(lambda k, s: jax.random.normal(k, s, dtype), static_argnums=1)
        calls = [
            [make(jax.random.fold_in(key, i), s) for s in shapes] + ([] if last is None else [last])
            for i in range(CALLS)
        ]
        theirs = microseconds(functools.partial(definition, **settings), calls)
        ours = microseconds(functools.partial(operation, **settings), calls)
        figures.append({"function": name, "xla_us": theirs, "ops_us": ours})
        print(f"| {name} | {theirs:.2f} | {ours:.2f} |", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"batch": arguments.batch, "rows": figures}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
