"""Clients beside each other: nobody waits for another's prompt, and who goes away leaves nothing behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.live_server import LiveServer

ENDLESS = {"model": "alphabet", "prompt": "abc", "max_tokens": 2000, "ignore_eos": True}


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def is_idle(live: LiveServer) -> bool:
    return not live.api.generations and live.engine.manager.usage == 0


def send(live: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Post a request by hand, so that the connection can be cut at any time."""
    address = urlsplit(live.url)
    connection = socket.create_connection((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("is_stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("n", [1, 3])
def test_all_samples_are_aborted_when_the_client_leaves(own: LiveServer, is_stream: bool, n: int) -> None:
    own.engine.executor.gate.clear()
    connection = send(own, {**ENDLESS, "stream": is_stream, "n": n})
    eventually(lambda: len(own.engine.service.requests) == 1)
    connection.close()
    eventually(lambda: len(own.engine.service.aborted) == 1)
    own.engine.executor.gate.set()
    eventually(lambda: is_idle(own))
    assert own.engine.service.aborted == [own.engine.service.requests[0].request_id]
    assert f'anaphora_requests_total{{finish_reason="abort"}} {n}.0' in own.client.get("/metrics").text
    own.engine.manager.check()


def test_client_that_leaves_in_the_middle_of_a_stream(own: LiveServer) -> None:
    with httpx.stream("POST", f"{own.url}/v1/completions", json={**ENDLESS, "stream": True}) as response:
        chunks = response.iter_lines()
        assert next(chunks).startswith("data: ")
        own.engine.executor.gate.clear()
    own.engine.executor.gate.set()
    eventually(lambda: is_idle(own))
    assert own.engine.service.aborted == [own.engine.service.requests[0].request_id]


def test_client_that_leaves_while_it_sends_the_body(own: LiveServer) -> None:
    address = urlsplit(own.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"model":')
    connection.close()
    assert own.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert len(own.engine.service.requests) == 1


def test_aborted_requests_count_as_such(own: LiveServer) -> None:
    own.engine.executor.gate.clear()
    connection = send(own, ENDLESS)
    eventually(lambda: len(own.engine.service.requests) == 1)
    connection.close()
    eventually(lambda: len(own.engine.service.aborted) == 1)
    own.engine.executor.gate.set()
    assert 'anaphora_requests_total{finish_reason="abort"} 1.0' in own.client.get("/metrics").text


def test_a_slow_template_holds_nobody_up(own: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def render(*_: Any, **__: Any) -> str:
        has_begun.set()
        assert may_end.wait(10)
        return "abc"

    monkeypatch.setattr(type(own.engine.model.chat_template), "render", render)
    body = {"model": "alphabet", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{own.url}/v1/chat/completions", json=body)))
    thread.start()
    assert has_begun.wait(10)
    assert own.client.get("/health").status_code == 200
    assert own.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json()["choices"][0]["text"] == "b"
    may_end.set()
    thread.join(10)
    assert answers[0].json()["choices"][0]["message"]["content"] == "d"
