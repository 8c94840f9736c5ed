"""A server's counters and configuration, each cause on the smallest scrape that has it; and a real HTTP exchange."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from anaphora.cli import main
from anaphora.lab.live.diagnosis import CAUSES, diagnose
from anaphora.lab.live.server import Config, config_of, parse_metrics
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
    assert CAUSES.keys() == SCRAPES.keys() | {"cold_start", "not_reported"}


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
