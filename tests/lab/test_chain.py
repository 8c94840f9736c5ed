"""Hit rate, batch, throughput, first token: the chain on a machine whose costs are set, and on a real executor."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from anaphora.cli import main
from anaphora.engine.cost_model import HardwareProfile
from anaphora.lab.chain import Memory, Traffic, picture, real, simulated, table
from tests.server.fake_engine import AlphabetExecutor
from tests.tiny_models import tiny_shape

SHAPE = tiny_shape()
PROMPTS_COST = HardwareProfile("prompts cost, steps nearly nothing", 1e-6, None, 1e9, None, None)
STEPS_COST = HardwareProfile("steps cost, prompts nothing", 0.0, 1e6, None, None, None)
MEMORY = Memory(num_blocks=200, max_num_batched_tokens=512)
PROMPT_BOUND = Traffic("prompt-bound", 32, 256, 4)
DECODE_BOUND = Traffic("decode-bound", 32, 32, 192)


def test_the_shared_part_alone_changes_from_point_to_point() -> None:
    for shared in (0.0, 0.5, 1.0):
        arrivals = PROMPT_BOUND.arrivals(shared, 1000)
        prompts = [bytes(each.request.prompt) for each in arrivals]
        assert {len(prompt) for prompt in prompts} == {4 * 256}
        assert len({prompt[: 4 * round(256 * shared)] for prompt in prompts}) == 1
        assert len(set(prompts)) == (1 if shared == 1.0 else 33)


def test_more_reuse_is_a_larger_batch_more_throughput_and_a_sooner_first_token() -> None:
    points = simulated(PROMPT_BOUND, [0.0, 0.5, 0.9], MEMORY, SHAPE, PROMPTS_COST)
    assert points[0].hit_rate == 0
    for before, after in itertools.pairwise(points):
        assert after.hit_rate > before.hit_rate
        assert after.batch > before.batch
        assert after.output_tokens_per_s > before.output_tokens_per_s
        assert after.ttft_s < before.ttft_s


def test_throughput_hardly_gains_where_the_steps_of_generation_take_the_time_and_memory_suffices() -> None:
    first, last = simulated(DECODE_BOUND, [0.0, 0.9], Memory(1000, max_num_batched_tokens=512), SHAPE, STEPS_COST)
    assert last.hit_rate > 0.4
    assert last.output_tokens_per_s / first.output_tokens_per_s - 1 < 0.06


def test_the_real_engine_finds_as_much_as_the_simulated_one() -> None:
    executor = AlphabetExecutor(max_context=2048)
    executor.allocate_kv(MEMORY.num_blocks, 16)
    for shared in (0.0, 0.5):
        (virtual,) = simulated(PROMPT_BOUND, [shared], MEMORY, SHAPE, PROMPTS_COST)
        measured = real(PROMPT_BOUND, shared, MEMORY, executor)  # type: ignore[arg-type]
        assert (measured.hit_rate, measured.batch) == (virtual.hit_rate, virtual.batch)


def test_table_and_picture_show_every_point() -> None:
    points = simulated(PROMPT_BOUND, [0.0, 0.9], MEMORY, SHAPE, PROMPTS_COST)
    assert [row[2] for row in table(points).rows] == [f"{point.hit_rate:.2%}" for point in points]
    drawn = picture(points)
    assert drawn.count("<circle") == 3 * len(points)
    assert "2. higher throughput" in drawn


class TestCommand:
    def test_simulated(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = [
            "chain", "--model", "SmolLM2-135M-Instruct", "--requests", "8", "--prefill", "256", "4", "--decode", "32",
            "16", "--shared", "0", "0.75", "--svg", str(tmp_path), "--report", str(tmp_path / "r.html"),
        ]  # fmt: skip
        assert main(options) == 0
        out = capsys.readouterr().out
        assert "prompt-bound: 8 requests of 256 + 4 tokens" in out
        assert "throughput +" in out
        assert (tmp_path / "chain.svg").read_text().startswith("<svg")
        assert "<svg" in (tmp_path / "r.html").read_text()
        assert main([*options, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["points"]) == 4

    def test_too_little_memory_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["chain", "--capacity", "10", "--requests", "2"]) == 1
        assert "anaphora: " in capsys.readouterr().err

    def test_unbounded_memory_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["chain", "--capacity", "unbounded", "--requests", "2"]) == 1
        assert "--capacity: unbounded" in capsys.readouterr().err
