"""HTTP towards a replica: what a server may do, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from anaphora.router.connection import MAX_HEAD_BYTES
from anaphora.router.upstream import BadRequestError, Upstream, UpstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Script = Callable[["Peer"], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Peer:
    """A replica's side of one connection. number: how many came before."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number

    async def request(self) -> tuple[bytes, bytes]:
        """Read a request; return head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lengths = [line[16:] for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
        return head, await self.reader.readexactly(int(lengths[0])) if lengths else b""

    async def say(self, *parts: bytes, gap_s: float = 0.0) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(gap_s)


@contextlib.asynccontextmanager
async def replica(script: Script, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve each connection by `script`, and close it when that returns. Yields the URL."""
    number = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        peer = Peer(reader, writer, number)
        number += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await script(peer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{'https' if context else 'http'}://{host}:{port}"
    finally:
        server.close()


def saying(*parts: bytes, gap_s: float = 0.0) -> Script:
    """Answer every request on a connection with these bytes."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(*parts, gap_s=gap_s)

    return script


def once(*parts: bytes) -> Script:
    """Answer one request with these bytes, and close."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*parts)

    return script


async def ask(
    upstream: Upstream, url: str, method: bytes = b"POST", body: bytes = b"{}"
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    answer = await upstream.send(url, method, b"/v1/x", [], body)
    try:
        return answer.status, answer.headers, b"".join([chunk async for chunk in answer.chunks()])
    finally:
        answer.close()


def run(
    script: Script, scenario: Callable[[Upstream, str], Awaitable[None]], *, first_byte_s: float = 5, idle_s: float = 5
) -> None:
    async def main() -> None:
        upstream = Upstream(connect_s=5, first_byte_s=first_byte_s, idle_s=idle_s)
        async with replica(script) as url:
            await asyncio.wait_for(scenario(upstream, url), 20)
        await upstream.close()

    asyncio.run(main())


def check_answer(script: Script, status: int, body: bytes, *, method: bytes = b"POST", num_times: int = 2) -> None:
    async def scenario(upstream: Upstream, url: str) -> None:
        for _ in range(num_times):
            got = await ask(upstream, url, method)
            assert (got[0], got[2]) == (status, body)

    run(script, scenario)


def check_refusal(script: Script, reason: str, *, first_byte_s: float = 5, idle_s: float = 5) -> UpstreamError:
    caught: list[UpstreamError] = []

    async def scenario(upstream: Upstream, url: str) -> None:
        with pytest.raises(UpstreamError, match=reason) as error:
            await ask(upstream, url)
        caught.append(error.value)

    run(script, scenario, first_byte_s=first_byte_s, idle_s=idle_s)
    return caught[0]


def test_a_body_may_be_counted_chunked_or_end_with_the_connection() -> None:
    check_answer(saying(OK), 200, b"ok")
    check_answer(saying(CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"), 200, b"ok")
    check_answer(once(b"HTTP/1.1 200 OK\r\n\r\no", b"k"), 200, b"ok")
    check_answer(once(b"HTTP/1.0 200 OK\r\n\r\nok"), 200, b"ok")
    check_answer(once(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nok"), 200, b"ok")


@pytest.mark.parametrize("status", [200, 204, 304])
def test_an_answer_may_have_no_body(status: int) -> None:
    length = b"content-length: 0\r\n" if status == 200 else b""
    check_answer(saying(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, length)), status, b"")


def test_a_head_has_no_body_whatever_its_length_says() -> None:
    check_answer(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"), 200, b"", method=b"HEAD")


def test_trailers_and_chunk_extensions_are_left_out() -> None:
    answer = CHUNKED + b"2;name=value\r\nok\r\n0\r\nx-checksum: 1\r\nx-other: 2\r\n\r\n"

    async def scenario(upstream: Upstream, url: str) -> None:
        for _ in range(2):
            _, headers, body = await ask(upstream, url)
            assert (headers, body) == ([], b"ok")

    run(saying(answer), scenario)


def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"

    async def scenario(upstream: Upstream, url: str) -> None:
        for _ in range(2):
            assert await ask(upstream, url) == (200, [(b"content-length", b"2")], b"ok")

    run(saying(interim, OK), scenario)
    run(saying(interim + OK), scenario)


def test_a_change_of_protocol_is_refused() -> None:
    check_refusal(once(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello"), "protocol")


def test_an_answer_may_come_byte_by_byte() -> None:
    answer = CHUNKED + b"2\r\nok\r\n0\r\n\r\n"
    check_answer(saying(*(bytes([byte]) for byte in answer)), 200, b"ok")


def test_headers_of_the_connection_alone_are_not_passed_on() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Mine\r\nKeep-Alive: timeout=5\r\nX-Mine: 1\r\nX-Empty:\r\n"
        b"X-Twice: 1\r\nX-Twice: 2\r\nContent-Length: 0\r\n\r\n"
    )

    async def scenario(upstream: Upstream, url: str) -> None:
        _, headers, _ = await ask(upstream, url)
        assert headers == [(b"x-empty", b""), (b"x-twice", b"1"), (b"x-twice", b"2"), (b"content-length", b"0")]

    run(saying(head), scenario)


def test_what_is_compressed_stays_so() -> None:
    body = gzip.compress(b"text " * 1000)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)
    check_answer(saying(head + body), 200, body)


def test_connections_are_kept_unless_the_replica_closes_them() -> None:
    numbers: list[int] = []

    async def keeping(peer: Peer) -> None:
        while True:
            await peer.request()
            numbers.append(peer.number)
            await peer.say(OK)

    async def closing(peer: Peer) -> None:
        await peer.request()
        numbers.append(peer.number)
        await peer.say(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

    async def scenario(upstream: Upstream, url: str) -> None:
        for _ in range(3):
            assert (await ask(upstream, url))[2] == b"ok"

    run(keeping, scenario)
    assert numbers == [0, 0, 0]
    numbers.clear()
    run(closing, scenario)
    assert numbers == [0, 1, 2]


def test_a_request_that_meets_a_closing_connection_is_sent_once_more() -> None:
    requests: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        requests.append(peer.number)
        await peer.say(OK)
        if peer.number == 0:  # reads the second request and closes, as a server does whose idle time was just over
            await peer.request()
            requests.append(peer.number)

    async def scenario(upstream: Upstream, url: str) -> None:
        assert (await ask(upstream, url))[2] == b"ok"
        assert (await ask(upstream, url))[2] == b"ok"

    run(script, scenario)
    assert requests == [0, 0, 1]


def test_a_request_whose_answer_began_is_never_sent_again() -> None:
    requests: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        requests.append(peer.number)
        await peer.say(OK)
        await peer.request()
        requests.append(peer.number)
        await peer.say(b"HTTP/1.1 2")

    async def scenario(upstream: Upstream, url: str) -> None:
        await ask(upstream, url)
        with pytest.raises(UpstreamError, match="whole answer"):
            await ask(upstream, url)

    run(script, scenario)
    assert requests == [0, 0]


def test_on_a_new_connection_a_silent_close_is_an_error() -> None:
    requests: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        requests.append(peer.number)

    error = check_refusal(script, "closed the connection")
    assert error.was_sent
    assert requests == [0]


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil" if peer.number == 0 else b""))
        await peer.request()
        await peer.say(OK)

    check_answer(script, 200, b"ok", num_times=3)


def test_an_answer_that_comes_before_the_request_was_read_counts() -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
        while await peer.reader.read(65536):
            await asyncio.sleep(0)

    async def scenario(upstream: Upstream, url: str) -> None:
        status, _, body = await ask(upstream, url, body=bytes(8 * 2**20))
        assert (status, body) == (413, b"big")

    run(script, scenario)


def test_a_large_body_is_sent_whole() -> None:
    sizes: list[int] = []

    async def script(peer: Peer) -> None:
        while True:
            sizes.append(len((await peer.request())[1]))
            await peer.say(OK)

    async def scenario(upstream: Upstream, url: str) -> None:
        for size in (0, 1, 300_000, 5_000_000):
            assert (await ask(upstream, url, body=bytes(size)))[2] == b"ok"

    run(script, scenario)
    assert sizes == [0, 1, 300_000, 5_000_000]


def test_a_replica_that_does_not_read_is_given_up() -> None:
    async def script(peer: Peer) -> None:
        await asyncio.sleep(5)

    async def scenario(upstream: Upstream, url: str) -> None:
        with pytest.raises(UpstreamError, match="too long to read") as caught:
            await ask(upstream, url, body=bytes(32 * 2**20))
        assert caught.value.is_timeout

    run(script, scenario, idle_s=0.2)


def test_a_slow_head_counts_until_it_is_whole() -> None:
    parts = [b"HTTP/1.1 200 OK\r\n", *[b"x-%d: y\r\n" % i for i in range(100)]]
    assert check_refusal(saying(*parts, gap_s=0.05), "in time", first_byte_s=0.3).is_timeout


def test_the_time_between_bytes_of_a_body_is_bounded_and_their_number_is_not() -> None:
    stream = saying(CHUNKED, *[b"1\r\nx\r\n"] * 12, b"0\r\n\r\n", gap_s=0.05)
    run(stream, lambda upstream, url: _expect(upstream, url, b"x" * 12), first_byte_s=0.3, idle_s=0.3)
    assert check_refusal(saying(CHUNKED, b"1\r\nx\r\n", b"", gap_s=1), "in time", idle_s=0.1).is_timeout


async def _expect(upstream: Upstream, url: str, body: bytes) -> None:
    assert (await ask(upstream, url))[2] == body


HUGE = MAX_HEAD_BYTES + 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * HUGE + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 4 * HUGE,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * HUGE,
        b"HTTP/1.1 100 Continue\r\n\r\n" * HUGE,
        CHUNKED + b"0\r\n" + b"x: y\r\n" * HUGE,
    ],
    ids=["one header", "one that never ends", "many", "interim answers", "trailers"],
)
def test_a_huge_head_is_refused(answer: bytes) -> None:
    pieces = [answer[at : at + 50_000] for at in range(0, len(answer), 50_000)]
    check_refusal(once(*pieces), "head of the answer is over")


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx: y\x00\r\n\r\n",
        CHUNKED + b"-2\r\nok\r\n",
        CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n",
    ],
)
def test_what_two_readers_could_understand_differently_is_refused(answer: bytes) -> None:
    check_refusal(once(answer), "no valid HTTP")


@pytest.mark.parametrize("answer", [OK[:-1], CHUNKED + b"2\r\nok\r\n", CHUNKED + b"2\r\no", OK[:20]])
def test_an_answer_that_is_cut_off_is_an_error(answer: bytes) -> None:
    assert not check_refusal(once(answer), "whole answer").is_timeout


def test_what_came_before_a_break_is_handed_over() -> None:
    async def scenario(upstream: Upstream, url: str) -> None:
        answer = await upstream.send(url, b"POST", b"/", [], b"")
        assert await answer.read() == b"ok"
        with pytest.raises(UpstreamError):
            await answer.read()
        answer.close()

    run(once(CHUNKED + b"2\r\nok\r\n"), scenario)


def test_a_reader_who_stops_reading_stops_the_replica() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * 2**20))
        for _ in range(1024):
            await peer.say(bytes(65536))
            sent += 65536

    async def scenario(upstream: Upstream, url: str) -> None:
        answer = await upstream.send(url, b"POST", b"/", [], b"")
        await asyncio.sleep(0.5)
        assert sent < 32 * 2**20
        num_bytes = 0
        async for chunk in answer.chunks():
            num_bytes += len(chunk)
        assert num_bytes == 64 * 2**20
        answer.close()

    run(script, scenario)


def test_who_gives_up_closes_the_connection() -> None:
    seen = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        assert await peer.reader.read() == b""
        seen.set()

    async def scenario(upstream: Upstream, url: str) -> None:
        task = asyncio.ensure_future(ask(upstream, url))
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.wait_for(seen.wait(), 5)

    run(script, scenario)


@pytest.mark.parametrize(
    ("method", "target", "header"),
    [
        (b"GET", b"/a b", (b"x", b"y")),
        (b"GET", b"/\r\nx: y", (b"x", b"y")),
        (b"GE T", b"/", (b"x", b"y")),
        (b"GET", b"/", (b"x", b"y\r\nz: 1")),
        (b"GET", b"/", (b"x", b"y\x00")),
        (b"GET", b"/", (b"x y", b"z")),
        (b"GET", b"/", (b"x\r\n\r\n", b"z")),
    ],
)
def test_what_would_become_another_request_is_not_sent(
    method: bytes, target: bytes, header: tuple[bytes, bytes]
) -> None:
    async def scenario(upstream: Upstream, url: str) -> None:
        with pytest.raises(BadRequestError):
            await upstream.send(url, method, target, [header], b"")

    run(saying(OK), scenario)


def test_a_replica_that_cannot_be_reached_has_not_seen_the_request() -> None:
    async def scenario() -> None:
        upstream = Upstream(connect_s=0.5)
        for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:80"):
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream, url)
            assert not caught.value.was_sent

    asyncio.run(scenario())


def test_a_path_of_a_replica_stands_before_the_target() -> None:
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        heads.append((await peer.request())[0])
        await peer.say(OK)

    async def scenario(upstream: Upstream, url: str) -> None:
        await ask(upstream, url + "/fleet/a/")
        assert heads[0].startswith(b"POST /fleet/a/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")

    run(script, scenario)


def test_a_replica_behind_tls_is_verified(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("openssl, the command, is not installed")
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate, key)

    async def scenario() -> None:
        async with replica(saying(OK), theirs) as url:
            upstream = Upstream(ssl_context=ssl.create_default_context(cafile=str(certificate)))
            for _ in range(2):
                assert (await ask(upstream, url))[2] == b"ok"
            await upstream.close()
            with pytest.raises(UpstreamError, match=r"(?i)certificate"):
                await ask(Upstream(), url)

    asyncio.run(scenario())
