"""What replicas report: usage in answers, load in metrics; and the alarm when predictions drift."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.router.engine_metrics import EngineMetrics, read_metrics
from anaphora.router.metrics import Drift
from anaphora.router.usage import UsageReader

OPENAI = b'{"choices":[],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":48}}}'
ANTHROPIC = (
    b'data: {"type":"message_start","message":{"usage":{"input_tokens":10,"cache_read_input_tokens":32}}}\n\n'
    + b'data: {"type":"content_block_delta"}\n\n' * 2000
)


@pytest.mark.parametrize(("answer", "cached", "prompt"), [(OPENAI, 48, 90), (ANTHROPIC, 32, 10), (b"{}", None, None)])
@pytest.mark.parametrize("size", [7, 1000, 10**6])
def test_usage_is_read_however_the_answer_is_cut(answer: bytes, cached: int, prompt: int, size: int) -> None:
    reader = UsageReader()
    for at in range(0, len(answer), size):
        reader.feed(answer[at : at + size])
    assert (reader.cached_tokens, reader.prompt_tokens) == (cached, prompt)


def test_what_a_model_writes_cannot_imitate_usage() -> None:
    reader = UsageReader()
    reader.feed(OPENAI[:-1] + rb',"text":"\"cached_tokens\": 99999"}')
    assert reader.cached_tokens == 48


def test_vllms_metrics() -> None:
    metrics = read_metrics(
        """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="5000"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 100.0
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="c"} 200.0
process_start_time_seconds 1.7e+09
"""
    )
    assert metrics == EngineMetrics(
        5, 1, 0.25, 16, 5000, 1.7e9, 1.5e6, frozenset("ab"), frozenset("c"), 2
    )  # ranks add up; of the adapters' lines the newest counts


def test_sglangs_and_our_own_metrics() -> None:
    sglang = read_metrics('sglang:num_running_reqs 2\nsglang:num_queue_reqs 7\nsglang:token_usage{tp="0"} 0.5\n')
    assert (sglang.num_running, sglang.num_waiting, sglang.kv_usage) == (2, 7, 0.5)
    ours = read_metrics("anaphora_requests_running 1.0\nanaphora_kv_blocks 100.0\nanaphora_prompt_tokens_total 5.0\n")
    assert (ours.num_running, ours.block_size, ours.num_blocks, ours.prompt_tokens) == (1, 16, 100, 5)


@given(st.text() | st.text(alphabet='vllm:kv_cache_usage_perc{}="\n 0123.e+-NaInf', max_size=200))
def test_no_exposition_makes_it_fail(text: str) -> None:
    metrics = read_metrics(text + "\nvllm:kv_cache_usage_perc NaN\nvllm:num_requests_running +Inf\n")
    assert 0 <= metrics.kv_usage <= 1
    assert metrics.num_running >= 0


def test_the_alarm_needs_enough_answers_and_a_real_difference() -> None:
    drift = Drift()
    for _ in range(19):
        drift.add(100, 0)
    assert not drift.is_alarming
    drift.add(100, 0)
    assert drift.is_alarming
    assert drift.share == 1
    for _ in range(200):
        drift.add(100, 96)
    assert drift.share == pytest.approx(0.04)
    assert not drift.is_alarming
