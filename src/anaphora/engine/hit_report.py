"""HitReports: events that say again what requests found, if they ask for it: vLLM's `kv_cache_report_mode` full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.cache.events import BlockStored
from anaphora.identity.extras import extra_keys
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.cache.sequence import Sequence
    from anaphora.engine.live_request import LiveRequest
    from anaphora.engine.scheduler import ScheduledSpan


class HitReports:
    """Requests that ask for a report and were not admitted yet, and reports that nobody has taken."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._asking: set[LiveRequest] = set()
        self._reports: list[BlockStored] = []

    def submitted(self, live: LiveRequest) -> None:
        """A request stands in the queue."""
        if live.request.reports_hits:
            self._asking.add(live)

    def ended(self, live: LiveRequest) -> None:
        """It is over."""
        self._asking.discard(live)

    def scheduled(self, spans: list[ScheduledSpan]) -> None:
        """Report what those found who ask for it and are in their first step."""
        if not self._asking:
            return
        for live, _, _ in spans:
            if live in self._asking:
                self._asking.discard(live)
                report = hit_report(self._manager, live.sequence)
                if report is not None:
                    self._reports.append(report)

    def take(self) -> list[BlockStored]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports


def hit_report(manager: KVCacheManager, sequence: Sequence) -> BlockStored | None:
    """Return a running sequence's cached whole blocks, from the head of the chain on, as if they were stored now; None
    if there are none. Call it at admission."""
    block_size = manager.block_size
    num_blocks = sequence.num_cached_tokens // block_size
    if num_blocks == 0:
        return None
    return BlockStored(
        digests=tuple(manager.block_digests(sequence)[:num_blocks]),
        parent=None,
        tokens=bytes(sequence.tokens[: num_blocks * block_size * TOKEN_BYTES]),
        block_size=block_size,
        namespace=sequence.namespace,
        extras=extra_keys(sequence.namespace, sequence.media, 0, num_blocks, block_size),
    )
