"""What the README shows a reader to type works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_usage_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    command = [sys.executable, "-P", "-c", example]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counters = dict(re.findall(r"^(\w+) +(\d+)$", done.stdout, re.MULTILINE))
    assert (counters["calls"], counters["eager"], counters["captures"]) == ("100", "1", "1")
    assert counters["replays"] == "98"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).resolve().parent.parent / link).exists(), link
