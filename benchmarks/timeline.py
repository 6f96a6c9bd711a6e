"""Shows one decode step as the kernels that it runs, of XLA and of jaxgraph: needs a GPU.

    python benchmarks/timeline.py [--shape S] [--json FILE]

JAX's profiler records the kernels of a few steps in one `lax.scan`, those within graphs one by one.
A kernel that waits for its predecessor on the device (dependent launch) is there before it works,
so a kernel counts from the end of the one before it.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxgraph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama import SHAPES, decode_step, empty_cache, random_params

STEPS = 8  # in the scan
# Of jaxgraph's kernels, by name. XLA's names say what is fused, not what it is for.
KINDS = {
    "attention": re.compile(r"^Attention"),
    "layers": re.compile(r"^Layer"),  # of small models: products and attention in two kernels
    "products": re.compile(r"^(Stream|Along|Tiled|Columns|Panels)"),
    "norms, rows and all else": re.compile(r"^jaxgraph_|^[A-Z]"),
}
OTHER, BETWEEN = "kernels of XLA", "between kernels"


class Kernel(NamedTuple):
    """When a kernel was at work, microseconds from the step's begin."""

    name: str
    start_us: float
    end_us: float

    @property
    def kind(self) -> str:
        """What it does, by its name."""
        return next((k for k, pattern in KINDS.items() if pattern.search(self.name)), OTHER)


def short(name: str) -> str:
    """A kernel's name without namespaces, template and other parameters."""
    name = re.sub(r"\(anonymous namespace\)|<unnamed>", "", name.removeprefix("void "))
    return re.sub(r"[<(].*", "", name).rpartition("::")[2]


def kernels_of(profile: Any) -> list[Kernel]:
    """All kernels and copies that a profile (`jax.profiler.ProfileData`) has of GPUs, in order."""
    found = [
        Kernel(event.name, event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(found, key=lambda kernel: kernel.end_us)


def one_step(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """A step from the middle of several equal ones, which other kernels may come before and after.

    It begins behind the longest pause of a step, and at the end of the kernel before.

    Raises:
      ValueError: nothing repeats itself that often.
    """
    names = [kernel.name for kernel in kernels]
    for count in range(len(names) // steps, len(names) // (steps + 1), -1):
        middle = len(names) // 2 - count
        if names[middle : middle + count] == names[middle + count : middle + 2 * count]:
            break
    else:
        raise ValueError(f"{len(kernels)} kernels are not those of {steps} equal steps")

    def pause(i: int) -> float:
        return kernels[i].start_us - kernels[i - 1].end_us

    first = max(range(middle, middle + count), key=pause)
    origin = before = kernels[first - 1].end_us
    step = []
    for name, start, end in kernels[first : first + count]:
        step.append(Kernel(short(name), max(start, before) - origin, end - origin))
        before = end
    return step


def summary(step: Sequence[Kernel]) -> dict[str, tuple[int, float]]:
    """By kind: how many kernels, and their microseconds; and those in which none was at work."""
    found: dict[str, tuple[int, float]] = {}
    for kernel in step:
        count, us = found.get(kernel.kind, (0, 0.0))
        found[kernel.kind] = count + 1, us + kernel.end_us - kernel.start_us
    idle = step[-1].end_us - sum(us for _, us in found.values())
    return {**dict(sorted(found.items(), key=lambda item: -item[1][1])), BETWEEN: (0, idle)}


def profiled(make: Callable[..., Any], arguments: argparse.Namespace) -> list[Kernel]:
    """The kernels of a step of the function that `make` compiles."""
    config = SHAPES[arguments.shape]
    params = random_params(config, "bfloat16", jax.random.key(0))
    cache = empty_cache(config, arguments.batch, arguments.context, "bfloat16")
    token, position = jnp.ones(arguments.batch, jnp.int32), jnp.int32(arguments.position)
    step = make(partial(decode_step, config=config), donate_argnums=(1,))

    @partial(jax.jit, donate_argnums=1)
    def run(params: Any, cache: Any) -> Any:
        def body(state: Any, _: None) -> Any:
            token, position, cache = state
            return step(params, cache, token, position), None

        return jax.lax.scan(body, (token, position, cache), length=STEPS)[0]

    for _ in range(2):
        *_, cache = jax.block_until_ready(run(params, cache))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run(params, cache))
        (file,) = Path(folder).rglob("*.xplane.pb")
        return one_step(kernels_of(jax.profiler.ProfileData.from_file(str(file))), STEPS)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="1b", help="default: %(default)s")
    add("--batch", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--context", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--position", type=int, default=512, metavar="N", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="also write all kernels there")
    arguments = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        print("no GPU is here, so there are no kernels to show")
        return 0
    engines: dict[str, Any] = {}
    for name, make in (("XLA", jax.jit), ("jaxgraph", jaxgraph.wrap)):
        step = profiled(make, arguments)
        engines[name] = {
            "end_us": step[-1].end_us,
            "kinds": summary(step),
            "kernels": [{**kernel._asdict(), "kind": kernel.kind} for kernel in step],
        }
        print(f"{name}: {len(step)} kernels in {step[-1].end_us:.1f} µs")
        for what, (count, us) in engines[name]["kinds"].items():
            print(f"  {what:24} {count:5} {us:9.1f} µs")
    if arguments.json:
        figures = {"shape": arguments.shape, "batch": arguments.batch, "engines": engines}
        arguments.json.write_text(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
