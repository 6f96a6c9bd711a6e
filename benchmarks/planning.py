"""What tracing and planning a step cost, against XLA's compilation of it.

    python benchmarks/planning.py [--layers N] [--json FILE]

Seconds of the processor (so that what else runs on the machine does not count), the least of three.
XLA compiles one layer of a scan; all of them are planned.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxgraph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama import SHAPES, decode_step, empty_cache, random_params

TIMES = 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=30, metavar="N", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args(argv)
    rows = []
    for how in ("list", "scan"):
        step, args = step_of(arguments.layers, stacked=how == "scan")
        ours = seconds(functools.partial(jaxgraph.explain, step), args)
        xla = seconds(lambda *a, step=step: jax.jit(step).lower(*a).compile(), args)
        print(f"{arguments.layers} layers as a {how}: XLA {xla:.2f} s, jaxgraph {ours:.2f} s")
        rows.append({"layers": arguments.layers, "how": how, "xla_s": xla, "plan_s": ours})
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


def step_of(layers: int, stacked: bool) -> tuple[Callable, tuple[Any, ...]]:
    """A step of that many layers of 15m, and the shapes of its arguments."""
    config = replace(SHAPES["15m"], layers=layers)
    make = functools.partial(random_params, config, jnp.bfloat16, stacked=stacked)
    params = jax.eval_shape(make, jax.random.key(0))
    cache = jax.eval_shape(lambda: empty_cache(config, 1, 64, jnp.bfloat16, stacked=stacked))
    token, position = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return functools.partial(decode_step, config=config), (params, cache, token, position)


def seconds(function: Callable, args: tuple[Any, ...]) -> float:
    """The least that the processor worked for a call, without what JAX remembers."""

    def once() -> float:
        jax.clear_caches()
        begin = time.process_time()
        function(*args)
        return time.process_time() - begin

    return min(once() for _ in range(TIMES))


if __name__ == "__main__":
    sys.exit(main())
