"""What goes wrong with models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ModelError(Exception):
    """A model that cannot be fetched, read or run. The message names the file or field at fault and what would do."""


@contextmanager
def naming(path: Path, *, unless: str | None = None) -> Iterator[None]:
    """Put `path` before the messages of ModelErrors inside, unless they have it (or the text `unless`) already."""
    try:
        yield
    except ModelError as error:
        if (unless or str(path)) in str(error):
            raise
        raise ModelError(f"{path}: {error}") from None
