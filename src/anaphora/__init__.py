"""Automatic prefix caching for LLM inference: the cache that an engine embeds.

Standard library only. The engine, the server and the model loading are in `anaphora.engine`, `anaphora.server` and
`anaphora.model`, for those who install `anaphora[serve]`.
"""

from anaphora.cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheStats,
    Explanation,
    InvariantError,
    KVCacheManager,
    Mirror,
    Retention,
    Sequence,
)
from anaphora.identity import Adapter, BlockDigests, MediaSpan, Namespace, PromptEmbeds, VllmDigests
from anaphora.version import __version__

__all__ = [
    "Adapter",
    "AllBlocksCleared",
    "BlockDigests",
    "BlockRemoved",
    "BlockStored",
    "CacheStats",
    "Explanation",
    "InvariantError",
    "KVCacheManager",
    "MediaSpan",
    "Mirror",
    "Namespace",
    "PromptEmbeds",
    "Retention",
    "Sequence",
    "VllmDigests",
    "__version__",
]
