"""Who is in the fleet, by all that several sources say of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anaphora.router.fleet_state import Fleet
    from anaphora.router.replica import ReplicaSpec


@dataclass(frozen=True, slots=True)
class EventPorts:
    """Where replicas that are found publish their KV events. Rank n of a pod uses the nth port after these."""

    events: int
    replay: int | None = None
    topic: str = ""

    def applied(self, spec: ReplicaSpec, host: str, rank: int = 0) -> ReplicaSpec:
        """Return the replica with its events, at `host` (IPv6 in brackets)."""
        replay = f"tcp://{host}:{self.replay + rank}" if self.replay else None
        return replace(spec, kv_events=f"tcp://{host}:{self.events + rank}", kv_replay=replay, topic=self.topic)


class Membership:
    """The union of what each source named last. A source that falls silent keeps its replicas.

    say: is told in one line who joined and who drains.
    """

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._say = say
        self._named: dict[str, Sequence[ReplicaSpec]] = {}
        self._held: dict[str, Sequence[ReplicaSpec]] = {}

    def set(
        self, source: str, specs: Sequence[ReplicaSpec], held: Sequence[ReplicaSpec] = (), *, quietly: bool = False
    ) -> None:
        """One source names its replicas, all of them.

        held: replicas that are there and not ready. Those in the fleet stay, without new requests, so that a moment's
            unreadiness does not cost what is known of their caches; others do not join.
        """
        self._named[source] = specs
        self._held[source] = held
        ready = {spec.name: spec for specs in self._named.values() for spec in specs}
        waiting = {
            spec.name: spec
            for specs in self._held.values()
            for spec in specs
            if spec.name not in ready and spec.name in self._fleet.replicas
        }
        joined, left = self._fleet.reconcile([*ready.values(), *waiting.values()], waiting)
        if (joined or left) and not quietly:
            self._say(f"Replicas: {', '.join(joined) or 'none'} joined, {', '.join(left) or 'none'} drain.")

    def renewed(self, name: str) -> None:
        """Another process has a replica's address: nothing is known of its cache."""
        replica = self._fleet.replicas.get(name)
        if replica is not None:
            self._fleet.lost(replica)
