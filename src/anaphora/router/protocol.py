"""HTTP/1.1 below the router: uvicorn's protocol on httptools, with limits and this API's form of errors."""

from __future__ import annotations

from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anaphora.server.errors import ApiError
from anaphora.server.protocol import MIN_MEAN_CHUNK_BYTES, NUM_FREE_CHUNKS

MAX_HEAD_BYTES = 64 * 1024
"""A request's line and headers together."""
_INVALID = "Invalid HTTP request received."


class _OverLimitError(Exception):
    pass


class RouterProtocol(HttpToolsProtocol):
    """Refuses heads that are too long and bodies in too many tiny chunks; answers what is no HTTP as an ApiError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._is_upgrade = False
        self._head_bytes = self._num_chunks = self._num_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response(_INVALID)
            return
        if self._is_in_head:
            # Of a header that has not ended, the parser says nothing yet.
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(_INVALID)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Who offers another protocol may be answered in this one. The parser has given up the rest, a body perhaps:
            # it gets the request again, without the offer.
            self._is_upgrade = False
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.send_400_response(_INVALID)
                return
            fields = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in {b"connection", b"upgrade"}]
            head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self.url, b"".join(fields))
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[upgrade.args[0] :])

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, of trailers too."""
        self._count(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _OverLimitError

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._is_in_head = False
        self._head_bytes = self._num_chunks = self._num_bytes = 0
        self._is_upgrade = self.parser.should_upgrade()
        if not self._is_upgrade:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._num_chunks += 1
        self._num_bytes += len(body)
        if self._num_chunks > NUM_FREE_CHUNKS + self._num_bytes // MIN_MEAN_CHUNK_BYTES:
            raise _OverLimitError
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._is_in_head = True
        self._head_bytes = 0
        if not self._is_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's, which answers in plain text."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = msgspec.json.encode(ApiError(400, msg, code="invalid_http").body())
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
