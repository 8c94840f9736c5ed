"""The known policies, written to be obvious, and the clairvoyant optimum."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from .adaptive import Adaptive
from .simulator import Policy, Residency
from .trace import Request

NEVER = 1 << 60


class KeyedPolicy:
    """Evicts the leaf with the smallest key. Keys are set when a request touches a block. O(log n) per victim."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.key: list[Any] = [None] * residency.trace.num_blocks
        self.num_hits = [0] * residency.trace.num_blocks
        self._heap: list[tuple[Any, int]] = []
        self.prepare()

    def prepare(self) -> None:
        """Sets up what a subclass keeps."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """The key of a block that ``request`` touched at ``depth`` (0 at the head)."""
        raise NotImplementedError

    def count(self, block: int, is_hit: bool) -> None:
        """Counts a hit; a block that was evicted starts again."""
        self.num_hits[block] = self.num_hits[block] + 1 if is_hit else 0

    def begin(self, request: Request, num_hits: int) -> None:
        """Nothing to do: keys change when the request's blocks are resident."""

    def victim(self) -> int | None:
        """The evictable block with the smallest key."""
        while self._heap:
            key, block = heapq.heappop(self._heap)
            if self.key[block] == key and self.residency.is_evictable(block):
                return block
        return None

    def became_leaf(self, block: int) -> None:
        """Makes the block a candidate; one that is pinned becomes one again when its request ends."""
        if self.residency.pinned_by[block] != self.residency.request_index:
            heapq.heappush(self._heap, (self.key[block], block))

    def end(self, request: Request, num_hits: int, num_kept: int) -> None:
        """Renews the keys of the chain; only its last block can be a leaf."""
        for depth, block in enumerate(request.chain[:num_kept]):
            self.count(block, depth < num_hits)
            self.key[block] = self.make_key(block, depth, request, depth < num_hits)
        if num_kept:
            last = request.chain[num_kept - 1]
            if not self.residency.num_extensions[last]:
                heapq.heappush(self._heap, (self.key[last], last))

    @property
    def now(self) -> int:
        """Requests so far: recency."""
        return self.residency.request_index


class Lru(KeyedPolicy):
    """Least recently used."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """Recency, the tail before the head."""
        return (self.now, -depth)


class Mru(KeyedPolicy):
    """Most recently used."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """Recency, negated."""
        return (-self.now, -depth)


class Fifo(KeyedPolicy):
    """First in, first out: hits do not count."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """When the block was inserted."""
        return self.key[block] if is_hit else (self.now, -depth)


class Filo(KeyedPolicy):
    """Last in, first out."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """When the block was inserted, negated."""
        return self.key[block] if is_hit else (-self.now, -depth)


class Lfu(KeyedPolicy):
    """Least frequently used, then least recently; counts end with eviction, as in SGLang."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """Hits, then recency."""
        return (self.num_hits[block], self.now, -depth)


class Slru(KeyedPolicy):
    """Blocks with two hits or more are protected; recency within each part. Counts end with eviction, as in SGLang."""

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """Protected last, then recency."""
        return (self.num_hits[block] >= 2, self.now, -depth)


class LfuWithHistory(Lfu):
    """LFU that remembers every count for ever: unbounded memory, a stricter rival than what engines run."""

    def count(self, block: int, is_hit: bool) -> None:
        """Counts every request, hit or not."""
        self.num_hits[block] += 1


class SlruWithHistory(Slru):
    """SLRU that remembers every count for ever: a block asked for twice is protected even if it was evicted."""

    def count(self, block: int, is_hit: bool) -> None:
        """Counts every request, hit or not."""
        self.num_hits[block] += 1


class TailLru(KeyedPolicy):
    """T-LRU (arXiv 2510.15152): tails that can be recomputed within the latency target go first.

    A leaf is tail-safe if what stays cached before it is at least ``longest + next_prompt - threshold`` blocks, where
    ``longest`` is the longest prompt seen through it.
    """

    THRESHOLD_BLOCKS = 16
    NEXT_PROMPT_BLOCKS = 1

    def prepare(self) -> None:
        """Longest prompt per block."""
        self.longest = [0] * self.residency.trace.num_blocks

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """Tail-safe first, then recency."""
        self.longest[block] = max(self.longest[block], len(request.chain))
        budget = max(self.longest[block] + self.NEXT_PROMPT_BLOCKS - self.THRESHOLD_BLOCKS, 0)
        return (depth < budget, self.now, -depth)


class Clairvoyant(KeyedPolicy):
    """Belady's optimum: evicts the block that is asked for again latest.

    A head is asked for again no later than what extends it, so the block to evict is always a leaf and the constraint
    of prefixes costs nothing. It must still insert every request's blocks, as an engine must.
    """

    def prepare(self) -> None:
        """Index of the next request for each block of each request."""
        requests = self.residency.trace.requests
        upcoming = [NEVER] * self.residency.trace.num_blocks
        self._next_use: list[list[int]] = [[] for _ in requests]
        for index in range(len(requests) - 1, -1, -1):
            chain = requests[index].chain
            self._next_use[index] = [upcoming[block] for block in chain]
            for block in chain:
                upcoming[block] = index

    def make_key(self, block: int, depth: int, request: Request, is_hit: bool) -> Any:
        """Next use, latest first; the tail before the head."""
        return (-self._next_use[self.now][depth], -depth)


class Arc:
    """ARC (Megiddo and Modha, FAST 2003), leaves only: recent (t1) and frequent (t2) lists, each with a ghost list."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self._t1: OrderedDict[int, None] = OrderedDict()
        self._t2: OrderedDict[int, None] = OrderedDict()
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0  # of t1, in blocks
        self._returned: set[int] = set()

    def begin(self, request: Request, num_hits: int) -> None:
        """Moves the target toward the list whose ghosts are asked for."""
        b1, b2, capacity = self._b1, self._b2, self.residency.capacity
        self._returned.clear()
        for block in request.chain[num_hits:]:
            if block in b1:
                self._target = min(capacity, self._target + max(1.0, len(b2) / len(b1)))
                del b1[block]
            elif block in b2:
                self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
                del b2[block]
            else:
                continue
            self._returned.add(block)

    def victim(self) -> int | None:
        """The least recent leaf of the list that is over its share."""
        recent, frequent = (self._t1, self._b1), (self._t2, self._b2)
        order = (recent, frequent) if len(self._t1) > self._target else (frequent, recent)
        for listed, ghosts in order:
            block = self._least_recent_leaf(listed)
            if block is not None:
                del listed[block]
                ghosts[block] = None
                if len(ghosts) > self.residency.capacity:
                    ghosts.popitem(last=False)
                return block
        return None

    def _least_recent_leaf(self, listed: Iterable[int]) -> int | None:
        return next((block for block in listed if self.residency.is_evictable(block)), None)

    def became_leaf(self, block: int) -> None:
        """Nothing to do: the lists hold heads as well."""

    def end(self, request: Request, num_hits: int, num_kept: int) -> None:
        """Hits and returned ghosts are frequent, the rest is recent; the head most recent of all."""
        for depth in range(num_kept - 1, -1, -1):
            block = request.chain[depth]
            if depth < num_hits or block in self._returned:
                self._t1.pop(block, None)
                self._t2[block] = None
                self._t2.move_to_end(block)
            else:
                self._t1[block] = None


# `priority` is LRU where all priorities are equal, as they are in a trace that has none.
POLICIES: dict[str, Callable[[Residency], Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "filo": Filo,
    "mru": Mru,
    "priority": Lru,
    "tlru": TailLru,
    "lfu-history": LfuWithHistory,
    "slru-history": SlruWithHistory,
    "arc": Arc,
    "adaptive": Adaptive,
    "optimum": Clairvoyant,
}
