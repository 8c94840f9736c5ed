"""HTTP towards replicas: bytes in, bytes out, over kept connections."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import httpcore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

RawHeaders = list[tuple[bytes, bytes]]

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
_ERRORS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.ConnectionNotAvailable,
)


class UpstreamError(Exception):
    """The replica cannot be reached, broke off or took too long. was_sent: whether it may have begun to work."""

    def __init__(self, message: str, *, was_sent: bool, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.is_timeout = is_timeout


class BadRequestError(Exception):
    """The request's head cannot be passed on."""


class UpstreamAnswer:
    """A replica's answer whose body has yet to come. Close it, in whatever way it ends."""

    def __init__(self, response: httpcore.Response) -> None:
        self._response = response
        self.status = response.status
        self.headers: RawHeaders = end_to_end(response.headers)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises UpstreamError where it breaks off."""
        try:
            async for chunk in self._response.aiter_stream():
                yield chunk
        except _ERRORS as error:
            raise UpstreamError(_describe(error), was_sent=True, is_timeout=_is_timeout(error)) from None

    async def close(self) -> None:
        """Give the connection back, or end it if the body is not read: the replica then sees that nobody listens."""
        with contextlib.suppress(*_ERRORS):
            await self._response.aclose()


class Upstream:
    """Connections to every replica.

    connect_s: to connect. first_byte_s: from a request to the head of its answer. idle_s: between bytes of a body.
    """

    def __init__(self, *, connect_s: float = 3.0, first_byte_s: float = 600.0, idle_s: float = 120.0) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=100_000, max_keepalive_connections=1024, keepalive_expiry=30.0, retries=0
        )
        self._connect_s = connect_s
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s

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

        Raises:
            UpstreamError: see there.
            BadRequestError: these headers cannot be sent.
        """
        base = httpcore.URL(url)
        authority = base.host if base.port is None else base.host + b":%d" % base.port
        prefix = base.target.rstrip(b"/")
        destination = httpcore.URL(scheme=base.scheme, host=base.host, port=base.port, target=prefix + target)
        head = [(b"host", authority), *headers]
        if body or method == b"POST":
            head.append((b"content-length", b"%d" % len(body)))
        read_s = self._first_byte_s if timeout_s is None else timeout_s
        timeout = {"connect": self._connect_s, "read": read_s, "write": self._idle_s, "pool": self._connect_s}
        try:
            request = httpcore.Request(method, destination, headers=head, content=body, extensions={"timeout": timeout})
            response = await self._pool.handle_async_request(request)
        except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout) as error:
            raise UpstreamError(_describe(error), was_sent=False) from None
        except httpcore.LocalProtocolError as error:
            raise BadRequestError(str(error)) from None
        except _ERRORS as error:
            raise UpstreamError(_describe(error), was_sent=True, is_timeout=_is_timeout(error)) from None
        timeout["read"] = self._idle_s  # httpcore looks it up anew for every read
        return UpstreamAnswer(response)

    async def get(self, url: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises UpstreamError."""
        answer = await self.send(url, b"GET", path.encode(), [(b"accept", b"*/*")], b"", timeout_s=timeout_s)
        try:
            body = b"".join([chunk async for chunk in answer.chunks()])
        finally:
            await answer.close()
        return answer.status, body

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.aclose()


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the headers that a proxy passes on: all but those that belong to one connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP and name not in named]


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, httpcore.TimeoutException)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
