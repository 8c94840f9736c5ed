"""How a server ends."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from anaphora.server import run
from anaphora.server.run import ListenError, bind, url_of
from tests.server.events import read_events
from tests.server.live_server import serving_fake
from tests.server.test_concurrency import ENDLESS, eventually

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer


def in_background(live: LiveServer, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=20))
    )
    thread.start()
    eventually(lambda: len(live.engine.service.requests) == 1)
    return thread, answers


def test_requests_may_finish_after_the_server_was_told_to_stop() -> None:
    with serving_fake() as live:
        live.engine.executor.gate.clear()
        thread, answers = in_background(live, {"model": "alphabet", "prompt": "abc", "max_tokens": 3})
        live.server.stop()
        live.engine.executor.gate.set()
        thread.join(10)
    assert answers[0].json()["choices"][0]["text"] == "def"


@pytest.mark.parametrize("is_stream", [False, True])
def test_requests_that_take_longer_end_with_an_error(monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    monkeypatch.setattr(run, "SHUTDOWN_GRACE_S", 0.1)
    with serving_fake() as live:
        live.engine.executor.gate.clear()
        thread, answers = in_background(live, {**ENDLESS, "stream": is_stream})
        live.server.stop()
        eventually(lambda: len(live.engine.service.aborted) == 1)
        live.engine.executor.gate.set()
        thread.join(10)
    expected = {
        "error": {
            "message": "The server is shutting down.",
            "type": "server_error",
            "param": None,
            "code": "shutting_down",
        }
    }
    if is_stream:
        assert read_events(answers[0]) == [expected]
    else:
        assert (answers[0].status_code, answers[0].json()) == (503, expected)


def test_a_quiet_end_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serving_fake() as live:
        live.post("/v1/completions", {"prompt": "abc"})
    assert caplog.records == []


def test_a_stopped_engine_is_unhealthy_and_answers_503() -> None:
    with serving_fake() as live:
        assert live.client.get("/health").json() == {"status": "ok"}
        live.engine.service.close()
        for response in (live.client.get("/health"), live.post("/v1/completions", {"prompt": "abc"})):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_stopped"


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match=f"^port {port} on 127.0.0.1 is in use; choose another with --port$"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_one_clear_line() -> None:
    with pytest.raises(ListenError, match=r"^cannot listen on 192\.0\.2\.1, port 8000: "):
        bind("192.0.2.1", 8000)


def test_url_is_one_that_this_machine_can_open() -> None:
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
    ],
)
def test_a_client_that_never_finishes_its_request_keeps_no_server_alive(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(run, "SHUTDOWN_GRACE_S", 0.2)
    with serving_fake() as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(sent)
            eventually(lambda: bool(live.server.server_state.connections))
            live.server.stop()
            eventually(lambda: not live.server.server_state.connections)
