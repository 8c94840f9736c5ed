"""A file that is read again when it changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_T = TypeVar("_T")
_RELOAD_S = 1.0
_SETTLE_S = 0.1
"""A file that changes within this time is still being written."""


class FileError(Exception):
    """A file that cannot be read, or says what it must not; the message names it."""


class WatchedFile(Generic[_T]):
    """A fault in the file, once it was read, leaves everything as it was.

    read: raises OSError or ValueError. use: is given each new content. say: is told of faults.
    """

    def __init__(
        self, path: Path, read: Callable[[Path], _T], use: Callable[[_T], None], say: Callable[[str], None]
    ) -> None:
        self._path = path
        self._read = read
        self._use = use
        self._say = say
        self._seen: tuple[int, int] | None = None

    def load(self) -> None:
        """Read the file now. Raises FileError."""
        try:
            self._seen = self._state()
            content = self._read(self._path)
        except (OSError, ValueError) as error:
            raise FileError(f"{self._path}: {error}") from None
        self._use(content)

    def _state(self) -> tuple[int, int] | None:
        """What changes when the file does; None while there is none, as it is being replaced perhaps."""
        try:
            state = self._path.stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size

    async def watch(self) -> None:
        """Read it again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            state = self._state()
            if state in {None, self._seen}:
                continue
            await asyncio.sleep(_SETTLE_S)
            if self._state() != state:
                continue
            try:
                self.load()
            except FileError as error:
                self._say(f"anaphora: {error}; what was read before stays in force")
