"""Block ids that nobody holds, in the order in which vLLM takes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator


class FreeQueue:
    """Every unreferenced block, blank or cached, in one doubly linked list: the head is taken next.

    The order is vLLM's (its block pool, version 0.32): ids ascending at first; blocks that lose their last holder go to
    the tail if they have content, to the head if not; a hit unlinks a block wherever it stands.
    Cost: O(1) a block for everything.
    """

    __slots__ = ("_next", "_num_free", "_previous")

    def __init__(self, num_blocks: int) -> None:
        # Entry 0 is the list's anchor: its successor is the head, its predecessor the tail.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def take(self, num_blocks: int) -> array[int]:
        """Remove and return the first `num_blocks` ids; the caller has made sure that they are there."""
        ids = array("i")
        block = self._next[0]
        for _ in range(num_blocks):
            ids.append(block)
            block = self._next[block]
        self._next[0] = block
        self._previous[block] = 0
        self._num_free -= num_blocks
        return ids

    def remove(self, block: int) -> None:
        """Unlink a block that is in the list."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1

    def append(self, ids: Iterable[int]) -> None:
        """Put blocks at the tail, in the order given."""
        last = self._previous[0]
        for block in ids:
            self._next[last] = block
            self._previous[block] = last
            last = block
            self._num_free += 1
        self._next[last] = 0
        self._previous[0] = last

    def prepend(self, ids: Iterable[int]) -> None:
        """Put blocks before the head, keeping the order given: the first of them is taken next."""
        last, head = 0, self._next[0]
        for block in ids:
            self._next[last] = block
            self._previous[block] = last
            last = block
            self._num_free += 1
        self._next[last] = head
        self._previous[head] = last
