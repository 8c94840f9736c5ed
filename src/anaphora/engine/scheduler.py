"""Scheduler: which tokens of which requests are computed in the next step.

A request is in one of two places, and only this module moves it:

    submit -> waiting ----- allocate -----> running ----- finish, abort -----> gone
              (no blocks) <---- preempt --- (holds blocks)

Prefill and decode are the same thing here: a running request has `num_tokens` known tokens of which
`num_computed_tokens` have KV, and a step computes some or all of the rest. A decode step is the case of one.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from anaphora.engine.joiners import DEFAULT_MAX_OVERTAKES
from anaphora.engine.prefixes_in_progress import DEFAULT_MIN_HELD_TOKENS
from anaphora.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest
    from anaphora.engine.order import QueueOrderChoice

_by_rank = attrgetter("rank")


ScheduledSpan: TypeAlias = "tuple[LiveRequest, int, int]"
"""A running request, `start`, `num_tokens`: so many of its tokens from that position on; slots for their KV are
allocated. A plain tuple, since one is made for every sequence in every step."""


class Scheduler:
    """Continuous batching under a budget of tokens a step, with preemption by recompute.

    Every step serves running requests first, by rank (priority, then arrival), then admits waiting ones, in the order
    that the queue has. A running request that cannot get slots preempts one of lower rank: of the lowest priority the
    one with the fewest tokens that nobody else holds, so that would have to be computed again. If there is none, it
    keeps its blocks and sits out the step. So who is first in rank always proceeds: in the end it is alone in the pool,
    where it fits (the engine refuses requests that do not). Nobody is admitted in a step in which slots ran short, lest
    the new one be preempted next; who was preempted comes back only when every running request could get a block more.
    A waiting request that finds no room makes running ones of a lower priority give way in the next step.

    Cost: O(running) a step, besides the manager's and the queue's own; O(blocks held) for a preemption.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        queue_order: QueueOrderChoice = "fcfs",
        min_held_tokens: int = DEFAULT_MIN_HELD_TOKENS,
        max_group_overtakes: int = DEFAULT_MAX_OVERTAKES,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r} is not allowed; it must be at least 1")
        self.waiting = WaitingQueue(
            manager, queue_order, min_held_tokens=min_held_tokens, max_group_overtakes=max_group_overtakes
        )
        self.running: list[LiveRequest] = []
        """By rank, so who must give way is at the end."""
        self.max_num_seqs = max_num_seqs
        self._manager = manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_unborn = 0
        """Seats kept for samples of running requests that do not run yet."""
        self._is_full = False
        """Whether the last admission found no room."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, live: LiveRequest) -> None:
        """Queue a new request."""
        self.waiting.push(live)

    def add_branch(self, live: LiveRequest, parent: LiveRequest) -> None:
        """Run a sample of a running request, on the seat that was kept for it."""
        parent.num_unborn -= 1
        self._num_unborn -= 1
        insort(self.running, live, key=_by_rank)

    def remove(self, live: LiveRequest) -> None:
        """Forget a request, wherever it is. Its sequence is the caller's to finish or abort."""
        if live.sequence.is_admitted:
            self.running.remove(live)
            self._num_unborn -= live.num_unborn
            self.waiting.ended(live)
        else:
            self.waiting.remove(live)

    def committed(self, live: LiveRequest) -> None:
        """A running request's KV was committed: others may find it. To be called where a block may have become full."""
        self.waiting.committed(live)

    def first(self) -> LiveRequest:
        """Return who can go on last of all if nobody can: the first in rank that runs, or else that waits."""
        first = self.running[0] if self.running else self.waiting.peek()
        assert first is not None, "nobody runs, so nobody is held, and somebody waits"
        return first

    def schedule(self, now_s: float = 0.0) -> list[ScheduledSpan]:
        """Choose the next step's spans and allocate their slots. Every span has at least one token.

        Empty although there are requests: not even the first in rank gets slots, so someone else holds blocks.
        """
        may_admit = self._begin_pass(now_s)
        scheduled: list[ScheduledSpan] = []
        budget = self._max_num_batched_tokens
        # Preemption shortens the list behind the request that is being served, never before it.
        for live in self.running:
            if not budget:
                break
            position = live.position
            if position < live.end_of_slots:
                live.position = position + 1
                scheduled.append((live, position, 1))
                budget -= 1
                continue
            sequence = live.sequence
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            num_running = len(self.running)
            if not self._allocate(live, num_tokens):
                return scheduled
            may_admit = may_admit and len(self.running) == num_running
            budget -= num_tokens
            scheduled.append(self._take_turn(live, num_tokens))
        if may_admit:
            self._admit(scheduled, budget)
        return scheduled

    def _begin_pass(self, now_s: float) -> bool:
        """Whether somebody who waits may be admitted, as nobody had to give way."""
        if not self.waiting:
            self._is_full = False
            return False
        self.waiting.begin_pass(now_s)
        if not self._is_full:
            return True
        num_waiting = len(self.waiting)
        self._make_way()
        return len(self.waiting) <= num_waiting

    def _take_turn(self, live: LiveRequest, num_tokens: int) -> ScheduledSpan:
        """A running request, with slots for them, computes so many tokens."""
        self.waiting.computes(live, num_tokens)
        sequence = live.sequence
        start = sequence.num_computed_tokens
        end = start + num_tokens
        if end == sequence.num_tokens and not live.num_unborn:
            live.position = end
            live.end_of_slots = len(sequence.block_table) * self._manager.block_size
        return live, start, num_tokens

    def _allocate(self, live: LiveRequest, num_tokens: int) -> bool:
        """Get slots for a running request; False if nobody behind it can give way."""
        while not self._manager.allocate(live.sequence, num_tokens):
            behind = self.running[self.running.index(live) + 1 :]
            if not behind:
                return False
            self._preempt(self._cheapest(behind))
        return True

    def _cheapest(self, candidates: Sequence[LiveRequest]) -> LiveRequest:
        """Return who of running requests is preempted first: of those of the lowest priority that free a block, the
        one with the least to compute again; of equals the last."""
        lowest = max(live.request.priority for live in candidates)
        candidates = [live for live in candidates if live.request.priority == lowest]
        if len(candidates) == 1:
            return candidates[0]
        num_holders = Counter[int]()
        for live in self.running:
            num_holders.update(live.sequence.block_table)
        size = self._manager.block_size

        def cost(live: LiveRequest) -> tuple[bool, int, int]:
            # What others hold stays. What only it holds is not lost at once, but it is what others take.
            num_own = sum(num_holders[block] == 1 for block in live.sequence.block_table)
            num_shared_tokens = (len(live.sequence.block_table) - num_own) * size
            return num_own == 0, max(0, live.num_computed_tokens - num_shared_tokens), -live.arrival

        return min(candidates, key=cost)

    def _preempt(self, live: LiveRequest) -> None:
        self.running.remove(live)
        self._num_unborn -= live.num_unborn
        live.commit(self._manager, 0)
        live.end_of_slots = 0
        self._manager.preempt(live.sequence)
        self.waiting.push_preempted(live)

    def _make_way(self) -> None:
        """Admit a waiting request that found no room, at the cost of running ones of lower priority."""
        most_urgent = self.waiting.most_urgent
        if most_urgent is None or not self.running or self.running[-1].request.priority <= most_urgent:
            return
        live = self.waiting.peek()
        while live is not None:
            if self._has_seats(live):
                num_tokens = live.sequence.num_tokens - self._manager.lookup(live.sequence)
                if self._manager.allocate(live.sequence, min(num_tokens, self._max_num_batched_tokens)):
                    self._enter(live)
                    return
            lower = [each for each in self.running if each.request.priority > live.request.priority]
            if not lower:
                return
            self._preempt(self._cheapest(lower))

    def _admit(self, scheduled: list[ScheduledSpan], budget: int) -> None:
        manager, waiting = self._manager, self.waiting
        self._is_full = False
        while budget and waiting:
            if len(self.running) + self._num_unborn >= self.max_num_seqs:
                self._is_full = True
                return
            live = waiting.peek()
            if live is None:
                return
            if not self._has_seats(live):
                self._is_full = True
                return
            sequence = live.sequence
            num_left = sequence.num_tokens - manager.lookup(sequence)
            num_tokens = min(num_left, budget)
            if sequence.was_admitted and self.running:
                num_blocks = -(-num_left // manager.block_size) + manager.num_to_load(sequence)
                if num_blocks + len(self.running) > manager.num_free_blocks:
                    self._is_full = True
                    return
            if not manager.allocate(sequence, num_tokens):
                self._is_full = True
                return
            self._enter(live)
            # What admission found counts, not what the lookup before it did.
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, num_tokens)
            scheduled.append(self._take_turn(live, num_tokens))
            budget -= num_tokens

    def _has_seats(self, live: LiveRequest) -> bool:
        return len(self.running) + self._num_unborn + live.num_unborn < self.max_num_seqs

    def _enter(self, live: LiveRequest) -> None:
        self.waiting.admit(live)
        self._num_unborn += live.num_unborn
        insort(self.running, live, key=_by_rank)
