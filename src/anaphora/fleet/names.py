"""BlockNames: where the blocks of one holder lie, by the names that their engine gave them."""

from __future__ import annotations

from itertools import groupby, repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_RUN = 64
"""Names in a run: what has to be looked through where one of them is meant."""

Span = tuple[int, int]
"""A place in the tree and the number of its blocks that follow from there."""


class _Run:
    """Names of blocks that follow each other in the tree from `place` on, `step` of the tree's in each. The first
    `size` names count."""

    __slots__ = ("names", "place", "size", "step")

    def __init__(self, names: tuple[bytes, ...], place: int, step: int) -> None:
        self.names = names
        self.place = place
        self.step = step
        self.size = len(names)

    def place_of(self, name: bytes) -> int:
        last = self.size - 1
        return self.place + (last if self.names[last] == name else self.names.index(name)) * self.step

    def spans(self, names: tuple[bytes, ...]) -> list[Span]:
        """Where these names' blocks lie: one span where they follow each other, as they were stored or backwards."""
        count, step = len(names), self.step
        at = self.names.index(names[0])
        if self.names[at : at + count] == names:
            return [(self.place + at * step, count * step)]
        if at + 1 >= count and self.names[at + 1 - count : at + 1] == names[::-1]:
            return [(self.place + (at + 1 - count) * step, count * step)]
        return [(self.place_of(name), step) for name in names]


class BlockNames:
    """A table from names to places that is filled in only as far as it is asked.

    Engines store blocks in runs, go on after a run's last block, and remove runs whole or from their end. So of a new
    run only the first and the last name are entered; the others are when a name is asked for that is none of these,
    once each. A name may be stored several times, and has to be taken as often.
    """

    __slots__ = ("_ends", "_pending", "_table", "count", "extra_copies")

    def __init__(self) -> None:
        self.count = 0
        self.extra_copies: dict[bytes, int] = {}
        self._table: dict[bytes, _Run] = {}
        self._ends: dict[bytes, _Run] = {}
        self._pending: dict[_Run, None] = {}

    def add(self, names: tuple[bytes, ...], place: int, step: int, *, is_new: bool) -> None:
        """Enter names of blocks that follow each other. is_new: none of them can be in the table.

        Cost: about half a microsecond for 64 new names, 0.1 to 0.2 us a name for others.
        """
        for at in range(0, len(names), MAX_RUN):
            run = _Run(names[at : at + MAX_RUN], place + at * step, step)
            first, last = run.names[0], run.names[-1]
            ends = self._ends
            if is_new and first not in ends and last not in ends:
                ends[first] = ends[last] = run
                self._pending[run] = None
                self.count += run.size
            else:
                self._settle()
                self._enter(run)
                self.count = len(self._table)

    def place(self, name: bytes) -> int | None:
        """Where a block lies; None for a name that is not here."""
        run = self._ends.get(name) or self._table.get(name)
        if run is None and self._pending:
            self._settle()
            run = self._table.get(name)
        return None if run is None else run.place_of(name)

    def take(self, names: Sequence[bytes]) -> tuple[list[Span], list[bytes]]:
        """Take one copy of each name away. Return where the blocks lie whose last copy it was, and unknown names.

        Cost: about 30 ns a name where runs go whole or from their end, else 0.1 to 0.2 us.
        """
        if self.extra_copies:
            names = [name for name in names if not self._drop_copy(name)]
        asked = tuple(names)
        spans: list[Span] = []
        for _ in range(2):  # what is not from a run's end as it is written is so backwards, perhaps
            at = 0
            while at < len(asked):
                run = self._ends.get(asked[at])
                taken = 0 if run is None else self._take_from(run, asked, at, spans)
                if not taken:
                    break
                at += taken
            else:
                return spans, []
            asked = asked[at:][::-1]
        return spans, self._take_each(asked, spans)

    def lose(self, is_place: Callable[[int], bool]) -> None:
        """Forget names, with all of their copies, of blocks that lie nowhere any more. Tails have gone first."""
        self._settle()
        table = self._table
        for run in dict.fromkeys(table.values()):
            end = run.size
            while end and not is_place(run.place + (end - 1) * run.step):
                end -= 1
            for name in run.names[end : run.size]:
                if table.get(name) is run:
                    del table[name]
                    self.extra_copies.pop(name, None)
        self.count = len(table)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Every name and its place; slow."""
        for name, run in self._table.items():
            yield name, run.place_of(name)
        for run in self._pending:
            for name in run.names[: run.size]:
                yield name, run.place_of(name)

    def check(self) -> None:
        """Assert every invariant. Cost: all of it."""
        assert self.count == len(self._table) + sum(run.size for run in self._pending)
        assert self.extra_copies.keys() <= self._table.keys()
        ends = {name for run in self._pending for name in (run.names[0], run.names[run.size - 1])}
        assert self._ends.keys() == ends

    def _take_from(self, run: _Run, asked: tuple[bytes, ...], at: int, spans: list[Span]) -> int:
        """Take what is asked for from `at` on from a run that nobody has looked into. Return how many names it was."""
        names, size = run.names, run.size
        count = min(size, len(asked) - at)
        part = asked[at : at + count]
        if part != names[size - count : size][::-1]:
            if part == names[:size]:
                pass  # all of it, in its order
            elif part[0] == names[size - 1]:
                count = 1
                while part[count] == names[size - 1 - count]:
                    count += 1
            else:
                return 0  # its head without its tail
        left = size - count
        spans.append((run.place + left * run.step, count * run.step))
        self.count -= count
        self._ends.pop(names[size - 1], None)
        run.size = left
        if left:
            self._ends[names[0]] = self._ends[names[left - 1]] = run
        else:
            self._ends.pop(names[0], None)
            del self._pending[run]
        return count

    def _take_each(self, asked: tuple[bytes, ...], spans: list[Span]) -> list[bytes]:
        if self._pending:
            self._settle()
        table = self._table
        if len(asked) == 1:
            run = table.pop(asked[0], None)
            self.count = len(table)
            if run is None:
                return [asked[0]]
            spans.append((run.place + run.names.index(asked[0]) * run.step, run.step))
            return []
        unknown: list[bytes] = []
        at = 0
        for run, same in groupby([table.pop(name, None) for name in asked]):  # a run equals itself alone
            end = at + len(list(same))
            if run is None:
                unknown += asked[at:end]
            else:
                spans += run.spans(asked[at:end])
            at = end
        self.count = len(table)
        return unknown

    def _settle(self) -> None:
        """Enter the names of all runs."""
        for run in self._pending:
            self._enter(run)
        self._pending.clear()
        self._ends.clear()

    def _enter(self, run: _Run) -> None:
        names = run.names[: run.size]
        runs = list(map(self._table.setdefault, names, repeat(run)))  # one probe a name
        if runs.count(run) != len(names):
            for name, other in zip(names, runs, strict=True):
                if other is not run:
                    self._table[name] = run
                    self.extra_copies[name] = self.extra_copies.get(name, 0) + 1

    def _drop_copy(self, name: bytes) -> bool:
        """Take one of several copies of a name away. Return whether there were several."""
        left = self.extra_copies.get(name, 0)
        if left > 1:
            self.extra_copies[name] = left - 1
        elif left:
            del self.extra_copies[name]
        return left > 0
