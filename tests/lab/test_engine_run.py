"""Whole engines on a trace: requests that come one by one find what the cache alone does; time is the cost model's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anaphora.cli import main
from anaphora.engine.cost_model import HardwareProfile
from anaphora.lab.encoding import EstimatingEncoder
from anaphora.lab.engine_run import EngineSetting, run_engines, tokens_of
from anaphora.lab.importers import open_requests
from anaphora.lab.model_files import hardware, model_shape
from anaphora.lab.replay import CacheReplay, count
from anaphora.lab.trace import Prompt, Trace, build_trace
from anaphora.lab.workload import as_mooncake, generate
from anaphora.tokens import pack
from tests.tiny_models import tiny_shape

SHAPE = tiny_shape()
A_SECOND_A_SPAN = HardwareProfile("a second a span", 1.0, None, None, None, None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    file.write_text("\n".join(as_mooncake(generate(["chat", "shared-system"], 6, 0.01, seed=2))))
    return file


def trace_of(path: Path, block_size: int | None = None) -> Trace:
    trace = build_trace("t", open_requests(path).requests(), EstimatingEncoder(), block_size)
    # Short answers, so that a run is quick.
    trace.prompts = [Prompt(p.units, p.tail, p.num_tokens, p.time_s, num_output_tokens=2) for p in trace.prompts]
    return trace


@pytest.mark.parametrize("block_size", [16, 512])
def test_requests_that_come_one_by_one_find_what_the_cache_alone_does(path: Path, block_size: int) -> None:
    trace = trace_of(path, block_size)
    fast = HardwareProfile("fast", 1e-6, None, None, None, None)
    outcome = run_engines(trace, EngineSetting(4000, block_size=block_size), SHAPE, fast)
    alone = count(trace.prompts, CacheReplay(4000, block_size, trace.unit), block_size)
    assert (outcome.cached_tokens, outcome.prompt_tokens) == (alone.num_cached_tokens, trace.num_tokens)
    assert outcome.output_tokens == 2 * len(trace.prompts)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_host_memory_serves_what_the_cache_alone_says_and_costs_the_time_to_move_it(path: Path, index: Any) -> None:
    trace = trace_of(path, 16)
    capacity = max(-(-(p.num_tokens + 2) // 16) for p in trace.prompts) + 3
    free = HardwareProfile("fast", 1e-6, None, None, None, None)
    slow = replace(free, host_bytes_per_s=1e3)
    setting = EngineSetting(capacity, index=index, host_blocks=4000)
    without, outcome, slowed = (
        run_engines(trace, each, SHAPE, profile)
        for each, profile in ((replace(setting, host_blocks=0), free), (setting, free), (setting, slow))
    )
    assert without.host_cached_tokens == 0 < outcome.host_cached_tokens
    assert outcome.cached_tokens > without.cached_tokens
    # As much as a cache that holds everything.
    assert outcome.cached_tokens == run_engines(trace, EngineSetting(4000, index=index), SHAPE, free).cached_tokens
    assert sum(slowed.ttft_s) > 2 * sum(outcome.ttft_s)
    assert outcome.as_dict()["cached_tokens_by_tier"] == {
        "device": outcome.cached_tokens - outcome.host_cached_tokens,
        "host": outcome.host_cached_tokens,
    }


def test_without_a_cache_nothing_is_found_and_all_is_answered(path: Path) -> None:
    trace = trace_of(path, 16)
    outcome = run_engines(trace, EngineSetting(4000, has_cache=False), SHAPE, A_SECOND_A_SPAN)
    assert (outcome.cached_tokens, outcome.num_requests) == (0, len(trace.prompts))


def test_what_does_not_fit_is_refused_and_counted(path: Path) -> None:
    trace = trace_of(path, 16)
    blocks = sorted(-(-(p.num_tokens + 2) // 16) for p in trace.prompts)
    outcome = run_engines(trace, EngineSetting(blocks[-1] - 1), SHAPE, A_SECOND_A_SPAN)
    assert outcome.num_refused == sum(each == blocks[-1] for each in blocks)
    assert outcome.num_requests + outcome.num_refused == len(trace.prompts)


def test_replicas_share_the_work_and_the_time() -> None:
    prompts = [Prompt(pack([n]), None, 1, 0.0, num_output_tokens=1) for n in range(4)]
    trace = Trace("t", 1, prompts)
    one, two = (run_engines(trace, EngineSetting(64, replicas=n), SHAPE, A_SECOND_A_SPAN) for n in (1, 2))
    assert (one.duration_s, two.duration_s) == (4.0, 2.0)
    assert two.ttft_s == [2.0] * 4


def test_arrivals_can_come_faster_or_all_at_once() -> None:
    prompts = [Prompt(pack([n]), None, 1, 100.0 * n, num_output_tokens=1) for n in range(3)]
    trace = Trace("t", 1, prompts)
    times = {}
    for speed in (1.0, 10.0, None):
        times[speed] = run_engines(trace, EngineSetting(64, speed=speed), SHAPE, A_SECOND_A_SPAN).duration_s
    assert times == {1.0: 201.0, 10.0: 21.0, None: 3.0}


def test_a_unit_is_spelled_out_as_tokens_of_its_own() -> None:
    prompt = Prompt(pack([3, 5]), 7, 10, 0.0)
    assert np.frombuffer(tokens_of(prompt, 4), np.int32).tolist() == [13, 14, 15, 16, 21, 22, 23, 24, 29, 30]
    with pytest.raises(ValueError, match="int32"):
        tokens_of(Prompt(pack([2**30]), None, 4, 0.0), 4)


class TestCommand:
    def test_time_and_throughput_beside_no_cache(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--engine", "--model", "SmolLM2-135M-Instruct", "--capacity", "1GiB", "--beside-no-cache", "--json"]
        assert main(["simulate", str(path), "--limit", "6", *options]) == 0
        runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
        assert runs[0]["hit_rate"] > 0 == runs[1]["hit_rate"]
        assert runs[0]["ttft_s"]["p50"] <= runs[1]["ttft_s"]["p50"]

    def test_host_memory_has_columns_of_its_own(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--engine", "--model", "SmolLM2-135M-Instruct", "--capacity", "200MiB"]
        assert main(["simulate", str(path), "--limit", "6", *options, "--host-capacity", "0", "2GiB"]) == 0
        header, *_ = (line for line in capsys.readouterr().out.splitlines() if "policy" in line)
        assert "host blocks" in header
        assert "from host" in header

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "needs --model and --capacity"),
            (["--model", "Llama-3.1-8B", "--capacity", "1GiB", "--speed", "0"], "--speed"),
            (["--model", "Llama-3.1-8B", "--capacity", "1GiB", "--routing", "prefix"], "not with"),
            (["--model", "DeepSeek-V3", "--capacity", "9GiB"], "no whole shape"),
            (["--model", "Llama-3.1-8B", "--capacity", "1GiB", "--hardware", "abacus"], "--hardware: one of h100"),
        ],
    )
    def test_what_cannot_be_done_says_so(
        self, path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["simulate", str(path), "--engine", *options]) != 0
        assert message in capsys.readouterr().err

    def test_a_profile_of_this_machine_is_read(self, tmp_path: Path) -> None:
        A_SECOND_A_SPAN.save(tmp_path / "p.json")
        assert hardware(str(tmp_path / "p.json")) == A_SECOND_A_SPAN
        assert model_shape("Llama-3.1-8B").num_kv_heads == 8
