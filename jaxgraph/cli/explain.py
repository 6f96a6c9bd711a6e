"""Says how a function is run and why: what runs from graphs, and what stays in XLA."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxgraph.cli import target
from jaxgraph.cli.terminal import Terminal
from jaxgraph.observe.dump import as_json

_OK, _PLAIN = 0, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    target.add_arguments(parser)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[Terminal], None], int]:
    """Explains a call, without running it."""
    step, example = target.load(args)
    explanation = step.explain(*example)
    text = str(explanation)
    found = as_json(dataclasses.asdict(explanation)) | {"text": text.splitlines()}
    _drop_programs(found["splits"])

    def show(out: Terminal) -> None:
        out.line(text)

    return found, show, _OK if explanation.native else _PLAIN


def _drop_programs(splits: list[dict[str, Any]]) -> None:
    """Programs are bytes for the native core, and many."""
    for split in splits:
        split.pop("program", None)
        _drop_programs(split.get("bodies", []))
