"""What a decision looks at: one request and the replicas, as they are at one moment. Nothing here changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Knowledge: TypeAlias = Literal["precise", "partial", "approximate", "unknown"]
"""Where the knowledge of a replica's cache comes from: its events, a part of them, our own decisions, or nowhere."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica at the moment of a decision.

    matched_tokens: of the request's start, in any medium, blocks included that a request on its way will leave there.
    device_tokens: of those, what is in the engine's own memory.
    inflight_requests: sent from here and unfinished. inflight_tokens: prompt tokens of those that are still to compute.
    num_running, num_waiting, kv_usage: as the engine reports them, other routers' requests included.
    prefill_tokens_per_s: measured. max_running: requests that the engine runs at once.
    """

    name: str
    matched_tokens: int = 0
    device_tokens: int = 0
    inflight_requests: int = 0
    inflight_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 5000.0
    service_s: float = 2.0
    max_running: int = 64
    knowledge: Knowledge = "approximate"
    knowledge_age_s: float = 0.0
    adapters_running: frozenset[str] = frozenset()
    adapters_waiting: frozenset[str] = frozenset()
    max_adapters: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""

    @property
    def busy(self) -> int:
        """Requests on the replica: ours, or all that the engine knows of if those are more."""
        return max(self.inflight_requests, self.num_running + self.num_waiting)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request at the moment of its decision.

    num_tokens: of the prompt; num_blocks, block_size: its whole blocks, in the index's unit.
    head: what prompts that begin alike have in common, for the choice where nothing is known.
    session: the replica that the client's session was on, if it says so.
    """

    num_tokens: int
    num_blocks: int = 0
    block_size: int = 16
    head: bytes = b""
    session: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """One replica's line in a decision. parts: what the total is made of, by name."""

    replica: str
    total: float
    parts: Mapping[str, float]
    matched_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    replicas: the choice, then the fallbacks in order; empty if no replica can take it.
    scores: every replica that was considered. lower_is_better: whether they are costs.
    """

    replicas: tuple[str, ...]
    scores: tuple[Score, ...]
    reason: str
    lower_is_better: bool = True
    profile: str = "cost"
    prefill: str | None = None

    @property
    def replica(self) -> str | None:
        """The choice."""
        return self.replicas[0] if self.replicas else None

    def matched_tokens(self, replica: str) -> int:
        """What the decision took a replica to have of the prompt."""
        return next((score.matched_tokens for score in self.scores if score.replica == replica), 0)
