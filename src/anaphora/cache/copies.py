"""Copies: what the executor has to copy, so that nobody writes into a block that another still reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from anaphora.cache.index import PrefixIndex
    from anaphora.cache.sequence import Sequence
    from anaphora.cache.transfers import Transfers


class Copies:
    """Who needs a copy of a block, and the sequences that may still come to need one.

    A block that is not full can have several holders after a fork. Who writes into it first takes a block of its own.

    forked: holders that may share a block which is not full.
    """

    def __init__(self, index: PrefixIndex, block_size: int, transfers: Transfers) -> None:
        self.forked: set[Sequence] = set()
        self._index = index
        self._block_size = block_size
        self._transfers = transfers

    def add(self, source: int, target: int) -> None:
        """One block's content is needed in another."""
        self._transfers.add("copy", source, target)

    def shared_tails(self, sequence: Sequence) -> list[int]:
        """Return the layer groups whose block for the next token is not empty, not full, and somebody else's too."""
        position, num_written = divmod(sequence.num_computed_tokens, self._block_size)
        if not num_written or sequence not in self.forked:
            return []
        tables = sequence.block_tables
        return [group for group, table in enumerate(tables) if self._index.is_shared(table[position])]

    def copy_tails(self, sequence: Sequence, groups: SequenceOf[int]) -> None:
        """Give a sequence blocks of its own in place of those that `shared_tails` found. The caller made sure that
        there are as many."""
        position = sequence.num_computed_tokens // self._block_size
        for group, own in zip(groups, self._index.take(len(groups)), strict=True):
            # A new table, since someone may still look at the old one.
            table = sequence.block_tables[group] = sequence.block_tables[group][:]
            self._index.leave(table[position])
            self.add(table[position], own)
            table[position] = own
        sequence.block_table = sequence.block_tables[0]
