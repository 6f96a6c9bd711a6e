"""Makes every table and picture of docs/performance.md, on a machine with an NVIDIA GPU.

    python benchmarks/suite.py [--only PART ...] [--shape S ...] [--batch N ...] [--quick]

Each benchmark runs in a process of its own and leaves its figures as JSON in --out; then tables.md
and the pictures are made of all figures that lie there. So it can be run in pieces: `--only` names
the parts, `--shape` and `--batch` choose steps, `--quick` takes fewer rounds, and `--resume` leaves
out what has figures already. Exits with 1 if a benchmark failed. Where there is no GPU it says so
and exits with 0.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from render import render  # noqa: E402

PARTS = ("decode", "timeline", "ops", "regions", "profitability", "identity", "planning")
# Those in C++, by the targets that they are.
TARGETS = {
    "products": "stream_products",
    "attention": "attention",
    "layers": "layers",
    "steps": "steps",
}
PARTS += tuple(TARGETS)


@dataclass(frozen=True)
class Job:
    """A benchmark that writes `name`.json: by its option --json, or what it prints becomes that."""

    name: str
    command: tuple[str, ...]
    prints: bool = False


@dataclass(frozen=True)
class Step:
    """A decode step to time."""

    shape: str
    batch: int = 1
    context: int = 1024
    position: int = 512

    @property
    def name(self) -> str:
        return f"{self.shape}_{self.batch}" + ("" if self.context == 1024 else f"_{self.context}")


STEPS = (
    *(Step(shape) for shape in ("15m", "135m", "1b", "8b")),
    *(Step(shape, batch) for shape in ("1b", "8b") for batch in (4, 8, 16, 32, 64)),
    Step("1b", context=32768, position=32000),
)
TIMELINES = ("135m", "1b")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    out: Path = arguments.out
    failed = []
    if not arguments.render:
        found = machine()
        if found["backend"] != "gpu" and not arguments.anywhere:
            print("no GPU that JAX can use is here, so there is nothing to measure")
            return 0
        out.mkdir(parents=True, exist_ok=True)
        (out / "machine.json").write_text(json.dumps(found, indent=1) + "\n")
        failed = [job.name for job in jobs(arguments) if not run(job, arguments)]
    for written in render(out):
        print(written)
    if failed:
        print(f"failed: {', '.join(failed)}; see the .log files in {out}", file=sys.stderr)
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" ".join(PARTS))
    add("--shape", nargs="+", metavar="S", help="of decode steps; default: all")
    add("--batch", nargs="+", type=int, metavar="N", help="of decode steps; default: all")
    add("--quick", action="store_true", help="5 rounds instead of 20")
    add("--resume", action="store_true", help="leave out what has figures already")
    add("--render", action="store_true", help="measure nothing: tables and pictures alone")
    add("--limit", type=float, default=900, metavar="S", help="seconds for one benchmark")
    add("--build", type=Path, default=Path("build/bench-cmake"), help="for those in C++")
    add("--out", type=Path, default=Path("build/bench"), help="default: %(default)s")
    add("--anywhere", action="store_true", help=argparse.SUPPRESS)  # without a GPU, for tests
    return parser.parse_args(argv)


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """What is to be run, in order."""

    def wanted(step: Step) -> bool:
        return (arguments.shape is None or step.shape in arguments.shape) and (
            arguments.batch is None or step.batch in arguments.batch
        )

    def python(script: str, *options: object) -> tuple[str, ...]:
        return (sys.executable, "-P", str(HERE / script), *map(str, options))

    if "decode" in arguments.only:
        for step in filter(wanted, STEPS):
            options = ["--shape", step.shape, "--batch", step.batch, "--packed"]
            options += ["--context", step.context, "--position", step.position]
            options += ["--rounds", 5] if arguments.quick else []
            yield Job(f"decode_{step.name}", python("decode.py", *options))
    if "timeline" in arguments.only:
        for shape in TIMELINES:
            if wanted(Step(shape)):
                yield Job(f"timeline_{shape}", python("timeline.py", "--shape", shape))
    for part in ("ops", "regions", "identity", "planning"):
        if part in arguments.only:
            yield Job(part, python(f"{part}.py"))
    if "profitability" in arguments.only:
        for name in ("rows", "pieces", "prefill"):
            yield Job(f"profitability_{name}", python("profitability.py", name))
    for part, target in TARGETS.items():
        if part in arguments.only:
            program = built(target, arguments.build)
            if program is not None:
                yield Job(part, (str(program),), prints=True)


def built(target: str, build: Path) -> Path | None:
    """A benchmark in C++, made if it is not there; None: it cannot be made here."""
    source = HERE.parent
    commands = (
        ("cmake", "-S", str(source), "-B", str(build)),
        ("cmake", "--build", str(build), "--parallel", str(os.cpu_count()), "--target", target),
    )
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            print(f"{target}: left out, for it needs CMake, nvcc and GoogleTest", flush=True)
            return None
        if done.returncode != 0:
            print(f"{target}: left out, for it cannot be built (it needs nvcc and GoogleTest):")
            print((done.stderr or done.stdout)[-1000:], flush=True)
            return None
    return build / target


def run(job: Job, arguments: argparse.Namespace) -> bool:
    """Runs a benchmark; what it says goes to the screen and to its log. False: it failed."""
    figures = arguments.out / f"{job.name}.json"
    if arguments.resume and figures.exists():
        return True
    print(f"== {job.name}", flush=True)
    command = job.command if job.prints else (*job.command, "--json", str(figures))
    begin, lines = time.monotonic(), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = threading.Timer(arguments.limit, process.kill)
        timer.start()
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
        timer.cancel()
    took = time.monotonic() - begin
    print(f"== {job.name}: exit code {process.returncode} after {took:.0f} s\n", flush=True)
    figures.with_suffix(".log").write_text(f"{' '.join(command)}\n\n{''.join(lines)}")
    if process.returncode == 0 and job.prints:
        figures.write_text(json.dumps({"text": "".join(lines)}, indent=1) + "\n")
    return process.returncode == 0


def machine() -> dict[str, str]:
    """What the figures are of. JAX is asked in another process: it would keep the GPU's memory."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    ask = (
        "import jax, jaxgraph; d = jax.devices()[0];"
        "print(d.platform, d.device_kind, jaxgraph.__version__, sep='|')"
    )
    backend, device, version = (said(sys.executable, "-P", "-c", ask).split("|") + 3 * [""])[:3]
    return {
        "backend": backend,
        "device": device,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        **versions,
        "jaxgraph": said("git", "-C", str(HERE), "describe", "--always", "--dirty") or version,
        "date": time.strftime("%Y-%m-%d"),
    }


def said(*command: str) -> str:
    """The first line that a program prints; nothing where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
