import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import jaxgraph
from jaxgraph.cli import main
from jaxgraph.cli.terminal import Terminal
from jaxgraph.runtime import native

HERE = pathlib.Path(__file__).parent
OK, FAILED, USAGE, PLAIN = 0, 1, 2, 3
BACKENDS = ["cpu", "cuda"] if jax.default_backend() == "gpu" else ["cpu"]


@pytest.fixture(autouse=True)
def sample_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def machine(capsys, *argv):
    """Runs a command with --json: exit code and what it printed."""
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_finds_all_well(capsys):
    code, found = machine(capsys, "doctor")
    assert code == OK, found
    assert found["versions"]["jaxgraph"] == jaxgraph.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert len(found["devices"]) == len(jax.devices())
    tests = {test["name"]: test["error"] for test in found["self_test"]}
    assert {"cpu: capture and replay", "cpu: update by re-capture"} <= set(tests)
    assert set(tests.values()) == {""}
    assert found["problems"] == found["warnings"] == []


@pytest.mark.gpu
def test_doctor_tests_the_gpu_too(capsys):
    code, found = machine(capsys, "doctor")
    assert code == OK, found
    assert found["build"]["cuda"] and found["build"]["run_time_compiler"].startswith("NVRTC")
    assert [d["plain"] for d in found["devices"]] == [None] * len(jax.devices())
    names = [t["name"] for t in found["self_test"] if not t["error"]]
    ways = ["capture and replay", "update by patching", "update by re-capture"]
    ways.append("update by instantiation")
    assert names == [f"{backend}: {way}" for backend in ("cpu", "cuda") for way in ways]


def test_doctor_says_what_is_switched_off(capsys, monkeypatch):
    for variable in [name for name in os.environ if name.startswith("JAXGRAPH_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("JAXGRAPH_DISABLE", "1")
    code, found = machine(capsys, "doctor", "--no-self-test")
    assert code == PLAIN
    assert found["environment"] == {"JAXGRAPH_DISABLE": "1"}
    assert any("JAXGRAPH_DISABLE" in warning for warning in found["warnings"])
    assert "self_test" not in found


def test_doctor_says_that_no_kernels_are_compiled(capsys, monkeypatch):
    class Gpu:
        platform, device_kind = "gpu", "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda *backend: [Gpu()])
    monkeypatch.setattr(native, "why_unsupported", lambda platform: None)
    why = "off: JAXGRAPH_DISABLE_JIT is set"
    monkeypatch.setattr(native, "compiler_status", lambda: why)
    code, found = machine(capsys, "doctor", "--no-self-test")
    assert code == PLAIN
    assert found["warnings"] == [f"no kernels are compiled for your shapes: {why}"]
    monkeypatch.setattr(native, "compiler_status", lambda: "NVRTC 13.0")
    assert machine(capsys, "doctor", "--no-self-test")[0] == OK


def test_doctor_tests_what_the_environment_switches_off(capsys, monkeypatch):
    monkeypatch.setenv("JAXGRAPH_DISABLE", "1")
    code, found = machine(capsys, "doctor")
    assert code == PLAIN
    assert {test["error"] for test in found["self_test"]} == {""}


def test_doctor_names_a_wrong_setting(capsys, monkeypatch):
    monkeypatch.setenv("JAXGRAPH_CHUNK_SIZE", "many")
    code, found = machine(capsys, "doctor")
    assert code == FAILED
    assert "JAXGRAPH_CHUNK_SIZE='many'" in found["problems"][0]


def test_doctor_reports_a_failed_self_test(capsys, monkeypatch):
    from jaxgraph.cli import self_test

    monkeypatch.setattr(self_test, "_captured", lambda device: "results differ")
    code, found = machine(capsys, "doctor")
    assert code == FAILED
    assert found["problems"] == [f"{b}: capture and replay: results differ" for b in BACKENDS]


def test_doctor_for_people(capsys):
    assert main(["doctor", "--no-self-test"]) == OK
    out = capsys.readouterr().out
    assert "all is well" in out and jax.__version__ in out
    assert "\x1b" not in out, "no colours where there is no terminal"


@pytest.mark.parametrize("name", ["step", "wrapped", "Holder.step"])
def test_explain(name, capsys):
    code, found = machine(capsys, "explain", f"sample_step:{name}")
    assert code == OK
    assert found["native"] and found["platform"] == BACKENDS[-1]
    assert any("split 0: native" in line for line in found["text"])


def test_explain_by_shapes(capsys):
    code, found = machine(
        capsys, "explain", "sample_step:step", "--shapes", "f32[2,64] f32[64, 64] f32[8,2,64]"
    )
    assert code == OK and found["native"]
    code, found = machine(
        capsys, "explain", "sample_step:prefill", "--shapes", "f32[512,64] f32[64,512]"
    )
    assert any("all in XLA" in line for line in found["text"])


def test_explain_with_arguments_of_another_function(capsys):
    assert main(["explain", "sample_step:step", "--args", "sample_step:other_args"]) == OK
    assert "split 0: native" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sample_step"], "not of the form"),
        (["no_such_module:f"], "cannot be imported"),
        (["sample_step:nothing"], "has no nothing"),
        (["sample_step:not_a_function"], "expects a function"),
        (["sample_step:step", "--shapes", "x32[4]"], "is not like f32[4,64]"),
        (["json:dumps"], "what is json:dumps called with?"),
    ],
)
def test_what_is_not_understood_is_said(argv, said, capsys):
    assert main(["explain", *argv]) == USAGE
    assert said in capsys.readouterr().err


def test_bench_times_both_and_compares(capsys):
    code, found = machine(capsys, "bench", "sample_step:step", "--donate", "2", "--calls", "5")
    assert code == OK, found
    assert found["same"] and found["native"]
    assert 0 < found["jit_us"]["least"] <= found["jit_us"]["median"] <= found["jit_us"]["p99"]
    assert found["jaxgraph_us"]["least"] > 0
    assert found["stats"]["calls"] == 7
    assert found["stats"]["executions"] == 7 and found["stats"]["replays"] >= 1


def test_bench_notices_other_results(capsys):
    code, found = machine(capsys, "bench", "sample_step:wrong", "--calls", "1")
    assert code == FAILED
    assert not found["same"]


def test_bench_for_people(capsys):
    assert main(["bench", "sample_step:wrapped", "--calls", "3"]) == OK
    out = capsys.readouterr().out
    assert "jax.jit" in out and "median" in out
    assert main(["bench", "sample_step:step", "--calls", "0"]) == USAGE


def test_colours_only_on_a_terminal(monkeypatch):
    class File:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Terminal(File()).paint("x", "bad") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Terminal(File()).paint("x", "bad") == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(File, "isatty", lambda self: False)
    assert Terminal(File()).paint("x", "bad") == "x"


def test_as_a_program():
    def run(*argv):
        return subprocess.run(
            [sys.executable, "-P", "-m", "jaxgraph", *argv],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )

    assert run("nonsense").returncode == USAGE
    assert run().returncode == USAGE
    done = run("doctor", "--no-self-test", "--json")
    assert done.returncode == OK, done.stderr
    assert json.loads(done.stdout)["versions"]["jaxgraph"] == jaxgraph.__version__
