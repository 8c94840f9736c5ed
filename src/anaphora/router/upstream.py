"""HTTP towards replicas: bytes in, bytes out, over kept connections."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from anaphora.router.connection import Connection, RawHeaders, UpstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_HEADERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\x00-\x08\x0a-\x1f\x7f]*\r\n)*")
_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_KEPT_S = 30.0
"""How long a connection may wait for its next request."""
_STALE_S = 1.0
"""A kept connection that ends this soon after a request, without a byte, had been closed before the request came."""
_MAX_KEPT = 1024
_MAX_OWN_BODY_BYTES = 64 * 2**20


class BadRequestError(Exception):
    """The request's head cannot be passed on."""


class UpstreamAnswer:
    """A replica's answer whose body has yet to come. Close it, in whatever way it ends."""

    def __init__(self, upstream: Upstream, origin: _Origin, connection: Connection, idle_s: float) -> None:
        self._upstream = upstream
        self._origin = origin
        self._connection: Connection | None = connection
        self._idle_s = idle_s
        self.status = connection.status
        self.headers: RawHeaders = end_to_end(connection.headers)

    async def read(self) -> bytes:
        """Return what has come of the body since the last call, at least a byte; b"" at its end.

        Raises UpstreamError where it breaks off.
        """
        return await self._connection.read(self._idle_s) if self._connection else b""

    @property
    def is_at_end(self) -> bool:
        """Whether all of the body was read: whoever knows needs no empty read to learn it."""
        return self._connection is None or self._connection.is_at_end

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises UpstreamError where it breaks off."""
        while data := await self.read():
            yield data

    def close(self) -> None:
        """Give the connection back, or end it if the body is not read: the replica then sees that nobody listens."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._upstream.take_back(self._origin, connection)


class _Origin:
    """Where a URL leads to, and the connections that wait there. The newest is used first."""

    def __init__(self, url: str, context: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self.url = url
        self.host = parts.hostname or ""
        is_secure = parts.scheme == "https"
        self.context = (context or ssl.create_default_context()) if is_secure else None
        self.port = parts.port or (443 if is_secure else 80)
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.kept: deque[tuple[float, Connection]] = deque()


class Upstream:
    """Connections to every replica.

    connect_s: to connect. first_byte_s: from a request to the head of its answer. idle_s: between bytes of a body.
    ssl_context: for replicas whose URL begins with https; None: the system's authorities.
    """

    def __init__(
        self,
        *,
        connect_s: float = 3.0,
        first_byte_s: float = 600.0,
        idle_s: float = 120.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_s = connect_s
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s
        self._ssl_context = ssl_context
        self._origins: dict[str, _Origin] = {}
        self._connections: set[Connection] = set()
        self._num_kept = 0
        self._sweeping: asyncio.TimerHandle | None = None

    async def send(
        self,
        url: str,
        method: bytes,
        target: bytes,
        headers: RawHeaders,
        body: bytes,
        *,
        timeout_s: float | None = None,
    ) -> UpstreamAnswer:
        """Send a request and return its answer when its head is there. target: path and query.

        A kept connection may turn out to have been closed meanwhile: without a byte of an answer, at once. The request
        is then sent again on a new one, once.

        Raises:
            UpstreamError: see there.
            BadRequestError: these headers cannot be sent.
        """
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = _Origin(url, self._ssl_context)
        head = _head(origin, method, target, headers, len(body) if body or method == b"POST" else None)
        first_byte_s = self._first_byte_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        connection = self._take_kept(origin, loop.time())
        is_kept = connection is not None
        while True:
            if connection is None:
                connection = await self._connect(loop, origin)
            started = loop.time()
            try:
                connection.start(method, head, body)
                await connection.read_head(first_byte_s, self._idle_s)
                return UpstreamAnswer(self, origin, connection, self._idle_s)
            except UpstreamError as error:
                connection.abort()
                if not is_kept or connection.has_received or error.is_timeout or loop.time() - started > _STALE_S:
                    raise
                is_kept, connection = False, None
            except BaseException:
                connection.abort()
                raise

    async def get(self, url: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises UpstreamError."""
        answer = await self.send(url, b"GET", path.encode(), [(b"accept", b"*/*")], b"", timeout_s=timeout_s)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            while part := await answer.read():
                num_bytes += len(part)
                if num_bytes > _MAX_OWN_BODY_BYTES:
                    raise UpstreamError(f"{path} is over {_MAX_OWN_BODY_BYTES} bytes", was_sent=True)
                parts.append(part)
        finally:
            answer.close()
        return answer.status, b"".join(parts)

    async def close(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for connection in list(self._connections):
            connection.abort()
        self._origins.clear()
        self._num_kept = 0

    # Connections

    async def _connect(self, loop: asyncio.AbstractEventLoop, origin: _Origin) -> Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._connections.discard), origin.host, origin.port, ssl=origin.context
                )
        except TimeoutError:
            raise UpstreamError(f"no connection within {self._connect_s:g} s", was_sent=False) from None
        except (OSError, ValueError) as error:  # ValueError: a host name that is none
            raise UpstreamError(_describe(error), was_sent=False) from None
        self._connections.add(connection)
        return connection

    def _take_kept(self, origin: _Origin, now: float) -> Connection | None:
        while origin.kept:
            since, connection = origin.kept.pop()
            self._num_kept -= 1
            if connection.is_open and now - since < _KEPT_S:
                return connection
            connection.abort()
        return None

    def take_back(self, origin: _Origin, connection: Connection) -> None:
        """An exchange is over; the connection is kept for the next one if it can be."""
        if not connection.finish():
            return
        if self._num_kept >= _MAX_KEPT or self._origins.setdefault(origin.url, origin) is not origin:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        origin.kept.append((loop.time(), connection))
        self._num_kept += 1
        if self._sweeping is None:
            self._sweeping = loop.call_later(_KEPT_S, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what nobody used for long, and forget origins that have nothing."""
        now = loop.time()
        for url, origin in list(self._origins.items()):
            while origin.kept and (now - origin.kept[0][0] >= _KEPT_S or not origin.kept[0][1].is_open):
                origin.kept.popleft()[1].abort()
                self._num_kept -= 1
            if not origin.kept:
                del self._origins[url]
        self._sweeping = loop.call_later(_KEPT_S, self._sweep, loop) if self._num_kept else None


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the headers that a proxy passes on: all but those that belong to one connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped: frozenset[bytes] | set[bytes] = _HOP_BY_HOP
    for name, value in lowered:
        if name == b"connection":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return [pair for pair in lowered if pair[0] not in dropped]


def _head(origin: _Origin, method: bytes, target: bytes, headers: RawHeaders, length: int | None) -> bytes:
    """Return a request's head. Raises BadRequestError for what would end it, or begin another one, in the middle."""
    if not method.isalpha() or not _TARGET.fullmatch(target):
        raise BadRequestError(f"the method or the target, {(method + b' ' + target)[:200]!r}, cannot be sent")
    fields = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if fields.count(b"\r\n") != len(headers) or not _HEADERS.fullmatch(fields):
        raise BadRequestError("a header has a name or a value that cannot be sent")
    if length is not None:
        fields += b"content-length: %d\r\n" % length
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, origin.prefix, target, origin.authority, fields)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


__all__ = ["BadRequestError", "RawHeaders", "Upstream", "UpstreamAnswer", "UpstreamError", "end_to_end"]
