"""What was asked of the cache and what was found."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CacheStats:
    """Counters since the start. Each request counts once, at its first admission.

    queries and hits are tokens: all tokens of the request at that time, and those found. A preempted request that
    comes back finds mostly its own blocks, so its lookup counts apart, in the preempted_ fields.

    host_hits, preempted_host_hits: those of the hits that were found in host memory. saved_blocks went there, and
    loaded_blocks came back; of evicted_blocks those in host_evicted_blocks are lost from host memory too.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    host_hits: int = 0
    preempted_host_hits: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    host_evicted_blocks: int = 0

    @property
    def hits_by_tier(self) -> dict[str, int]:
        """The hits, by where they were found."""
        return {"device": self.hits - self.host_hits, "host": self.host_hits}

    @property
    def hit_rate(self) -> float | None:
        """Hits over queries, or None where nothing was asked yet."""
        return self.hits / self.queries if self.queries else None

    def copy(self) -> CacheStats:
        """Return the counters as they stand."""
        return CacheStats(**{f.name: getattr(self, f.name) for f in fields(self)})
