"""A prefix that is being computed counts: who shares it waits for it, if that pays, and never for ever."""

from __future__ import annotations

import pytest

from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import VOCAB_SIZE, toy_output

LONG = [(11 * i + 5) % VOCAB_SIZE for i in range(160)]
INDEXES = pytest.mark.parametrize("index", ["radix", "hash"])


def holding(**options: object) -> ToyEngine:
    return toy_engine(**{"num_blocks": 400, "block_size": 16, **options})  # type: ignore[arg-type]


def num_held(toy: ToyEngine) -> int:
    return toy.engine.stats().num_held


@INDEXES
@pytest.mark.parametrize(("budget", "min_held_tokens"), [(4096, 64), (50, 16)])
def test_sixty_four_equal_prompts_cost_one_prefill(index: str, budget: int, min_held_tokens: int) -> None:
    toy = holding(index=index, max_num_batched_tokens=budget, min_held_tokens=min_held_tokens)
    prompt = LONG[:129]
    requests = [request(f"r{i}", prompt, max_tokens=1) for i in range(64)]
    outcomes = toy.run(*requests)
    # 8 whole blocks once, and for everyone the one token that is never served.
    assert toy.executor.num_computed_tokens == 128 + 64
    assert [outcome.num_cached_tokens for outcome in outcomes] == [0] + [128] * 63
    assert {outcome.token_ids for outcome in outcomes} == {toy_output(prompt, requests[0].sampling)}


def test_eight_equal_prompts_of_65_tokens_compute_72() -> None:
    toy = holding()
    toy.run(*(request(f"r{i}", LONG[:65], max_tokens=1) for i in range(8)))
    assert toy.executor.num_computed_tokens == 65 + 7


def test_others_go_on_while_some_are_held() -> None:
    toy = holding()
    toy.submit(request("first", LONG), request("second", LONG), request("other", [1, 2, 3]))
    toy.step()
    assert toy.executor.batches[-1] == [(0, 160), (0, 3)]
    assert num_held(toy) == 1
    toy.step()
    assert toy.executor.batches[-1] == [(160, 1), (3, 1), (144, 16)]
    assert num_held(toy) == 0


def test_of_a_prompt_in_chunks_others_start_from_what_they_share_as_soon_as_that_is_computed() -> None:
    toy = holding(max_num_batched_tokens=100)
    toy.submit(request("first", LONG), request("second", [*LONG[:96], 1, 2], max_tokens=1))
    toy.step()
    assert toy.executor.batches[-1] == [(0, 100)]
    toy.step()
    assert toy.executor.batches[-1] == [(100, 60), (96, 2)]
    assert toy.outcomes["second"].num_cached_tokens == 96


@pytest.mark.parametrize(("num_shared", "num_first_step"), [(63, 2), (64, 1)])
def test_nobody_is_held_for_a_prefix_too_short_to_be_worth_it(num_shared: int, num_first_step: int) -> None:
    toy = holding()
    a, b = ([*LONG[:num_shared], token, *range(20)] for token in (40, 41))
    toy.submit(request("a", a), request("b", b))
    toy.step()
    assert len(toy.executor.batches[-1]) == num_first_step


def test_what_is_cached_already_does_not_count_as_saved() -> None:
    toy = holding()
    toy.run(request("before", LONG[:80], max_tokens=1))
    toy.submit(request("a", LONG[:129]), request("b", LONG[:129]))
    toy.step()
    assert toy.executor.batches[-1] == [(80, 49), (80, 49)]


@pytest.mark.parametrize(
    ("leader", "follower"),
    [
        ({"salt": "one"}, {"salt": "two"}),
        ({"write_cache": False}, {}),
        ({}, {"read_cache": False}),
    ],
)
def test_nobody_is_held_for_what_it_cannot_be_served(leader: dict[str, object], follower: dict[str, object]) -> None:
    toy = holding()
    toy.submit(request("a", LONG, **leader), request("b", LONG, **follower))  # type: ignore[arg-type]
    toy.step()
    assert len(toy.executor.batches[-1]) == 2


def test_a_step_that_fails_is_waited_for_no_longer_than_that() -> None:
    toy = holding()
    toy.submit(*(request(f"r{i}", LONG, max_tokens=1) for i in range(3)))
    toy.executor.failures.append(RuntimeError("flaky"))
    toy.step()
    assert (toy.outcomes["r0"].finish_reason, num_held(toy)) == ("error", 2)
    toy.step()
    assert toy.executor.batches[-1] == [(0, 160)]
    toy.run()
    assert toy.outcomes["r2"].num_cached_tokens == 144


def test_if_who_computes_it_is_aborted_between_chunks_another_goes_on_from_there() -> None:
    toy = holding(max_num_batched_tokens=64)
    toy.submit(*(request(f"r{i}", LONG, max_tokens=1) for i in range(3)))
    toy.step()
    toy.abort("r0")
    toy.step()
    assert toy.executor.batches[-1] == [(64, 64)]
    toy.run()
    assert toy.outcomes["r2"].num_cached_tokens == 128  # the 16 tokens after that are not worth a step


def test_a_held_request_can_be_aborted() -> None:
    toy = holding()
    toy.submit(request("first", LONG, max_tokens=1), request("second", LONG))
    toy.step()
    assert num_held(toy) == 1
    toy.abort("second")
    toy.run()
    assert toy.executor.num_computed_tokens == len(LONG)


def test_followers_of_followers_each_compute_only_what_is_new() -> None:
    toy = holding()
    prompts = [[*LONG[:64], *range(i, i + 20), *LONG[64:144], token] for i in (0, 9) for token in range(4)]
    toy.run(*(request(f"r{i}", prompt, max_tokens=1) for i, prompt in enumerate(prompts)))
    # 64 shared by all, then (20 + 80) by each half in whole blocks of 16, then what is left for each.
    assert toy.executor.num_computed_tokens == 64 + 2 * 96 + 8 * (165 - 160)
