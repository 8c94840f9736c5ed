"""Replicas behind a name in DNS: its A and AAAA records, or its SRV records."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.router.replica import ReplicaSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from dns.asyncresolver import Resolver

    from anaphora.router.discovery.membership import EventPorts, Membership

log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 5.0
_EMPTY_ANSWERS_TO_BELIEVE = 3
_NOBODY = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name to look up. port: of replicas; None for SRV records, which have their own."""

    name: str
    port: int | None = None

    @classmethod
    def of(cls, text: str) -> DnsName:
        """Read `HOST:PORT`, or `_SERVICE._PROTOCOL.HOST` for SRV records. Raises ValueError."""
        if text.startswith("_"):
            if ":" in text or text.count(".") < 2:
                raise ValueError(f"expected SRV records as _http._tcp.NAME, got {text[:200]!r}")
            return cls(text)
        name, colon, port = text.rpartition(":")
        if not colon or not name or ":" in name or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError(f"expected HOST:PORT, or _http._tcp.HOST for SRV records, got {text[:200]!r}")
        return cls(name, int(port))

    @property
    def text(self) -> str:
        """As it was written."""
        return self.name if self.port is None else f"{self.name}:{self.port}"


class DnsError(Exception):
    """The name could not be looked up, which says nothing of who is there."""


class DnsSource:
    """Looks a name up again and again.

    A lookup that fails changes nothing. An answer that names nobody counts once it came three times in a row: a name
    server that has just started has no records either, and replicas that are gone fail their health checks anyway.

    lookup: returns (address, port) pairs; raises DnsError. on_lost: called with whether the last one failed.
    """

    def __init__(
        self,
        name: DnsName,
        membership: Membership,
        *,
        interval_s: float = DEFAULT_INTERVAL_S,
        events: EventPorts | None = None,
        lookup: Callable[[], Awaitable[Sequence[tuple[str, int]]]] | None = None,
        on_lost: Callable[[bool], None] = lambda _is_lost: None,
    ) -> None:
        self._name = name
        self._membership = membership
        self._interval_s = interval_s
        self._events = events
        self._lookup = lookup or _lookup_of(name)
        self._on_lost = on_lost
        self._num_empty = 0
        self._has_failed = False

    async def run(self) -> None:
        """Look it up until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval_s)

    async def refresh(self) -> None:
        """Look it up once."""
        try:
            found = await self._lookup()
        except DnsError as error:
            if not self._has_failed:
                log.warning("%s: %s; its replicas stay as they are", self._name.text, error)
            self._has_failed = True
            self._on_lost(True)
            return
        self._has_failed = False
        self._on_lost(False)
        self._num_empty = 0 if found else self._num_empty + 1
        if found or self._num_empty >= _EMPTY_ANSWERS_TO_BELIEVE:
            self._membership.set(f"dns {self._name.text}", [self._spec(*pair) for pair in sorted(set(found))])

    def _spec(self, address: str, port: int) -> ReplicaSpec:
        host = f"[{address}]" if ":" in address else address
        spec = ReplicaSpec.of(f"http://{host}:{port}")
        return spec if self._events is None else self._events.applied(spec, host)


def _lookup_of(name: DnsName) -> Callable[[], Awaitable[Sequence[tuple[str, int]]]]:
    port = name.port
    if port is None:
        return lambda: lookup_srv(name.name)
    return lambda: lookup_addresses(name.name, port)


async def lookup_addresses(host: str, port: int) -> list[tuple[str, int]]:
    """The host's addresses, as this machine resolves names (/etc/hosts too). Raises DnsError.

    Where a name has addresses of both families, those of the preferred one: a pod of a dual-stack cluster has both, and
    is one replica.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NOBODY:
            return []
        raise DnsError(error.strerror or str(error)) from None
    except (OSError, UnicodeError) as error:
        raise DnsError(str(error)) from None
    return _one_family((str(address[0]), port) for _, _, _, _, address in found)


async def lookup_srv(name: str, resolver: Resolver | None = None) -> list[tuple[str, int]]:
    """The addresses and ports of a name's SRV records of the most preferred (lowest) priority. Raises DnsError.

    Weights are left aside: loads and prefixes decide. A target whose address is not known fails the whole lookup, so
    that half an answer removes nobody.
    """
    from dns import asyncresolver, exception, resolver as dns_resolver  # noqa: I001, PLC0415 - only SRV needs dnspython

    try:
        ask = resolver or asyncresolver.Resolver()
        try:
            answer = await ask.resolve(name, "SRV", search=True)
        except (dns_resolver.NXDOMAIN, dns_resolver.NoAnswer):
            return []
        best = min(record.priority for record in answer)
        found: list[tuple[str, int]] = []
        for record in answer:
            if record.priority != best:
                continue
            addresses = await ask.resolve_name(record.target)
            # IPv4 first: whether this machine reaches IPv6 is not asked here.
            by_family = sorted(addresses.addresses(), key=lambda address: ":" in address)
            found += _one_family((address, record.port) for address in by_family)
    except exception.DNSException as error:
        raise DnsError(str(error)) from None
    return found


def _one_family(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    found = list(pairs)
    return [pair for pair in found if (":" in pair[0]) == (":" in found[0][0])]
