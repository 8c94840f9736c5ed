"""Automatic prefix caching for LLM inference."""

from anaphora.identity import Adapter, Namespace
from anaphora.version import __version__

__all__ = ["Adapter", "Namespace", "__version__"]
