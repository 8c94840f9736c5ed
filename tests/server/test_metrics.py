"""GET /metrics: what has happened, in Prometheus' words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from anaphora import KVCacheManager
from anaphora.engine.request import Delta
from anaphora.engine.stats import EngineStats
from anaphora.server.cache_metrics import CacheCollector
from anaphora.server.metrics import Metrics
from anaphora.version import __version__

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer


def samples(exposition: str) -> dict[str, float]:
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def test_tokens_and_requests_are_counted(own: LiveServer) -> None:
    for _ in range(2):
        own.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 5})
    own.post("/v1/completions", {"prompt": "y", "max_tokens": 5})
    own.engine.executor.failures.append(RuntimeError("oh"))
    own.post("/v1/completions", {"prompt": "b", "max_tokens": 5})
    own.post("/v1/completions", {"prompt": "a", "max_tokens": -1})
    values = samples(own.client.get("/metrics").text)
    assert values["anaphora_prompt_tokens_total"] == 82
    assert values["anaphora_cached_tokens_total"] == 32
    assert values["anaphora_computed_prompt_tokens_total"] == 40 + 8 + 1
    assert values["anaphora_output_tokens_total"] == 12
    assert values["anaphora_preemptions_total"] == 0
    assert {name: value for name, value in values.items() if name.startswith("anaphora_requests_total")} == {
        "anaphora_requests_total|length": 2,
        "anaphora_requests_total|stop": 1,
        "anaphora_requests_total|error": 1,
        "anaphora_requests_total|abort": 0,
    }
    assert values["anaphora_time_to_first_token_seconds_count"] == 3
    assert values["anaphora_inter_token_latency_seconds_count"] == 9


def test_there_is_nothing_but_what_is_documented(own: LiveServer) -> None:
    own.post("/v1/completions", {"prompt": "abc", "max_tokens": 5})
    given = {name.partition("|")[0] for name in samples(own.client.get("/metrics").text)}
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    documented = set(re.findall(r"`([\w:]+)", page.split("\n## Metrics\n")[1].split("\n## ")[0]))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in given} - documented == set()


def test_gauges_show_the_engine_as_it_is(own: LiveServer) -> None:
    values = samples(own.client.get("/metrics").text)
    assert values["anaphora_kv_blocks"] == values["anaphora_kv_free_blocks"] == 256
    assert values["anaphora_kv_usage_ratio"] == 0
    assert values["anaphora_requests_running"] == values["anaphora_requests_waiting"] == 0
    assert values[f"anaphora_server_info|alphabet|{__version__}"] == 1


def test_openmetrics_is_spoken_to_those_who_ask(live: LiveServer) -> None:
    response = live.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == "anaphora_prompt_tokens" for family in parse_openmetrics(response.text))


def test_latencies_run_from_arrival_to_first_token_and_from_token_to_token() -> None:
    times = iter([102.0, 103.0])
    metrics = Metrics("m", lambda: EngineStats(num_blocks=1), clock=lambda: next(times))
    timer = metrics.start_request(started=99.0)
    for token_ids in ((7,), (), (8,)):  # what brings no token does not count
        timer.observe(Delta("r", token_ids, "", 1, 0, 1))
    timer.finish("stop")
    values = samples(metrics.expose("")[0].decode())
    assert values["anaphora_time_to_first_token_seconds_sum"] == 3.0
    assert values["anaphora_inter_token_latency_seconds_sum"] == 1.0
    assert values["anaphora_inter_token_latency_seconds_count"] == 1


def test_vllms_names_tell_the_same(own: LiveServer) -> None:
    for _ in range(2):
        own.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 5})
    values = samples(own.client.get("/metrics").text)
    of_vllm = {name.partition("|")[0]: value for name, value in values.items() if name.startswith("vllm:")}
    assert of_vllm["vllm:prefix_cache_queries_total"] == values["anaphora_prompt_tokens_total"] == 80
    assert of_vllm["vllm:prefix_cache_hits_total"] == values["anaphora_cached_tokens_total"] == 32
    assert of_vllm["vllm:time_to_first_token_seconds_count"] == 2
    text = own.client.get("/metrics").text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="alphabet"} 32.0' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="alphabet"} 2.0' in text


def test_the_blocks_of_the_pool_are_each_in_one_state(own: LiveServer) -> None:
    own.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 5})
    values = samples(own.client.get("/metrics").text)
    blocks = {name.partition("|")[2]: value for name, value in values.items() if name.startswith("anaphora_blocks")}
    assert blocks == {"free": 254, "evictable": 2, "pinned": 0}


def test_hits_are_told_by_the_tier_that_had_them() -> None:
    manager = KVCacheManager(4, 4, host_blocks=8)
    for first in (100, 200, 100):
        sequence = manager.start(range(first, first + 13))
        manager.allocate(sequence, 13 - sequence.num_cached_tokens)
        manager.commit(sequence, 13 - sequence.num_computed_tokens)
        manager.finish(sequence)
    values = {
        f"{sample.name}{sample.labels or ''}": sample.value
        for family in CacheCollector(manager).collect()
        for sample in family.samples
    }
    assert values["anaphora_prefix_cache_hit_tokens_total{'tier': 'device'}"] == 0
    assert values["anaphora_prefix_cache_hit_tokens_total{'tier': 'host'}"] == 12
    assert values["anaphora_host_blocks{'state': 'cached'}"] == 6
    assert values["anaphora_host_blocks{'state': 'free'}"] == 2
    assert values["anaphora_saved_blocks_total"] == 6
    assert values["anaphora_loaded_blocks_total"] == 3
    assert values["anaphora_host_evicted_blocks_total"] == 0


def test_vllms_names_call_host_memory_external() -> None:
    stats = EngineStats(num_blocks=4, prompt_tokens=39, cached_tokens=12, host_cached_tokens=8)
    metrics = Metrics("m", lambda: stats, manager=KVCacheManager(4, host_blocks=8))
    values = samples(metrics.expose("")[0].decode())
    of_vllm = {name.split("|")[0]: value for name, value in values.items() if name.startswith("vllm:")}
    assert of_vllm["vllm:prefix_cache_hits_total"] == 4
    assert of_vllm["vllm:external_prefix_cache_queries_total"] == 35
    assert of_vllm["vllm:external_prefix_cache_hits_total"] == 8
