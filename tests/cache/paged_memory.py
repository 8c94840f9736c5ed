"""What an executor's pages would hold: the ground truth that the cache's books are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.hash_index import HashIndex
from anaphora.cache.radix_index import RadixIndex
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anaphora.cache.transfers import Transfer

Content = tuple[Namespace, bytes]


class PagedMemory:
    """Per block id, the prefix whose KV was written there last: a namespace and all tokens up to the last one written.

    KV of a token depends on everything before it, so a page is right for a sequence only if the whole prefix is equal.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pages: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        """The same, per host block."""

    def transfer(self, transfers: Iterable[Transfer]) -> None:
        """Move pages as an executor does before a step."""
        for kind, pairs in transfers:
            sources = self.host if kind == "load" else self.pages
            targets = self.host if kind == "save" else self.pages
            for source, target in pairs:
                # What a part of a block is copied from may have been blank; what moves between tiers never is.
                if source in sources or kind != "copy":
                    targets[target] = sources[source]

    def foresee(self) -> PagedMemory:
        """Return what the pages will hold once the transfers that wait have been made."""
        ahead = PagedMemory(self.manager)
        ahead.pages, ahead.host = dict(self.pages), dict(self.host)
        ahead.transfer(self.manager._transfers.pending())
        return ahead

    def verify_host(self) -> None:
        """Assert that every host block in use holds what the tier would serve it for."""
        tier = self.manager._host
        if tier is not None:
            for host_block, (run, position) in tier._places.items():
                prefix = tier._trie.prefix_of(run, position + 1)
                assert self.host[host_block] == (prefix.namespace, prefix.tokens)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Write the KV of the next tokens, as an executor does between allocate and commit, then commit."""
        block_size = self.manager.block_size
        first = sequence.num_computed_tokens
        last = first + num_tokens
        self.verify(sequence)
        for position in range(first // block_size, -(-last // block_size)):
            end = min(last, (position + 1) * block_size)
            prefix = bytes(sequence.tokens[: end * TOKEN_BYTES])
            for table in sequence.block_tables:
                assert table[position], "the window has left a block that is to be computed"
                self.pages[table[position]] = (sequence.namespace, prefix)
        self.manager.commit(sequence, num_tokens)

    def verify(self, sequence: Sequence) -> None:
        """Assert that the next token of a running sequence can read all that it attends to through the tables."""
        block_size = self.manager.block_size
        num_computed = sequence.num_computed_tokens
        firsts = dict(self.manager._windows.left_behind(num_computed))
        for group, table in enumerate(sequence.block_tables):
            for position in range(firsts.get(group, 0), -(-num_computed // block_size)):
                namespace, prefix = self.pages[table[position]]
                end = min(num_computed, (position + 1) * block_size) * TOKEN_BYTES
                assert namespace == sequence.namespace
                assert prefix[:end] == bytes(sequence.tokens[:end])


def fingerprint(manager: KVCacheManager) -> object:
    """Everything that a refused or read-only call must leave as it was, the order of eviction included."""
    index = manager._index
    if isinstance(index, RadixIndex):
        order: object = [
            [(tuple(node.blocks), bytes(node.key)) for order in index._tree.orders() for node in order.idle],
            list(index._blank),
            sorted((tuple(node.blocks), bytes(node.key), node.ref) for node in index._tree.nodes()),
        ]
    else:
        assert isinstance(index, HashIndex)
        order = [list(index._free), [list(index._named.runs), list(index._named._positions), index.stored()]]
    host = manager._host
    if host is not None:
        order = [order, list(host._order), host._blank, host._places, host._held, list(host._trie.runs())]
    order = [order, manager._transfers.pending()]
    tables = sorted((str(s.block_tables), s.num_computed_tokens) for s in manager._index.holders)
    return order, tables, manager.stats(), manager.num_free_blocks, manager.num_cached_blocks
