"""What goes wrong with models."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be fetched, read or run. The message names the file or field at fault and what would do."""
