"""Load: what is queued on a replica, and how fast it is taken to be."""

from __future__ import annotations

import pytest

from anaphora.fleet.load import Load, believed_speed, pooled_speed


def test_a_prompt_is_queued_until_its_answer_begins() -> None:
    load = Load()
    first, second = load.depart(1000, 0.0), load.depart(500, 0.0)
    assert load.inflight_tokens(0.1) == 1500
    first.arrive(0.2)
    assert load.inflight_tokens(0.2) == 500
    second.end(0.3)
    second.end(0.3)
    assert load.inflight_tokens(0.3) == 0
    assert len(load.inflight) == 1


def test_a_prompt_that_must_be_done_by_now_is_not_queued_though_its_answer_is_awaited() -> None:
    load = Load(prefill_tokens_per_s=1000)
    load.depart(1000, 0.0)
    assert load.inflight_tokens(2.0) == 1000
    assert load.inflight_tokens(3.0) == 0
    assert len(load.inflight) == 1


def test_only_streams_that_found_no_queue_tell_the_speed() -> None:
    load = Load(prefill_tokens_per_s=1000)
    alone, behind = load.depart(2000, 0.0), load.depart(2000, 0.0)
    behind.arrive(4.0)
    assert load.num_samples == 0
    alone.arrive(1.0)
    assert load.prefill_tokens_per_s == pytest.approx(1200)
    whole = load.depart(2000, 10.0)
    whole.end(10.0)
    load.depart(2000, 10.0).arrive(99.0, is_stream=False)
    assert load.num_samples == 1


def test_equal_replicas_count_as_equally_fast_and_another_kind_does_not() -> None:
    loads = [Load(prefill_tokens_per_s=speed, num_samples=20) for speed in (900, 1000, 1100, 4000)]
    pooled = pooled_speed([*loads, Load()])
    assert pooled == 1050
    assert [believed_speed(load, pooled) for load in loads] == [1050, 1050, 1050, 4000]
    assert believed_speed(Load(prefill_tokens_per_s=9999, num_samples=1), pooled) == 1050
    assert pooled_speed([]) == Load().prefill_tokens_per_s
