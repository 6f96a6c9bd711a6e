"""The example that the README points to first."""

import re

import compare_xla
import pytest


def test_both_ways_give_the_same_tokens(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_xla, "STEPS", 20)
    compare_xla.main()
    output = capsys.readouterr().out
    assert "same tokens: True" in output
    assert re.search(r"^replays +18$", output, re.MULTILINE)
