"""What operators hold on to: drain, health, keys, events, trace, logs."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from anaphora.cache.events import AllBlocksCleared
from anaphora.server.logs import JsonFormatter
from anaphora.server.tenants import KeysError, Tenants
from anaphora.server.trace import StepTrace, TraceError
from anaphora.wire import AnaphoraCodec, EventFollower, FindableNames
from tests.server.fake_engine import BLOCK_SIZE, FakeEngine
from tests.server.live_server import serving_fake
from tests.server.test_concurrency import ENDLESS, eventually
from tests.server.test_shutdown import in_background
from tests.server.trace_events import PHASES, check_trace

if TYPE_CHECKING:
    from pathlib import Path

ALPHABET = "abcdefghijklmnopqrstuvwx"
KEYS = {"authorization": "Bearer a-key"}


class TestDrain:
    def test_new_requests_are_told_to_go_elsewhere_while_running_ones_finish(self) -> None:
        with serving_fake() as live:
            live.engine.executor.gate.clear()
            thread, answers = in_background(live, {"model": "alphabet", "prompt": "abc", "max_tokens": 3})
            assert live.client.get("/ready").status_code == 200
            live.server.stop()
            eventually(lambda: live.client.get("/ready").status_code == 503)
            refused = live.post("/v1/completions", {"prompt": "abc"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "shutting_down"
            assert live.client.get("/health").status_code == 200, "alive it is"
            live.engine.executor.gate.set()
            thread.join(10)
        assert answers[0].json()["choices"][0]["text"] == "def"

    def test_a_signal_drains_and_a_second_one_ends_what_runs(self) -> None:
        with serving_fake() as live:
            live.engine.executor.gate.clear()
            thread, answers = in_background(live, {**ENDLESS})
            live.server.handle_exit(signal.SIGTERM, None)
            eventually(lambda: live.client.get("/ready").status_code == 503)
            live.server.handle_exit(signal.SIGTERM, None)
            eventually(lambda: len(live.engine.service.aborted) == 1)
            live.engine.executor.gate.set()
            thread.join(10)
        assert answers[0].status_code == 503


class TestHealth:
    def test_a_step_that_does_not_end_is_unhealthy(self) -> None:
        with serving_fake(stuck_after_s=0.05) as live:
            live.engine.executor.gate.clear()
            thread, _ = in_background(live, {"model": "alphabet", "prompt": "abc", "max_tokens": 3})
            eventually(lambda: live.client.get("/health").status_code == 503)
            assert live.client.get("/health").json()["error"]["code"] == "engine_stuck"
            assert live.client.get("/ready").status_code == 503
            live.engine.executor.gate.set()
            thread.join(10)
            eventually(lambda: live.client.get("/health").status_code == 200)

    def test_an_engine_whose_thread_died_is_unhealthy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving_fake() as live:

            def crash() -> None:
                raise MemoryError

            monkeypatch.setattr(live.engine.service.engine, "step", crash)
            assert live.post("/v1/completions", {"prompt": "abc"}).status_code == 500
            for path in ("/health", "/ready"):
                answer = live.client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")


class TestTenants:
    def test_only_keys_that_are_known_get_answers(self) -> None:
        with serving_fake(tenants=Tenants({"a": ["a-key"], "b": ["b-key"]})) as live:
            for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "a-key"}):
                for answer in (
                    live.client.post("/v1/completions", json={"model": "alphabet", "prompt": "a"}, headers=headers),
                    live.client.get("/v1/models", headers=headers),
                ):
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            for headers in (KEYS, {"x-api-key": "b-key"}):
                assert live.client.get("/v1/models", headers=headers).status_code == 200
            assert live.client.get("/health").status_code == 200

    def test_what_a_tenant_leaves_is_found_by_that_tenant_alone_whatever_salts_are_sent(self) -> None:
        def cached(key: str, salt: str | None = None) -> int:
            body: dict[str, Any] = {"model": "alphabet", "prompt": ALPHABET, "max_tokens": 1, "cache_salt": salt}
            answer = live.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

        with serving_fake(tenants=Tenants({"a": ["a-key"], "a1": ["b-key"]})) as live:
            assert [cached("a-key"), cached("a-key")] == [0, 16]
            assert [cached("b-key"), cached("b-key", "x"), cached("a-key", "x")] == [0, 0, 0]
            assert [cached("b-key", "tenant 1:a"), cached("a-key", "1")] == [0, 0], "a salt cannot imitate a tenant"
            assert [cached("b-key", "x"), cached("a-key")] == [16, 16]

    def test_keys_may_stand_hashed_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(
            '[tenants]\na = ["plain", "sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"]\n'
        )
        tenants = Tenants.read(path)
        assert [tenants.of_key(key) for key in ("plain", "key", "sha256:2c70", "")] == ["a", "a", None, None]

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "expected a table 'tenants'"),
            ("[tenants]", "expected at least one key"),
            ('[tenants]\na = "k"', "expected a table 'tenants' alone, with a list of strings for each tenant"),
            ('[tenants]\na = ["k"]\nb = ["k"]', r"b\[0\]: the same key as of a"),
            ('[tenants]\na = [""]', r"a\[0\]: an empty key"),
            ('[tenants]\na = ["sha256:12"]', r"a\[0\]: expected 64 hexadecimal digits after sha256:"),
            ("=", "no TOML: .*"),
        ],
    )
    def test_a_keys_file_at_fault_is_one_clear_line(self, tmp_path: Path, text: str, problem: str) -> None:
        path = tmp_path / "keys.toml"
        path.write_text(text)
        with pytest.raises(KeysError, match=f"^{path}: {problem}$"):
            Tenants.read(path)


class TestKvEvents:
    def test_the_picture_of_a_live_server_is_its_index(self) -> None:
        pytest.importorskip("zmq")
        from anaphora.server.kv_events import KvEventOptions, KvEvents
        from anaphora.wire.subscriber import EventSubscriber

        events = KvEvents(KvEventOptions("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv@a", form="anaphora"))
        engine = FakeEngine(num_blocks=12, on_events=events.publish)
        names = FindableNames()
        follower = EventFollower(names, AnaphoraCodec().decode)
        subscriber = EventSubscriber(lambda: None)
        subscriber.start()
        try:
            with serving_fake(engine, kv_events=events, allows_reset=True) as live:
                sources = live.client.get("/kv_event_sources").json()
                assert sources["0"]["topic"] == "kv@a"
                subscriber.add("it", sources["0"]["endpoint"], sources["0"]["replay_endpoint"])

                def is_followed() -> bool:
                    follower.take(action for _, action in subscriber.take())
                    found = {name[0] for name in names.blocks}
                    return subscriber.is_settled("it") and follower.is_whole and found == set(held(engine))

                for i in range(8):  # more than fits: some are evicted
                    body = {"prompt": chr(97 + i) * 40, "max_tokens": 4, "vllm_xargs": {"kv_cache_report_mode": "full"}}
                    assert live.post("/v1/completions", body).status_code == 200
                eventually(is_followed)
                assert names.blocks
                # An idle server tells at once that it forgot everything.
                assert live.client.post("/reset_prefix_cache").json() == {"success": True}
                eventually(lambda: is_followed() and not names.blocks)
                metrics = live.client.get("/metrics").text
                assert 'anaphora_kv_events_total{type="AllBlocksCleared"} 1.0' in metrics
                assert "anaphora_kv_event_batches_dropped_total 0.0" in metrics
        finally:
            subscriber.close()
            events.publisher.close()

    def test_what_a_request_finds_is_published_again_if_it_asks_for_that(self) -> None:
        batches: list[list[Any]] = []
        with serving_fake(FakeEngine(on_events=batches.append)) as live:
            for extra in ({}, {}, {"vllm_xargs": {"kv_cache_report_mode": "full"}}):
                live.post("/v1/completions", {"prompt": ALPHABET * 2, "max_tokens": 1, "cache_salt": "s", **extra})
            eventually(lambda: len(batches) == 2)
        (first,), (again,) = batches
        assert (again.digests, again.parent) == (first.digests[:2], None), "the last token is always computed"
        assert again.tokens == first.tokens[: len(again.tokens)]

    def test_a_cache_in_use_is_not_reset_and_who_may_not_reset_finds_no_such_path(self) -> None:
        with serving_fake(allows_reset=True) as live:
            live.engine.executor.gate.clear()
            thread, _ = in_background(live, {"model": "alphabet", "prompt": "abc", "max_tokens": 3})
            eventually(lambda: live.engine.service.busy_s > 0)
            answers: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{live.url}/reset_prefix_cache")))
            asking.start()
            time.sleep(0.05)
            live.engine.executor.gate.set()
            asking.join(10)
            thread.join(10)
            assert answers[0].status_code == 200
        with serving_fake() as live:
            assert live.client.post("/reset_prefix_cache").status_code == 404


def held(engine: FakeEngine) -> list[bytes]:
    """The digests of all that can be found."""
    digests: list[bytes] = [digest for digest, _ in engine.manager._index.stored()]  # type: ignore[attr-defined]
    return digests


class TestTrace:
    def test_it_has_steps_requests_and_cache_events_and_no_prompt(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        trace = StepTrace(path)
        with serving_fake(FakeEngine(on_events=trace.cached, observer=trace)) as live:
            for _ in range(2):
                body = {"prompt": ALPHABET, "max_tokens": 3, "cache_salt": "a secret salt"}
                assert live.post("/v1/completions", body).status_code == 200
        trace.close()
        events = read_trace(path)
        steps = [event for event in events if event["name"] == "step"]
        assert [step["args"]["prefill_tokens"] for step in steps] == [24, 0, 0, 8, 0, 0]
        begun = [(event["id"], event["name"]) for event in events if event["ph"] == "b"]
        ended = [(event["id"], event["name"]) for event in events if event["ph"] == "e"]
        assert sorted(begun) == sorted(ended)
        assert [name for _, name in begun] == 2 * ["request", "waiting", "prefill", "decode"]
        requests = [event["args"] for event in events if (event["ph"], event["name"]) == ("e", "request")]
        assert [args["cached_tokens"] for args in requests] == [0, BLOCK_SIZE]
        assert any(event["name"] == "cache" and event["args"]["stored_blocks"] == 1 for event in events)
        assert "secret" not in path.read_text()

    def test_it_keeps_to_the_format_whatever_becomes_of_requests(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        trace = StepTrace(path)
        engine = FakeEngine(num_blocks=8, on_events=trace.cached, observer=trace)
        with serving_fake(engine) as live:
            bodies: list[dict[str, Any]] = [
                {"prompt": "a" * 70, "max_tokens": 30, "n": 2},
                {"prompt": "b" * 70, "max_tokens": 30},  # not both fit: one is preempted
                {"prompt": "c" * 20, "max_tokens": 1},
                {"prompt": "a" * 70, "max_tokens": 90, "deadline_s": 0.001},  # aborted, wherever it is
            ]
            running = [in_background(live, {"model": "alphabet", **body}) for body in bodies]
            for thread, _ in running:
                thread.join(20)
            engine.executor.failures.append(RuntimeError("broken"))
            assert live.post("/v1/completions", {"prompt": "d", "max_tokens": 3}).status_code == 500
            live.post("/v1/completions", {"prompt": "d", "max_tokens": 2})
        trace.close()
        events = read_trace(path)
        check_trace(events)
        assert {event["ph"] for event in events} == PHASES
        reasons = {
            event["args"]["finish_reason"] for event in events if (event["ph"], event["name"]) == ("e", "request")
        }
        assert {"length", "error"} <= reasons
        step = next(event for event in events if event["ph"] == "X")
        for event in (
            {"name": "step", "ph": "X", "pid": 1, "tid": 1, "ts": 1},
            {"name": "x", "ph": "e", "cat": "request", "id": "never begun", "pid": 1, "ts": 1},
            {"name": "step", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": step["ts"] + step["dur"] / 2},
        ):
            with pytest.raises((AssertionError, KeyError, IndexError)):
                check_trace([*events, event])

    def test_it_grows_to_its_limit_and_says_so(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        trace = StepTrace(path, max_bytes=600)
        for _ in range(100):
            trace.cached([AllBlocksCleared()])
        trace.close()
        assert read_trace(path)[-1]["name"] == "the trace is full"
        assert path.stat().st_size < 800

    def test_a_file_that_cannot_be_written_is_one_clear_line(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=f"^{tmp_path}: Is a directory$"):
            StepTrace(tmp_path)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """As Perfetto does: an array that nobody closed."""
    events: list[dict[str, Any]] = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    return events


class TestLogs:
    def test_a_line_of_json_for_each_request_without_what_it_said(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "anaphora.requests"), serving_fake() as live:
            live.post("/v1/completions", {"prompt": ALPHABET, "max_tokens": 2, "n": 2, "cache_salt": "a secret"})
        (record,) = [record for record in caplog.records if record.name == "anaphora.requests"]
        text = JsonFormatter().format(record)
        line = msgspec.json.decode(text)
        assert line["id"].startswith("cmpl-")
        shown = {key: line[key] for key in ("prompt_tokens", "cached_tokens", "output_tokens", "finish_reasons")}
        assert shown == {
            "prompt_tokens": 24,
            "cached_tokens": 0,
            "output_tokens": 4,
            "finish_reasons": ["length", "length"],
        }
        assert 0 < line["ttft_s"] <= line["duration_s"]
        assert "secret" not in text
        assert ALPHABET not in text

    def test_arguments_and_messages_of_exceptions_stay_out(self) -> None:
        try:
            raise ValueError("a prompt")
        except ValueError:
            import sys

            record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed: %s", ("a salt",), sys.exc_info())
        text = JsonFormatter().format(record)
        line = msgspec.json.decode(text)
        assert (line["level"], line["message"], line["error"]) == ("error", "failed: %s", "ValueError")
        assert "a prompt" not in text
        assert "a salt" not in text


class TestProtocol:
    def exchange(self, url: str, *sent: bytes) -> tuple[int, Any]:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            for data in sent:
                client.sendall(data)
            received = b""
            while data := client.recv(65536):
                received += data
        head, _, body = received.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    @pytest.mark.parametrize("length", [b"ten", b"-1", b"1, 2", b"\xff"])
    def test_a_malformed_content_length_is_answered_as_an_error_of_the_api(self, length: bytes) -> None:
        with serving_fake() as live:
            request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n"
            status, body = self.exchange(live.url, request)
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert body["error"]["type"] == "invalid_request_error"

    def test_a_body_in_many_tiny_chunks_is_refused(self) -> None:
        with serving_fake() as live:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            status, body = self.exchange(live.url, head + b"1\r\n \r\n" * 5000)
            assert (status, body["error"]["code"]) == (400, "invalid_http")
            assert live.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}).status_code == 200

    def test_a_body_in_some_tiny_chunks_and_a_long_one_are_read(self) -> None:
        body = json.dumps({"model": "alphabet", "prompt": "abc", "max_tokens": 2}).encode()
        with serving_fake() as live:
            tiny = live.client.post("/v1/completions", content=(bytes([byte]) for byte in body))
            assert tiny.json()["choices"][0]["text"] == "de"
            long = live.client.post("/v1/completions", content=b" " * 1_000_000 + body)
            assert long.json()["choices"][0]["text"] == "de"


@pytest.mark.parametrize("form", ["vllm", "anaphora"])
def test_neither_a_salt_nor_a_tenant_leaves_in_clear(form: Any) -> None:
    pytest.importorskip("zmq")
    from anaphora.server.kv_events import KvEventOptions, KvEvents

    tenants = Tenants({"a tenant": ["a-key"]})
    for clear_salts in [False, True]:
        events = KvEvents(KvEventOptions("tcp://127.0.0.1:*", form=form, clear_salts=clear_salts))
        with serving_fake(FakeEngine(on_events=events.publish), tenants=tenants, kv_events=events) as live:
            body = {"model": "alphabet", "prompt": ALPHABET, "max_tokens": 1, "cache_salt": "a secret"}
            assert live.client.post("/v1/completions", json=body, headers=KEYS).status_code == 200
            eventually(lambda publisher=events.publisher: publisher.stats().num_published == 1)
            (sent,) = events.publisher._buffer
        events.publisher.close()
        is_clear = clear_salts and form == "vllm"
        assert (b"a secret" in sent.payload) == is_clear
        assert (b"a tenant" in sent.payload) == is_clear
