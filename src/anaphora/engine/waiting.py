"""WaitingQueue: requests that hold no blocks, and who of them is next."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from typing import TYPE_CHECKING

from anaphora.engine.joiners import DEFAULT_MAX_OVERTAKES, Joiners
from anaphora.engine.order import new_order
from anaphora.engine.order.lazy_heap import LazyHeap
from anaphora.engine.prefixes_in_progress import DEFAULT_MIN_HELD_TOKENS, PrefixesInProgress

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest
    from anaphora.engine.order import QueueOrder
    from anaphora.engine.order.queue_order import QueueOrderChoice

MAX_MOVED = 128
"""How many requests a pass may at most hold back, and take back: a pass costs the same however long the queue is."""


class _Class:
    """Those of one priority: preempted ones go first, then those that are short of time, then the order decides."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.preempted: LazyHeap[tuple[int, int], LiveRequest] = LazyHeap()
        self.hurried: LazyHeap[tuple[float], LiveRequest] = LazyHeap()
        self.num_ready = 0
        """In any of the three."""


class WaitingQueue:
    """By priority; of equals, those that were preempted, those that have less than half of their time left, and then
    by the order that was chosen, except that one who joins a group of running requests may go before (`Joiners`). A
    request whose prefix is being computed in a step is held back from that step.

    Cost: as the order has it, and O(log waiting) a call.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        order: QueueOrderChoice = "fcfs",
        *,
        min_held_tokens: int = DEFAULT_MIN_HELD_TOKENS,
        max_group_overtakes: int = DEFAULT_MAX_OVERTAKES,
    ) -> None:
        """Raises ValueError for an unknown order, a min_held_tokens below 1, or a max_group_overtakes below 0."""
        if min_held_tokens < 1:
            raise ValueError(f"min_held_tokens: {min_held_tokens} is not allowed; it must be at least 1")
        self._manager = manager
        self._order = order
        self._min_held_tokens = min_held_tokens
        self._in_progress = PrefixesInProgress(manager, min_held_tokens)
        self._joiners = Joiners(manager, max_group_overtakes)
        self._classes: dict[int, _Class] = {0: _Class(new_order(order, manager))}
        self._ready_priorities: list[int] = []
        """Ascending, of the classes in which somebody is ready."""
        self._places: dict[LiveRequest, str] = {}
        """Where each is: "order", "preempted", "hurried", "held"."""
        self._held: OrderedDict[LiveRequest, None] = OrderedDict()
        self._half_times: LazyHeap[tuple[float], LiveRequest] = LazyHeap()
        self._num_moves_left = MAX_MOVED

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_held(self) -> int:
        """How many were held back by the last pass, or still are by earlier ones."""
        return len(self._held)

    @property
    def most_urgent(self) -> int | None:
        """The lowest priority of somebody who could be admitted; None if nobody could."""
        return self._ready_priorities[0] if self._ready_priorities else None

    def push(self, live: LiveRequest) -> None:
        """Add a new request."""
        self._joiners.waits(live)
        self._enter(live, "order")
        if live.half_time_s < live.deadline_s:
            self._half_times.push((live.half_time_s,), live)

    def push_preempted(self, live: LiveRequest) -> None:
        """Add a request that was running."""
        self._joiners.ended(live)
        self._joiners.waits(live)
        self._enter(live, "preempted")

    def begin_pass(self, now_s: float) -> None:
        """A pass of the scheduler begins: whoever was held is back, whoever is late in a hurry."""
        self._in_progress.clear()
        self._joiners.begin_pass()
        self._num_moves_left = MAX_MOVED
        for _ in range(min(MAX_MOVED, len(self._held))):
            live, _ = self._held.popitem(last=False)
            self._enter(live, "order")
        while (entry := self._half_times.first_entry()) is not None and entry[0][0] <= now_s:
            self._half_times.drop_first()
            live = entry[1]
            if self._places.get(live) == "order":
                self._leave(live)
                self._enter(live, "hurried")

    def peek(self) -> LiveRequest | None:
        """Return the next one to be admitted; None if there is none, or this pass has looked at enough."""
        for priority in list(self._ready_priorities):
            ready = self._classes[priority]
            for heap, place in ((ready.preempted, "preempted"), (ready.hurried, "hurried")):
                first = heap.first(lambda live, place=place: self._places.get(live) == place)  # type: ignore[misc]
                if first is not None:
                    return first
            while (live := ready.order.peek()) is not None:
                if not self._in_progress.is_worth_waiting_for(live):
                    return self._joiners.first(live, self._in_progress.is_worth_waiting_for)
                self._leave(live)
                self._places[live] = "held"
                self._held[live] = None
                self._num_moves_left -= 1
                if not self._num_moves_left:
                    return None
        return None

    def admit(self, live: LiveRequest) -> None:
        """Take out a request, because it runs now. KeyError if it is not ready."""
        if self._take_out(live) == "order":
            self._classes[live.request.priority].order.admitted(live)
        self._joiners.admitted(live)

    def remove(self, live: LiveRequest) -> None:
        """Take out a request that has ended. KeyError if it is not here."""
        self._joiners.gone(live)
        if live in self._held:
            del self._held[live], self._places[live]
        else:
            self._leave(live)

    def computes(self, live: LiveRequest, num_tokens: int) -> None:
        """A running request computes so many tokens in the step of this pass: others may wait for them."""
        if num_tokens >= self._min_held_tokens:
            self._in_progress.add(live, num_tokens)

    def committed(self, live: LiveRequest) -> None:
        """A running request has computed more tokens: all may find them."""
        for priority in self._ready_priorities:
            self._classes[priority].order.committed(live)

    def ended(self, live: LiveRequest) -> None:
        """A running request has ended."""
        self._joiners.ended(live)
        self._classes[live.request.priority].order.ended(live)

    def _enter(self, live: LiveRequest, place: str) -> None:
        priority = live.request.priority
        ready = self._classes.get(priority)
        if ready is None:
            ready = self._classes[priority] = _Class(new_order(self._order, self._manager))
        self._places[live] = place
        if not ready.num_ready:
            insort(self._ready_priorities, priority)
        ready.num_ready += 1
        if place == "order":
            ready.order.push(live)
            self._joiners.enters(live)
        elif place == "preempted":
            ready.preempted.push((live.arrival, live.index), live)
        else:
            ready.hurried.push((live.deadline_s,), live)

    def _leave(self, live: LiveRequest) -> None:
        if self._take_out(live) == "order":
            self._classes[live.request.priority].order.remove(live)

    def _take_out(self, live: LiveRequest) -> str:
        """Strike a ready request off; return where it was. If in the order, that is still to be told."""
        priority = live.request.priority
        ready = self._classes[priority]
        ready.num_ready -= 1
        if not ready.num_ready:
            self._ready_priorities.remove(priority)
        place = self._places.pop(live)
        if place == "order":
            self._joiners.leaves(live)
        return place
