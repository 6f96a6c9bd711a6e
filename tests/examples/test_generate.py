"""The command line: what it prints, and how it ends."""

import re
import subprocess
import sys
from pathlib import Path

import generate
import model_cache
import pytest
from tiny_model import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf")


def run(*arguments: object) -> int:
    return generate.main([str(argument) for argument in arguments])


def test_help() -> None:
    command = [sys.executable, generate.__file__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for option in ("--prompt", "--max-tokens", "--engine", "--model", "--dtype", "--layers"):
        assert option in done.stdout
    assert "JAXGRAPH_CACHE" in done.stdout


@pytest.mark.parametrize("layers", ["list", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_xla(model: Path, capsys: pytest.CaptureFixture, layers: str, dtype: str) -> None:
    options = ("--max-tokens", 8, "--layers", layers, "--dtype", dtype)
    assert run("--engine", "xla", "--model", model, "--prompt", "hello", *options) == 0
    output = capsys.readouterr().out
    assert "plain XLA" in output and "tokens/s" in output and "jaxgraph" not in output


@pytest.mark.parametrize("options", [(), ("--layers", "scan"), ("--pack",)])
def test_both_engines(model: Path, capsys: pytest.CaptureFixture, options) -> None:
    assert run("--model", model, "--prompt", "hello", "--max-tokens", 12, *options) == 0
    output = capsys.readouterr().out
    assert "Tokens identical: yes, all 12" in output
    labels, counts = output.splitlines()[-4], output.splitlines()[-2]
    counters = dict(zip(re.findall(r"\w+", labels), re.findall(r"\d+", counts), strict=True))
    # The first token is the prompt's, so there are eleven steps.
    assert (counters["eager"], counters["captured"], counters["replayed"]) == ("1", "1", "9")
    assert counters["updated"] == "0"


def test_raw_prompt_without_template(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_model(tmp_path / "m.gguf", template=None)
    assert run("--engine", "xla", "--model", path, "--prompt", "hello", "--max-tokens", 2) == 0
    assert run("--engine", "xla", "--model", path, "--raw", "--max-tokens", 1) == 0


def test_the_context_limits_the_tokens(model: Path, capsys: pytest.CaptureFixture) -> None:
    options = ("--context", 20, "--max-tokens", 50)
    assert run("--engine", "xla", "--model", model, "--prompt", "hello", *options) == 0
    # The prompt is <|user|>hello<|end|><|assistant|>; the last token is not fed back.
    assert "leaves room for 17 tokens" in capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert run("--engine", "xla", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_the_prompt_must_fit(model: Path, capsys: pytest.CaptureFixture) -> None:
    options = ("--model", model, "--context", 20, "--prompt", "many words " * 20)
    assert "raise --context" in error_of(capsys, *options)


def test_an_empty_prompt(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert "empty" in error_of(capsys, "--model", model, "--raw", "--prompt", "")


def test_a_missing_file(capsys: pytest.CaptureFixture) -> None:
    assert "no such file" in error_of(capsys, "--model", "/no/such/model.gguf")


def test_a_truncated_file(model: Path, capsys: pytest.CaptureFixture) -> None:
    model.write_bytes(model.read_bytes()[:-1000])
    assert "truncated" in error_of(capsys, "--model", model)


def test_an_unsupported_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_model(tmp_path / "m.gguf", arch="mamba")
    assert "'mamba' is not supported" in error_of(capsys, "--model", path)


def test_no_model_to_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(folder: Path) -> Path:
        raise model_cache.ModelUnavailable("no registry")

    monkeypatch.setenv("JAXGRAPH_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(model_cache, "_download", unreachable)
    assert "no registry" in error_of(capsys)


@pytest.mark.parametrize("bad", [("--max-tokens", 0), ("--dtype", "int8"), ("--engine", "torch")])
def test_bad_arguments(capsys: pytest.CaptureFixture, bad) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*bad)
    assert caught.value.code == 2


def test_interrupted(
    model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(tokenizer, tokens) -> None:
        next(tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream", interrupt)
    assert run("--engine", "xla", "--model", model) == 130
    assert "tokens/s" in capsys.readouterr().out


def test_plot(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "steps.png"
    options = ("--model", model, "--prompt", "hello", "--max-tokens", 6, "--plot", picture)
    assert run("--engine", "jaxgraph", *options) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out.replace("\n", "")
    assert run("--engine", "xla", *options) == 2
    assert "--plot draws what jaxgraph does" in capsys.readouterr().err
