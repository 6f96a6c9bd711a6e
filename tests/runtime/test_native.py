"""Where the native library can run."""

import os
import subprocess
import sys

import pytest

from jaxgraph.runtime import native


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("90a", "9.0", True),
        ("90a", "10.0", False),  # made of Hopper's own instructions
        ("90a", "8.0", False),
        ("75", "9.0", True),  # holds PTX, compiled when it is loaded
        ("80", "7.5", False),
        ("80-real", "8.6", True),
        ("80-real", "9.0", False),
        ("100f", "10.3", True),
        ("75-virtual", "12.0", True),
        ("120", "12.0", True),
        ("75 80 90a", "9.0", True),
        ("80-real 90a", "10.0", False),
        ("native", "8.9", True),
    ],
)
def test_which_devices_a_build_runs_on(architectures, capability, runs):
    reason = native._why_device_unsupported(capability, architectures.split())
    assert (reason is None) == runs
    if not runs:
        assert f"compute capability {capability}" in reason
        assert "CUDAARCHS" in reason


@pytest.mark.parametrize(
    ("architectures", "capability", "streams"),
    [
        ("90a", "9.0", True),
        ("90-virtual", "10.0", True),
        ("75-virtual 90a-real", "9.0", True),
        ("75-virtual 90a-real", "10.0", False),  # code without clusters, compiled when it is loaded
        ("80", "9.0", False),
        ("80 120", "12.0", False),
        ("native", "9.0", True),
        ("native", "8.9", False),
    ],
)
def test_which_devices_stream_many_rows(architectures, capability, streams):
    assert native._streams_on(capability, architectures.split()) == streams


def test_older_devices_than_cuda_supports():
    reason = native._why_device_unsupported("7.0", ["70"])
    assert "below 7.5" in reason


def test_platforms():
    assert native.why_unsupported("cpu") is None
    assert "'tpu'" in native.why_unsupported("tpu")
    assert native.ffi_platform("rocm") is None


def test_build_info_says_what_is_inside():
    info = native.build_info()
    assert info["version"]
    assert info["cuda"] == bool(info["cuda_architectures"])
    assert info["cuda"] == (info["cuda_runtime"] > 0)


@pytest.mark.parametrize(("switch", "off"), [("1", True), (" Yes", True), ("0", False)])
def test_the_run_time_compiler_reads_its_switch_as_a_boolean(switch: str, off: bool):
    code = "from jaxgraph.runtime import native; print(native.compiler_status())"
    env = {**os.environ, "JAXGRAPH_DISABLE_JIT": switch, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    status = run.stdout.strip()
    assert "\n" not in status
    if not native.build_info()["cuda"]:
        assert status == "off: this build has no CUDA device"
    else:
        assert ("JAXGRAPH_DISABLE_JIT" in status) == off
