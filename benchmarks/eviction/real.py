"""The library's own cache manager, driven by a trace: a block of the trace is one token, a cache block holds one."""

from __future__ import annotations

from typing import Any

from anaphora import KVCacheManager
from anaphora.cache.eviction import POLICIES, Tlru

from .trace import Request, Trace

TLRU = Tlru(threshold=16, next_prompt=1)  # in blocks of the trace, as the reference has it
REAL_POLICIES: dict[str, Any] = {**{name: name for name in POLICIES if name != "priority"}, "tlru": TLRU}


class RealCache:
    """A `KVCacheManager` of ``capacity`` blocks on the trace's clock.

    The manager always leaves a prompt's last token to compute, so each prompt gets one more token, which nobody else
    has and whose KV is never committed; the pool has one more block for it.
    """

    def __init__(self, trace: Trace, capacity: int, policy: str) -> None:
        self._now_s = 0.0
        self._unique = trace.num_blocks
        self.manager = KVCacheManager(capacity + 1, 1, eviction=REAL_POLICIES[policy], clock=lambda: self._now_s)

    def serve(self, request: Request) -> int:
        """Serves one request to its end and returns how many of its blocks were cached."""
        self._now_s = request.time_s
        self._unique += 1
        manager = self.manager
        chain = request.chain[: manager.num_blocks - 1]  # what does not fit is computed and not kept
        sequence = manager.start([*chain, self._unique])
        is_admitted = manager.allocate(sequence, len(chain) + 1 - sequence.num_cached_tokens)
        assert is_admitted, "nobody holds a block, so there is room"
        manager.commit(sequence, len(chain) - sequence.num_computed_tokens)
        manager.finish(sequence)
        return sequence.num_cached_tokens
