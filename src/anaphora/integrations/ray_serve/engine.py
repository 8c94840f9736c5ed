"""EngineReplica: one engine of ours as a Ray Serve deployment, with the whole HTTP API behind one streaming method."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from anaphora.engine.service import EngineService
from anaphora.integrations.ray_serve.messages import AnswerHead, HttpCall
from anaphora.server.app import OpenAIServer
from anaphora.server.kv_events import KvEventOptions, KvEvents
from anaphora.server.loading import load_engine
from anaphora.server.served_model import ServedModel

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from anaphora.engine.build import EngineOptions

DEFAULT_MAX_RUNNING = 64
"""Requests that an engine runs at once, where its options do not say."""
_QUEUED_CHUNKS = 64


class EngineReplica:
    """A model, its engine and its cache, for as long as the actor lives.

    model: as `anaphora serve` takes it, None for the default model. engine: options of `build_engine`.
    publishes: whether routers can follow what the cache holds, over ZMQ at ports of the actor's node that are free.
    """

    def __init__(
        self, model: str | None = None, engine: EngineOptions | None = None, *, publishes: bool = True
    ) -> None:
        self._opened = contextlib.ExitStack()
        events: KvEvents | None = None
        if publishes:
            # The node's own address: Ray's other nodes reach it there.
            address = f"tcp://{_bracketed(ray.util.get_node_ip_address())}:0"
            events = KvEvents(KvEventOptions(address, replay_endpoint=address))
            self._opened.callback(events.publisher.close)
        loaded, built = load_engine(model, {**(engine or {}), "events": publishes})
        self._events = events
        self._engine = built
        self._max_running = (engine or {}).get("max_num_seqs", DEFAULT_MAX_RUNNING)
        self._model = ServedModel.of(loaded, built)
        service = EngineService(built, events.publish if events is not None else None)
        self._app = OpenAIServer(service, self._model, kv_events=events).app
        service.start()
        self._opened.callback(service.close)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, call: HttpCall) -> AsyncGenerator[AnswerHead | bytes, None]:
        """Answer a request: its head, then its body as it comes. To stop reading is to cancel the request."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_QUEUED_CHUNKS)
        gone = asyncio.Event()
        task = asyncio.create_task(self._run(call, messages, gone))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    own = [(b"x-anaphora-replica", self._name.encode())]
                    if self._name in call.predicted:
                        own.append((b"x-anaphora-predicted-cached-tokens", b"%d" % call.predicted[self._name]))
                    yield AnswerHead(message["status"], [*message["headers"], *own])
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            gone.set()
            while not task.done():  # it may be waiting for room
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(messages.get(), 0.05)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def record_replica_metadata(self) -> dict[str, Any]:
        """Ray's hook: what routers learn of this replica, once. See `ReplicaFacts`."""
        manager = self._engine.manager
        adapters = self._engine.adapters
        names = [self._model.name, *(adapters.by_name if adapters is not None else ())]
        facts: dict[str, Any] = {
            "num_blocks": manager.num_blocks,
            "block_size": manager.block_size,
            "max_running": self._max_running,
            "models": dict.fromkeys(names, self._model.name),
        }
        if self._events is not None:
            facts["kv_events"] = self._events.publisher.endpoint
            facts["kv_replay"] = self._events.publisher.replay_endpoint
        return {"anaphora": facts}

    async def check_health(self) -> None:
        """Ray's hook: raise for an engine that stopped or hangs, and be replaced."""
        call = HttpCall("GET", "/health", b"", [], b"")
        head, *body = [part async for part in self.answer(call)]
        if not isinstance(head, AnswerHead) or head.status != 200:
            raise RuntimeError(b"".join(part for part in body if isinstance(part, bytes)).decode())

    def __del__(self) -> None:
        """Ray calls it when the replica's last request has ended."""
        self._opened.close()

    async def _run(self, call: HttpCall, messages: asyncio.Queue[dict[str, Any] | None], gone: asyncio.Event) -> None:
        has_read = False

        async def receive() -> dict[str, Any]:
            nonlocal has_read
            if not has_read:
                has_read = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": call.method, "path": call.path, "raw_path": call.path.encode(), "query_string": call.query,
            "headers": call.headers, "client": None, "server": None,
        }  # fmt: skip
        try:
            await self._app(scope, receive, messages.put)  # type: ignore[arg-type]
        finally:
            await messages.put(None)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
