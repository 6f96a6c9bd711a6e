"""Checks the installation: versions, devices, settings, and a short self-test on each backend."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jaxgraph.cli.self_test import self_test
from jaxgraph.cli.terminal import Terminal
from jaxgraph.options import Options
from jaxgraph.runtime import native

_OK, _FAILED, _PLAIN = 0, 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--no-self-test", action="store_true", help="run nothing on the devices")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[Terminal], None], int]:
    """Looks at everything and tests it."""
    info = native.build_info()
    found: dict[str, Any] = {
        "versions": {
            "jaxgraph": info["version"],
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
            "numpy": np.__version__,
            "python": sys.version.split()[0],
            "system": platform.platform(),
        },
        "build": {k: v for k, v in info.items() if k != "version"}
        | {"run_time_compiler": native.compiler_status()},
        "devices": [_device(device) for device in jax.devices()],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("JAXGRAPH_")},
    }
    problems = []
    warnings = [
        f"{d['name']} runs the plain function: {d['plain']}" for d in found["devices"] if d["plain"]
    ]
    try:
        options = Options()
    except ValueError as error:
        problems.append(f"a setting is wrong: {error}")
        options = None
    if options is not None and options.disable:
        warnings.append("switched off by JAXGRAPH_DISABLE: every function runs as jax.jit runs it")
    if options is not None and not options.fusion:
        warnings.append("fusion is switched off by JAXGRAPH_DISABLE_FUSION")
    if options is not None and not options.concurrency:
        warnings.append("side streams are switched off by JAXGRAPH_DISABLE_CONCURRENCY")
    compiler = found["build"]["run_time_compiler"]
    if compiler.startswith("off") and any(d["cuda"] and not d["plain"] for d in found["devices"]):
        warnings.append(f"no kernels are compiled for your shapes: {compiler}")
    if not args.no_self_test and options is not None:
        found["self_test"] = [test for device in _test_devices() for test in self_test(device)]
        problems += [f"{t['name']}: {t['error']}" for t in found["self_test"] if t["error"]]
    found |= {"warnings": warnings, "problems": problems}

    def show(out: Terminal) -> None:
        _show(found, out)

    return found, show, _FAILED if problems else _PLAIN if warnings else _OK


def _device(device: Any) -> dict[str, Any]:
    name = "cuda" if device.platform == "gpu" else device.platform
    return {
        "name": str(device),
        "kind": device.device_kind,
        "cuda": name == "cuda",
        "compute_capability": getattr(device, "compute_capability", None),
        "plain": native.why_unsupported(name),
    }


def _test_devices() -> list[Any]:
    """One device of each backend that has native splits."""
    devices = jax.local_devices(backend="cpu")[:1]
    if jax.default_backend() == "gpu" and native.why_unsupported("cuda") is None:
        devices += jax.local_devices()[:1]
    return devices


def _show(found: dict[str, Any], out: Terminal) -> None:
    out.head("versions")
    out.pairs([(name, str(value)) for name, value in found["versions"].items()])
    out.head("build")
    out.pairs([(name, str(value) or "none") for name, value in found["build"].items()])
    out.head("devices")
    for d in found["devices"]:
        capability = (
            f", compute capability {d['compute_capability']}" if d["compute_capability"] else ""
        )
        out.line(f"  {d['name']} ({d['kind']}{capability}): {d['plain'] or 'native'}")
    out.head("environment")
    if not found["environment"]:
        out.line("  no JAXGRAPH_ variable is set")
    out.pairs(list(found["environment"].items()))
    if "self_test" in found:
        out.head("self-test")
        for test in found["self_test"]:
            verdict = out.paint("FAILED", "bad") if test["error"] else out.paint("ok", "good")
            out.line(f"  {test['name']:<28} {verdict}  {test['ms']:.0f} ms")
    for warning in found["warnings"]:
        out.line(out.paint(f"warning: {warning}", "warn"))
    for problem in found["problems"]:
        out.line(out.paint(f"problem: {problem}", "bad"))
    if not found["warnings"] and not found["problems"]:
        out.line(out.paint("all is well", "good"))
