"""QuotaLanes: the free blocks of namespaces that have a quota, apart from the queue that all others share."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from anaphora.cache.index import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anaphora.identity import Namespace


class QuotaLane:
    """Cached blocks of one namespace that nobody holds, least recently let go first, and the most there may be."""

    __slots__ = ("blocks", "max_blocks")

    def __init__(self, max_blocks: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.max_blocks = max_blocks

    def append(self, blocks: Iterable[int]) -> None:
        """Put blocks at the tail, in the order given."""
        self.blocks.update(dict.fromkeys(blocks))

    def remove(self, blocks: Iterable[int]) -> None:
        """Take blocks out that are here."""
        for block in blocks:
            del self.blocks[block]

    def take(self, num_blocks: int) -> array[int]:
        """Remove and return the first blocks, at most as many as there are."""
        blocks = array("i", islice(self.blocks, num_blocks))
        self.remove(blocks)
        return blocks

    def take_excess(self) -> array[int]:
        """Remove and return what goes beyond the quota."""
        return self.take(max(0, len(self.blocks) - self.max_blocks))


class QuotaLanes:
    """The lanes by namespace. Only named blocks stand in one: who takes a block's name moves it elsewhere.

    Cost: O(1) a block; memory for the blocks that stand here, not for the pool.
    """

    def __init__(self) -> None:
        self._lanes: dict[Namespace, QuotaLane] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __len__(self) -> int:
        return sum(len(lane.blocks) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[int]:
        for lane in self._lanes.values():
            yield from lane.blocks

    def get(self, namespace: Namespace) -> QuotaLane | None:
        """Return a namespace's lane, None if it has no quota."""
        return self._lanes.get(namespace)

    def open(self, namespace: Namespace, max_blocks: int) -> QuotaLane:
        """Give a namespace a lane of its own, or the one that it has another quota."""
        lane = self._lanes.setdefault(namespace, QuotaLane(max_blocks))
        lane.max_blocks = max_blocks
        return lane

    def close(self, namespace: Namespace) -> array[int]:
        """Drop a namespace's quota; return what stood in its lane, in its order."""
        lane = self._lanes.pop(namespace, None)
        return array("i", lane.blocks) if lane is not None else array("i")

    def take(self, num_blocks: int) -> array[int]:
        """Remove and return blocks of the largest lanes first, each from its head. There are as many."""
        blocks = array("i")
        for lane in sorted(self._lanes.values(), key=lambda lane: -len(lane.blocks)):
            blocks += lane.take(num_blocks - len(blocks))
        return blocks

    def remove_if_here(self, blocks: Iterable[int]) -> array[int]:
        """Take out those of these blocks that stand in a lane, and return them. Cost: O(what stands in lanes)."""
        wanted = set(blocks)
        found = array("i")
        for lane in self._lanes.values():
            here = [block for block in lane.blocks if block in wanted]
            lane.remove(here)
            found.extend(here)
        return found

    def clear(self) -> array[int]:
        """Empty all lanes; the quotas stay. Return what stood there."""
        blocks = array("i", self)
        for lane in self._lanes.values():
            lane.blocks.clear()
        return blocks

    def check(self) -> None:
        """Assert that quotas are kept, and that no block stands in two lanes. Raises InvariantError."""
        blocks = list(self)
        require(len(set(blocks)) == len(blocks), "a block stands in two lanes")
        for lane in self._lanes.values():
            require(len(lane.blocks) <= lane.max_blocks, "a namespace keeps more than its quota")
