"""Automatic prefix caching for LLM inference."""

from anaphora.cache import CacheStats, InvariantError, KVCacheManager, Sequence
from anaphora.identity import Adapter, Namespace
from anaphora.version import __version__

__all__ = [
    "Adapter",
    "CacheStats",
    "InvariantError",
    "KVCacheManager",
    "Namespace",
    "Sequence",
    "__version__",
]
