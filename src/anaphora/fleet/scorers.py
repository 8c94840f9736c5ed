"""Scorers: how well each replica suits a request by one measure, 0 to 1. The names and rules are llm-d's (v0.9)."""

from __future__ import annotations

import base64
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anaphora.fleet.view import ReplicaView, RequestView


class Scorer(Protocol):
    """Scores replicas. Changes nothing by it."""

    def score(self, request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """Return a score for each of `replicas`, in their order."""
        ...


def prefix_ratio(request: RequestView, replica: ReplicaView) -> float:
    """The share of the prompt's whole blocks that the replica has."""
    total = request.num_blocks * request.block_size
    return min(replica.matched_tokens / total, 1.0) if total else 0.0


@dataclass(frozen=True, slots=True)
class PrefixScorer:
    """prefix-cache-scorer. With match_length_weight the square of the matched length counts too (llm-d after v0.9)."""

    match_length_weight: float = 0.0
    match_length_scale_tokens: int = 8192

    def score(self, request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        weight, scale = self.match_length_weight, self.match_length_scale_tokens
        return [
            weight * min(1.0, replica.matched_tokens / scale) ** 2 + (1 - weight) * prefix_ratio(request, replica)
            for replica in replicas
        ]


def _least_is_best(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [1.0] * len(values) if low == high else [(high - value) / (high - low) for value in values]


@dataclass(frozen=True, slots=True)
class QueueScorer:
    """queue-scorer: fewest waiting requests."""

    def score(self, _request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        return _least_is_best([float(replica.num_waiting) for replica in replicas])


@dataclass(frozen=True, slots=True)
class RunningScorer:
    """running-requests-size-scorer: fewest running requests."""

    def score(self, _request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        return _least_is_best([float(replica.num_running) for replica in replicas])


@dataclass(frozen=True, slots=True)
class KvUtilisationScorer:
    """kv-cache-utilization-scorer: most free KV memory."""

    def score(self, _request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        return [1.0 - replica.kv_usage for replica in replicas]


@dataclass(frozen=True, slots=True)
class LoadAwareScorer:
    """load-aware-scorer: 0.5 without a queue, down to 0 at `threshold` waiting requests."""

    threshold: int = 128

    def score(self, _request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        return [0.5 * (1 - min(replica.num_waiting, self.threshold) / self.threshold) for replica in replicas]


@dataclass(frozen=True, slots=True)
class ActiveRequestScorer:
    """active-request-scorer: fewest unfinished requests of ours; 1 up to `idle_threshold` of them."""

    idle_threshold: int = 0
    max_busy_score: float = 1.0

    def score(self, _request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        most = max(replica.inflight_requests for replica in replicas)
        return [
            1.0
            if replica.inflight_requests <= self.idle_threshold
            else (most - replica.inflight_requests) / most * self.max_busy_score
            for replica in replicas
        ]


@dataclass(frozen=True, slots=True)
class TokenLoadScorer:
    """token-load-scorer: fewest tokens to compute, this request's own uncached ones included."""

    queue_threshold_tokens: int = 4_194_304

    def score(self, request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        limit = self.queue_threshold_tokens
        return [
            1.0 - min(replica.inflight_tokens + max(request.num_tokens - replica.matched_tokens, 0), limit) / limit
            for replica in replicas
        ]


@dataclass(frozen=True, slots=True)
class LoraAffinityScorer:
    """lora-affinity-scorer: the adapter runs there, or there is room for it, or it is waited for there already."""

    def score(self, request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""

        def of(replica: ReplicaView) -> float:
            if request.adapter in replica.adapters_running:
                return 1.0
            if len(replica.adapters_running) + len(replica.adapters_waiting) < replica.max_adapters:
                return 0.8
            return 0.6 if request.adapter in replica.adapters_waiting else 0.0

        return [of(replica) for replica in replicas]


@dataclass(frozen=True, slots=True)
class ContextLengthScorer:
    """context-length-aware: replicas whose label names the range of lengths that they are for; narrow ranges first."""

    label: str = "llm-d.ai/context-length-range"

    def score(self, request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""

        def of(replica: ReplicaView) -> float:
            bounds = context_range(replica, self.label)
            if bounds is None:
                return 0.5
            low, high = bounds
            width = max(high - low, 1)
            if low <= request.num_tokens <= high:
                return 0.3 + 0.7 * (0.7 / (1 + width / 10_000) + 0.3 * (high - request.num_tokens) / width)
            distance = low - request.num_tokens if request.num_tokens < low else request.num_tokens - high
            return 0.3 / (1 + distance / 1000)

        return [of(replica) for replica in replicas]


def context_range(replica: ReplicaView, label: str) -> tuple[int, int] | None:
    """The range that a label like "0-8192" names; None for no such label."""
    low, dash, high = replica.labels.get(label, "").partition("-")
    return (int(low), int(high)) if dash and low.isdecimal() and high.isdecimal() else None


def session_token(replica: str) -> str:
    """What a client sends again to come back to a replica."""
    return base64.b64encode(replica.encode()).decode()


@dataclass(frozen=True, slots=True)
class SessionScorer:
    """session-affinity-scorer: 1 for the replica that the session's token names."""

    def score(self, request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        return [float(request.session == session_token(replica.name)) for replica in replicas]


class NoHitLruScorer:
    """no-hit-lru-scorer: spreads requests that nobody has a prefix of, least recently used replica first.

    The one scorer with a memory: `sent` tells it where such requests went.
    """

    def __init__(self, lru_size: int = 1024) -> None:
        self._lru_size = lru_size
        self._used: OrderedDict[str, None] = OrderedDict()

    def score(self, _request: RequestView, replicas: Sequence[ReplicaView]) -> list[float]:
        """See Scorer."""
        if any(replica.matched_tokens for replica in replicas):
            return [0.5] * len(replicas)
        names = [replica.name for replica in replicas]
        order = [name for name in names if name not in self._used] + [name for name in self._used if name in names]
        if len(order) == 1:
            return [1.0]
        rank = {name: position for position, name in enumerate(order)}
        return [1.0 - rank[name] / (len(order) - 1) for name in names]

    def sent(self, replica: str, *, had_hit: bool) -> None:
        """A request went to a replica; had_hit: whether any replica had a part of its prefix."""
        if had_hit:
            return
        self._used.pop(replica, None)
        self._used[replica] = None
        if len(self._used) > self._lru_size:
            self._used.popitem(last=False)


SCORERS: dict[str, Callable[..., Scorer]] = {
    "prefix-cache-scorer": PrefixScorer,
    "precise-prefix-cache-scorer": PrefixScorer,
    "queue-scorer": QueueScorer,
    "running-requests-size-scorer": RunningScorer,
    "kv-cache-utilization-scorer": KvUtilisationScorer,
    "load-aware-scorer": LoadAwareScorer,
    "active-request-scorer": ActiveRequestScorer,
    "token-load-scorer": TokenLoadScorer,
    "lora-affinity-scorer": LoraAffinityScorer,
    "context-length-aware": ContextLengthScorer,
    "session-affinity-scorer": SessionScorer,
    "no-hit-lru-scorer": NoHitLruScorer,
}
"""By the type that a configuration file names."""
