"""A prefix cache of equal blocks: match, pin, make room, insert. What goes first is the policy's choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .trace import Request, Trace


class Cache(Protocol):
    """What the benchmark drives: anything that serves requests one by one and says how many blocks it had."""

    def serve(self, request: Request) -> int:
        """Serves one request and returns how many of its leading blocks were resident."""


class Residency:
    """What a policy may read of the cache: residency, resident extensions and the pin of the current request."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.trace = trace
        self.capacity = capacity
        self.resident = bytearray(trace.num_blocks)
        self.num_extensions = [0] * trace.num_blocks  # resident blocks directly after this one
        self.pinned_by = [-1] * trace.num_blocks
        self.request_index = -1

    def is_evictable(self, block: int) -> bool:
        """Whether the block is resident, nothing resident extends it and the current request does not use it."""
        return (
            bool(self.resident[block])
            and not self.num_extensions[block]
            and self.pinned_by[block] != self.request_index
        )


class Policy(Protocol):
    """Chooses victims. A call order of ``begin``, any number of (``victim``, ``became_leaf``), ``end`` per request."""

    def begin(self, request: Request, num_hits: int) -> None:
        """A request arrives; its first ``num_hits`` blocks are resident, and all of its blocks are now pinned."""

    def victim(self) -> int | None:
        """Takes the next block to evict, an evictable one, out of the policy; None if there is none."""

    def became_leaf(self, block: int) -> None:
        """The last resident extension of a block was evicted."""

    def end(self, request: Request, num_hits: int, num_kept: int) -> None:
        """The first ``num_kept`` blocks of the request are resident now; pins end with the next ``begin``."""


class ReferenceCache:
    """A cache of ``capacity`` blocks under a policy. A block never goes before what extends it."""

    def __init__(self, trace: Trace, capacity: int, make_policy: Callable[[Residency], Policy]) -> None:
        self._residency = Residency(trace, capacity)
        self._policy = make_policy(self._residency)
        self._num_free = capacity

    def serve(self, request: Request) -> int:
        """Serves one request. What does not fit beside the request's own blocks is computed and not kept."""
        residency, policy = self._residency, self._policy
        resident, num_extensions, parent = residency.resident, residency.num_extensions, residency.trace.parent
        residency.request_index += 1
        num_hits = 0
        for block in request.chain:
            if not resident[block]:
                break
            num_hits += 1
        for block in request.chain:
            residency.pinned_by[block] = residency.request_index
        policy.begin(request, num_hits)

        num_missing = len(request.chain) - num_hits
        while self._num_free < num_missing:
            victim = policy.victim()
            if victim is None:
                num_missing = self._num_free
                break
            resident[victim] = 0
            self._num_free += 1
            head = parent[victim]
            if head >= 0:
                num_extensions[head] -= 1
                if not num_extensions[head]:
                    policy.became_leaf(head)
        num_kept = num_hits + num_missing
        for block in request.chain[num_hits:num_kept]:
            resident[block] = 1
            if parent[block] >= 0:
                num_extensions[parent[block]] += 1
        self._num_free -= num_missing
        policy.end(request, num_hits, num_kept)
        return num_hits


def hit_rate(trace: Trace, cache: Cache) -> float:
    """Share of all blocks asked for that were resident, counting every listed block, partial last ones included."""
    return sum(cache.serve(request) for request in trace.requests) / max(1, trace.num_lookups)
