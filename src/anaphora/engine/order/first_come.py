"""FirstComeOrder (`fcfs`): by arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.order.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest


class FirstComeOrder:
    """First come, first served. Cost: O(log waiting) a call."""

    def __init__(self, manager: KVCacheManager) -> None:
        """`manager` is not asked anything."""
        self._members: set[LiveRequest] = set()
        self._by_arrival: LazyHeap[tuple[int], LiveRequest] = LazyHeap()

    def push(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._members.add(live)
        self._by_arrival.push((live.arrival,), live)
        if self._by_arrival.is_crowded:
            self._by_arrival.rebuild(((member.arrival,), member) for member in self._members)

    def remove(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._members.remove(live)

    def peek(self) -> LiveRequest | None:
        """See QueueOrder."""
        return self._by_arrival.first(self._members.__contains__)

    def committed(self, live: LiveRequest) -> None:
        """Changes nothing here."""

    def admitted(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self.remove(live)

    def ended(self, live: LiveRequest) -> None:
        """Changes nothing here."""
