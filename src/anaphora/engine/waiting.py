"""WaitingQueue: requests that hold no blocks, in the order in which they will be admitted."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.engine.live_request import LiveRequest


class WaitingQueue:
    """First come, first served; preempted requests come before everyone else. Cost: O(1) a call."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, LiveRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._queue.values())

    def push(self, live: LiveRequest) -> None:
        """Add a new request at the end."""
        self._queue[live.request_id] = live

    def push_preempted(self, live: LiveRequest) -> None:
        """Add a request that was running at the front. Preempting the latest first keeps them in order of arrival."""
        self._queue[live.request_id] = live
        self._queue.move_to_end(live.request_id, last=False)

    def peek(self) -> LiveRequest:
        """Return the next one to be admitted. IndexError if there is none."""
        for live in self._queue.values():
            return live
        raise IndexError("no request is waiting")

    def remove(self, live: LiveRequest) -> None:
        """Take out a request: it was admitted or aborted. KeyError if it is not here."""
        del self._queue[live.request_id]
