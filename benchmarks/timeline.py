"""Shows one decode step as the kernels that it runs, of XLA and of jaxgraph: needs a GPU.

    python benchmarks/timeline.py [--shape S] [--json FILE]

JAX's profiler records the kernels of a few steps that follow each other without waiting, those
within graphs one by one. A kernel that waits for its predecessor on the device (dependent launch)
is there before it works, so a kernel counts from the end of the one before it.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxgraph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama import SHAPES, decode_step, empty_cache, random_params

WARM, PROFILED = 12, 5  # steps
# Of jaxgraph's kernels, by name. XLA's names say what is fused, not what it is for.
KINDS = {
    "attention": re.compile(r"^Attention"),
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


def last_step(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """The last of several equal steps, from the end of the one before it.

    Raises:
      ValueError: the steps are not equal, so that nobody knows where one ends.
    """
    count, rest = divmod(len(kernels), steps)
    parts = [kernels[i * count : (i + 1) * count] for i in range(steps)]
    if count == 0 or rest or any(_names(p) != _names(parts[0]) for p in parts):
        raise ValueError(f"{len(kernels)} kernels are not those of {steps} equal steps")
    origin = before = parts[-2][-1].end_us
    step = []
    for name, start, end in parts[-1]:
        step.append(Kernel(short(name), max(start, before) - origin, end - origin))
        before = end
    return step


def _names(kernels: Iterable[Kernel]) -> list[str]:
    return sorted(kernel.name for kernel in kernels)


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
    cache = empty_cache(config, 1, arguments.context, "bfloat16")
    state = (jnp.ones(1, jnp.int32), jnp.int32(arguments.position), cache)
    step = make(partial(decode_step, config=config), donate_argnums=(1,))

    def run(state: Any, steps: int) -> Any:
        for _ in range(steps):
            state = step(params, state[2], state[0], state[1])
        return jax.block_until_ready(state)

    state = run(state, WARM)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run(state, PROFILED)
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        return last_step(kernels_of(profile), PROFILED)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="1b", help="default: %(default)s")
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
        figures = {"shape": arguments.shape, "engines": engines}
        arguments.json.write_text(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
