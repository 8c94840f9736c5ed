"""Server-sent events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from anaphora.server.errors import ApiError, internal_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from anaphora.server.generation import Generation

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    """One event with a JSON object as its data."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class EventStream(Response):
    """Sends each object of `payloads` as an event, then [DONE].

    A fault in the middle is one more event, in the shape of an error, and the stream ends without [DONE]: the status
    line is long gone. The generation is watched: when the client goes away, it is aborted.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, payloads: AsyncIterator[Any]) -> None:
        # No proxy in between is to hold events back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._payloads = payloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it: the ASGI call."""

        async def send_body(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with self._generation.watch(receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for payload in self._payloads:
                    await send_body(event(payload))
                await send_body(DONE, more=False)
            except ClientDisconnect:
                return
            except ApiError as error:
                await send_body(event(error.body()), more=False)
            except Exception:
                logger.exception("A stream failed")
                await send_body(event(internal_error().body()), more=False)
