"""The router's HTTP application: the proxied paths, and its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from anaphora.router.proxy import ClientGoneError, Proxy
from anaphora.server.errors import ApiError, internal_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from anaphora.router.fleet_state import Fleet
    from anaphora.router.metrics import Metrics
    from anaphora.router.upstream import Upstream

log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 1.0
_EXPLAIN = "/explain"


class InProgress:
    """The requests that are going on."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    @contextlib.contextmanager
    def one(self) -> Any:
        """The current task is one of them while in the context."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def interrupt(self) -> None:
        """End all of them, because the router stops."""
        for task in list(self._tasks):
            task.cancel()


class RouterApp:
    """The ASGI application. background: what runs beside it, from start to end.

    POST and GET under /v1 go to a replica. `/explain/v1/...` takes the same body and tells where it would go;
    `/explain/<request id>` tells of a request that went; `/replicas`, `/health` and `/metrics` are the router's own.
    in_progress: where requests that do not come through here (Envoy's) count as going on.
    """

    def __init__(
        self,
        fleet: Fleet,
        proxy: Proxy,
        metrics: Metrics,
        upstream: Upstream,
        background: list[Callable[[], Awaitable[None]]],
        in_progress: InProgress | None = None,
    ) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._metrics = metrics
        self._upstream = upstream
        self._background = [*background, self._keep_house]
        self.generations = InProgress() if in_progress is None else in_progress

    @property
    def app(self) -> RouterApp:
        """Itself: what a server runs."""
        return self

    def drain(self) -> None:
        """The router is to stop. Requests are served until the last one has ended, but /health says no."""
        self._fleet.is_closing = True

    @property
    def replica_names(self) -> tuple[str, ...]:
        """The fleet's replicas."""
        return tuple(self._fleet.replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the application's life."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":  # websockets: no replica speaks them
            raise ValueError(f"{scope['type']}: expected http")
        has_started = False

        async def watched_send(message: Any) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        with self.generations.one():
            try:
                await self._route(scope, receive, watched_send)
            except ClientGoneError:
                return
            except ApiError as error:
                if has_started:
                    raise
                await _send_json(send, error.status, error.body(), error)
            except ConnectionAbortedError as error:
                log.warning("%s %s: %s", scope["method"], scope["path"], error)
                raise
            except Exception:
                log.exception("%s %s failed", scope["method"], scope["path"])
                if has_started:
                    raise
                await _send_json(send, 500, internal_error().body())

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path.startswith("/v1/") and method in {"GET", "POST", "DELETE"}:
            await self._proxy.handle(scope, receive, send)
        elif path.startswith(f"{_EXPLAIN}/v1/") and method == "POST":
            body = await self._proxy.read(scope, receive)
            routed, _ = await self._proxy.route(scope, body)
            await _send_json(send, 200, routed.explain())
        elif path.startswith(f"{_EXPLAIN}/") and method == "GET":
            routed_before = self._fleet.explained.get(path.removeprefix(f"{_EXPLAIN}/"))
            if routed_before is None:
                raise ApiError(404, "No such request; the last 1000 are kept.", code="unknown_request")
            await _send_json(send, 200, routed_before.explain())
        elif path == "/replicas" and method == "GET":
            await _send_json(send, 200, self._describe_replicas())
        elif path == "/health" and method in {"GET", "HEAD"}:
            now = self._fleet.clock()
            num_ready = sum(replica.can_take(now) for replica in self._fleet.replicas.values())
            is_closing = self._fleet.is_closing
            status = 200 if num_ready and not is_closing else 503
            await _send_json(send, status, {"ready_replicas": num_ready, "draining": is_closing})
        elif path == "/metrics" and method == "GET":
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            body, content_type = self._metrics.expose(accept)
            await _send(send, 200, body, content_type.encode())
        else:
            raise ApiError(404, f"Not found: {method} {path[:200]}", code="unknown_url")

    def _describe_replicas(self) -> dict[str, Any]:
        now = self._fleet.clock()
        knowledge = self._fleet.knowledge
        return {
            "replicas": [
                {
                    "replica": name,
                    "ready": replica.can_take(now),
                    "healthy": replica.is_healthy,
                    "draining": replica.is_draining,
                    "held": replica.is_held,
                    "models": sorted(replica.models),
                    "knowledge": knowledge.kind(name),
                    "problem": replica.precise_problem,
                    "known_blocks": knowledge.index.num_blocks_of(name),
                    "inflight_requests": len(replica.load.inflight),
                    "running": replica.load.num_running,
                    "waiting": replica.load.num_waiting,
                    "kv_usage": replica.load.kv_usage,
                }
                for name, replica in self._fleet.replicas.items()
            ]
        }

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        tasks = [asyncio.ensure_future(self._guarded(job)) for job in self._background]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._upstream.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _guarded(self, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await job()
                return
            except Exception:
                log.exception("a background job failed, and begins anew")
                await asyncio.sleep(1)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._fleet.knowledge.expire()
            self._fleet.knowledge.index.sweep()


async def _send_json(send: Send, status: int, payload: Any, error: ApiError | None = None) -> None:
    extra = [(b"retry-after", b"1")] if status == 503 else []
    if error is not None:
        extra += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if error is not None and status == 413:
        extra.append((b"connection", b"close"))
    await _send(send, status, msgspec.json.encode(payload), b"application/json", extra)


async def _send(
    send: Send, status: int, body: bytes, content_type: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
