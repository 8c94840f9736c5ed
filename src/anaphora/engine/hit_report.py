"""The event that says again what a request found, for those who ask for it: vLLM's `kv_cache_report_mode` full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.cache.events import BlockStored
from anaphora.identity.extras import extra_keys
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.cache.sequence import Sequence


def hit_report(manager: KVCacheManager, sequence: Sequence) -> BlockStored | None:
    """Return a running sequence's cached whole blocks, from the head of the chain on, as if they were stored now; None
    if there are none. Call it at admission."""
    block_size = manager.block_size
    num_blocks = sequence.num_cached_tokens // block_size
    if num_blocks == 0:
        return None
    return BlockStored(
        digests=tuple(manager.block_digests(sequence)[:num_blocks]),
        parent=None,
        tokens=bytes(sequence.tokens[: num_blocks * block_size * TOKEN_BYTES]),
        block_size=block_size,
        namespace=sequence.namespace,
        extras=extra_keys(sequence.namespace, sequence.media, 0, num_blocks, block_size),
    )
