"""Joiners: waiting requests that begin with what running ones attend to, and how long others wait for them.

An executor attends once to a prefix that several sequences of a step share. So a request that joins others while they
run costs less in every step than the same request a moment later, when they have ended. It may be admitted before the
one whose turn it is, if

- its prefix is shared by at least MIN_SHARED_TOKENS, so that it is attended to once, and cached;
- it saves more than the other would: gain = tokens in common * steps that it can run beside the youngest of its group;
- whoever has waited longest has been passed over fewer times than `max_overtakes`, or than half of those that wait if
  that is more (a longer queue has more of each group in it, and a longer wait anyway). So nobody was passed over more
  often: those who came later were passed over by some of the same requests, and by no others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

from anaphora.engine.executor import MIN_SHARED_TOKENS
from anaphora.engine.order.prompt_tree import common_tokens
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest

DEFAULT_MAX_OVERTAKES = 16
_SHARE = 0.5
"""Of those that wait: as for `fair`."""

_Key: TypeAlias = "tuple[int, object, bytes]"
"""Priority, namespace, and the first tokens: as many as a group must have in common."""


class Joiners:
    """Who may be admitted before others because it joins a group that runs.

    max_overtakes: how often a request may be passed over for such, where half of those that wait are not more; 0 for
        never.

    Cost: hashing 1 KB for each request that comes or goes; a comparison of prompts for each running group that
    somebody waits to join, when somebody is admitted.
    """

    def __init__(self, manager: KVCacheManager, max_overtakes: int = DEFAULT_MAX_OVERTAKES) -> None:
        if not isinstance(max_overtakes, int) or max_overtakes < 0:
            raise ValueError(f"max_group_overtakes: {max_overtakes!r} is not allowed; it must be 0 or more")
        self._manager = manager
        self._max_overtakes = max_overtakes
        num_blocks = -(-MIN_SHARED_TOKENS // manager.block_size)
        self._min_tokens = num_blocks * manager.block_size
        self._key_bytes = self._min_tokens * TOKEN_BYTES
        self._waiting: dict[_Key, OrderedDict[LiveRequest, None]] = {}
        self._running: dict[_Key, OrderedDict[LiveRequest, None]] = {}
        self._num_overtakes = 0
        self._since: OrderedDict[LiveRequest, int] = OrderedDict()
        """All that wait, in the order in which they began to: how many overtakes there had been by then."""
        self._chosen: LiveRequest | None = None
        """Who goes before its turn, as far as it is not admitted yet."""

    def begin_pass(self) -> None:
        """A pass begins. One that was chosen in the last and found no room kept others out: that counts, too."""
        if self._chosen is not None:
            self._chosen = None
            self._num_overtakes += 1

    def waits(self, live: LiveRequest) -> None:
        """A request begins to wait."""
        self._since[live] = self._num_overtakes

    def gone(self, live: LiveRequest) -> None:
        """A request waits no longer."""
        self._since.pop(live, None)
        if live is self._chosen:
            self._chosen = None

    def enters(self, live: LiveRequest) -> None:
        """A request that waits may be chosen from now on."""
        _add(self._waiting, self._key(live), live)

    def leaves(self, live: LiveRequest) -> None:
        """It may not any more."""
        _discard(self._waiting, self._key(live), live)

    def admitted(self, live: LiveRequest) -> None:
        """A request runs now."""
        if live is self._chosen:
            self._num_overtakes += 1
        self.gone(live)
        _add(self._running, self._key(live), live)

    def ended(self, live: LiveRequest) -> None:
        """A request does not run any more, or never did."""
        _discard(self._running, self._key(live), live)

    def first(self, head: LiveRequest, is_held_back: Callable[[LiveRequest], bool]) -> LiveRequest:
        """Return who is to be admitted: `head`, whose turn it is, or one of its priority that joins a group."""
        self._chosen = None
        if not self._max_overtakes or not self._waiting or self._is_patience_spent():
            return head
        best, most = head, self._gain(head, self._key(head))
        for key in self._running:
            waiting = self._waiting.get(key)
            if waiting is None or key[0] != head.request.priority:
                continue
            live = next(iter(waiting))
            gain = self._gain(live, key)
            if gain > most and self._manager.lookup(live.sequence) >= self._min_tokens and not is_held_back(live):
                best, most = live, gain
        if best is not head:
            self._chosen = best
        return best

    def _is_patience_spent(self) -> bool:
        longest = next(iter(self._since.values()))
        return self._num_overtakes - longest >= max(self._max_overtakes, int(_SHARE * len(self._since)))

    def _gain(self, live: LiveRequest, key: _Key | None) -> int:
        """Reads of a token's KV that it saves by running beside the youngest of its group."""
        running = None if key is None else self._running.get(key)
        if not running:
            return 0
        youngest = next(reversed(running))
        num_left = youngest.request.sampling.max_tokens - youngest.output.num_tokens
        num_common = common_tokens(live.request.prompt, youngest.request.prompt, 0)
        return num_common * min(num_left, live.request.sampling.max_tokens)

    def _key(self, live: LiveRequest) -> _Key | None:
        request = live.request
        if not request.read_cache or len(request.prompt) <= self._key_bytes:
            return None
        return request.priority, request.namespace, request.prompt[: self._key_bytes]


def _add(groups: dict[_Key, OrderedDict[LiveRequest, None]], key: _Key | None, live: LiveRequest) -> None:
    if key is not None:
        groups.setdefault(key, OrderedDict())[live] = None


def _discard(groups: dict[_Key, OrderedDict[LiveRequest, None]], key: _Key | None, live: LiveRequest) -> None:
    group = None if key is None else groups.get(key)
    if group is not None and key is not None:
        group.pop(live, None)
        if not group:
            del groups[key]
