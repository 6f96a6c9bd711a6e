"""The benchmarks' driver, on a CPU and with next to nothing to do: what it runs and writes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxgraph

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import suite

    return suite


@pytest.fixture
def steps(monkeypatch):
    """The wrapped functions that are made from now on."""
    made, wrap = [], jaxgraph.wrap

    def remembered(*args, **kwargs):
        made.append(wrap(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(jaxgraph, "wrap", remembered)
    return made


def decode_figures(shape, batch, xla_us, ours_us, context=1024):
    def timing(name, us):
        return {"name": name, "step_us": us, "host_us": us / 2, "counters": {}}

    return {
        "settings": {"shape": shape, "batch": batch, "context": context},
        "copy_bytes_per_second": 4e12,
        "bytes_read": 2_000_000_000,
        "floor_us": 500.0,
        "timings": [
            timing("XLA, jit", xla_us + 100),
            timing("XLA, lax.scan", xla_us),
            timing("jaxgraph", ours_us + 7),
            timing("jaxgraph, packed", ours_us),
        ],
    }


@pytest.fixture
def measured(tmp_path):
    """A folder of figures of several steps."""
    for name, figures in {
        "1b_8": decode_figures("1b", 8, 1100, 1000),
        "1b_1": decode_figures("1b", 1, 1500, 750),
        "1b_1_32768": decode_figures("1b", 1, 1900, 1400, context=32768),
        "135m_1": decode_figures("135m", 1, 1300, 600),
    }.items():
        (tmp_path / f"decode_{name}.json").write_text(json.dumps(figures))
    return tmp_path


def rows_of(text, title):
    section = text.split(f"{title}\n\n")[1].split("\n\n")[0]
    return [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines()[2:]]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is something to measure")
def test_without_a_gpu_it_says_so_and_that_is_no_failure(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", BENCHMARKS / "suite.py", "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing to measure" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_run_leaves_figures_a_table_and_a_log(suite, tmp_path, monkeypatch, capfd):
    step = suite.Step("15m", context=16, position=4)
    monkeypatch.setattr(suite, "STEPS", (step,))
    run = suite.jobs

    def tiny(arguments):
        for job in run(arguments):
            yield suite.Job(job.name, (*job.command, "--steps", "2", "--rounds", "1"))

    monkeypatch.setattr(suite, "jobs", tiny)
    argv = ["--anywhere", "--only", "decode", "--out", str(tmp_path)]
    assert suite.main(argv) == 0, capfd.readouterr().out
    figures = json.loads((tmp_path / "decode_15m_1_16.json").read_text())
    assert figures["settings"]["context"] == 16
    names = [t["name"] for t in figures["timings"]]
    assert {"XLA, jit", "XLA, lax.scan", "jaxgraph", "jaxgraph, packed, lax.scan"} <= set(names)
    assert "--rounds 1" in (tmp_path / "decode_15m_1_16.log").read_text()
    text = (tmp_path / "tables.md").read_text()
    assert json.loads((tmp_path / "machine.json").read_text())["jax"] in text
    (row,) = rows_of(text, "## Decode steps")
    best = min(t["step_us"] for t in figures["timings"] if t["name"].startswith("jaxgraph"))
    assert row[0] == "15m, batch 1, context 16" and row[2] == f"{best:,.0f}"


def test_what_is_wanted_is_run_and_nothing_else(suite):
    def names(*argv):
        return [job.name for job in suite.jobs(suite.parse_arguments(list(argv)))]

    assert names("--only", "decode", "--shape", "1b", "--batch", "1", "8") == [
        "decode_1b_1", "decode_1b_8", "decode_1b_1_32768",
    ]  # fmt: skip
    assert names("--only", "ops", "identity", "regions") == ["ops", "regions", "identity"]
    assert names("--only", "planning") == ["planning"]
    assert names("--only", "profitability") == [
        "profitability_rows", "profitability_pieces", "profitability_prefill",
    ]  # fmt: skip
    assert names("--only", "timeline", "--shape", "135m") == ["timeline_135m"]
    (job,) = suite.jobs(suite.parse_arguments(["--only", "decode", "--shape", "8b", "--batch", "4",
                                               "--quick"]))  # fmt: skip
    command = " ".join(job.command)
    assert "--shape 8b --batch 4 --packed" in command and command.endswith("--rounds 5")


def test_a_failure_is_told_and_the_others_go_on(suite, tmp_path, monkeypatch, capfd):
    def python(code):
        return (sys.executable, "-c", code)

    monkeypatch.setattr(suite, "jobs", lambda arguments: iter([
        suite.Job("broken", python("raise SystemExit('no memory left')")),
        suite.Job("endless", python("import time; time.sleep(600)")),
        suite.Job("products", python("print('1b 700 us')"), prints=True),
    ]))  # fmt: skip
    argv = ["--anywhere", "--out", str(tmp_path), "--limit", "5"]
    assert suite.main(argv) == 1
    captured = capfd.readouterr()
    assert "no memory left" in captured.out and "failed: broken, endless" in captured.err
    assert json.loads((tmp_path / "products.json").read_text()) == {"text": "1b 700 us\n"}
    assert "1b 700 us" in (tmp_path / "tables.md").read_text()
    assert not (tmp_path / "broken.json").exists()


def test_resuming_leaves_out_what_is_there(suite, measured, monkeypatch):
    job = suite.Job("decode_1b_1", (sys.executable, "-c", "raise SystemExit(1)"))
    monkeypatch.setattr(suite, "jobs", lambda arguments: iter([job]))
    argv = ["--anywhere", "--out", str(measured)]
    assert suite.main([*argv, "--resume"]) == 0
    assert suite.main(argv) == 1


def test_tables_and_pictures_of_what_was_measured(suite, measured):
    pytest.importorskip("matplotlib")
    assert suite.main(["--render", "--out", str(measured)]) == 0
    text = (measured / "tables.md").read_text()
    assert rows_of(text, "## Decode steps") == [
        ["135m, batch 1", "1,300", "600", "2.17", "500", "83 %"],
        ["1b, batch 1", "1,500", "750", "2.00", "500", "67 %"],
        ["1b, batch 8", "1,100", "1,000", "1.10", "500", "50 %"],
        ["1b, batch 1, context 32,768", "1,900", "1,400", "1.36", "500", "36 %"],
    ]
    assert rows_of(text, "### 1b, batch 8")[0] == ["XLA, jit", "1,200.0", "600.0", "42 %"]
    for picture in ("bandwidth.png", "batches.png"):
        assert (measured / picture).read_bytes().startswith(b"\x89PNG")


def test_pictures_show_the_figures(suite, measured):
    pytest.importorskip("matplotlib")
    import pictures
    import render

    decode = [render.load(measured / f"decode_1b_{batch}.json") for batch in (1, 8)]
    axes = pictures.bandwidth_figure(decode).axes[0]
    assert [round(bar.get_width(), 2) for bar in axes.patches] == [1.33, 1.82, 2.67, 2.0]
    axes = pictures.batches_figure(decode).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines == {"XLA": [1.5, 1.1], "jaxgraph": [0.75, 1.0], "memory floor": [0.5, 0.5]}


def test_other_tables(suite, tmp_path):
    files = {
        "ops": {"batch": 1, "rows": [{"function": "rope", "xla_us": 12.1, "ops_us": 11.07}]},
        "identity": {"rows": [{"what": "uid hit", "ns": 230.0, "per": 230.0, "unit": "call"}]},
        "regions": {"rows": [
            {"experts": 2, "width": 512, "hidden": 1024, "at_once_us": 121.4, "chain_us": 140.2},
            {"experts": 4, "width": 512, "hidden": 512, "at_once_us": 164.0, "chain_us": 194.0},
        ]},
        "planning": {"rows": [{"layers": 30, "how": "scan", "xla_s": 0.731, "plan_s": 0.564}]},
        "profitability_rows": {"settings": {"table": "rows"}, "head": "rows", "rows": [
            {"case": 8, "xla_us": 1200.4, "jaxgraph_us": 800.3},
        ]},
    }  # fmt: skip
    for name, figures in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    assert suite.main(["--render", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "tables.md").read_text()
    assert rows_of(text, "## Operations") == [["rope", "12.10", "11.07"]]
    assert rows_of(text, "## What deciding costs") == [["uid hit", "0.23", "230.0 a call"]]
    assert rows_of(text, "## What planning costs") == [["a scan of 30", "0.73", "0.56"]]
    assert rows_of(text, "## Profitability: rows") == [["8", "1,200", "800", "1.50"]]
    assert rows_of(text, "## Fork-join regions") == [["2", "", "121, 140"], ["4", "164, 194", ""]]


@pytest.mark.parametrize(
    ("table", "options", "native"),
    [
        ("rows", ["--rows", "1", "40", "--layers", "2"], [True, True]),
        ("pieces", ["--pieces", "2", "--of", "1", "2"], [True, True]),
        ("prefill", ["--lengths", "20"], [False]),
    ],
)
def test_what_profitability_compares(monkeypatch, steps, tmp_path, table, options, native):
    """All of ours is native, except for the prefill, which the rules leave to XLA."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import profitability

    file = tmp_path / "figures.json"
    argv = [table, "--shape", "15m", "--rounds", "1", *options, "--json", str(file)]
    assert profitability.main(argv) == 0
    rows = json.loads(file.read_text())["rows"]
    assert all(row["xla_us"] > 0 and row["jaxgraph_us"] > 0 for row in rows)
    assert [step.explain().native for step in steps] == native


def test_regions_are_marked_and_not(monkeypatch, steps, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import regions

    monkeypatch.setattr(regions, "EXPERTS", (3,))
    monkeypatch.setattr(regions, "SIZES", ((64, 128),))
    monkeypatch.setattr(regions, "STEPS", 2)
    assert regions.main(["--json", str(tmp_path / "regions.json")]) == 0
    (row,) = json.loads((tmp_path / "regions.json").read_text())["rows"]
    assert (row["experts"], row["width"], row["hidden"]) == (3, 64, 128)
    assert min(row["at_once_us"], row["chain_us"]) > 0
    found = [re.search(r"(\d+) fork-join regions", str(step.explain()))[1] for step in steps]
    assert int(found[0]) > 0 and found[1] == "0"


def test_planning_is_timed_as_a_list_and_as_a_scan(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planning

    monkeypatch.setattr(planning, "TIMES", 1)
    assert planning.main(["--layers", "2", "--json", str(tmp_path / "planning.json")]) == 0
    rows = json.loads((tmp_path / "planning.json").read_text())["rows"]
    assert [(row["layers"], row["how"]) for row in rows] == [(2, "list"), (2, "scan")]
    assert all(row["xla_s"] > 0 and row["plan_s"] > 0 for row in rows)


@pytest.mark.parametrize("tools", ["", "#!/bin/sh\necho 'no CUDA compiler' >&2\nexit 1\n"])
def test_what_cannot_be_built_is_left_out(suite, tmp_path, monkeypatch, capsys, tools):
    if tools:
        (tmp_path / "cmake").write_text(tools)
        (tmp_path / "cmake").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere" if not tools else f"{tmp_path}:/bin")
    arguments = suite.parse_arguments(["--only", "products", "--build", str(tmp_path / "b")])
    assert list(suite.jobs(arguments)) == []
    said = capsys.readouterr().out
    assert "stream_products: left out" in said and "GoogleTest" in said
    assert ("no CUDA compiler" in said) == bool(tools)


def test_every_target_is_a_benchmark(suite):
    assert set(suite.TARGETS) <= set(suite.PARTS)
    for target in suite.TARGETS.values():
        assert (suite.HERE / f"{target}.cpp").exists(), target
