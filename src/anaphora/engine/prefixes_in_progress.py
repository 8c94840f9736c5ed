"""PrefixesInProgress: prompts that are being computed now, and who waits for what part of them.

Of requests that arrive together with the same new prefix one, the leader, computes it. The others are held back until
the part that they share is committed, and start from there: 64 equal prompts cost one prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anaphora.engine.order.prompt_tree import common_tokens
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest

DEFAULT_MIN_HELD_TOKENS = 64
"""Fewer are computed in less time than the one step takes that whoever is held waits at least."""
MAX_IDLE_PASSES = 4
"""So many passes of the scheduler in a row a leader may compute nothing before nobody waits for it any more."""


@dataclass(slots=True)
class _Leader:
    num_idle_passes: int = 0
    held: dict[LiveRequest, int] = field(default_factory=dict)
    """How many tokens of the leader's each waits for."""


class PrefixesInProgress:
    """Leaders, and who is held for them. A held request comes back, at the latest, when its leader stops being one.

    Cost: a look at one block for a request that shares with nobody; a comparison for each leader with the same first
    block for others.
    """

    def __init__(self, manager: KVCacheManager, min_held_tokens: int = DEFAULT_MIN_HELD_TOKENS) -> None:
        self._manager = manager
        self._min_held_tokens = min_held_tokens
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._leaders: dict[LiveRequest, _Leader] = {}
        self._by_first_block: dict[object, dict[LiveRequest, None]] = {}

    def start(self, live: LiveRequest) -> None:
        """A request was admitted: others may wait for what it computes, if it leaves that in the cache."""
        sequence = live.sequence
        if sequence.publishes and live.num_prompt_tokens - sequence.num_computed_tokens >= self._min_held_tokens:
            self._leaders[live] = _Leader()
            self._by_first_block.setdefault(self._first_block(live), {})[live] = None

    def hold(self, live: LiveRequest) -> bool:
        """Hold a waiting request if a leader computes enough of its prompt; return whether it is held."""
        if not self._leaders or not live.request.read_cache:
            return False
        leaders = self._by_first_block.get(self._first_block(live))
        if not leaders:
            return False
        prompt = live.request.prompt
        # Its own last token is never served.
        num_wanted, chosen = 0, None
        for leader in leaders:
            num_common = min(common_tokens(prompt, leader.request.prompt, 0), live.num_prompt_tokens - 1)
            if num_common > num_wanted:
                num_wanted, chosen = num_common, leader
        num_wanted -= num_wanted % self._manager.block_size
        if chosen is None or num_wanted - self._manager.lookup(live.sequence) < self._min_held_tokens:
            return False
        if num_wanted <= chosen.sequence.num_computed_tokens:  # computed, and evicted since
            return False
        self._leaders[chosen].held[live] = num_wanted
        return True

    def progressed(self, live: LiveRequest) -> list[LiveRequest]:
        """A running request has committed tokens: return those that need not wait for it any longer."""
        leader = self._leaders.get(live)
        if leader is None:
            return []
        num_computed = live.sequence.num_computed_tokens
        leader.num_idle_passes = 0
        if num_computed >= live.num_prompt_tokens:
            return self.stop(live)
        back = [each for each, num_wanted in leader.held.items() if num_wanted <= num_computed]
        for each in back:
            del leader.held[each]
        return back

    def stop(self, live: LiveRequest) -> list[LiveRequest]:
        """A running request computes its prompt no more, for whatever reason: return all that waited for it."""
        leader = self._leaders.pop(live, None)
        if leader is None:
            return []
        key = self._first_block(live)
        del self._by_first_block[key][live]
        if not self._by_first_block[key]:
            del self._by_first_block[key]
        return list(leader.held)

    def forget(self, live: LiveRequest) -> None:
        """A held request waits no more. Does nothing if it is not held."""
        for leader in self._leaders.values():
            leader.held.pop(live, None)

    def begin_pass(self) -> Iterator[LiveRequest]:
        """A pass of the scheduler begins: yield those whose leaders have been idle for too long."""
        for live, leader in list(self._leaders.items()):
            leader.num_idle_passes += 1
            if leader.num_idle_passes > MAX_IDLE_PASSES:
                yield from self.stop(live)

    def _first_block(self, live: LiveRequest) -> object:
        return live.request.namespace, live.request.prompt[: self._block_bytes]
