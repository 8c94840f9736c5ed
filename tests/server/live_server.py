"""A server on a free port, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from anaphora.server.app import OpenAIServer
from anaphora.server.run import Server, bind, url_of
from tests.server.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class LiveServer:
    """A running server, its engine, and a client for it."""

    url: str
    engine: FakeEngine
    api: OpenAIServer
    server: Server
    client: httpx.Client

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json={"model": "alphabet", **body})


@contextlib.contextmanager
def running(api: OpenAIServer, make: Callable[..., Server] = Server) -> Iterator[tuple[Server, str]]:
    """Serve while in the context, by the server that `make` returns; yield it and its URL."""
    sock = bind("127.0.0.1", 0)
    started = threading.Event()
    draining = {"on_draining": api.drain} if make is Server and hasattr(api, "drain") else {}
    server = make(api, on_started=started.set, **draining)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    url = url_of(sock)
    thread.start()
    try:
        assert started.wait(10), "the server did not start"
        yield server, url
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serving_fake(engine: FakeEngine | None = None, **options: Any) -> Iterator[LiveServer]:
    """Serve a fake engine; options are those of OpenAIServer."""
    engine = engine or FakeEngine()
    api = OpenAIServer(engine.service, engine.model, **options)
    with running(api) as (server, url), httpx.Client(base_url=url, timeout=10) as client:
        yield LiveServer(url, engine, api, server, client)
