"""Filters: which replicas may have a request at all. The names and rules are llm-d's (v0.9)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from anaphora.fleet.scorers import prefix_ratio, session_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anaphora.fleet.view import ReplicaView, RequestView

ROLE_LABEL = "llm-d.ai/role"


class Filter(Protocol):
    """Leaves some of the replicas. Changes nothing."""

    def filter(self, request: RequestView, replicas: Sequence[ReplicaView], rng: random.Random) -> list[ReplicaView]:
        """Return those that are left, perhaps none."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixAffinityFilter:
    """prefix-cache-affinity-filter: only those that have most of the prompt, unless waiting for them takes too long.

    affinity_threshold: share of the prompt that makes a replica one of those. exploration_probability: how often
    all are left all the same. max_ttft_penalty_ms: how much later the first token may come on them; 0: however much.
    """

    affinity_threshold: float = 0.80
    exploration_probability: float = 0.0
    max_ttft_penalty_ms: float = 18_000
    peak_prefill_throughput: float = 15_928

    def filter(self, request: RequestView, replicas: Sequence[ReplicaView], rng: random.Random) -> list[ReplicaView]:
        """See Filter."""
        everyone = list(replicas)
        if len(everyone) <= 1 or self.affinity_threshold <= 0 or rng.random() < self.exploration_probability:
            return everyone
        sticky = [replica for replica in everyone if prefix_ratio(request, replica) >= self.affinity_threshold]
        rest = [replica for replica in everyone if replica not in sticky]
        if not sticky:
            return everyone
        if self.max_ttft_penalty_ms > 0 and rest:
            penalty = min(map(self._ttft_ms, sticky)) - min(map(self._ttft_ms, rest))
            if penalty > self.max_ttft_penalty_ms:
                return everyone
        return sticky

    def _ttft_ms(self, replica: ReplicaView) -> float:
        return replica.inflight_tokens / self.peak_prefill_throughput * 1000


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """session-affinity-filter: the session's replica alone, if it is among them."""

    def filter(self, request: RequestView, replicas: Sequence[ReplicaView], _rng: random.Random) -> list[ReplicaView]:
        """See Filter."""
        pinned = [replica for replica in replicas if request.session == session_token(replica.name)]
        return pinned or list(replicas)


@dataclass(frozen=True, slots=True)
class LabelFilter:
    """label-selector-filter: those that have all of these labels."""

    selector: Mapping[str, str] = field(default_factory=dict)

    def filter(self, _request: RequestView, replicas: Sequence[ReplicaView], _rng: random.Random) -> list[ReplicaView]:
        """See Filter."""
        return [
            replica
            for replica in replicas
            if all(replica.labels.get(name) == value for name, value in self.selector.items())
        ]


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """decode-filter, prefill-filter, encode-filter: those whose role label names the role, alone or among others."""

    role: str
    takes_unlabelled: bool = False

    def filter(self, _request: RequestView, replicas: Sequence[ReplicaView], _rng: random.Random) -> list[ReplicaView]:
        """See Filter."""
        return [replica for replica in replicas if self._fits(replica.labels.get(ROLE_LABEL))]

    def _fits(self, label: str | None) -> bool:
        if not label:
            return self.takes_unlabelled
        return self.role in label.split("-") or (label == "both" and self.role in {"prefill", "decode"})


@dataclass(frozen=True, slots=True)
class UtilisationFilter:
    """utilization-detector as a filter: those below both thresholds; all if none is."""

    queue_depth_threshold: float = 5
    kv_cache_util_threshold: float = 0.8
    headroom: float = 0.0

    def filter(self, _request: RequestView, replicas: Sequence[ReplicaView], _rng: random.Random) -> list[ReplicaView]:
        """See Filter."""
        room = 1 + self.headroom
        left = [
            replica
            for replica in replicas
            if replica.num_waiting <= self.queue_depth_threshold * room
            and replica.kv_usage <= self.kv_cache_util_threshold * room
        ]
        return left or list(replicas)


FILTERS: dict[str, Callable[..., Filter]] = {
    "prefix-cache-affinity-filter": PrefixAffinityFilter,
    "session-affinity-filter": SessionFilter,
    "label-selector-filter": LabelFilter,
    "decode-filter": lambda: RoleFilter("decode", takes_unlabelled=True),
    "prefill-filter": lambda: RoleFilter("prefill"),
    "encode-filter": lambda: RoleFilter("encode"),
    "utilization-detector": UtilisationFilter,
}
"""By the type that a configuration file names."""
