"""The router in front of real servers: where requests go, and what comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from openai import APIError, OpenAI

from anaphora.engine.build import build_engine
from anaphora.engine.service import EngineService
from anaphora.model import load_model
from anaphora.router.model_text import load_text_side
from anaphora.router.prompt import ModelPrompts
from anaphora.server.app import OpenAIServer
from anaphora.server.served_model import ServedModel
from tests.router.live_router import LiveRouter, cached_tokens, eventually, replica_of, routing
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer, running, serving_fake
from tests.tiny_models import write_gguf_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG = "once upon a time there was a prefix that everybody shared, and it was long. " * 4


@pytest.fixture
def two() -> Iterator[tuple[LiveRouter, LiveServer, LiveServer]]:
    with serving_fake() as a, serving_fake() as b, routing(a.url, b.url) as router:
        yield router, a, b


def test_the_second_turn_goes_where_the_first_one_is(two: Any) -> None:
    router, *_ = two
    homes = set()
    for user in range(14):
        opening = f"user {user}: {LONG}"
        first = router.chat(opening)
        answer = first.json()["choices"][0]["message"]["content"]
        second = router.chat(opening, answer, "and then?")
        assert replica_of(second) == replica_of(first)
        assert cached_tokens(second) >= len(opening) // 16 * 16 - 16
        assert int(second.headers["x-anaphora-predicted-cached-tokens"]) > 0
        homes.add(replica_of(first))
    assert len(homes) == 2, "different users are spread"


@contextlib.contextmanager
def serving_model(path: Path) -> Iterator[str]:
    """A real server with the model at `path`; yields its URL."""
    model = load_model(path)
    engine = build_engine(model, executor="reference", kv_memory_bytes=2**20)
    with running(OpenAIServer(EngineService(engine), ServedModel.of(model, engine))) as (_, url):
        yield url


def test_with_the_models_tokenizer_the_prediction_is_what_the_replica_reports(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "tiny.gguf", max_context=2048)
    prompts = ModelPrompts(*load_text_side(path))
    with serving_model(path) as a, serving_model(path) as b, routing(a, b, prompts=prompts) as router:
        for user in ("Ann", "Bob", "Cy"):
            homes = set()
            said = [f"I am {user}. What is the capital of France?"]
            for _ in range(4):
                # One token of an answer never fills a block, so nothing is cached that the router has not seen.
                response = router.chat(*said, model="tiny", max_tokens=1)
                assert response.status_code == 200, response.text
                assert response.headers["x-anaphora-tokens"] == "exact"
                usage = response.json()["usage"]
                assert int(response.headers["x-anaphora-prompt-tokens"]) == usage["prompt_tokens"]
                assert int(response.headers["x-anaphora-predicted-cached-tokens"]) == cached_tokens(response)
                said += ["Paris, as far as I know.", "And what else do you know of it?"]
                homes.add(replica_of(response))
            assert len(homes) == 1
            assert cached_tokens(response) > 100
            explanation = router.explain(response)
            assert explanation["reported_cached_tokens"] == explanation["predicted_cached_tokens"] > 100


def test_an_answer_passes_byte_for_byte(two: Any) -> None:
    router, a, _ = two
    body = {"model": "alphabet", "prompt": "abc", "max_tokens": 5, "temperature": 0}
    direct = a.client.post("/v1/completions", json=body).json()
    routed = router.client.post("/v1/completions", json=body).json()
    for answer in (direct, routed):
        del answer["id"], answer["created"]
        del answer["usage"]
    assert routed == direct


def test_an_answer_has_the_replicas_date_and_no_second_one(two: Any) -> None:
    router, *_ = two
    response = router.complete("abc")
    assert response.status_code == 200
    assert len(response.headers.get_list("date")) == 1


def test_a_stream_passes_chunk_by_chunk(two: Any) -> None:
    router, a, b = two
    a.engine.executor.gate.clear()
    b.engine.executor.gate.clear()
    body = {"model": "alphabet", "prompt": "abc", "max_tokens": 5, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    timer = threading.Timer(0.2, lambda: (a.engine.executor.gate.set(), b.engine.executor.gate.set()))
    timer.start()
    with router.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    texts = [choice["text"] for line in lines[:-1] for choice in msgspec.json.decode(line[6:])["choices"]]
    assert "".join(texts) == "defgh"
    eventually(lambda: router.explain(response)["reported_cached_tokens"] is not None)


def test_the_openai_client_works_through_the_router(two: Any) -> None:
    router, *_ = two
    client = OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="alphabet", prompt="abc", max_tokens=3, stream=True, temperature=0)
    assert "".join(chunk.choices[0].text for chunk in stream) == "def"
    assert [model.id for model in client.models.list()] == ["alphabet"]
    with pytest.raises(APIError) as caught:
        client.completions.create(model="unknown", prompt="abc")
    assert caught.value.code == "model_not_found"  # the replica's own words


def test_a_client_that_goes_away_stops_the_replica(two: Any) -> None:
    router, a, b = two
    for server in (a, b):
        server.engine.executor.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(router.url + "/v1/completions", json={"model": "alphabet", "prompt": "abc"}, timeout=0.3)
    eventually(lambda: a.engine.service.aborted or b.engine.service.aborted)
    for server in (a, b):
        server.engine.executor.gate.set()
    eventually(lambda: all(entry["inflight_requests"] == 0 for entry in router.replicas().values()))


def test_a_dead_replica_is_left_out_before_the_first_byte() -> None:
    with serving_fake() as a:
        with serving_fake() as b:
            dead = b.url
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            specs = (a.url, dead)
            with _routing_unready(*specs) as router:
                for i in range(8):
                    assert replica_of(router.complete(f"{i} {LONG}")) in a.url
                assert router.client.get("/health").status_code == 200
                eventually(lambda: router.replicas()[dead.removeprefix("http://")]["ready"] is False)


@contextlib.contextmanager
def _routing_unready(*urls: str) -> Iterator[LiveRouter]:
    with routing(urls[0], probe_s=0.3) as router:
        from anaphora.router.replica import ReplicaSpec

        for url in urls[1:]:
            router.app._fleet.add(ReplicaSpec.of(url))
        yield router


def test_without_a_replica_the_answer_is_503_with_retry_after() -> None:
    with routing() as router:
        response = router.complete("abc")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "no_replica"
        assert router.client.get("/health").status_code == 503


def breaking_server(answer: bytes, *, closes: bool = True, hold: threading.Event | None = None) -> Any:
    """A replica that is healthy, and answers every POST with these bytes."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            data = connection.recv(65536)
            if data.startswith(b"GET"):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            connection.sendall(answer)
            if hold:
                hold.wait(10)

    @contextlib.contextmanager
    def run() -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=serve, args=(listener,), daemon=True).start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"

    return run()


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'16\r\ndata: {"choices": []}\n\n\r\n'
)


def test_a_replica_that_dies_in_mid_stream_ends_it_with_an_error() -> None:
    with breaking_server(STREAM_HEAD) as url, routing(url) as router:
        client = OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="m", prompt="abc", stream=True)
        with pytest.raises(APIError, match="broke off"):
            list(stream)


def test_an_incomplete_answer_is_never_taken_for_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    with breaking_server(head) as url, routing(url) as router, pytest.raises(httpx.RemoteProtocolError):
        router.complete("abc")


def test_a_replica_that_breaks_off_before_the_first_byte_is_replaced() -> None:
    with breaking_server(b"") as broken, serving_fake() as good, routing(broken, good.url) as router:
        for i in range(10):
            assert replica_of(router.complete(f"{i} {LONG}")) in good.url


@pytest.mark.parametrize("status", [503, 429])
def test_a_replica_that_refuses_is_replaced(status: int) -> None:
    head = b"HTTP/1.1 %d No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
    with breaking_server(head) as broken, serving_fake() as good, routing(broken, good.url) as router:
        for i in range(6):
            assert replica_of(router.complete(f"{i} {LONG}")) in good.url
    with breaking_server(head) as broken, routing(broken) as router:
        assert router.complete("abc").status_code == status


def test_a_replica_that_hangs_is_given_up_and_not_asked_twice() -> None:
    hold = threading.Event()
    with breaking_server(b"", hold=hold) as url, routing(url, first_byte_s=0.2) as router:
        response = router.complete("abc")
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "replica_timeout"
        hold.set()


def test_a_restarted_replica_has_nothing() -> None:
    with serving_fake() as a, routing(a.url) as router:
        router.complete(LONG)
        name = a.url.removeprefix("http://")
        assert router.replicas()[name]["known_blocks"] > 0
        a.server.stop()
        eventually(lambda: router.replicas()[name]["known_blocks"] == 0)
        assert router.complete(LONG).status_code in {502, 503}


def test_a_draining_replica_ends_what_it_has_and_gets_nothing_new(tmp_path: Any) -> None:
    file = tmp_path / "replicas"
    with serving_fake() as a, serving_fake() as b:
        file.write_text(f"{a.url}\n{b.url}  # both\n")
        with routing(replicas_file=file) as router:
            for server in (a, b):
                server.engine.executor.gate.clear()
            answers: list[httpx.Response] = []
            threads = [
                threading.Thread(target=lambda i=i: answers.append(router.complete(f"{i} {LONG}"))) for i in "xy"
            ]
            for thread in threads:
                thread.start()
            eventually(lambda: all(entry["inflight_requests"] == 1 for entry in router.replicas().values()))
            file.write_text(f"{a.url}\n")
            eventually(lambda: any(entry["draining"] for entry in router.replicas().values()))
            for server in (a, b):
                server.engine.executor.gate.set()
            for thread in threads:
                thread.join()
            assert len({replica_of(answer) for answer in answers}) == 2
            eventually(lambda: len(router.replicas()) == 1)
            file.write_text("nonsense\n")
            assert replica_of(router.complete("abc")) in a.url


def test_shadow_mode_tells_and_does_not_steer() -> None:
    with serving_fake() as a, serving_fake() as b, routing(a.url, b.url, is_shadow=True) as router:
        responses = [router.complete(LONG) for _ in range(4)]
        assert len({replica_of(response) for response in responses}) == 2
        assert {response.headers["x-anaphora-shadow-replica"] for response in responses} <= set(router.replicas())


def test_a_tenants_salt_is_bound_to_its_key() -> None:
    with serving_fake() as a, routing(a.url, binds_salts=True) as router:
        for tenant, salt in (("one", None), ("two", None), ("two", "theirs")):
            headers = {"authorization": f"Bearer {tenant}"}
            body = {"model": "alphabet", "prompt": LONG, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
            router.client.post("/v1/completions", json=body, headers=headers)
        salts = [request.namespace.salt for request in a.engine.service.requests]
        assert salts[0] != salts[1] == salts[2] is not None


def test_explain_says_where_a_request_would_go_and_sends_nothing(two: Any) -> None:
    router, a, b = two
    home = replica_of(router.complete(LONG))
    before = len(a.engine.service.requests) + len(b.engine.service.requests)
    answer = router.client.post("/explain/v1/completions", json={"model": "alphabet", "prompt": LONG}).json()
    assert answer["replica"] == home
    assert "tokens" in answer["reason"]
    lines = {line["replica"]: line for line in answer["scores"]}
    assert len(lines) == 2
    assert lines[home]["predicted_cached_tokens"] == max(line["predicted_cached_tokens"] for line in lines.values()) > 0
    assert set(lines[home]["parts"]) == {"queue", "compute", "fleet", "slots", "running"}
    assert len(a.engine.service.requests) + len(b.engine.service.requests) == before
    assert router.client.get("/explain/none").status_code == 404


def test_the_metrics_tell_predicted_and_reported_tokens(two: Any) -> None:
    router, *_ = two
    for _ in range(3):
        router.complete(LONG)
    text = router.client.get("/metrics").text
    for name in (
        'anaphora_router_requests_total{outcome="answered",replica=',
        "anaphora_router_predicted_cached_tokens_total{replica=",
        "anaphora_router_reported_cached_tokens_total{replica=",
        "anaphora_router_prediction_alarm{replica=",
        "anaphora_router_index_bytes",
    ):
        assert name in text


HOSTILE: list[tuple[str, Callable[[httpx.Client], httpx.Response], set[int]]] = [
    ("no JSON", lambda c: c.post("/v1/completions", content=b"{"), {400}),
    ("not an object", lambda c: c.post("/v1/completions", content=b"[1]"), {400}),
    ("nested", lambda c: c.post("/v1/chat/completions", content=b"[" * 100_000), {400}),
    ("no body", lambda c: c.post("/v1/completions"), {400}),
    ("odd types", lambda c: c.post("/v1/chat/completions", json={"messages": 5, "model": [], "prompt": {}}), {400}),
    ("odd messages", lambda c: c.post("/v1/chat/completions", json={"messages": [1, None, {}], "model": "x"}), {400}),
    ("odd ids", lambda c: c.post("/v1/completions", json={"prompt": [1, "a"], "model": "alphabet"}), {400}),
    ("huge ids", lambda c: c.post("/v1/completions", json={"prompt": [2**70], "model": "alphabet"}), {400}),
    ("surrogate", lambda c: c.post("/v1/completions", content=b'{"model":"alphabet","prompt":"\\ud800"}'), {200, 400}),
    ("too long", lambda c: c.post("/v1/completions", content=b"x" * 200_000), {413}),
    ("own headers", lambda c: c.get("/v1/models", headers={"x-anaphora-replica": "evil"}), {200}),
    ("connection header", lambda c: c.get("/v1/models", headers={"connection": "close, host, accept"}), {200}),
    ("path", lambda c: c.get("/v1/../../etc/passwd"), {404}),
    ("escaped path", lambda c: c.get("/v1/models/%2e%2e%2f%0d%0ax"), {404}),
    ("other path", lambda c: c.get("/admin"), {404}),
    ("other method", lambda c: c.request("TRACE", "/v1/models"), {404, 405}),
]


def test_hostile_requests_get_an_answer_and_harm_nobody() -> None:
    with serving_fake() as a, routing(a.url, body_limit_bytes=150_000) as router:
        for what, ask, allowed in HOSTILE:
            response = ask(router.client)
            assert response.status_code in allowed, (what, response.status_code, response.text[:200])
        assert replica_of(router.complete("abc")) in a.url
        assert router.replicas()[a.url.removeprefix("http://")]["ready"]


def test_bytes_after_the_head_of_a_request_never_become_another_one() -> None:
    with serving_fake() as a, routing(a.url) as router:
        host, port = router.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
                b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
            )
            raw.settimeout(3)
            assert b" 400 " in raw.recv(4096).split(b"\r\n")[0]


def test_a_slow_replica_is_avoided_when_waiting_costs_more_than_computing() -> None:
    with serving_fake(FakeEngine()) as a, serving_fake() as b, routing(a.url, b.url, max_running=2) as router:
        home = replica_of(router.complete(LONG))
        slow = a if home in a.url else b
        slow.engine.executor.gate.clear()
        answers: list[httpx.Response] = []

        def ask(i: int) -> None:
            answers.append(router.complete(f"{LONG} {i}"))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(answers) >= 1)
        slow.engine.executor.gate.set()
        for thread in threads:
            thread.join()
        assert len({replica_of(answer) for answer in answers}) == 2


def test_under_load_a_replica_that_is_killed_costs_no_answer_and_what_was_known_of_it_goes() -> None:
    with serving_fake() as a, serving_fake() as b, routing(a.url, b.url) as router:
        statuses: list[int] = []

        def ask(user: int) -> None:
            with httpx.Client(base_url=router.url, timeout=20) as client:
                for turn in range(12):
                    body = {"model": "alphabet", "prompt": f"{user} {LONG} {turn}", "max_tokens": 2, "temperature": 0}
                    statuses.append(client.post("/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=ask, args=(user,)) for user in range(6)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(statuses) > 12)
        a.server.stop()
        for thread in threads:
            thread.join()
        assert len(statuses) == 72
        assert set(statuses) <= {200, 502, 503}
        assert statuses.count(200) >= 66, "a request may meet the replica's own 503 while it stops"
        dead = a.url.removeprefix("http://")
        eventually(lambda: router.replicas()[dead]["known_blocks"] == 0)
        eventually(lambda: not router.replicas()[dead]["ready"])
        assert replica_of(router.complete(LONG)) in b.url
