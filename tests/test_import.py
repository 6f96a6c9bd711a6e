"""What `import jaxgraph` costs, and what it leaves alone."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MS = 100


def run(code):
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_import_takes_less_than_100_ms_beyond_jax():
    code = (
        "import time, jax, jax.numpy\n"
        "begin = time.process_time()\n"
        "import jaxgraph\n"
        "print((time.process_time() - begin) * 1e3)\n"
    )
    run(code)  # compiles
    assert min(float(run(code)[0]) for _ in range(5)) < MOST_MS


@pytest.mark.parametrize(
    "module", ["matplotlib", "jaxgraph.plan.step", "jaxgraph.cli", "jaxgraph.frontend.contraction"]
)
def test_import_leaves_alone_what_is_not_needed_yet(module):
    assert run(f"import sys, jaxgraph; print({module!r} in sys.modules)") == ["False"]


def test_import_starts_no_backend():
    code = "import jaxgraph; from jax._src import xla_bridge; print(len(xla_bridge._backends))"
    assert run(code) == ["0"]


def test_in_a_source_folder_it_says_what_to_do(tmp_path):
    source = Path(__file__).resolve().parent.parent / "jaxgraph"
    shutil.copytree(source, tmp_path / "jaxgraph", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    command = [sys.executable, "-c", "import jaxgraph"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert f"ImportError: {tmp_path / 'jaxgraph'} is jaxgraph's source" in done.stderr
    assert "`python -P`" in done.stderr
