"""OpenAIIngress: HTTP on one side, a handle of engines on the other. Its router has the knowledge."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from anaphora.integrations.ray_serve.messages import AnswerHead, HttpCall
from anaphora.server.body import read_body
from anaphora.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

BODY_LIMIT_BYTES = 32 * 2**20
_MAX_ATTEMPTS = 3


class OpenAIIngress:
    """Passes what comes under /v1 to an engine, and its answer back, byte for byte, as it comes.

    An engine that dies before the first byte of its answer is replaced by another; one that dies later ends the stream
    with an error event, as clients of OpenAI's API know it.
    """

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines: Any = engines.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/"))
        try:
            if path == "/health":
                return Response(b'{"status":"ok"}', media_type="application/json")
            if not path.startswith("/v1/"):
                raise ApiError(404, f"Not found: {request.method} {path[:200]}", code="unknown_url")
            body = await read_body(request.stream(), request.headers.get("content-length"), BODY_LIMIT_BYTES)
            call = HttpCall(request.method, path, request.scope["query_string"], _headers(request), body)
            return await self._pass_on(call)
        except ApiError as error:
            return Response(
                msgspec.json.encode(error.body()), error.status, headers=error.headers, media_type="application/json"
            )

    async def _pass_on(self, call: HttpCall) -> Response:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            parts = self._engines.remote(call)
            try:
                head = await anext(parts)
                break
            except (ActorDiedError, ActorUnavailableError) as error:
                log.warning("an engine died before it answered: %s", error)
                if attempt == _MAX_ATTEMPTS:
                    raise ApiError(502, "No engine could be reached.", code="replica_unreachable") from None
            except RayError as error:
                log.error("an engine failed: %s", error)  # it holds the engine's traceback
                raise ApiError(502, "The engine failed; its log says more.", code="replica_failed") from None
        assert isinstance(head, AnswerHead)
        headers = dict(head.headers)
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        response = StreamingResponse(_body(parts, is_event_stream=is_stream), head.status)
        response.raw_headers = list(head.headers)
        return response


async def _body(parts: Any, *, is_event_stream: bool) -> AsyncIterator[bytes]:
    try:
        async for chunk in parts:
            yield chunk
    except RayError as error:
        log.warning("an engine broke off: %s", error)
        if not is_event_stream:
            raise  # the length was promised: the connection breaks, and nobody takes the answer for whole
        told = ApiError(502, "The engine broke off.", code="replica_broke_off").body()
        yield b"\n\ndata: " + msgspec.json.encode(told) + b"\n\n"
    finally:
        parts.cancel()  # where the client went away; nothing if all was read


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    # One hop's own; the body is whole here.
    drop = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    return [(name, value) for name, value in request.headers.raw if name not in drop]
