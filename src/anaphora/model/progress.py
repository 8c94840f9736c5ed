"""Progress of a download, as bytes on disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with what is fetched, bytes so far, and bytes in all (None if that is not known)."""

_LINES_EVERY_S = 5.0


def no_progress(name: str, done_bytes: int, total_bytes: int | None) -> None:
    """Say nothing."""


class PrintedProgress:
    """One rewritten line on a terminal; elsewhere, a line at the start, every few seconds, and at the end."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._rewrites = self._stream.isatty()
        self._name = ""
        self._printed_at = 0.0

    def __call__(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Print what is worth a line."""
        is_done = total_bytes is not None and done_bytes >= total_bytes
        is_new = name != self._name
        if not (self._rewrites or is_new or is_done or self._clock() - self._printed_at >= _LINES_EVERY_S):
            return
        self._name, self._printed_at = name, self._clock()
        line = f"{name}: {done_bytes / 1e6:.1f} MB"
        if total_bytes:
            line += f" of {total_bytes / 1e6:.1f} MB ({100 * done_bytes // total_bytes} %)"
        if self._rewrites:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if is_done else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
