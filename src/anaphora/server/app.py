"""The HTTP application: routes, the way of a request through them, and its life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from anaphora.engine.service import EngineClosedError
from anaphora.server.answer import Answer
from anaphora.server.body import DEFAULT_LIMIT_BYTES, decode_body, read_body
from anaphora.server.errors import ApiError, bad_key, draining, engine_stopped, engine_stuck, internal_error
from anaphora.server.generation import Generations, RefusedError
from anaphora.server.metrics import Metrics
from anaphora.server.openai_api import (
    Call,
    ChatCompletionRequest,
    CompletionRequest,
    chat_call,
    completion_call,
)
from anaphora.server.openai_output import ChatFormat, CompletionFormat, Format
from anaphora.server.streaming import EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anaphora.engine.service import EngineService
    from anaphora.server.kv_events import KvEvents
    from anaphora.server.served_model import ServedModel
    from anaphora.server.tenants import Tenants

DEFAULT_STUCK_AFTER_S = 120.0
"""Far longer than a step takes on a slow machine."""
RETRY_AFTER_S = 5
"""When to come back to a server that is shutting down: another one may stand in its place."""

logger = logging.getLogger(__name__)

Endpoint: TypeAlias = "Callable[[Request], Awaitable[Response]]"
_CLIENT_CLOSED_REQUEST = 499  # never seen by anyone: the client is gone


class OpenAIServer:
    """OpenAI's endpoints over one engine and one model.

    body_limit_bytes: longer request bodies are refused.
    uses_cache: whether requests read and write the prefix cache.
    allows_priority: whether clients choose their priority; else all have the same.
    tenants: who may call, and whose prefixes are whose; None for anybody, and no tenants.
    kv_events: what publishes the cache's events, to be described and counted.
    allows_reset: whether POST /reset_prefix_cache empties the cache.
    stuck_after_s: a step that takes longer makes the server unhealthy.
    """

    def __init__(
        self,
        service: EngineService,
        model: ServedModel,
        *,
        body_limit_bytes: int = DEFAULT_LIMIT_BYTES,
        uses_cache: bool = True,
        allows_priority: bool = False,
        tenants: Tenants | None = None,
        kv_events: KvEvents | None = None,
        allows_reset: bool = False,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
    ) -> None:
        self._service = service
        self._model = model
        self._body_limit_bytes = body_limit_bytes
        self._uses_cache = uses_cache
        self._allows_priority = allows_priority
        self._tenants = tenants
        self._kv_events = kv_events
        self._stuck_after_s = stuck_after_s
        self._is_draining = False
        self._metrics = Metrics(model.name, service.stats, manager=service.engine.manager, kv_events=kv_events)
        self.generations = Generations(service, self._metrics)
        self._chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
        self._completion_decoder = msgspec.json.Decoder(CompletionRequest)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", _guarded(self._chat_completions), methods=["POST"]),
                Route("/v1/completions", _guarded(self._completions), methods=["POST"]),
                Route("/v1/models", _guarded(self._list_models)),
                Route("/v1/models/{model_id:path}", _guarded(self._show_model)),
                Route("/health", _guarded(self._health)),
                Route("/ready", _guarded(self._ready)),
                Route("/metrics", _guarded(self._show_metrics)),
                *([Route("/kv_event_sources", _guarded(self._show_sources))] if kv_events else []),
                *([Route("/reset_prefix_cache", _guarded(self._reset), methods=["POST"])] if allows_reset else []),
            ],
            exception_handlers={
                ApiError: _answer_api_error,
                HTTPException: _answer_http_exception,
                EngineClosedError: _answer_engine_closed,
                ClientDisconnect: _answer_nobody,
            },
            lifespan=self._lifespan,
        )
        # A redirect would have no body, and most clients do not post again; a path too many is a 404 like any other.
        self.app.router.redirect_slashes = False

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._service.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._service.close)

    def drain(self) -> None:
        """Refuse new requests from now on, because the server stops."""
        self._is_draining = True

    async def _chat_completions(self, request: Request) -> Response:
        def prepare(body: bytes) -> Call:
            return chat_call(decode_body(body, self._chat_decoder), self._model)

        return await self._answer(request, prepare, ChatFormat(), "chatcmpl-")

    async def _completions(self, request: Request) -> Response:
        def prepare(body: bytes) -> Call:
            return completion_call(decode_body(body, self._completion_decoder), self._model)

        return await self._answer(request, prepare, CompletionFormat(), "cmpl-")

    async def _answer(
        self, request: Request, prepare: Callable[[bytes], Call], form: Format, id_prefix: str
    ) -> Response:
        started = self._metrics.clock()
        self._refuse_if_draining()
        tenant = self._tenant(request)
        body = await read_body(request.stream(), request.headers.get("content-length"), self._body_limit_bytes)
        # Decoding and tokenising take milliseconds for a long prompt; the event loop has streams to serve meanwhile.
        call = await asyncio.to_thread(prepare, body)
        if tenant is not None:
            call = call.of_tenant(tenant)
        self._refuse_if_draining()
        call_id = id_prefix + uuid.uuid4().hex
        try:
            requests = call.requests(call_id, uses_cache=self._uses_cache, allows_priority=self._allows_priority)
            generation = self.generations.submit(requests, started)
        except RefusedError as refused:
            raise call.refusal(refused.index, refused.error, self._model) from None
        answer = Answer(call, call_id, form, self._model)
        if call.is_stream:
            return EventStream(generation, answer.chunks(generation.deltas()))
        async with generation.watch(request.receive):
            return _json(await answer.whole(generation.deltas()))

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise draining(RETRY_AFTER_S)

    def _tenant(self, request: Request) -> str | None:
        """Who asks, None where nobody is told apart. Raises a 401 for a key that is nobody's."""
        if self._tenants is None:
            return None
        tenant = self._tenants.of_headers(request.headers)
        if tenant is None:
            raise bad_key()
        return tenant

    async def _list_models(self, request: Request) -> Response:
        self._tenant(request)
        return _json({"object": "list", "data": self._model.describe_all()})

    async def _show_model(self, request: Request) -> Response:
        self._tenant(request)
        return _json(self._model.describe(self._model.require(request.path_params["model_id"])))

    async def _health(self, _request: Request) -> Response:
        """Whether the process is worth keeping."""
        if not (self._service.is_healthy and self._service.is_running):
            raise engine_stopped()
        busy_s = self._service.busy_s
        if busy_s > self._stuck_after_s:
            raise engine_stuck(busy_s)
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether to send requests here."""
        self._refuse_if_draining()
        return await self._health(request)

    async def _show_sources(self, _request: Request) -> Response:
        assert self._kv_events is not None
        return _json(self._kv_events.describe())

    async def _reset(self, request: Request) -> Response:
        self._tenant(request)
        return _json({"success": await asyncio.wrap_future(self._service.reset_cache())})

    async def _show_metrics(self, request: Request) -> Response:
        body, content_type = self._metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Answer unforeseen faults with a 500 and keep the connection, which an exception that reaches uvicorn ends."""

    async def run(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ApiError, EngineClosedError, ClientDisconnect):
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return _json(internal_error().body(), HTTPStatus.INTERNAL_SERVER_ERROR)

    return run


def _json(payload: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = _json(error.body(), error.status)
    response.headers.update(error.headers)
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        response.headers["connection"] = "close"  # some of the body may still be on its way
    return response


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Paths and methods that the router does not know."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    body = ApiError(error.status_code, f"{error.detail}: {where[:200]}", code=code).body()
    response = _json(body, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _answer_engine_closed(_request: Request, _error: Exception) -> Response:
    return _json(engine_stopped().body(), HTTPStatus.SERVICE_UNAVAILABLE)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
