"""The virtual executor: the engine's own loop, by a clock that only work moves on, with costs that are data."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest

from anaphora import KVCacheManager
from anaphora.engine.calibration import (
    MeasuredStep,
    StepTimer,
    compare,
    example_arrivals,
    fit_profile,
    with_overhead,
)
from anaphora.engine.cost_model import CostModel, HardwareProfile, WorkModel
from anaphora.engine.executor import Batch, Span
from anaphora.engine.loop import Engine
from anaphora.engine.reference import ReferenceExecutor
from anaphora.engine.replay import Arrival, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import FILLER_TOKEN, ScriptedSampler, VirtualClock, VirtualExecutor, scripted_sampler
from anaphora.tokens import pack
from tests.engine.toy_engine import request
from tests.tiny_models import random_weights, tiny_shape

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = tiny_shape()
PROFILE = HardwareProfile("test", 0.001, 1e9, 1e9, 1e9, 1e9)
PER_SPAN = HardwareProfile("a second a span", 1.0, None, None, None, None)


def virtual_engine(profile: HardwareProfile = PER_SPAN, **options: int) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    executor = VirtualExecutor(SHAPE, profile, clock)
    return Engine(executor, KVCacheManager(64, 16), clock=clock, **options), clock  # type: ignore[arg-type]


def span(start: int, num_tokens: int, num_logits: int = 1) -> Span:
    return Span(np.zeros(num_tokens, np.int32), start, [array("i", range(1, 65))], num_logits)


def test_a_step_lasts_as_long_as_its_work_takes() -> None:
    work = WorkModel(SHAPE).of(Batch([span(10, 4), span(0, 3, num_logits=0)]))
    layer_weights = 64 * (2 * 64 + 2 * 32 + 3 * 96)
    head_weights = 64 * 320
    assert work.num_spans == 2
    assert work.weight_bytes == 2 * (2 * layer_weights + head_weights)
    assert work.flops == 2 * (2 * layer_weights * 7 + head_weights * 1)
    assert work.attention_flops == 4 * 2 * 64 * ((10 * 4 + 10) + 6)
    assert work.kv_bytes == (2 * 2 * 2 * 32) * (14 + 3)
    assert CostModel(SHAPE, PROFILE).step_s(Batch([span(10, 4), span(0, 3, num_logits=0)])) == pytest.approx(
        0.002 + sum(work[1:5]) / 1e9
    )
    assert work.num_rows == 1


def test_the_engines_own_time_is_for_a_step_and_for_each_row_that_is_drawn_from() -> None:
    profile = HardwareProfile("x", 0.0, None, None, None, None, step_s=1.0, row_s=0.25)
    spans = [span(0, 4), span(9, 1), span(0, 3, num_logits=0)]
    assert CostModel(SHAPE, profile).step_s(Batch(spans)) == 1.5


def test_only_work_and_waiting_for_arrivals_move_the_clock() -> None:
    engine, clock = virtual_engine()
    arrivals = [Arrival(2.5, request("a", [1], max_tokens=2)), Arrival(10.0, request("b", [2], max_tokens=1))]
    a, b = replay(engine, clock, arrivals)
    assert (a.first_token_s, a.finished_s, a.ttft_s) == (3.5, 4.5, 1.0)
    assert (b.first_token_s, b.finished_s) == (11.0, 11.0)
    assert clock() == 11.0


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    engine, clock = virtual_engine()
    arrivals = [Arrival(0.0, request("a", [1], max_tokens=2)), Arrival(0.4, request("b", [2], max_tokens=1))]
    a, b = replay(engine, clock, arrivals)
    assert (a.first_token_s, b.first_token_s, b.ttft_s) == (1.0, 3.0, 2.6)


def test_a_client_that_waits_for_its_answer_sends_the_next_request_then() -> None:
    engine, clock = virtual_engine()
    arrivals = [Arrival(0.0, request(name, [n], max_tokens=2)) for n, name in enumerate("abc", 1)]
    a, b, c = replay(engine, clock, arrivals, concurrency=1)
    assert [(each.arrived_s, each.ttft_s, each.finished_s) for each in (a, b, c)] == [(0, 1, 2), (2, 1, 4), (4, 1, 6)]


def test_arrivals_that_go_back_in_time_are_refused() -> None:
    engine, clock = virtual_engine()
    with pytest.raises(ValueError, match="arrivals: 'b' comes before the one ahead of it"):
        replay(engine, clock, [Arrival(2.0, request("a", [1])), Arrival(1.0, request("b", [1]))])


def test_requests_say_what_they_were_told_to_say_and_the_next_turn_finds_it() -> None:
    clock = VirtualClock()
    said = list(range(100, 140))
    engine = Engine(
        VirtualExecutor(SHAPE, PER_SPAN, clock),
        KVCacheManager(64, 16),
        clock=clock,
        new_sampler=scripted_sampler({"turn 1": said}),
    )
    turn_1 = request("turn 1", range(1, 9), max_tokens=40)
    turn_2 = request("turn 2", [*range(1, 9), *said, 9], max_tokens=2)
    deltas = []
    for turn in (turn_1, turn_2):
        engine.submit(turn)
        while engine.has_work:
            deltas += engine.step()
    assert [token for delta in deltas for token in delta.token_ids] == [*said, FILLER_TOKEN, FILLER_TOKEN]
    assert deltas[-1].num_cached_tokens == 32  # 8 + 39 computed tokens are 2 whole blocks


def test_equal_arrivals_give_equal_records_to_the_last_bit() -> None:
    arrivals = example_arrivals(SHAPE.vocab_size, max_tokens=400, rate_per_s=50)
    first, second = (replay(*virtual_engine(PROFILE, max_num_seqs=4), arrivals) for _ in range(2))
    assert first == second
    assert all(record.finish_reason == "length" for record in first)


def test_the_virtual_run_finds_the_cached_tokens_that_the_real_one_finds() -> None:
    executor = ReferenceExecutor(SHAPE, random_weights(SHAPE))
    engine = Engine(executor, KVCacheManager(200, 16))
    arrivals = [
        Arrival(0.0, arrival.request) for arrival in example_arrivals(SHAPE.vocab_size, max_tokens=300, num_requests=12)
    ]
    comparison = compare(engine, SHAPE, PROFILE, arrivals)
    assert comparison.num_equal_runs == 1
    assert sum(record.num_cached_tokens for record in comparison.real) > 0
    assert "cached tokens of each: equal" in comparison.to_table()


def test_fitting_recovers_the_speeds_that_made_the_times() -> None:
    truth = HardwareProfile("truth", 0.002, 3e9, 5e9, 7e8, None)
    clock = VirtualClock()
    timer = StepTimer(VirtualExecutor(SHAPE, truth, clock), SHAPE, num_blocks=600, block_size=16, clock=clock)
    timer.run(1)
    fitted = fit_profile("fitted", timer.steps)
    for name in ("span_s", "weight_bytes_per_s", "flops_per_s", "attention_flops_per_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    assert fitted.kv_bytes_per_s is None or fitted.kv_bytes_per_s > 1e15


def test_the_engines_own_time_is_measured_by_the_engines_clocks() -> None:
    clock = VirtualClock()

    class SlowSampler(ScriptedSampler):
        def sample(self, logits: object, position: int) -> int:
            clock.advance(0.125)
            return 0

    engine = Engine(
        VirtualExecutor(SHAPE, PROFILE, clock),
        KVCacheManager(64, 16),
        clock=clock,
        new_sampler=lambda request, seed: SlowSampler(),
    )
    profile = with_overhead(PROFILE, engine)
    assert profile.row_s == pytest.approx(0.125)
    assert profile.step_s == pytest.approx(0, abs=1e-9)


def test_fitting_needs_a_step() -> None:
    with pytest.raises(ValueError, match="steps: none was measured"):
        fit_profile("none", [])


def test_no_speed_is_fitted_below_zero() -> None:
    work = WorkModel(SHAPE)
    shorter_with_more_tokens = [
        MeasuredStep(work.of(Batch([span(0, num)])), seconds) for num, seconds in ((8, 0.02), (64, 0.01))
    ]
    profile = fit_profile("odd", shorter_with_more_tokens)
    assert profile.span_s >= 0
    assert all(speed is None or speed > 0 for speed in (profile.flops_per_s, profile.kv_bytes_per_s))


def test_a_profile_is_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PER_SPAN.save(path)
    assert HardwareProfile.load(path) == PER_SPAN
    older = json.loads(path.read_text())
    del older["host_bytes_per_s"]
    path.write_text(json.dumps(older))
    assert HardwareProfile.load(path) == PER_SPAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s: 0 is not allowed; it must be above 0"),
        ({"row_s": -1}, "row_s: -1 is not allowed; it must be 0 or more"),
        ({"step_s": None}, "step_s: expected a number, got None"),
        ({"span_s": -1}, "span_s: -1 is not allowed; it must be 0 or more"),
        ({"kv_bytes_per_s": "fast"}, "kv_bytes_per_s: expected a number, got 'fast'"),
        ({"gpu": 1}, "expected an object with the fields attention_flops_per_s, flops_per_s"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        HardwareProfile.load(path)


def test_a_thousand_requests_take_as_many_steps_as_they_must() -> None:
    engine, clock = virtual_engine(PROFILE, max_num_seqs=64)
    requests = [
        Request(f"r{i}", pack([i % 300, i // 300, *range(14)]), SamplingParams(max_tokens=4, temperature=0.0))
        for i in range(1000)
    ]
    records = replay(engine, clock, [Arrival(0.0, each) for each in requests])
    assert sum(record.num_output_tokens for record in records) == 4000
    assert engine.stats().num_steps >= 1000 * 4 // 64
