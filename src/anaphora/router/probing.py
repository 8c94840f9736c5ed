"""Asks replicas how they are: alive, loaded, with what models and how large a cache."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from anaphora.router.engine_metrics import EngineMetrics, read_metrics
from anaphora.router.upstream import BadRequestError, UpstreamError

if TYPE_CHECKING:
    from anaphora.router.fleet_state import Fleet
    from anaphora.router.replica import Replica
    from anaphora.router.upstream import Upstream

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_MODELS_EVERY = 15


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class _Answers:
    """What was asked in one round: ranks of an engine share the answers."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._asked: dict[tuple[str, str], asyncio.Task[tuple[int, bytes]]] = {}

    async def get(self, url: str, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises as `Upstream.get` does."""
        task = self._asked.get((url, path))
        if task is None:
            task = self._asked[url, path] = asyncio.ensure_future(self._upstream.get(url, path, timeout_s=_TIMEOUT_S))
        return await task


class Prober:
    """Visits every replica once an interval. `interval_s` also bounds how long a dead one is believed alive: twice."""

    def __init__(self, fleet: Fleet, upstream: Upstream, interval_s: float = 1.0) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._interval_s = interval_s
        self._rounds: dict[str, int] = {}
        self._counters: dict[str, float] = {}

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await self.probe_all()
            await asyncio.sleep(self._interval_s)

    async def probe_all(self) -> None:
        """Probe every replica once, all at the same time."""
        replicas = list(self._fleet.replicas.values())
        answers = _Answers(self._upstream)
        await asyncio.gather(*(self.probe(replica, answers) for replica in replicas))
        for table in (self._rounds, self._counters):
            for name in table.keys() - self._fleet.replicas.keys():
                del table[name]

    async def probe(self, replica: Replica, answers: _Answers) -> None:
        """Probe one replica. What it does not offer is left as it was."""
        try:
            status, _ = await answers.get(replica.spec.url, "/health")
            is_alive = status < 400 or status == 404
        except (UpstreamError, BadRequestError):
            is_alive = False
        if not is_alive:
            if replica.probe_failed():
                log.warning("%s: unhealthy", replica.name)
                self._fleet.lost(replica)
                replica.models = {}
                self._rounds.pop(replica.name, None)
            return
        if replica.probe_succeeded():
            log.warning("%s: healthy again", replica.name)
        turn = self._rounds.get(replica.name, 0)
        self._rounds[replica.name] = turn + 1
        if turn % _MODELS_EVERY == 0:
            await self._ask_models(replica, answers)
        await self._ask_metrics(replica, answers)

    async def _ask_models(self, replica: Replica, answers: _Answers) -> None:
        try:
            status, body = await answers.get(replica.spec.url, "/v1/models")
            if status == 200:
                cards = msgspec.json.decode(body, type=_ModelList).data
                replica.models = {card.id: card.parent or card.id for card in cards}
        except (UpstreamError, BadRequestError, msgspec.DecodeError):
            pass

    async def _ask_metrics(self, replica: Replica, answers: _Answers) -> None:
        try:
            status, body = await answers.get(replica.spec.url, "/metrics")
        except (UpstreamError, BadRequestError):
            return
        if status == 200 and replica.name in self._fleet.replicas:
            self.take(replica, read_metrics(body.decode(errors="replace"), replica.spec.rank))

    def take(self, replica: Replica, metrics: EngineMetrics) -> None:
        """Note what a replica said."""
        load = replica.load
        load.num_running, load.num_waiting, load.kv_usage = metrics.num_running, metrics.num_waiting, metrics.kv_usage
        replica.adapters_running, replica.adapters_waiting = metrics.adapters_running, metrics.adapters_waiting
        replica.max_adapters = metrics.max_adapters
        replica.block_size = metrics.block_size
        before = self._counters.get(replica.name)
        has_restarted = replica.started not in {None, metrics.started} or (
            before is not None and metrics.prompt_tokens is not None and metrics.prompt_tokens < before
        )
        if has_restarted:
            log.warning("%s: has restarted", replica.name)
            self._fleet.lost(replica)
        replica.started = metrics.started
        if metrics.prompt_tokens is not None:
            self._counters[replica.name] = metrics.prompt_tokens
        if metrics.num_blocks and metrics.block_size:
            own = self._fleet.knowledge.index.block_size
            self._fleet.knowledge.resize(replica.name, max(metrics.num_blocks * metrics.block_size // own, 1))
