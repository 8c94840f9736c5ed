"""A server's counters and configuration, each cause on the smallest scrape that has it; and a real HTTP exchange."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from anaphora.cli import main
from anaphora.identity import Namespace
from anaphora.lab.live.diagnosis import CAUSES, diagnose
from anaphora.lab.live.events import EventWatch, source_of
from anaphora.lab.live.server import Config, config_of, parse_metrics
from anaphora.tokens import pack
from anaphora.wire import VllmEventFormat
from anaphora.wire.sequence import Apply, Lost
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import serving_fake

from .samples import SAMPLES

VLLM = 'vllm:cache_config_info{block_size="%d",enable_prefix_caching="%s",num_gpu_blocks="1000"} 1\n'


def vllm(queries: float, hits: float, *, block: int = 16, on: str = "True", more: str = "") -> str:
    return (
        VLLM % (block, on) + f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"
        f"vllm:prompt_tokens_total {queries}\nvllm:request_success_total 10\n{more}"
    )


SCRAPES = {
    "no_metrics": "",
    "not_counted": VLLM % (16, "True") + "vllm:prompt_tokens_total 5\n",
    "disabled": vllm(1000, 0, on="False"),
    "no_traffic": vllm(0, 0),
    "below_minimum": vllm(100, 0),
    "large_blocks": vllm(20_000, 0, block=784),
    "second_tier": vllm(
        20_000, 0, more="vllm:external_prefix_cache_queries_total 100\nvllm:external_prefix_cache_hits_total 60\n"
    ),
    "preempted": vllm(20_000, 0, more="vllm:num_preemptions_total 3\n"),
    "evicted": vllm(20_000, 0, more="vllm:kv_cache_usage_perc 0.97\n"),
    "nothing_shared": vllm(20_000, 0, more="vllm:kv_cache_usage_perc 0.2\n"),
    "healthy": vllm(20_000, 12_000),
}


@pytest.mark.parametrize("cause", SCRAPES)
def test_each_cause_is_named(cause: str) -> None:
    metrics = parse_metrics(SCRAPES[cause].encode())
    assert diagnose(metrics, config_of(metrics)).cause == cause


def test_an_unused_cause_does_not_exist() -> None:
    assert CAUSES.keys() == SCRAPES.keys() | {"cold_start", "not_reported", "cleared", "split"}


def test_a_server_that_was_cold_is_not_one_that_is() -> None:
    before, now = parse_metrics(vllm(1_000_000, 0).encode()), parse_metrics(vllm(1_150_000, 99_600).encode())
    found = diagnose(now, config_of(now), before)
    assert found.cause == "cold_start"
    assert found.facts["hit rate between the scrapes"] == pytest.approx(0.664)
    assert found.facts["hit rate since the start"] == pytest.approx(0.0866, abs=1e-4)


def test_sglang_hits_that_answers_do_not_show() -> None:
    text = (
        'sglang:cached_tokens_total{cache_source="device"} 92\n'
        "sglang:prompt_tokens_total 100\nsglang:cache_hit_rate 0\n"
    )
    metrics = parse_metrics(text.encode())
    found = diagnose(metrics, config_of(metrics, {"disable_radix_cache": False, "page_size": 1}))
    assert found.cause == "not_reported"
    assert "--enable-cache-report" in found.fix
    assert found.facts["hit rate since the start"] == 0.92
    assert any("last batch alone" in note for note in found.notes)


@pytest.mark.parametrize(("block", "drops", "minimum"), [(16, False, 17), (448, True, 897), (1, False, 2)])
def test_the_shortest_prompt_that_can_hit(block: int, drops: bool, minimum: int) -> None:
    assert Config(block_size=block, recomputes_last_block=drops).min_shareable_tokens == minimum


def test_what_is_not_known_is_not_zero() -> None:
    metrics = parse_metrics(b"vllm:prompt_tokens_total 5\n")
    facts = diagnose(metrics, config_of(metrics)).facts
    assert facts["hit rate since the start"] is None
    assert facts["KV pool in use"] is None


@contextmanager
def serving(pages: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class TestCommand:
    def test_a_live_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving({"/metrics": SCRAPES["evicted"]}) as url:
            assert main(["explain", f"{url}/v1", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["cause"] == "evicted"
            assert main(["explain", url, "--fail-under", "0.5"]) == 3

    def test_our_own_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving_fake() as live:
            for _ in range(2):
                live.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 5})
            assert main(["explain", live.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["cause"] == "healthy"
        # 32 of the second prompt's 40 tokens are whole blocks before its last token.
        assert found["facts"]["hit rate since the start"] == 32 / 80
        assert found["facts"]["engine"] == "anaphora"

    def test_a_server_described_by_itself(self, capsys: pytest.CaptureFixture[str]) -> None:
        pages = {
            "/metrics": "sglang:cached_tokens_total 0\nsglang:prompt_tokens_total 1000\n",
            "/get_server_info": json.dumps({"disable_radix_cache": True}),
        }
        with serving(pages) as url:
            assert main(["explain", url]) == 0
        assert "disabled" in capsys.readouterr().out

    def test_a_server_without_metrics(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving({}) as url:
            assert main(["explain", url, "--fail-under", "0.5"]) == 4
        assert "no_metrics" in capsys.readouterr().out

    def test_nobody_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving({}) as url:
            pass
        assert main(["explain", url]) == 1
        assert "metrics" in capsys.readouterr().err

    def test_two_scrapes_in_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before, now = tmp_path / "a.prom", tmp_path / "b.prom"
        before.write_text(vllm(1_000_000, 0))
        now.write_text(vllm(1_150_000, 99_600))
        assert main(["explain", str(now), "--since", str(before)]) == 0
        assert "66.40%" in capsys.readouterr().out

    def test_a_capture_of_kv_events(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "events.jsonl"
        path.write_bytes(SAMPLES["kv-events"].splitlines()[0] + b"\n" + SAMPLES["kv-events"].splitlines()[1])
        assert main(["explain", str(path), "--json"]) == 0
        (replica,) = json.loads(capsys.readouterr().out)["replicas"]
        assert (replica["replica"], replica["blocks"], replica["missed_batches"]) == ("p1", 1, 1)


def stored(digests: str, parent: str | None = None, tokens: list[int] | None = None, salt: str | None = None) -> Event:
    ids = tokens if tokens is not None else list(range(len(digests)))
    names = tuple(digest.encode() for digest in digests)
    return BlockStored(names, parent.encode() if parent else None, pack(ids), 1, Namespace(salt=salt))


def removed(digests: str) -> Event:
    return BlockRemoved(tuple(digest.encode() for digest in digests))


def watched(*batches: list[Event]) -> EventWatch:
    seconds = itertools.count(10.0)
    watch = EventWatch(clock=lambda: next(seconds))
    codec = VllmEventFormat()
    watch.take(Apply(codec.encode(batch, ts=1.0)) for batch in batches)
    return watch


class TestEvents:
    low = parse_metrics(vllm(20_000, 0, more="vllm:kv_cache_usage_perc 0.2\n").encode())

    def cause(self, watch: EventWatch) -> str:
        return diagnose(self.low, config_of(self.low), events=watch).cause

    def test_what_comes_back_after_its_eviction_had_too_little_memory(self) -> None:
        watch = watched([stored("ab")], [removed("b")], [stored("b", "a", [1])])
        assert (watch.num_stored, watch.num_removed, watch.num_back_after_eviction) == (3, 1, 1)
        assert watch.away_s == [1.0]
        assert self.cause(watch) == "evicted"

    def test_a_cache_that_is_emptied(self) -> None:
        watch = watched([stored("ab")], [AllBlocksCleared()], [stored("a", tokens=[0])])
        assert (watch.num_cleared, watch.num_back_after_clearing, watch.num_back_after_eviction) == (1, 1, 0)
        assert self.cause(watch) == "cleared"

    def test_equal_beginnings_under_several_names_are_kept_apart(self) -> None:
        watch = watched([stored("a", tokens=[7], salt="x")], [stored("b", tokens=[7], salt="y")])
        assert (watch.num_heads, watch.num_split_heads) == (2, 1)
        assert self.cause(watch) == "split"

    def test_prompts_that_begin_differently_share_nothing(self) -> None:
        watch = watched([stored("a", tokens=[1])], [stored("b", tokens=[2])])
        found = diagnose(self.low, config_of(self.low), events=watch)
        assert found.cause == "nothing_shared"
        assert "2 different first blocks" in found.fix
        assert "nothing that was stored was shared" in found.fix

    def test_a_block_behind_which_prompts_part_was_shared(self) -> None:
        watch = watched([stored("ab")], [stored("c", "a", [5])])
        assert watch.num_shared == 1

    def test_repeated_reports_of_what_is_there_are_counted_once(self) -> None:
        watch = watched([stored("ab")], [stored("ab")])
        assert (watch.num_stored, watch.num_back_after_eviction) == (2, 0)

    def test_unreadable_batches_are_gaps(self) -> None:
        watch = EventWatch()
        watch.take([Apply(b"no batch"), Lost()])
        assert watch.facts()["gaps in the stream"] == 1

    def test_addresses_that_a_server_listens_on_everywhere_are_at_its_host(self) -> None:
        described = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558", "topic": "kv"}}
        assert source_of(described, "http://10.0.0.7:8000") == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "kv")
        assert source_of(None, "http://x") is None

    def test_a_live_server_whose_events_say_more_than_its_counters(self, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("zmq")
        from anaphora.server.kv_events import KvEventOptions, KvEvents

        events = KvEvents(KvEventOptions("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"))
        engine = FakeEngine(num_blocks=6, on_events=events.publish)
        try:
            with serving_fake(engine, kv_events=events) as live:
                for turn in range(12):  # four prompts of four blocks in turn, where one fits
                    live.post("/v1/completions", {"prompt": chr(97 + turn % 4) * 50, "max_tokens": 2})
                assert main(["explain", live.url, "--kv-events", "--interval", "1", "--json"]) == 0
        finally:
            events.publisher.close()
        found = json.loads(capsys.readouterr().out)
        assert found["cause"] == "evicted"
        assert found["facts"]["stored again after eviction"] > 0
        assert found["facts"]["different first blocks"] == 4

    def test_a_server_that_does_not_tell_where_its_events_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving({"/metrics": SCRAPES["nothing_shared"]}) as url:
            assert main(["explain", url, "--kv-events"]) == 1
        assert "--kv-events tcp://HOST:PORT" in capsys.readouterr().err
