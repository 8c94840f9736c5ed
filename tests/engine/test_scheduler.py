"""Which tokens of which requests a step computes: budget, order, admission, preemption."""

from __future__ import annotations

import pytest

from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import toy_output


def spans(toy: ToyEngine) -> list[tuple[int, int]]:
    """(start, number of tokens) of the last step's spans."""
    return toy.executor.batches[-1]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    toy = toy_engine(max_num_batched_tokens=8)
    toy.run(request("a", range(1, 21), max_tokens=2))
    assert toy.executor.batches == [[(0, 8)], [(8, 8)], [(16, 4)], [(20, 1)]]


def test_prefill_and_decode_share_a_step_and_its_budget() -> None:
    toy = toy_engine(max_num_batched_tokens=8)
    toy.submit(request("a", range(4), max_tokens=9))
    toy.step()
    toy.submit(request("b", range(10, 30), max_tokens=1))
    toy.step()
    assert spans(toy) == [(4, 1), (0, 7)]
    toy.step()
    assert spans(toy) == [(5, 1), (7, 7)]


def test_several_requests_are_admitted_in_one_step_in_order_of_arrival() -> None:
    toy = toy_engine(max_num_batched_tokens=10)
    toy.submit(request("a", range(4)), request("b", range(10, 13)), request("c", range(20, 26)))
    toy.step()
    assert spans(toy) == [(0, 4), (0, 3), (0, 3)]


def test_no_more_requests_run_at_once_than_allowed() -> None:
    toy = toy_engine(max_num_seqs=2)
    toy.submit(*(request(name, [i], max_tokens=2) for i, name in enumerate("abc")))
    toy.step()
    assert (toy.engine.stats().num_running, toy.engine.stats().num_waiting) == (2, 1)
    toy.step()
    toy.step()
    assert (toy.engine.stats().num_running, toy.engine.stats().num_waiting) == (1, 0)


def test_cached_tokens_do_not_count_against_the_budget() -> None:
    toy = toy_engine(max_num_batched_tokens=8)
    prompt = list(range(1, 18))
    toy.run(request("cold", prompt, max_tokens=1))
    toy.submit(request("warm", [*prompt, 20, 21], max_tokens=1), request("next", range(30, 40), max_tokens=1))
    toy.step()
    assert spans(toy) == [(16, 3), (0, 5)]


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_tokens_not_computed_yet_are_never_a_hit(index: str) -> None:
    toy = toy_engine(index=index, max_num_batched_tokens=8)
    prompt = list(range(1, 18))
    toy.submit(request("a", prompt, max_tokens=1))
    toy.step()
    toy.submit(request("b", prompt, max_tokens=1))
    toy.engine.abort("a")  # its first 8 tokens are computed, the other 9 are not
    toy.step()
    assert spans(toy) == [(8, 8)]
    toy.run()
    assert toy.outcomes["b"].num_cached_tokens == 8


def test_chunks_of_ones_own_prompt_are_no_hits() -> None:
    toy = toy_engine(max_num_batched_tokens=8)
    (outcome,) = toy.run(request("cold", range(33), max_tokens=3))
    assert outcome.num_cached_tokens == 0
    assert toy.engine.stats().cached_tokens == 0


def test_a_request_short_of_blocks_preempts_the_latest_arrival() -> None:
    toy = toy_engine(num_blocks=4)
    toy.submit(request("a", range(8), max_tokens=5), request("b", range(10, 18), max_tokens=2))
    toy.step()
    assert toy.manager.num_free_blocks == 0
    toy.step()
    # "a" needs a third block; "b" gave it up and waits, its first token is kept.
    assert spans(toy) == [(8, 1)]
    assert toy.outcomes["b"].token_ids == toy_output(range(10, 18), request("b", [0], max_tokens=1).sampling)
    stats = toy.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (1, 1, 1)


def test_the_latest_arrival_sits_out_rather_than_preempt_itself() -> None:
    toy = toy_engine(num_blocks=5)
    toy.submit(request("a", range(9), max_tokens=3), request("b", range(10, 18), max_tokens=2))
    toy.step()
    assert toy.manager.num_free_blocks == 0
    toy.step()
    assert spans(toy) == [(9, 1)]
    assert toy.engine.stats().num_preemptions == 0
    toy.step()
    toy.step()
    assert spans(toy) == [(8, 1)]
    assert toy.outcomes["b"].finish_reason == "length"


def test_preempted_requests_come_back_first_and_in_order_of_arrival() -> None:
    toy = toy_engine(num_blocks=6, max_num_batched_tokens=64)
    toy.submit(
        request("a", range(8), max_tokens=16),
        request("b", range(10, 18), max_tokens=16),
        request("c", range(20, 28), max_tokens=16),
        request("d", range(30, 38), max_tokens=16),
    )
    order: list[str] = []
    while toy.engine.has_work:
        order += [delta.request_id for delta in toy.step() if delta.finish_reason]
    assert order == ["a", "b", "c", "d"]
    assert toy.engine.stats().num_preemptions >= 2


def test_nobody_is_admitted_while_running_requests_are_short_of_blocks() -> None:
    toy = toy_engine(num_blocks=5)
    toy.submit(request("a", range(9), max_tokens=4), request("b", range(10, 18), max_tokens=2))
    toy.step()
    toy.submit(request("c", [40], max_tokens=1))
    toy.step()
    assert toy.engine.stats().num_waiting == 1


def test_requests_that_share_a_prefix_and_fill_the_pool_all_finish() -> None:
    toy = toy_engine(num_blocks=24)
    shared = [i % 40 for i in range(64)]
    toy.run(request("first", shared, max_tokens=1))
    requests = [request(f"r{i}", [*shared, i], max_tokens=8) for i in range(8)]
    toy.submit(*requests)
    toy.step()
    assert toy.manager.num_free_blocks == 0
    toy.run()
    outcomes = [toy.outcomes[f"r{i}"] for i in range(8)]
    assert [outcome.finish_reason for outcome in outcomes] == ["length"] * 8
    assert [outcome.num_cached_tokens for outcome in outcomes] == [64] * 8
    for i, outcome in enumerate(outcomes):
        assert outcome.token_ids == toy_output([*shared, i], requests[i].sampling)
    assert toy.engine.stats().num_preemptions >= 1


def test_a_resumed_request_counts_its_hits_apart_and_keeps_its_cached_tokens() -> None:
    toy = toy_engine(num_blocks=5)
    toy.submit(request("old", range(20, 28), max_tokens=2), request("a", range(1, 10), max_tokens=2))
    toy.step()
    toy.step()
    assert (toy.engine.stats().num_preemptions, toy.outcomes["old"].finish_reason) == (1, "length")
    toy.step()
    assert spans(toy) == [(8, 2)]  # its last prompt token and the token that it had drawn before
    assert toy.outcomes["a"].finish_reason == "length"
    assert toy.outcomes["a"].num_cached_tokens == 0
    stats = toy.manager.stats()
    assert (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits) == (17, 0, 10, 8)
    assert toy.engine.stats().cached_tokens == 0


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: 0 is not allowed; it must be at least 1"):
        toy_engine(**{option: 0})
