"""Copies: what the executor has to copy, so that nobody writes into a block that another still reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from anaphora.cache.index import PrefixIndex
    from anaphora.cache.sequence import Sequence


class Copies:
    """The copies that wait for the next step, and the sequences that may still come to need one.

    A block that is not full can have several holders after a fork. Who writes into it first takes a block of its own.

    forked: holders that may share a block which is not full.
    """

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self.forked: set[Sequence] = set()
        self._index = index
        self._block_size = block_size
        self._waiting: list[tuple[int, int]] = []

    def add(self, source: int, target: int) -> None:
        """One block's content is needed in another."""
        self._waiting.append((source, target))

    def take(self) -> list[tuple[int, int]]:
        """Return the (from, to) pairs in order; then forget them."""
        waiting, self._waiting = self._waiting, []
        return waiting

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
