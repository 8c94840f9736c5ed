"""FairOrder (`fair`): longest cached prefix first, within rounds that nobody is left out of.

**Rounds** keep the order that makes hits from starving anyone. Requests join the newest round as they come, until it is
full; then the next one begins. Rounds are served one after another, and inside a round the longest cached prefix goes
first. So only requests of its own round that came later overtake a request: fewer than a round holds, which is
`max_overtakes`, or `share` of those that wait where that is more. A longer queue makes longer rounds, as it takes more
requests to have several of each prefix among them.

**Credit** keeps namespaces from crowding each other out (deficit round robin, as in "Locality-aware fair
scheduling in LLM serving", arXiv 2501.14312): a namespace pays for what it makes the engine compute, prompt tokens that
were not cached and output tokens. Who has used up its credit stands back in the round until all others have, then
everyone gets `quantum` tokens more. And who has credit and nothing else waiting need not queue behind the rounds of
others: it joins the one that is being served, unless that has made somebody wait for `max_overtakes` requests already.

So fewer than `max_overtakes` + max(`max_overtakes`, `share` * waiting) later requests are admitted before any; within
one namespace, the second term alone.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from typing import TYPE_CHECKING

from anaphora.engine.order.lazy_heap import LazyHeap
from anaphora.engine.order.longest_prefix import LongestPrefixOrder

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest
    from anaphora.identity import Namespace

DEFAULT_MAX_OVERTAKES = 256
DEFAULT_SHARE = 0.5
DEFAULT_QUANTUM = 8192
"""In tokens; some seconds of a small model on a CPU, a few steps on a GPU."""
_MANY_ACCOUNTS = 4096


class _Round:
    """Requests that are served before those of the next round.

    first_arrival: of the one that it was begun for. is_closed: whether nobody new may join, as those in it have had
    their share of being overtaken.
    """

    def __init__(self, manager: KVCacheManager, first_arrival: int, *, is_closed: bool = False) -> None:
        self.by_prefix = LongestPrefixOrder(manager)
        self.num_joined = 0
        self.first_arrival = first_arrival
        self.is_closed = is_closed


class FairOrder:
    """Locality with a bound on waiting; see this module. Cost: as `lpm` for each round, of which there are
    O(log waiting).

    A request that was held back for a prefix that is being computed comes back into its round, or before all others if
    that has been served in the meantime.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_overtakes: int = DEFAULT_MAX_OVERTAKES,
        share: float = DEFAULT_SHARE,
        quantum: int = DEFAULT_QUANTUM,
    ) -> None:
        for name, value, least in (("max_overtakes", max_overtakes, 1), ("quantum", quantum, 1), ("share", share, 0)):
            if not value >= least:
                raise ValueError(f"{name}: {value} is not allowed; it must be at least {least}")
        self._manager = manager
        self._max_overtakes = max_overtakes
        self._share = share
        self._quantum = quantum
        self._rounds: deque[_Round] = deque()
        self._round_of: dict[LiveRequest, _Round] = {}
        self._num_waiting: dict[Namespace, int] = {}
        self._credits: dict[Namespace, int] = {}
        """Of those that have less than a quantum, in tokens."""
        self._crowded_from = _MANY_ACCOUNTS
        self._last_arrival = -1
        self._jumpers: set[LiveRequest] = set()
        """Who joined the round that is being served though later ones had begun."""
        self._oldest: LazyHeap[tuple[int], LiveRequest] = LazyHeap()
        self._overtakers: list[int] = []
        """Arrivals of admitted requests that the oldest waiting one came before, ascending."""

    def push(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        namespace = live.request.namespace
        is_back = live.arrival <= self._last_arrival
        self._last_arrival = max(self._last_arrival, live.arrival)
        if is_back:
            chosen = self._round_before(live.arrival)
        elif self._rounds and self._may_jump(namespace):
            chosen = self._rounds[0]
            if len(self._rounds) > 1:
                self._jumpers.add(live)
        else:
            chosen = self._newest_round(live.arrival)
            chosen.num_joined += 1
        self._round_of[live] = chosen
        self._num_waiting[namespace] = self._num_waiting.get(namespace, 0) + 1
        chosen.by_prefix.push(live)
        self._oldest.push((live.arrival,), live)
        if self._oldest.is_crowded:
            self._oldest.rebuild(((member.arrival,), member) for member in self._round_of)

    def remove(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._round_of.pop(live).by_prefix.remove(live)
        self._jumpers.discard(live)
        namespace = live.request.namespace
        self._num_waiting[namespace] -= 1
        if not self._num_waiting[namespace]:
            del self._num_waiting[namespace]
        while self._rounds and not len(self._rounds[0].by_prefix):
            self._rounds.popleft()

    def peek(self) -> LiveRequest | None:
        """See QueueOrder."""
        if not self._rounds:
            return None
        by_prefix = self._rounds[0].by_prefix
        while (best := by_prefix.peek(self._is_out_of_credit)) is None:
            self._refill(by_prefix)
        return best

    def committed(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        for each in self._rounds:
            each.by_prefix.committed(live)

    def admitted(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self.remove(live)
        self._pay(live, live.sequence.num_tokens - live.num_cached_tokens)
        oldest = self._oldest.first(self._round_of.__contains__)
        if oldest is None:
            self._overtakers.clear()
        else:
            insort(self._overtakers, live.arrival)
            del self._overtakers[: bisect(self._overtakers, oldest.arrival)]

    def ended(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._pay(live, live.output.num_tokens)

    def _round_before(self, arrival: int) -> _Round:
        """Return the round that a request of this arrival joined, or a new one if it is not there any more."""
        for each in reversed(self._rounds):
            if each.first_arrival <= arrival:
                return each
        self._rounds.appendleft(_Round(self._manager, arrival, is_closed=True))
        return self._rounds[0]

    def _newest_round(self, arrival: int) -> _Round:
        capacity = max(self._max_overtakes, int(self._share * len(self._round_of)))
        if not self._rounds or self._rounds[-1].is_closed or self._rounds[-1].num_joined >= capacity:
            self._rounds.append(_Round(self._manager, arrival))
        return self._rounds[-1]

    def _may_jump(self, namespace: Namespace) -> bool:
        """Whether a request need not queue: its namespace has credit, nothing waiting, and patience is left."""
        if namespace in self._num_waiting or self._credits.get(namespace, self._quantum) <= 0:
            return False
        # Whoever overtook a younger one overtook the oldest too, so nobody was overtaken more often than it was.
        return len(self._overtakers) + len(self._jumpers) < self._max_overtakes

    def _pay(self, live: LiveRequest, num_tokens: int) -> None:
        namespace = live.request.namespace
        self._credits[namespace] = self._credits.get(namespace, self._quantum) - num_tokens
        if len(self._credits) > self._crowded_from:
            # Namespaces may be as many as users, so accounts are not kept for ever: everyone is given a quantum.
            self._give(self._quantum)
            self._crowded_from = max(_MANY_ACCOUNTS, 2 * len(self._credits))

    def _is_out_of_credit(self, live: LiveRequest) -> bool:
        return self._credits.get(live.request.namespace, self._quantum) <= 0

    def _refill(self, by_prefix: LongestPrefixOrder) -> None:
        """All of the round are out of credit: give everyone what the least indebted needs, in whole quanta."""
        highest = max(self._credits[namespace] for namespace in by_prefix.namespaces_passed_over())
        self._give((-highest // self._quantum + 1) * self._quantum)
        by_prefix.reconsider()

    def _give(self, num_tokens: int) -> None:
        # Nobody saves up: a full credit is a new one.
        self._credits = {
            namespace: credit + num_tokens
            for namespace, credit in self._credits.items()
            if credit + num_tokens < self._quantum
        }
