"""Times one decode step of a Llama-shaped model on random weights: plain XLA against jaxgraph.

Every variant runs the same 64 steps from the same position, again and again; the figure is the
median round's time over 64. The memory floor is what the step must at least take: the bytes of
weights and cache that it reads, over the copy bandwidth that this script measures on the device.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array, lax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama import SHAPES, Config, decode_step, empty_cache, random_params

State = tuple[Array, Array, Any]  # token, position, cache: what a step takes and returns
HOST_CALLS = 8  # short enough that no queue fills up and makes the host wait for the device


@dataclass(frozen=True)
class Timing:
    """Microseconds at the median: of a step, and of the host's part of one call."""

    name: str
    step_us: float
    host_us: float
    # jaxgraph's counters so far, where it ran.
    counters: dict[str, int] = field(default_factory=dict)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="135m", help="default: %(default)s")
    add("--batch", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--context", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--position", type=int, metavar="N", help="of the first step (default: the last possible)")
    add("--layers", choices=["list", "scan"], default="list", help="default: %(default)s")
    add("--packed", action="store_true", help="also time jaxgraph with parameters and cache packed")
    add("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--engine", choices=["xla", "jaxgraph", "both"], default="both", help="default: both")
    add("--steps", type=int, default=64, metavar="N", help="in a round (default: %(default)s)")
    add("--rounds", type=int, default=20, metavar="N", help="timed ones (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    last = arguments.context - arguments.steps
    arguments.position = last if arguments.position is None else arguments.position
    if not 0 <= arguments.position <= last:
        parser.error(f"--position must be from 0 to context - steps, {last}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    config = SHAPES[arguments.shape]
    bandwidth = copy_bandwidth()
    stacked = arguments.layers == "scan"
    params = random_params(config, arguments.dtype, jax.random.key(0), stacked=stacked)
    needed = bytes_read(config, params, arguments)
    floor_us = needed / bandwidth * 1e6
    print_heading(arguments, bandwidth, needed)
    timings = []
    for timing in measure(arguments, config, params):
        timings.append(timing)
        print(
            f"{timing.name:34} {timing.step_us:10.1f} {timing.host_us:10.1f}"
            f" {floor_us / timing.step_us:8.0%}",
            flush=True,
        )
    print(f"{'memory floor':34} {floor_us:10.1f} {'':10} {1:8.0%}")
    if arguments.json is not None:
        write_json(arguments, timings, needed, bandwidth)
    return 0


def measure(arguments: argparse.Namespace, config: Config, params: Any) -> Iterator[Timing]:
    """Times every variant, one after the other."""

    def fresh() -> State:
        token = jnp.ones(arguments.batch, jnp.int32)
        cache = empty_cache(
            config,
            arguments.batch,
            arguments.context,
            arguments.dtype,
            stacked=arguments.layers == "scan",
        )
        return token, jnp.int32(arguments.position), cache

    time_one = partial(time_steps, fresh=fresh, arguments=arguments)
    time_all = partial(time_scan, fresh=fresh, arguments=arguments)
    step = partial(decode_step, config=config)
    if arguments.engine in ("xla", "both"):
        jitted = jax.jit(step, donate_argnums=1)
        yield time_one("XLA, jit", jitted, params)
        yield time_one(
            "XLA, jit, command buffers off",
            without_command_buffers(jitted, params, fresh()),
            params,
        )
        yield time_all("XLA, lax.scan", step, params)
    if arguments.engine in ("jaxgraph", "both"):
        import jaxgraph

        wrapped = jaxgraph.wrap(step, donate_argnums=(1,))

        def fresh_packed() -> State:
            token, position, cache = fresh()
            return token, position, wrapped.pack(cache, argnum=1)

        forms = [("jaxgraph", params, fresh)]
        if arguments.packed:
            token, position, cache = jax.eval_shape(fresh)
            packed = wrapped.pack(params, example_args=(params, cache, token, position))
            forms.append(("jaxgraph, packed", packed, fresh_packed))
        for name, form, start in forms:
            timing = time_one(name, wrapped, form, fresh=start)
            yield replace(timing, counters=dict(wrapped.stats()))
            timing = time_all(f"{name}, lax.scan", wrapped, form, fresh=start)
            yield replace(timing, counters=dict(wrapped.stats()))


def without_command_buffers(jitted: Callable, params: Any, state: State) -> Callable:
    """The step compiled so that XLA launches every kernel by itself."""
    token, position, cache = state
    lowered = jitted.lower(params, cache, token, position)
    return lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})


def time_steps(
    name: str, step: Callable, params: Any, fresh: Callable[[], State], arguments: Any
) -> Timing:
    """Times steps called one by one from Python."""
    token, position, cache = fresh()

    def run(cache: Any, steps: int) -> State:
        state = (token, position, cache)
        for _ in range(steps):
            state = step(params, state[2], state[0], state[1])
        return state

    step_us, cache = time_rounds(run, cache, arguments)
    host = []
    for _ in range(arguments.rounds):
        jax.block_until_ready(cache)
        start = time.perf_counter()
        *_, cache = run(cache, min(HOST_CALLS, arguments.steps))
        host.append((time.perf_counter() - start) / min(HOST_CALLS, arguments.steps))
    jax.block_until_ready(cache)
    return Timing(name, step_us, statistics.median(host) * 1e6)


def time_scan(
    name: str, step: Callable, params: Any, fresh: Callable[[], State], arguments: Any
) -> Timing:
    """Times all steps of a round in one `lax.scan`: one call from Python."""

    @partial(jax.jit, donate_argnums=1, static_argnums=4)
    def scanned(params: Any, cache: Any, token: Array, position: Array, steps: int) -> State:
        def body(state: State, _: None) -> tuple[State, None]:
            token, position, cache = state
            return step(params, cache, token, position), None

        return lax.scan(body, (token, position, cache), length=steps)[0]

    token, position, cache = fresh()
    host = []

    def run(cache: Any, steps: int) -> State:
        start = time.perf_counter()
        state = scanned(params, cache, token, position, steps)
        host.append(time.perf_counter() - start)
        return state

    step_us, _ = time_rounds(run, cache, arguments)
    return Timing(name, step_us, statistics.median(host) / arguments.steps * 1e6)


def time_rounds(run: Callable[[Any, int], State], cache: Any, arguments: Any) -> tuple[float, Any]:
    """The median round's microseconds per step, after rounds that compile and warm up."""
    seconds = []
    for round_number in range(3 + arguments.rounds):
        jax.block_until_ready(cache)
        start = time.perf_counter()
        token, _, cache = run(cache, arguments.steps)
        token.block_until_ready()
        if round_number >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / arguments.steps * 1e6, cache


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the device adding one to a large array in place."""
    size = (1 << 30) if jax.default_backend() == "gpu" else (1 << 28)
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add_one(jnp.zeros(size // 4, jnp.float32)).block_until_ready()
    calls, seconds = 10, []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            x = add_one(x)
        x.block_until_ready()
        seconds.append((time.perf_counter() - start) / calls)
    return 2 * size / statistics.median(seconds)


def bytes_read(config: Config, params: Any, arguments: argparse.Namespace) -> int:
    """Bytes of weights and cache that a step in the middle of a round reads at least."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tied:
        # Only the batch's rows of the table are read; tied, it is the output projection too.
        weights -= params["embed"].nbytes
    rows = arguments.position + arguments.steps // 2
    row = (
        2 * config.layers * config.kv_heads * config.head_dim * jnp.dtype(arguments.dtype).itemsize
    )
    return weights + arguments.batch * rows * row


def print_heading(arguments: argparse.Namespace, bandwidth: float, needed: int) -> None:
    device = jax.devices()[0].device_kind
    print(
        f"{arguments.shape}, batch {arguments.batch}, context {arguments.context}, "
        f"position {arguments.position}, {arguments.dtype}, layers as {arguments.layers}; "
        f"{device}, jax {jax.__version__}"
    )
    print(f"a step reads {needed / 1e6:.1f} MB; copying runs at {bandwidth / 1e9:.0f} GB/s\n")
    print(f"{'':34} {'µs a step':>10} {'host µs':>10} {'of floor':>8}")


def write_json(
    arguments: argparse.Namespace, timings: list[Timing], needed: int, bandwidth: float
) -> None:
    settings = {k: v for k, v in vars(arguments).items() if k != "json"}
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    versions["jaxlib"] = jaxlib.__version__
    figures = {
        "device": jax.devices()[0].device_kind,
        "backend": jax.devices()[0].client.platform_version,
        "versions": versions,
        "settings": settings,
        "copy_bytes_per_second": bandwidth,
        "bytes_read": needed,
        "floor_us": needed / bandwidth * 1e6,
        "timings": [asdict(timing) for timing in timings],
    }
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
