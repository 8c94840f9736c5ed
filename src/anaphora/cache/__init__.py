"""The core: which blocks hold which prefix, who uses them, and what goes first. Standard library only."""

from anaphora.cache.index import InvariantError
from anaphora.cache.manager import KVCacheManager
from anaphora.cache.sequence import Sequence
from anaphora.cache.stats import CacheStats

__all__ = ["CacheStats", "InvariantError", "KVCacheManager", "Sequence"]
