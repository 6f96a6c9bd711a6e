"""The native module: its handlers registered with JAX, and where it can run."""

from __future__ import annotations

import functools
import importlib.util
import os
import re

import jax

try:
    from jaxgraph import _native
except ImportError as error:
    if importlib.util.find_spec("jaxgraph._native") is not None:
        raise ImportError(f"jaxgraph's native module cannot be loaded: {error}") from error
    raise ImportError(
        f"{os.path.dirname(os.path.dirname(__file__))} is jaxgraph's source, which is not built. "
        "Python looks where it is started before it looks for installed packages: start it "
        "elsewhere, or as `python -P`. To install the package: `pip install .`"
    ) from None

EXECUTE = "jaxgraph_execute"  # a split, by an executor
LAUNCH = "jaxgraph_launch"  # a kernel by itself

stats = _native.stats
reset_stats = _native.reset_stats
events = _native.events
last_event = _native.last_event
executions = _native.executions
variants = _native.variants
preview = _native.preview
begin_trace = _native.begin_trace
end_trace = _native.end_trace
write_graphs = _native.write_graphs
clear = _native.clear
reserve = _native.reserve
encode_program = _native.encode_program
describe_program = _native.describe_program
arena_bytes = _native.arena_bytes
build_info = _native.build_info
compiler_status = _native.compiler_status

# Names of one platform: JAX's (`Device.platform`), lowering rules', and the FFI registry's.
_FFI_PLATFORM = {"cpu": "cpu", "cuda": "CUDA", "gpu": "CUDA"}

# Below pip's namespace package `nvidia`.
_NVRTC_FOLDERS = (("cu13", "lib"), ("cuda_nvrtc", "lib"))

# Oldest compute capability that CUDA 13 compiles for.
_OLDEST_CAPABILITY = (7, 5)


def _register() -> None:
    # At import, so that executables from the persistent compilation cache find their handlers.
    for platform, targets in _native.registrations().items():
        for target, stages in targets.items():
            jax.ffi.register_ffi_target(target, stages, platform=platform)


_register()


def _compiler_folders() -> list[str]:
    """Where pip puts NVRTC, which comes with jax[cuda13] (or with CUDA 12's packages)."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    folders = (os.path.join(root, *lib) for root in roots for lib in _NVRTC_FOLDERS)
    return [folder for folder in folders if os.path.isdir(folder)]


_native.set_compiler_folders(_compiler_folders())


def ffi_platform(platform: str) -> str | None:
    """The FFI registry's name of a platform that has a native backend, else None."""
    return _FFI_PLATFORM.get(platform)


@functools.cache
def why_unsupported(platform: str) -> str | None:
    """Why a platform ("cpu", "cuda", "tpu", ...) runs the plain function; None: it need not."""
    name = ffi_platform(platform)
    if name is None:
        return f"jaxgraph has no native backend for platform '{platform}'"
    if name == "cpu":
        return None
    info = build_info()
    if not info["cuda"]:
        return "this build of jaxgraph has no CUDA kernels (nvcc was not found when it was built)"
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # none here: the function is lowered for another machine
        return None
    for device in devices:
        reason = _why_device_unsupported(
            str(device.compute_capability), info["cuda_architectures"].split()
        )
        if reason is not None:
            return reason
    return None


@functools.cache
def streams_many_rows() -> bool:
    """Whether this machine's GPUs read 16-bit weights once for up to 64 rows, at memory's speed."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return False
    architectures = build_info()["cuda_architectures"].split()
    return all(_streams_on(str(device.compute_capability), architectures) for device in devices)


def _streams_on(capability: str, architectures: list[str]) -> bool:
    """Does a device have clusters of blocks, and kernels compiled to use them?"""
    major, minor = (int(part) for part in capability.split("."))
    return major in (9, 10) and any(
        _runs_on(a, major, minor) and (not a[0].isdigit() or not _runs_on(a, 8, 9))
        for a in architectures
    )


def _why_device_unsupported(capability: str, architectures: list[str]) -> str | None:
    major, minor = (int(part) for part in capability.split("."))
    if (major, minor) < _OLDEST_CAPABILITY:
        return f"compute capability {capability} is below 7.5, the oldest that CUDA 13 supports"
    if not any(_runs_on(architecture, major, minor) for architecture in architectures):
        return (
            f"this build has CUDA kernels for architectures {' '.join(architectures)}, not for "
            f"compute capability {capability}: reinstall with CUDAARCHS={major}{minor}"
        )
    return None


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Does code that CMake compiled for `architecture` run on a device of this capability?"""
    match = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture)
    if match is None:
        return True  # "native", "all": made for this machine, or for every one
    built = int(match[1]), int(match[2])
    if match[3] == "a":
        return built == (major, minor)
    if match[3] == "f" or match[4] == "-real":
        return built[0] == major and built[1] <= minor
    return built <= (major, minor)
