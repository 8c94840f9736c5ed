"""NamedBlocks: which block stands where among the known prefixes, and so has a name."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from anaphora.cache.events import AllBlocksCleared, BlockRemoved
from anaphora.cache.ghosts import Ghosts
from anaphora.cache.index import NUM_GHOSTS, require
from anaphora.cache.run_trie import RunTrie, extending

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anaphora.cache.events import Event
    from anaphora.cache.index import NextTier
    from anaphora.cache.residency import Residency
    from anaphora.cache.run import Run
    from anaphora.cache.windows import Windows


class NamedBlocks:
    """Per block its run and its position; tells events, residency and ghosts when that changes.

    runs: per block the run that it is in, None for a block without a name.
    """

    def __init__(
        self,
        num_blocks: int,
        trie: RunTrie,
        events: list[Event] | None,
        windows: Windows,
        residency: Residency | None,
    ) -> None:
        self.runs: list[Run | None] = [None] * (num_blocks + 1)
        self.ghosts = Ghosts(NUM_GHOSTS, trie)
        self._trie = trie
        self._events = events
        self._has_groups = windows.num_groups > 1
        self._has_windows = bool(windows.window_groups)
        self._residency = residency
        self.host: NextTier | None = None
        """Where blocks go that are evicted."""
        self._positions = [0] * (num_blocks + 1)
        self._groups = bytearray(num_blocks + 1)

    def name(self, group: int, run: Run, first: int, blocks: array[int]) -> None:
        """Give blocks of one group to a run, from a position on."""
        column, runs, positions = run.columns[group], self.runs, self._positions
        if first == len(column):
            column.extend(blocks)
            run.num_cached[group] += len(blocks) - (blocks.count(0) if self._has_windows else 0)
        else:
            for position, block in enumerate(blocks, first):
                run.place(group, position, block)
        for position, block in enumerate(blocks, first):
            runs[block] = run
            positions[block] = position
        runs[0] = None  # the null block has no name
        if self._has_groups:
            for block in blocks:
                self._groups[block] = group
        if self._residency is not None:
            for block in filter(None, blocks):
                self._residency.stored(block)

    def evict(self, blocks: array[int]) -> int:
        """Take their names from blocks that are about to be handed out; return how many had one."""
        runs = self.runs
        num_blocks = len(blocks)
        num_evicted = done = 0
        while done < num_blocks:
            run = runs[blocks[done]]
            if run is None:
                done += 1
                continue
            # Blocks of one run were let go together, last first; so they mostly come together.
            num_alike = self._num_alike(run, blocks, done)
            leaving = blocks[done : done + num_alike]
            end = self._positions[leaving[0]] + 1
            self.ghosts.remember(run, end - num_alike, end)
            if self._residency is not None:
                for block in leaving:
                    self._residency.evicted(block, 1)
            if self.host is not None and (run.copies is None or (0, end - 1) not in run.copies):
                self._save(self.host, run, end, leaving)
            self._unname(run, leaving)
            num_evicted += num_alike
            done += num_alike
        return num_evicted

    def _save(self, host: NextTier, run: Run, end: int, leaving: array[int]) -> None:
        """Let host memory have the blocks up to `end`, which are leaving last first."""
        first = end - len(leaving)
        names: list[bytes] = []
        parent = None
        if self._events is not None:
            names = self._trie.names(run, end)[first:end]
            above, at = self._trie.place(run, run.depth + first)
            parent = self._trie.names(above, at)[at - 1] if at else None
        host.save(self._trie.prefix_of(run, end), leaving[::-1], names, parent)

    def _num_alike(self, run: Run, blocks: array[int], start: int) -> int:
        """How many blocks from `start` on are those that the run serves at descending positions; at least 1."""
        position = self._positions[blocks[start]]
        if run.copies is not None:
            return 1
        column = run.columns[self._groups[blocks[start]]]
        limit = min(position + 1, len(blocks) - start)
        served = column[position + 1 - limit : position + 1]
        served.reverse()
        if blocks[start : start + limit] == served:
            return limit
        return next(i for i, block in enumerate(served) if block != blocks[start + i])

    def _unname(self, run: Run, blocks: array[int]) -> None:
        """Take blocks of one group away from a run: one, or those served at descending positions."""
        group = self._groups[blocks[0]]
        end = self._positions[blocks[0]] + 1
        first = end - len(blocks)
        runs = self.runs
        for block in blocks:
            runs[block] = None
        if self._events is not None:
            names = self._trie.names(run, end)[first:end]
            self._events.extend(BlockRemoved((name,), group=group) for name in reversed(names))
        if len(blocks) == 1:
            run.withdraw(group, first, blocks[0])
        else:
            run.columns[group][first:end] = array("i", bytes(4 * len(blocks)))
            run.num_cached[group] -= len(blocks)
        if end == run.num_blocks:
            self._trie.trim(run)

    def forget(self, blocks: Iterable[int], keeps_orphans: bool) -> tuple[list[int], dict[Run, int]]:
        """Take the names from blocks, and unless orphans are kept, from what extends content of which no copy is left.

        Return the blocks that had a name, and per run the first position that is no longer the way to anything."""
        forgotten = [(run, self._positions[block], block) for block in blocks if (run := self.runs[block]) is not None]
        if self.host is not None:
            for run, position, _ in forgotten:
                self.host.forget(self._trie.prefix_of(run, position + 1))
        for run, _, block in forgotten:
            self._forget(run, block)
        gone = [block for _, _, block in forgotten]
        if keeps_orphans:
            return gone, {}
        lost = extending((run, position) for run, position, _ in forgotten if not run.is_cached(position))
        for part, block in [(run, block) for run, first in lost.items() for block in run.blocks_from(first)]:
            self._forget(part, block)
            gone.append(block)
        return gone, lost

    def _forget(self, run: Run, block: int) -> None:
        if self._residency is not None:
            self._residency.forgotten(block)
        self._unname(run, array("i", [block]))

    def clear(self) -> None:
        """No block has a name any more, and nothing is known."""
        self._trie.roots.clear()
        self.ghosts.clear()
        if self._residency is not None:
            self._residency.clear()
        self.runs[:] = [None] * len(self.runs)
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def stored(self) -> list[tuple[bytes, int]]:
        """Name and group of every named block."""
        return [
            (self._trie.names(run, position + 1)[position], self._groups[block])
            for block, (run, position) in enumerate(zip(self.runs, self._positions, strict=True))
            if run is not None
        ]

    def is_at(self, block: int, run: Run, position: int) -> bool:
        """Whether a block stands there."""
        return self.runs[block] is run and self._positions[block] == position

    def check(self) -> None:
        """Assert that blocks and runs tell the same. Raises InvariantError. Cost: O(pool)."""
        num_named = 0
        for run, position, group, blocks in self._trie.cached():
            num_named += len(blocks)
            for block in blocks:
                require(self.is_at(block, run, position), "a block stands elsewhere than it says")
                require(self._groups[block] == group, "a block is another group's")
        require(num_named == sum(run is not None for run in self.runs), "a named block is in no run")
