"""Who is let in: requests of little importance are shed while the replicas are saturated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anaphora.router.replica import Replica
    from anaphora.router.resources import InferenceObjective

OBJECTIVE_HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
"""Where a request names its InferenceObjective; the first that is there counts."""
QUEUE_DEPTH = 5.0
KV_USAGE = 0.8
"""What llm-d's utilization-detector takes for saturated where nobody says otherwise."""


class Admission:
    """Priorities by objective, and what counts as saturated.

    queue_depth: requests waiting at a replica; kv_usage: of its KV cache, 0 to 1.
    """

    def __init__(self, *, queue_depth: float = QUEUE_DEPTH, kv_usage: float = KV_USAGE) -> None:
        self._queue_depth = queue_depth
        self._kv_usage = kv_usage
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
        """How full replicas are, 1 and more meaning saturated, 0 where there are none.

        llm-d's utilization-detector: the mean over replicas of waiting requests or KV usage, whichever is more, each by
        its limit. Requests that we have sent beyond what a replica runs at once count as waiting at once, before its
        metrics say so.
        """
        if not replicas:
            return 0.0
        return sum(map(self._fullness, replicas)) / len(replicas)

    def check(self, priority: int, replicas: Sequence[Replica]) -> None:
        """Raise ApiError (429) for a request of negative priority while `replicas`, its candidates, are saturated."""
        if priority < 0 and self.saturation(replicas) >= 1.0:
            raise ApiError(
                429,
                f"The replicas are saturated, and requests of priority {priority} give way.",
                code="saturated",
                headers={"x-llm-d-request-dropped-reason": "rejected-saturated", "retry-after": "1"},
            )

    def _fullness(self, replica: Replica) -> float:
        load = replica.load
        waiting = max(load.num_waiting, len(load.inflight) - replica.max_running)
        return max(waiting / self._queue_depth, load.kv_usage / self._kv_usage)
