"""LazyHeap: a heap whose entries may go stale where they lie."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KeyT = TypeVar("KeyT", bound="tuple[float, ...]")
ItemT = TypeVar("ItemT")

_serial = count()
_SLACK = 64


class LazyHeap(Generic[KeyT, ItemT]):
    """Items by ascending key, equals by the order of their pushes.

    Nothing is taken out where it lies: entries that no longer count are dropped when they come first, or when the
    owner rebuilds a crowded heap. Cost: O(log n) a call, amortised.
    """

    __slots__ = ("_crowded_from", "_entries")

    def __init__(self) -> None:
        self._entries: list[tuple[KeyT, int, ItemT]] = []
        self._crowded_from = _SLACK

    def __iter__(self) -> Iterator[ItemT]:
        """The items of all entries, stale ones and duplicates included, in no order."""
        return (item for _, _, item in self._entries)

    def push(self, key: KeyT, item: ItemT) -> None:
        """Add an entry."""
        heappush(self._entries, (key, next(_serial), item))

    def first(self, counts: Callable[[ItemT], bool]) -> ItemT | None:
        """Return the first item that counts, dropping those before it that do not; None if there is none."""
        entries = self._entries
        while entries:
            item = entries[0][2]
            if counts(item):
                return item
            heappop(entries)
        return None

    def first_entry(self) -> tuple[KeyT, ItemT] | None:
        """Return the first entry, whether it counts or not."""
        if not self._entries:
            return None
        key, _, item = self._entries[0]
        return key, item

    def drop_first(self) -> None:
        """Take out the first entry."""
        heappop(self._entries)

    @property
    def is_crowded(self) -> bool:
        """Whether it has doubled since it was last rebuilt, so that it is time to drop what does not count."""
        return len(self._entries) > self._crowded_from

    def rebuild(self, entries: Iterable[tuple[KeyT, ItemT]]) -> None:
        """Hold these entries and no others."""
        self._entries = [(key, next(_serial), item) for key, item in entries]
        heapify(self._entries)
        self._crowded_from = 2 * len(self._entries) + _SLACK

    def copy(self) -> LazyHeap[KeyT, ItemT]:
        """Return another heap with the same entries."""
        other: LazyHeap[KeyT, ItemT] = LazyHeap()
        other._entries = self._entries[:]
        other._crowded_from = self._crowded_from
        return other
