"""The replicas of a cluster: the pods of an InferencePool, or those that a label selector finds."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.router.kubernetes.reflector import Reflector
from anaphora.router.replica import ReplicaSpec
from anaphora.router.resources import InferencePool, Pod

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.router.discovery.membership import EventPorts, Membership
    from anaphora.router.kubernetes.api import ApiServer

log = logging.getLogger(__name__)

POOL_GROUP = "inference.networking.k8s.io"
_ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pods, by a label selector as the API takes it, and the ports at which each of them serves."""

    selector: str
    ports: tuple[int, ...]

    @classmethod
    def of(cls, pool: InferencePool) -> Selection:
        """What a pool selects."""
        return cls(pool.spec.selector.query, tuple(port.number for port in pool.spec.target_ports))


@dataclass(frozen=True, slots=True)
class PoolName:
    """An InferencePool."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class PodSource:
    """Names the pods that are ready, one replica for each of their ports, as the API tells of them.

    A pod that was told to stop (deletionTimestamp) drains at once. One that is not ready gets nothing new, but stays in
    mind. While the API cannot be reached, everything stays as it was.

    which: a pool, which may come, change and go, or a fixed selection in `namespace`.
    """

    def __init__(
        self,
        api: ApiServer,
        which: PoolName | Selection,
        membership: Membership,
        *,
        namespace: str,
        events: EventPorts | None = None,
    ) -> None:
        self._api = api
        self._which = which
        self._membership = membership
        self._namespace = namespace
        self._events = events
        self._source = f"kubernetes {which}"
        self._uids: dict[str, str] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        if isinstance(self._which, Selection):
            await self._follow_pods(self._which)
        else:
            await self._follow_pool(self._which)

    async def _follow_pool(self, which: PoolName) -> None:
        changed = asyncio.Event()
        path = f"/apis/{POOL_GROUP}/v1/namespaces/{which.namespace}/inferencepools"
        only = {"fieldSelector": f"metadata.name={which.name}"}
        pools = Reflector(self._api, path, InferencePool, changed.set, only)
        selection: Selection | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(pools.run())
            pods: asyncio.Task[None] | None = None
            while True:
                await changed.wait()
                changed.clear()
                pool = pools.objects.get(which.name)
                if pool is not None and pool.spec.app_protocol != "http":
                    log.warning("InferencePool %s: appProtocol %s: not spoken here", which, pool.spec.app_protocol)
                now = None if pool is None else Selection.of(pool)
                if now == selection and (now is not None or pods is not None):
                    continue
                if pods is not None:
                    pods.cancel()
                    pods = None
                selection = now
                if now is None:
                    log.warning("there is no InferencePool %s", which)
                    self._membership.set(self._source, [])
                else:
                    pods = group.create_task(self._follow_pods(now))

    async def _follow_pods(self, selection: Selection) -> None:
        pods: Reflector[Pod] = Reflector(
            self._api,
            f"/api/v1/namespaces/{self._namespace}/pods",
            Pod,
            lambda: self._publish(pods.objects.values(), selection.ports),
            {"labelSelector": selection.selector} if selection.selector else {},
        )
        await pods.run()

    def _publish(self, pods: Iterable[Pod], ports: tuple[int, ...]) -> None:
        ready: list[ReplicaSpec] = []
        held: list[ReplicaSpec] = []
        uids: dict[str, str] = {}
        for pod in pods:
            if pod.is_leaving or not pod.status.pod_ip:
                continue
            specs = replicas_of(pod, ports, self._events)
            (ready if pod.is_ready else held).extend(specs)
            uids |= {spec.name: pod.metadata.uid for spec in specs}
        for name, uid in uids.items():
            if self._uids.get(name, uid) != uid:
                self._membership.renewed(name)
        self._uids = uids
        self._membership.set(self._source, ready, held)


def replicas_of(pod: Pod, ports: Sequence[int], events: EventPorts | None = None) -> list[ReplicaSpec]:
    """Return a pod's replicas: one for each port, without those that its active-ports annotation leaves out.

    The pod must have an address. Its labels are the replicas'. Rank n serves at the nth port, and publishes its events
    at the nth port after the first's.
    """
    address = pod.status.pod_ip
    assert address
    host = f"[{address}]" if ":" in address else address
    annotations = pod.metadata.annotations or {}
    listed = next((annotations[name] for name in _ACTIVE_PORTS if name in annotations), None)
    active = set(ports) if listed is None else {int(p) for p in map(str.strip, listed.split(",")) if p.isdecimal()}
    labels = tuple(sorted((pod.metadata.labels or {}).items()))
    specs: list[ReplicaSpec] = []
    for rank, port in enumerate(ports):
        if port in active:
            spec = replace(ReplicaSpec.of(f"http://{host}:{port}"), labels=labels)
            specs.append(spec if events is None else events.applied(spec, host, rank))
    return specs
