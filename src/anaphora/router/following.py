"""Follows the KV events of those replicas that publish them, and keeps the fleet's knowledge by them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from anaphora.wire.decoder import WireError
from anaphora.wire.sequence import Apply, Lost, Restarted
from anaphora.wire.subscriber import EventSubscriber
from anaphora.wire.vllm_codec import events_of
from anaphora.wire.vllm_messages import decode_batch

if TYPE_CHECKING:
    from anaphora.router.fleet_state import Fleet
    from anaphora.router.replica import Replica, ReplicaSpec
    from anaphora.wire.sequence import Action

log = logging.getLogger(__name__)

_RECONCILE_S = 0.5


class Follower:
    """Lives on the event loop; the sockets have a thread of their own.

    A replica whose batches can be had from the first on is known precisely; one that was running long before, or whose
    events were lost, in part. An unreadable batch counts as a lost one.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._followed: dict[str, ReplicaSpec] = {}
        self._fresh: set[str] = set()
        self.num_batches = 0
        self.num_bad_batches = 0
        self.num_lost = 0

    async def run(self) -> None:
        """Follow until cancelled."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        subscriber = EventSubscriber(lambda: loop.call_soon_threadsafe(ready.set))
        subscriber.start()
        self._fleet.on_lost = lambda replica: self._resync(subscriber, replica)
        try:
            while True:
                self._reconcile(subscriber)
                try:
                    await asyncio.wait_for(ready.wait(), _RECONCILE_S)
                except TimeoutError:
                    continue
                ready.clear()
                for name, action in subscriber.take():
                    self.take(name, action)
                await asyncio.sleep(0)  # requests come first
        finally:
            self._fleet.on_lost = None
            await asyncio.to_thread(subscriber.close)

    def take(self, name: str, action: Action) -> None:
        """Do what one replica's sequence says."""
        replica = self._fleet.replicas.get(name)
        if replica is None:
            return
        knowledge = self._fleet.knowledge
        if isinstance(action, Restarted):
            log.warning("%s: its KV events begin anew", name)
            self._fresh.add(name)
        elif isinstance(action, Lost):
            self.num_lost += 1
            self._fresh.discard(name)
            replica.precise_problem = "some of its KV events were lost"
            knowledge.follow(name, [])
            knowledge.lose(name)
        elif isinstance(action, Apply):
            self.num_batches += 1
            if name in self._fresh:
                self._fresh.discard(name)
                replica.precise_problem = None
                knowledge.begin_following(name)
            try:
                batch = decode_batch(action.payload)
                _require_rank(batch.data_parallel_rank, replica.spec.rank)
                knowledge.follow(name, events_of(batch))
            except WireError as error:
                self.num_bad_batches += 1
                replica.precise_problem = f"unreadable KV events: {error}"
                log.warning("%s: %s", name, replica.precise_problem)
                knowledge.follow(name, [])
                knowledge.lose(name)

    def _reconcile(self, subscriber: EventSubscriber) -> None:
        wanted = {name: replica.spec for name, replica in self._fleet.replicas.items() if replica.spec.kv_events}
        for name in [name for name, spec in self._followed.items() if _published(wanted.get(name)) != _published(spec)]:
            subscriber.remove(name)
            del self._followed[name]
            if name in self._fleet.replicas:
                self._fleet.knowledge.stop_following(name)
        for name, spec in wanted.items():
            if name in self._followed:
                continue
            self._followed[name] = spec
            assert spec.kv_events is not None
            self._fresh.add(name)
            try:
                subscriber.add(name, spec.kv_events, spec.kv_replay, spec.topic)
            except ValueError as error:
                self._fleet.replicas[name].precise_problem = str(error)

    def _resync(self, subscriber: EventSubscriber, replica: Replica) -> None:
        if replica.name in self._followed:
            self._fresh.add(replica.name)
            subscriber.resync(replica.name)


def _published(spec: ReplicaSpec | None) -> tuple[str | None, str | None, str] | None:
    """Where a replica's events are; its labels may change without a new subscription."""
    return None if spec is None else (spec.kv_events, spec.kv_replay, spec.topic)


def _require_rank(told: int | None, expected: int | None) -> None:
    """Another rank's blocks are in another cache."""
    if None not in {told, expected} and told != expected:
        raise WireError(f"they are of data-parallel rank {told}, expected {expected}; kv-events is rank 0's endpoint")
