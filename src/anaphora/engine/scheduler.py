"""Scheduler: which tokens of which requests are computed in the next step.

A request is in one of two places, and only this module moves it:

    submit -> waiting ----- allocate -----> running ----- finish, abort -----> gone
              (no blocks) <---- preempt --- (holds blocks)

Prefill and decode are the same thing here: a running request has `num_tokens` known tokens of which
`num_computed_tokens` have KV, and a step computes some or all of the rest. A decode step is the case of one.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from anaphora.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest


class ScheduledSpan(NamedTuple):
    """`num_tokens` tokens of a running request from position `start` on; slots for their KV are allocated."""

    live: LiveRequest
    start: int
    num_tokens: int

    @property
    def is_complete(self) -> bool:
        """Whether the span reaches the last known token, so that the next one can be sampled."""
        return self.start + self.num_tokens == self.live.sequence.num_tokens


class Scheduler:
    """Continuous batching under a budget of tokens a step, with preemption by recompute.

    Every step serves running requests first, in order of arrival, then admits waiting ones. A running request that
    cannot get slots preempts the latest arrival; if it is the latest itself, it keeps its blocks and sits out the
    step. So the oldest request always proceeds: in the end it is alone in the pool, where it fits (the engine refuses
    requests that do not). Nobody is admitted in a step in which slots ran short, lest the new one be preempted next.

    Cost: O(running) a step, besides the manager's own.
    """

    def __init__(self, manager: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not allowed; it must be at least 1")
        self.waiting = WaitingQueue()
        self.running: list[LiveRequest] = []
        """In order of arrival, so the last one is the one to preempt."""
        self._manager = manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, live: LiveRequest) -> None:
        """Queue a new request."""
        self.waiting.push(live)

    def remove(self, live: LiveRequest) -> None:
        """Forget a request, wherever it is. Its sequence is the caller's to finish or abort."""
        if live.sequence.is_admitted:
            self.running.remove(live)
        else:
            self.waiting.remove(live)

    def schedule(self) -> list[ScheduledSpan]:
        """Choose the next step's spans and allocate their slots. Every span has at least one token.

        Empty although there are requests: not even the oldest gets slots, so someone else holds blocks.
        """
        scheduled: list[ScheduledSpan] = []
        budget = self._max_num_batched_tokens
        num_waiting = len(self.waiting)
        # By index: preemption shortens the list behind the request that is being served, never before it.
        position = 0
        while position < len(self.running) and budget:
            live = self.running[position]
            sequence = live.sequence
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if not self._allocate(live, num_tokens):
                return scheduled
            scheduled.append(ScheduledSpan(live, sequence.num_computed_tokens, num_tokens))
            budget -= num_tokens
            position += 1
        if len(self.waiting) == num_waiting:
            self._admit(scheduled, budget)
        return scheduled

    def _allocate(self, live: LiveRequest, num_tokens: int) -> bool:
        """Get slots for a running request; False if that would mean preempting itself."""
        while not self._manager.allocate(live.sequence, num_tokens):
            latest = self.running[-1]
            if latest is live:
                return False
            self.running.pop()
            self._manager.preempt(latest.sequence)
            self.waiting.push_preempted(latest)
        return True

    def _admit(self, scheduled: list[ScheduledSpan], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            live = self.waiting.peek()
            sequence = live.sequence
            num_tokens = min(sequence.num_tokens - self._num_hit_tokens(live), budget)
            if not self._manager.allocate(sequence, num_tokens):
                return
            self.waiting.remove(live)
            insort(self.running, live, key=attrgetter("arrival"))
            # What admission found counts, not what the lookup before it did.
            start = sequence.num_computed_tokens
            num_tokens = min(sequence.num_tokens - start, num_tokens)
            scheduled.append(ScheduledSpan(live, start, num_tokens))
            budget -= num_tokens

    def _num_hit_tokens(self, live: LiveRequest) -> int:
        """What admission would find now, for a preempted request too, whose `num_cached_tokens` is final."""
        sequence = live.sequence
        if not sequence.was_admitted:
            return sequence.num_cached_tokens
        if not live.request.read_cache:
            return 0
        return self._manager.match(sequence.tokens, live.request.namespace)
