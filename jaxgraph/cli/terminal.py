"""Text on a terminal: coloured there, plain anywhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

_COLOURS = {"good": "32", "bad": "31", "warn": "33", "head": "1"}


class Terminal:
    """Where a command writes to.

    Attributes:
      coloured: whether it is a terminal, and NO_COLOR is not set.
    """

    def __init__(self, file: TextIO):
        self._file = file
        self.coloured: bool = file.isatty() and not os.environ.get("NO_COLOR")

    def line(self, text: str = "") -> None:
        """Writes a line."""
        print(text, file=self._file)

    def head(self, text: str) -> None:
        """Writes a heading."""
        self.line(self.paint(text, "head"))

    def paint(self, text: str, kind: str) -> str:
        """The text in the colour of "good", "bad", "warn" or "head"."""
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self.coloured else text

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Writes names and values in two columns."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.line(f"  {name:<{width}}  {value}")
