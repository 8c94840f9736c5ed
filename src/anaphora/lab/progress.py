"""A bar on a terminal's stderr while runs go on; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_WIDTH = 28


class ProgressBar:
    """`advance` after each of `total` steps; used in a `with`, it leaves an empty line behind."""

    def __init__(self, total: int, label: str) -> None:
        self._total = max(1, total)
        self._label = label
        self._done = 0
        self._shows = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        self._draw()
        return self

    def advance(self) -> None:
        """One step more is done."""
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        if self._shows:
            filled = _WIDTH * self._done // self._total
            bar = "#" * filled + "." * (_WIDTH - filled)
            print(f"\r{self._label} [{bar}] {self._done}/{self._total}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shows:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
