"""HTTP/1.1 below the application: uvicorn's protocol, with this API's form of errors and a share of the event loop."""

from __future__ import annotations

from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from anaphora.server.errors import ApiError

MAX_SLICE_BYTES = 4096
"""What is parsed at once. A body in chunks of one byte costs some 20 us for each; others wait meanwhile."""
MIN_MEAN_CHUNK_BYTES = 64
NUM_FREE_CHUNKS = 1024
"""So many chunks may be as small as they like."""


class _Connection(h11.Connection):
    """Refuses bodies in too many tiny chunks."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > NUM_FREE_CHUNKS + self._num_bytes // MIN_MEAN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many tiny chunks")
        return event


class ApiProtocol(H11Protocol):
    """Parses what arrives slice by slice, with turns of the event loop between; answers what is no HTTP as an
    ApiError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, self.config.h11_max_incomplete_event_size or 64 * 1024)
        self._waiting = b""

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._waiting:
            self._waiting += data
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        super().data_received(data[:MAX_SLICE_BYTES])
        self._waiting = data[MAX_SLICE_BYTES:]
        if self._waiting:
            self.transport.pause_reading()
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        data, self._waiting = self._waiting, b""
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._parse(data)

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's, which answers in plain text."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:  # an answer is on its way already
            self.transport.close()
            return
        body = msgspec.json.encode(ApiError(400, msg, code="invalid_http").body())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
