"""A replica as the router knows it: its address, its state, its load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from anaphora.fleet.load import Load

if TYPE_CHECKING:
    from collections.abc import Iterable

_OPEN_S = 1.0
_MAX_OPEN_S = 30.0
_FAILURES_TO_OPEN = 3
_PROBES_TO_FAIL = 2


class ReplicaUrlError(ValueError):
    """A URL that is none of a replica; the message says what is expected."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What is configured of a replica.

    url: its root, http or https, without /v1. kv_events, kv_replay: ZMQ endpoints of its events, for precise knowledge.
    labels: for filters of a configuration file.
    rank: of a data-parallel engine behind the URL, each of which has a cache of its own; None: requests name no rank.
    """

    url: str
    kv_events: str | None = None
    kv_replay: str | None = None
    topic: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    rank: int | None = None

    @classmethod
    def of(cls, url: str, **options: str | None) -> ReplicaSpec:
        """Check and tidy a URL. Raises ReplicaUrlError."""
        parts = urlsplit(url.strip())
        try:
            has_port = parts.port is None or parts.port > 0
        except ValueError:
            has_port = False
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment or not has_port:
            raise ReplicaUrlError(f"expected a URL like http://10.0.0.5:8000, got {url[:200]!r}")
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(f"{parts.scheme}://{parts.netloc}{path}", **options)  # type: ignore[arg-type]

    def of_ranks(self, num_ranks: int) -> list[ReplicaSpec]:
        """Return one spec for each data-parallel rank of an engine.

        Rank n publishes at the nth port after rank 0's, as vLLM and SGLang do (vLLM 0.32, `offset_endpoint_port`).

        Raises ValueError for an endpoint without a port, or ports beyond 65535.
        """
        return [
            replace(self, rank=rank, kv_events=_at_rank(self.kv_events, rank), kv_replay=_at_rank(self.kv_replay, rank))
            for rank in range(num_ranks)
        ]

    @property
    def address(self) -> str:
        """Host and port (and path), which ranks of an engine share."""
        return self.url.partition("://")[2]

    @property
    def name(self) -> str:
        """The address, and the rank: how the replica is called in headers, metrics and explanations."""
        return self.address if self.rank is None else f"{self.address}#{self.rank}"


def _at_rank(endpoint: str | None, rank: int) -> str | None:
    if endpoint is None:
        return None
    head, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or not 0 < int(port) + rank < 65_536:
        raise ValueError(f"rank {rank} needs a port: expected tcp://HOST:PORT of rank 0, got {endpoint[:100]!r}")
    return f"{head}:{int(port) + rank}"


@dataclass(slots=True)
class Breaker:
    """Opens after failures in a row, so that a broken replica gets no traffic; lets one request try after a while."""

    failures: int = 0
    open_until: float = 0.0
    _is_trying: bool = False

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.failures < _FAILURES_TO_OPEN or (now >= self.open_until and not self._is_trying)

    def try_one(self) -> None:
        """A request is sent."""
        self._is_trying = self.failures >= _FAILURES_TO_OPEN

    def succeed(self) -> None:
        """The replica answered."""
        self.failures = 0
        self._is_trying = False

    def fail(self, now: float) -> None:
        """The replica could not be reached, or broke off."""
        self.failures += 1
        self._is_trying = False
        over = self.failures - _FAILURES_TO_OPEN
        if over >= 0:
            self.open_until = now + min(_OPEN_S * 2 ** min(over, 10), _MAX_OPEN_S)

    def release(self) -> None:
        """The request ended without saying anything of the replica: its client went away."""
        self._is_trying = False


@dataclass(slots=True, eq=False)
class Replica:
    """One engine process.

    is_healthy: None until it was first asked. models: name -> base model (itself, unless it is an adapter).
    is_held: whoever named it says that it is not ready. It gets nothing new, and what its cache has is kept in mind.
    started: the process's start in Unix seconds, if it says so.
    """

    spec: ReplicaSpec
    load: Load = field(default_factory=Load)
    breaker: Breaker = field(default_factory=Breaker)
    is_healthy: bool | None = None
    is_draining: bool = False
    is_held: bool = False
    failed_probes: int = 0
    models: dict[str, str] = field(default_factory=dict)
    started: float | None = None
    block_size: int | None = None
    max_running: int = 64
    adapters_running: frozenset[str] = frozenset()
    adapters_waiting: frozenset[str] = frozenset()
    max_adapters: int = 0
    precise_problem: str | None = None

    @property
    def name(self) -> str:
        """See ReplicaSpec.name."""
        return self.spec.name

    def can_take(self, now: float) -> bool:
        """Whether new requests may go there."""
        is_wanted = not self.is_draining and not self.is_held
        return self.is_healthy is not False and is_wanted and self.breaker.allows(now)

    def probe_failed(self) -> bool:
        """Note an unanswered health check. Return whether this one made the replica unhealthy."""
        self.failed_probes += 1
        if self.failed_probes >= _PROBES_TO_FAIL and self.is_healthy is not False:
            self.is_healthy = False
            return True
        return False

    def probe_succeeded(self) -> bool:
        """Note an answered health check. Return whether the replica was unhealthy before."""
        was_unhealthy = self.is_healthy is False
        self.failed_probes = 0
        self.is_healthy = True
        if was_unhealthy:
            self.breaker.succeed()
        return was_unhealthy


def serving(replicas: Iterable[Replica], model: object) -> list[Replica]:
    """Those that serve `model`, as far as is known; all where none is known to, for one of them to refuse it."""
    every = list(replicas)
    if not isinstance(model, str):
        return every
    return [r for r in every if model in r.models] or [r for r in every if not r.models] or every
