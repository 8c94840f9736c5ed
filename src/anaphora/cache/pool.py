"""Block ids that nobody holds, in the order in which vLLM takes them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from anaphora.cache.index import require

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class FreeQueue:
    """Every unreferenced block, blank or cached, in one queue: the head is taken next.

    The order is vLLM's (its block pool, version 0.32): ids ascending at first; blocks that lose their last holder go to
    the tail if they have content, to the head if not; a hit removes a block wherever it stands.

    Two arrays, so that ids move as slices: a stack of those that were prepended, its top the head of the queue, and
    behind it a log of those that were appended. A block that is removed stays in the log as a dead entry, to be passed
    over when its turn comes. It may be appended again, so it can stand there several times: the last entry is the one
    that counts. Dead entries never outnumber the pool.

    Cost: amortised O(1) a block for everything; a memcpy for taking and appending while no entry is dead.
    """

    __slots__ = ("_dead", "_first", "_log", "_num_dead", "_stack")

    def __init__(self, num_blocks: int) -> None:
        self._stack = array("i")
        self._log = array("i", range(1, num_blocks + 1))
        self._first = 0
        """Where the log begins: what stands before has been taken."""
        self._dead = [0] * (num_blocks + 1)
        """Per block how many of its entries in the log are dead."""
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._stack) + len(self._log) - self._first - self._num_dead

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self._stack)
        yield from self._living()

    def _living(self) -> array[int]:
        if not self._num_dead:
            return self._log[self._first :]
        living = array("i")
        dead = self._dead.copy()
        for block in self._log[self._first :]:
            if dead[block]:
                dead[block] -= 1
            else:
                living.append(block)
        return living

    def take(self, num_blocks: int) -> array[int]:
        """Remove and return the first `num_blocks` ids. Raises ValueError if there are not as many."""
        if num_blocks > len(self):
            raise ValueError(f"num_blocks: {len(self)} are left, got {num_blocks}")
        stack = self._stack
        cut = max(0, len(stack) - num_blocks)
        ids = stack[cut:]
        del stack[cut:]
        ids.reverse()
        while len(ids) < num_blocks:
            end = self._first + num_blocks - len(ids)
            entries = self._log[self._first : end]
            self._first = end
            if self._num_dead:
                dead = self._dead
                for block in entries:
                    if dead[block]:
                        dead[block] -= 1
                        self._num_dead -= 1
                    else:
                        ids.append(block)
            else:
                ids.extend(entries)
        if self._first * 2 > len(self._log):
            del self._log[: self._first]
            self._first = 0
        return ids

    def remove(self, ids: Collection[int]) -> None:
        """Take blocks out that are in the queue and were not prepended."""
        dead = self._dead
        for block in ids:
            dead[block] += 1
        self._num_dead += len(ids)
        if self._num_dead >= len(dead):
            self._log = self._living()
            self._first = 0
            self._dead = [0] * len(dead)
            self._num_dead = 0

    def append(self, ids: array[int]) -> None:
        """Put blocks at the tail, in the order given."""
        self._log.extend(ids)

    def prepend(self, ids: array[int]) -> None:
        """Put blocks before the head, keeping the order given: the first of them is taken next."""
        self._stack.extend(ids[::-1])

    def check(self) -> None:
        """Count the entries again. Raises InvariantError. Cost: O(pool)."""
        entries = self._log[self._first :]
        require(self._num_dead == sum(self._dead), "the count of dead entries is wrong")
        require(self._num_dead < len(self._dead), "dead entries outnumber the pool")
        times = dict.fromkeys(self._stack, 0)
        require(len(times) == len(self._stack), "a block was prepended twice")
        for block in entries:
            times[block] = times.get(block, 0) + 1
        for block, num_dead in enumerate(self._dead):
            num_living = times.get(block, 0) - num_dead
            require(0 <= num_living <= 1, "a block stands in the log more than once, or is dead without standing there")
        free = list(self)
        require(len(free) == len(set(free)) == len(self), "the free queue is out of order")
