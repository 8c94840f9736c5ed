"""The core: which blocks hold which prefix, who uses them, and what goes first. Standard library only."""

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Mirror
from anaphora.cache.explain import Elsewhere, Explanation
from anaphora.cache.index import InvariantError
from anaphora.cache.manager import KVCacheManager
from anaphora.cache.retention import Retention
from anaphora.cache.sequence import Sequence
from anaphora.cache.stats import CacheStats
from anaphora.cache.transfers import Transfer

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheStats",
    "Elsewhere",
    "Event",
    "Explanation",
    "InvariantError",
    "KVCacheManager",
    "Mirror",
    "Retention",
    "Sequence",
    "Transfer",
]
