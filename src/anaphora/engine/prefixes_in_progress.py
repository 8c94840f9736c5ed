"""PrefixesInProgress: prompts that are being computed in this step, which others may start from in the next.

Of requests that arrive together with the same new prefix one computes it. The others are held back for a step, and then
find it in the cache: 64 equal prompts cost one prefill. A request that is longer than a step's budget leaves nothing of
the budget for others, so they need not be held for more than its last chunk; nobody is held for longer than a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.order.prompt_tree import common_tokens
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest

DEFAULT_MIN_HELD_TOKENS = 64
"""Fewer are computed in less time than the step takes that whoever is held waits."""


class PrefixesInProgress:
    """What running requests compute of their prompts in the step that is being scheduled.

    Cost of a question: a look at one block for a request that shares with nobody; for others a comparison with each
    prompt that has the same first block.
    """

    def __init__(self, manager: KVCacheManager, min_held_tokens: int = DEFAULT_MIN_HELD_TOKENS) -> None:
        self._manager = manager
        self._min_held_tokens = min_held_tokens
        self._block_bytes = manager.block_size * TOKEN_BYTES
        self._by_first_block: dict[object, list[tuple[LiveRequest, int]]] = {}
        """(who, how much of its prompt has KV after the step)."""

    def clear(self) -> None:
        """The step is over: all that was computed is in the cache, or failed."""
        self._by_first_block.clear()

    def add(self, live: LiveRequest, num_tokens: int) -> None:
        """A running request computes so many more tokens in this step; those of its prompt may be worth waiting for."""
        sequence = live.sequence
        start = sequence.num_computed_tokens
        if sequence.publishes and min(start + num_tokens, live.num_prompt_tokens) - start >= self._min_held_tokens:
            self._by_first_block.setdefault(self._first_block(live), []).append((live, start + num_tokens))

    def is_worth_waiting_for(self, live: LiveRequest) -> bool:
        """Whether a waiting request would save enough if it were admitted in the next step instead of this one."""
        if not self._by_first_block or not live.request.read_cache:
            return False
        computed = self._by_first_block.get(self._first_block(live))
        if not computed:
            return False
        prompt = live.request.prompt
        # Its own last token is never served.
        num_servable = max(
            min(common_tokens(prompt, other.request.prompt, 0), num_tokens, live.num_prompt_tokens - 1)
            for other, num_tokens in computed
        )
        num_servable -= num_servable % self._manager.block_size
        return num_servable - self._manager.lookup(live.sequence) >= self._min_held_tokens

    def _first_block(self, live: LiveRequest) -> object:
        return live.request.namespace, live.request.prompt[: self._block_bytes]
