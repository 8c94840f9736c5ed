"""Priorities, deadlines, and who is preempted."""

from __future__ import annotations

import pytest

from anaphora.engine.request import RequestError
from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import toy_output


def order_of_ends(toy: ToyEngine) -> list[str]:
    ends: list[str] = []
    while toy.engine.has_work:
        ends += [delta.request_id for delta in toy.step() if delta.finish_reason]
    return ends


def test_the_lower_number_is_admitted_first() -> None:
    toy = toy_engine(max_num_seqs=1)
    toy.submit(*(request(name, [7], priority=i, max_tokens=1) for name, i in (("c", 3), ("a", -1), ("b", 0))))
    assert order_of_ends(toy) == ["a", "b", "c"]


def test_a_request_for_which_there_is_no_seat_takes_that_of_a_lower_priority() -> None:
    toy = toy_engine(max_num_seqs=2)
    toy.submit(*(request(name, [i], priority=1, max_tokens=9) for i, name in enumerate("xy")))
    toy.step()
    toy.submit(request("urgent", [40], max_tokens=2))
    assert order_of_ends(toy) == ["urgent", "x", "y"]
    assert toy.engine.stats().num_preemptions == 1
    assert toy.outcomes["y"].token_ids == toy_output([1], request("y", [1], max_tokens=9).sampling)


def test_a_request_for_which_there_are_no_blocks_takes_those_of_a_lower_priority() -> None:
    toy = toy_engine(num_blocks=6)
    toy.submit(*(request(name, range(10 * i, 10 * i + 8), priority=1, max_tokens=4) for i, name in enumerate("xy")))
    toy.step()
    toy.submit(request("urgent", range(30, 46), max_tokens=1))
    assert order_of_ends(toy)[0] == "urgent"


def test_a_request_that_needs_the_blocks_of_the_only_running_one_takes_them() -> None:
    toy = toy_engine(num_blocks=6)
    toy.submit(request("low", range(16), priority=1, max_tokens=4))
    toy.step()
    toy.submit(request("urgent", range(30, 42), max_tokens=1))
    assert order_of_ends(toy) == ["urgent", "low"]
    assert {outcome.finish_reason for outcome in toy.outcomes.values()} == {"length"}


def test_equals_do_not_preempt_each_other_for_a_seat() -> None:
    toy = toy_engine(max_num_seqs=1)
    toy.submit(request("a", [1], max_tokens=3), request("b", [2], max_tokens=1))
    assert order_of_ends(toy) == ["a", "b"]
    assert toy.engine.stats().num_preemptions == 0


def test_the_lowest_priority_is_preempted_first_though_it_came_first() -> None:
    toy = toy_engine(num_blocks=6)
    toy.submit(
        request("low", range(8), priority=1, max_tokens=9),
        request("a", range(10, 18), max_tokens=5),
        request("b", range(20, 28), max_tokens=5),
    )
    assert order_of_ends(toy)[-1] == "low"


@pytest.mark.parametrize("small_first", [True, False])
def test_of_equals_the_one_with_the_least_to_compute_again_is_preempted(small_first: bool) -> None:
    toy = toy_engine(num_blocks=8)
    others = [request("small", range(20, 28), max_tokens=6), request("big", range(30, 46), max_tokens=6)]
    toy.submit(request("old", range(8), max_tokens=6), *(others if small_first else reversed(others)))
    toy.step()
    assert toy.manager.num_free_blocks == 0
    toy.step()  # "old" needs a block
    stats = toy.engine.stats()
    assert (stats.num_preemptions, stats.num_running) == (1, 2)
    assert toy.executor.batches[-1] == [(8, 1), (16, 1)]


def test_what_others_hold_too_does_not_count_as_to_be_computed_again() -> None:
    toy = toy_engine(num_blocks=8)
    shared = list(range(1, 18))
    toy.run(request("seed", shared, max_tokens=1))
    toy.submit(
        request("old", range(30, 34), max_tokens=9),
        request("own", range(20, 23), max_tokens=6),
        request("first sharer", [*shared[:16], 40], max_tokens=3),
        request("sharer", [*shared[:16], 41], max_tokens=3),
    )
    toy.step()
    assert toy.manager.num_free_blocks == 0
    toy.step()
    # "own" has the fewest tokens in all, but each sharer has one that nobody else holds.
    assert toy.executor.batches[-1] == [(4, 1), (3, 1), (17, 1)]
    toy.run()


def test_a_request_that_is_not_done_by_its_deadline_is_aborted_wherever_it_is() -> None:
    now = [0.0]
    toy = toy_engine(max_num_seqs=1, clock=lambda: now[0])
    toy.submit(
        request("runs", [1], max_tokens=50, deadline_s=2.0),
        request("waits", [2], max_tokens=50, deadline_s=3.0),
        request("has time", [3], max_tokens=2),
    )
    toy.step()
    now[0] = 2.0
    toy.step()
    assert (toy.outcomes["runs"].finish_reason, toy.outcomes["runs"].error) == (
        "abort",
        "deadline_s: 2.0 s have passed",
    )
    assert len(toy.outcomes["runs"].token_ids) == 1
    now[0] = 3.5
    toy.run()
    assert toy.outcomes["waits"].finish_reason == "abort"
    assert toy.outcomes["has time"].finish_reason == "length"


def test_a_finished_request_has_no_deadline_even_if_its_id_comes_again() -> None:
    now = [0.0]
    toy = toy_engine(clock=lambda: now[0])
    toy.run(request("a", [1], max_tokens=1, deadline_s=1.0))
    toy.submit(request("a", [1], max_tokens=3))
    now[0] = 5.0
    toy.run()
    assert toy.outcomes["a"].finish_reason == "length"


@pytest.mark.parametrize("queue_order", ["fcfs", "lpm", "dfs", "fair"])
def test_who_has_less_than_half_of_its_time_left_goes_before_others_of_its_priority(queue_order: str) -> None:
    now = [0.0]
    toy = toy_engine(max_num_seqs=1, clock=lambda: now[0], queue_order=queue_order)
    toy.submit(request("first", [1], max_tokens=2))
    toy.step()
    toy.submit(
        *(request(f"patient {i}", [2, i], max_tokens=1) for i in range(3)),
        request("later", [3], max_tokens=1, deadline_s=12.0),
        request("sooner", [4], max_tokens=1, deadline_s=11.0),
    )
    now[0] = 7.0
    assert order_of_ends(toy)[:3] == ["first", "sooner", "later"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 1001}, "priority: 1001 is not allowed; it must be between -1000 and 1000"),
        ({"deadline_s": 0.0}, "deadline_s: 0.0 is not allowed; it must be above 0, or None"),
    ],
)
def test_priorities_and_deadlines_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request("a", [1], **options)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="queue_order: 'lifo' is not known"):
        toy_engine(queue_order="lifo")
