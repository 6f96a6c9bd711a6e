"""Options: defaults, the environment, what wins, what is refused."""

import dataclasses
import pickle

import pytest

from jaxgraph import Options

VARIABLES = [
    "JAXGRAPH_DISABLE",
    "JAXGRAPH_STRICT",
    "JAXGRAPH_CHUNK_SIZE",
    "JAXGRAPH_WARMUP_CALLS",
    "JAXGRAPH_MAX_VARIANTS",
    "JAXGRAPH_MAX_FAILURES",
    "JAXGRAPH_DISABLE_FUSION",
    "JAXGRAPH_DISABLE_CONCURRENCY",
    "JAXGRAPH_ON_ADDRESS_CHANGE",
    "JAXGRAPH_MAX_UNROLL",
    "JAXGRAPH_UPDATE_DEPTH",
    "JAXGRAPH_IDLE_SECONDS",
    "JAXGRAPH_SWEEP_SECONDS",
    "JAXGRAPH_MAX_EXECUTABLES",
    "JAXGRAPH_MEMORY_BUDGET",
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_defaults():
    options = Options()
    assert not options.disable
    assert not options.strict
    assert (options.chunk_size, options.warmup_calls) == (512, 2)
    assert (options.max_variants, options.max_failures) == (8, 2)
    assert options.fusion
    assert options.concurrency
    assert options.on_address_change == "update"
    assert options.update_depth == "patch"
    assert (options.idle_seconds, options.sweep_seconds) == (10, 5)


@pytest.mark.parametrize("text", ["0", "false", "no", "off", "", " 0 ", "False", "OFF"])
def test_a_switch_that_says_no_is_off(monkeypatch, text):
    monkeypatch.setenv("JAXGRAPH_DISABLE", text)
    monkeypatch.setenv("JAXGRAPH_DISABLE_FUSION", text)
    assert not Options().disable
    assert Options().fusion


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "TRUE", " yes\n"])
def test_a_switch_that_says_yes_is_on(monkeypatch, text):
    monkeypatch.setenv("JAXGRAPH_DISABLE", text)
    monkeypatch.setenv("JAXGRAPH_DISABLE_FUSION", text)
    monkeypatch.setenv("JAXGRAPH_DISABLE_CONCURRENCY", text)
    assert Options().disable
    assert not Options().fusion
    assert not Options().concurrency


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("JAXGRAPH_DISABLE", "maybe"),
        ("JAXGRAPH_DISABLE_FUSION", "2"),
        ("JAXGRAPH_CHUNK_SIZE", "many"),
        ("JAXGRAPH_CHUNK_SIZE", "-1"),
        ("JAXGRAPH_WARMUP_CALLS", "0"),
        ("JAXGRAPH_ON_ADDRESS_CHANGE", "panic"),
        ("JAXGRAPH_UPDATE_DEPTH", "deep"),
        ("JAXGRAPH_IDLE_SECONDS", "long"),
        ("JAXGRAPH_SWEEP_SECONDS", "nan"),
        ("JAXGRAPH_MEMORY_BUDGET", "-1"),
    ],
)
def test_garbage_gives_one_line_that_names_the_variable(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable) as error:
        Options()
    assert "\n" not in str(error.value)


def test_numbers_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JAXGRAPH_CHUNK_SIZE", "0")
    monkeypatch.setenv("JAXGRAPH_MAX_VARIANTS", "3")
    assert Options().chunk_size == 0
    assert Options().max_variants == 3


def test_explicit_fields_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("JAXGRAPH_DISABLE", "1")
    monkeypatch.setenv("JAXGRAPH_CHUNK_SIZE", "7")
    monkeypatch.setenv("JAXGRAPH_DISABLE_FUSION", "nonsense")
    options = Options(disable=False, chunk_size=512, fusion=True)
    assert not options.disable
    assert options.chunk_size == 512
    assert options.fusion


@pytest.mark.parametrize(
    "fields", [{"chunk_size": -1}, {"warmup_calls": 0}, {"on_address_change": "never"}]
)
def test_fields_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Options(**fields)


def test_a_field_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="chunk_size"):
        Options(chunk_size=1.5)


def test_frozen_and_picklable():
    options = Options(chunk_size=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.chunk_size = 4
    assert pickle.loads(pickle.dumps(options)) == options


def test_exec_options_name_every_setting_of_the_core():
    from jaxgraph.runtime import native

    spec = {
        "function": "f",
        "function_id": 1,
        "split": 0,
        "key": bytes(16),
        "arena_bytes": 0,
        "options": Options(
            chunk_size=5, on_address_change="rewarm", update_depth="instantiate", idle_seconds=1.5
        ).exec_options(),
        "bases": [dict(kind=0, hint=0, written=True, alias=-1, index=0, nbytes=0, label="arena")],
        "nodes": [],
    }
    described = native.describe_program(native.encode_program(spec))["options"]
    assert described == spec["options"]
    assert described["chunk_size"] == 5
    assert described["rewarm_on_address_change"]
    assert (described["update_depth"], described["idle_ms"]) == (2, 1500)


def test_a_short_time_is_not_for_ever():
    """What is measured in whole milliseconds is rounded up: 0 keeps recordings for ever."""
    settings = Options(idle_seconds=1e-4, sweep_seconds=1e-4).exec_options()
    assert (settings["idle_ms"], settings["sweep_ms"]) == (1, 1)
    settings = Options(idle_seconds=0, sweep_seconds=0).exec_options()
    assert (settings["idle_ms"], settings["sweep_ms"]) == (0, 0)
