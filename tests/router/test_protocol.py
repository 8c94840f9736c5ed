"""HTTP as clients speak it to the router, byte by byte where it matters."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from anaphora.router.protocol import MAX_HEAD_BYTES
from tests.router.live_router import LiveRouter, routing
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = msgspec.json.encode({"model": "alphabet", "prompt": "abc", "max_tokens": 2, "temperature": 0})
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    with serving_fake() as replica, routing(replica.url) as router:
        yield router


def talk(router: LiveRouter, *parts: bytes, until: bytes = b"") -> bytes:
    """Send the parts; return what comes until `until`, or the end."""
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b""
        try:
            for part in parts:
                connection.sendall(part)
            while not (until and until in data):
                more = connection.recv(65536)
                if not more:
                    break
                data += more
        except ConnectionError:
            pass
        return data


def test_a_chunked_body_with_trailers_is_a_body(router: LiveRouter) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:5], BODY[5:]))
    answer = talk(
        router, HEAD + b"transfer-encoding: chunked\r\n\r\n", body, b"0\r\nx-trailer: 1\r\n\r\n", until=b'"usage"'
    )
    assert answer.startswith(b"HTTP/1.1 200")


def test_requests_in_one_packet_are_answered_in_order(router: LiveRouter) -> None:
    answer = talk(router, WHOLE + b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", until=b"unknown_url")
    assert answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 404")


def test_a_client_that_waits_is_told_to_go_on(router: LiveRouter) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(1024).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_who_offers_another_protocol_is_answered_in_this_one(router: LiveRouter) -> None:
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    request = WHOLE.replace(b"host: x\r\n", b"host: x\r\n" + offer)
    assert talk(router, request, until=b'"usage"').startswith(b"HTTP/1.1 200")
    head, body = request[: -len(BODY)], request[-len(BODY) :]
    answer = talk(router, head, body[:9], body[9:] + WHOLE.replace(b"/completions", b"/nothing"), until=b"404")
    assert answer.startswith(b"HTTP/1.1 200")
    assert talk(router, b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_an_old_client_gets_its_answer_and_the_end(router: LiveRouter) -> None:
    answer = talk(router, WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


def test_a_head_request_has_no_body(router: LiveRouter) -> None:
    response = router.client.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert router.client.get("/health").status_code == 200


HUGE = MAX_HEAD_BYTES + 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /" + b"x" * HUGE + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 4 * HUGE,
        b"GET /v1/models HTTP/1.1\r\n" + b"x: y\r\n" * HUGE,
        b"GET /v1/models HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"content-length: +2\r\n\r\n{}",
        HEAD + b"transfer-encoding: gzip\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 3000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * HUGE,
    ],
    ids=[
        "no HTTP", "long target", "a header without an end", "many headers", "a space in a name", "a null byte",
        "two lengths", "a signed length", "no length", "tiny chunks", "many trailers",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_this_apis_form(router: LiveRouter, request_bytes: bytes) -> None:
    answer = talk(router, *(request_bytes[at : at + 4000] for at in range(0, len(request_bytes), 4000)))
    if answer:  # an answer may be lost where the rest of a request was on its way
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert msgspec.json.decode(body)["error"]["code"] == "invalid_http"
    assert router.client.get("/health").status_code == 200
