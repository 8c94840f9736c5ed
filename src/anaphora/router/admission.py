"""Who is let in: requests of little importance are shed while the replicas are saturated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anaphora.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anaphora.router.replica import Replica
    from anaphora.router.resources import InferenceObjective

OBJECTIVE_HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
"""Where a request names its InferenceObjective; the first that is there counts."""


class Saturation(Protocol):
    """How full replicas are."""

    def of(self, replica: Replica) -> float:
        """One replica's fullness, 1 and more meaning saturated."""
        ...


@dataclass(frozen=True, slots=True)
class Utilization:
    """llm-d's utilization-detector: waiting requests or KV usage, whichever is more, each by its limit.

    Requests that we have sent beyond what a replica runs at once count as waiting at once, before its metrics say so.

    queue_depth: requests waiting at a replica; kv_usage: of its KV cache, 0 to 1.
    """

    queue_depth: float = 5.0
    kv_usage: float = 0.8

    def of(self, replica: Replica) -> float:
        """See Saturation."""
        load = replica.load
        waiting = max(load.num_waiting, len(load.inflight) - replica.max_running)
        return max(waiting / self.queue_depth, load.kv_usage / self.kv_usage)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """llm-d's concurrency-detector: what we have sent and has not ended, by a limit.

    clock: None counts requests; otherwise prompt tokens that are still to be computed at that time.
    """

    limit: float = 100.0
    clock: Callable[[], float] | None = None

    def of(self, replica: Replica) -> float:
        """See Saturation."""
        load = replica.load
        return (len(load.inflight) if self.clock is None else load.inflight_tokens(self.clock())) / self.limit


class Admission:
    """Priorities by objective. saturation: what counts as full."""

    def __init__(self, saturation: Saturation | None = None) -> None:
        self._saturation = saturation or Utilization()
        self._sources: dict[str, Sequence[InferenceObjective]] = {}
        self._priorities: dict[str, int] = {}

    def set(self, source: str, objectives: Sequence[InferenceObjective]) -> None:
        """One source gives its objectives, all of them. Of several with one name the first source's counts."""
        self._sources[source] = objectives
        priorities: dict[str, int] = {}
        for given in self._sources.values():
            for objective in given:
                priorities.setdefault(objective.metadata.name, objective.spec.priority or 0)
        self._priorities = priorities

    def priority(self, headers: Mapping[bytes, bytes]) -> int:
        """A request's priority: its objective's, 0 where it names none that is known."""
        named = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), b"")
        return self._priorities.get(named.decode("latin-1").strip(), 0)

    def saturation(self, replicas: Sequence[Replica]) -> float:
        """How full replicas are on the average, 1 and more meaning saturated; 0 where there are none."""
        return sum(map(self._saturation.of, replicas)) / len(replicas) if replicas else 0.0

    def check(self, priority: int, replicas: Sequence[Replica]) -> None:
        """Raise ApiError (429) for a request of negative priority while `replicas`, its candidates, are saturated."""
        if priority < 0 and self.saturation(replicas) >= 1.0:
            raise ApiError(
                429,
                f"The replicas are saturated, and requests of priority {priority} give way.",
                code="saturated",
                headers={"x-llm-d-request-dropped-reason": "rejected-saturated", "retry-after": "1"},
            )
