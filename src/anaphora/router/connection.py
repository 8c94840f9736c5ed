"""One HTTP/1.1 connection to a replica: an exchange at a time, read as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable

RawHeaders = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
"""Names and values in the head of an answer, and again in its trailers."""
_HIGH_WATER_BYTES = 256 * 1024
"""What may wait for a slow reader before the replica is no longer read."""


class UpstreamError(Exception):
    """The replica cannot be reached, broke off or took too long. was_sent: whether it may have begun to work."""

    def __init__(self, message: str, *, was_sent: bool, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.is_timeout = is_timeout


class _HeadTooLargeError(Exception):
    pass


class Connection(asyncio.Protocol):
    """A connection on which one answer follows one request. `start` begins an exchange, `read_head` and `read` follow.

    An answer that comes before all of the request was sent counts; the connection is not used again then.
    on_closed: called once when the connection is no more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_closed: Callable[[Connection], None]) -> None:
        self._loop = loop
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing_paused = False
        self._is_reading_paused = False
        self._unsent_bytes = 0
        self._first_byte_s = self._send_s = 0.0
        self._begin(b"")
        self.has_ended = True

    def _begin(self, method: bytes) -> None:
        self._method = method
        self._error: UpstreamError | None = None
        self._chunks: deque[bytes] = deque()
        self._chunks_bytes = 0
        self._head_bytes = 0
        self._is_interim = False
        self._is_keepable = False
        self._ends_at_close = False
        self.has_head = False
        self.has_ended = False
        self.has_received = False
        """Whether anything of an answer came."""
        self.status = 0
        self.headers: RawHeaders = []

    # An exchange

    def start(self, method: bytes, head: bytes, body: bytes) -> None:
        """Send a request; method: of the request in `head`."""
        self._begin(method)
        if self._transport is None:
            self._error = UpstreamError("the replica closed the connection", was_sent=False)
            return
        if len(body) <= _HIGH_WATER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def read_head(self, first_byte_s: float, send_s: float) -> None:
        """Wait for status and headers. first_byte_s: counted from when all was sent; send_s: for some of it to go.

        Raises UpstreamError.
        """
        self._first_byte_s, self._send_s = first_byte_s, send_s
        while not self.has_head:
            if self._error is not None:
                raise self._error
            if self._is_writing_paused and self._transport is not None:
                self._unsent_bytes = self._transport.get_write_buffer_size()
                await self._wait(send_s)
            else:
                await self._wait(first_byte_s)

    async def read(self, idle_s: float) -> bytes:
        """Return what has come of the body, b"" at its end. Raises UpstreamError where it breaks off."""
        while not self._chunks:
            if self.has_ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait(idle_s)
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._chunks_bytes = 0
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_at_end(self) -> bool:
        """Whether all of the body was read."""
        return self.has_ended and not self._chunks

    def finish(self) -> bool:
        """End the exchange. Return whether another may follow; where not, the connection closes."""
        transport = self._transport
        if (
            transport is not None
            and not transport.is_closing()
            and self._is_keepable
            and self._error is None
            and self.is_at_end
            and not transport.get_write_buffer_size()
        ):
            return True
        self.abort()
        return False

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent, as far as is known here."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close at once, whatever has yet to be sent or to come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    # Waiting. One timer serves a connection's whole life: it is moved only where an earlier time is wanted.

    async def _wait(self, timeout_s: float) -> None:
        self._expect_within(timeout_s)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _expect_within(self, timeout_s: float) -> None:
        self._deadline = self._loop.time() + timeout_s
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        now = self._loop.time()
        if self._is_writing_paused and not self.has_head and self._transport is not None:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent_bytes:
                self._unsent_bytes = unsent
                self._deadline = now + self._send_s
        if now < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._look_at_the_time)
        else:
            self._fail("it took too long to read the request" if self._is_writing_paused else "no answer in time",
                       is_timeout=True)  # fmt: skip

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str, *, is_timeout: bool = False) -> None:
        if self._error is None and not self.has_ended:
            self._error = UpstreamError(message, was_sent=True, is_timeout=is_timeout)
        self._wake()
        self.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._error is not None:
            return
        if self.has_ended:  # nobody asked for this
            self._is_keepable = False
            self.abort()
            return
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the replica changed the protocol")
            return
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLargeError):
                self._fail(f"the head of the answer is over {MAX_HEAD_BYTES} bytes")
            else:
                self._fail(f"the answer is no valid HTTP: {error}")
            return
        if not self.has_head:
            self._head_bytes += len(data)  # of a header that has not ended, the parser says nothing yet
            if self._head_bytes > 2 * MAX_HEAD_BYTES:
                self._fail(f"the head of the answer is over {MAX_HEAD_BYTES} bytes")
            return
        if self._chunks_bytes > _HIGH_WATER_BYTES and not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """See asyncio.Protocol."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._ends_at_close and exc is None and self._error is None:
            self.has_ended = True
        elif not self.has_ended and self._error is None:
            self._error = UpstreamError(
                str(exc) if exc else "the replica closed the connection without a whole answer", was_sent=True
            )
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()
        self._on_closed(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_writing_paused = False
        if self._waiter is not None and not self.has_head:
            self._expect_within(self._first_byte_s)

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Trailers are counted and left out."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError
        if not self.has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """See httptools."""
        status = self._parser.get_status_code()
        if status < 200:
            self._is_interim = True
            return
        self.status = status
        self.has_head = True
        self._head_bytes = 0
        names = {name for name, _ in self.headers}
        is_framed = b"content-length" in names or self._parser.should_keep_alive()
        self._ends_at_close = not is_framed and not (b"transfer-encoding" in names and self._is_chunked())
        if self._method == b"HEAD":
            self.has_ended = True  # the parser would wait for the body that the length is about

    def _is_chunked(self) -> bool:
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding")
        return codings.rpartition(b",")[2].strip().lower() == b"chunked"

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self.has_ended:
            self._chunks.append(body)
            self._chunks_bytes += len(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._is_interim:
            self._is_interim = False
            self.headers = []
            return
        if not self.has_ended:
            self.has_ended = True
            self._is_keepable = self._parser.should_keep_alive()
