"""What an executor's pages would hold: the ground truth that the cache's books are held against."""

from __future__ import annotations

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.hash_index import HashIndex
from anaphora.cache.radix_index import RadixIndex
from anaphora.tokens import TOKEN_BYTES

Content = tuple[Namespace, bytes]


class PagedMemory:
    """Per block id, the prefix whose KV was written there last: a namespace and all tokens up to the last one written.

    KV of a token depends on everything before it, so a page is right for a sequence only if the whole prefix is equal.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pages: dict[int, Content] = {}

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Write the KV of the next tokens, as an executor does between allocate and commit, then commit."""
        block_size = self.manager.block_size
        first = sequence.num_computed_tokens
        last = first + num_tokens
        self.verify(sequence)
        for position in range(first // block_size, -(-last // block_size)):
            end = min(last, (position + 1) * block_size)
            prefix = bytes(sequence.tokens[: end * TOKEN_BYTES])
            self.pages[sequence.block_table[position]] = (sequence.namespace, prefix)
        self.manager.commit(sequence, num_tokens)

    def verify(self, sequence: Sequence) -> None:
        """Assert that every computed token of a running sequence can be read through its table."""
        block_size = self.manager.block_size
        for position in range(-(-sequence.num_computed_tokens // block_size)):
            namespace, prefix = self.pages[sequence.block_table[position]]
            end = min(sequence.num_computed_tokens, (position + 1) * block_size) * TOKEN_BYTES
            assert namespace == sequence.namespace
            assert prefix[:end] == bytes(sequence.tokens[:end])


def fingerprint(manager: KVCacheManager) -> object:
    """Everything that a refused or read-only call must leave as it was, the order of eviction included."""
    index = manager._index
    if isinstance(index, RadixIndex):
        order: object = [
            [(tuple(node.blocks), bytes(node.key)) for node in index._tree.evictable],
            list(index._blank),
            sorted((tuple(node.blocks), bytes(node.key), node.ref) for node in index._tree.nodes()),
        ]
    else:
        assert isinstance(index, HashIndex)
        order = [list(index._free), [prefix and prefix.digest for prefix in index._prefixes]]
    tables = sorted((tuple(s.block_table), s.num_computed_tokens) for s in manager._index.holders)
    return order, tables, manager.stats(), manager.num_free_blocks, manager.num_cached_blocks
