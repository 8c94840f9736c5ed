"""Several samples of one prompt: computed once, blocks shared, and each draws what it would draw alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anaphora.engine.request import RequestError, SamplingParams
from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import toy_output

PROMPT = list(range(1, 11))
DRAWN = {"temperature": 1.5, "seed": 7}


def samples(toy: ToyEngine, name: str, n: int) -> list[tuple[int, ...]]:
    return [toy.outcomes[f"{name}#{i}" if i else name].token_ids for i in range(n)]


def alone(sampling: SamplingParams, n: int) -> list[tuple[int, ...]]:
    return [toy_output(PROMPT, replace(sampling, seed=(sampling.seed or 0) + i)) for i in range(n)]


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_each_sample_is_what_its_seed_gives_alone_and_the_prompt_is_computed_once(index: str, block_size: int) -> None:
    toy = toy_engine(index=index, block_size=block_size)
    asked = request("a", PROMPT, n=5, max_tokens=6, **DRAWN)
    toy.run(asked)
    assert samples(toy, "a", 5) == alone(asked.sampling, 5)
    assert len(set(samples(toy, "a", 5))) == 5
    assert toy.executor.num_computed_tokens == len(PROMPT) + 5 * (6 - 1)
    assert toy.manager.num_free_blocks == toy.manager.num_blocks


def test_samples_share_the_blocks_of_the_prompt_and_copy_the_last_one_only() -> None:
    toy = toy_engine(block_size=4)
    toy.submit(request("a", PROMPT, n=4, max_tokens=4, **DRAWN))
    toy.step()
    assert toy.manager.num_blocks - toy.manager.num_free_blocks == 3
    toy.step()  # 2 whole blocks for all, and a block each for the 2 tokens after them and what they draw
    assert toy.manager.num_blocks - toy.manager.num_free_blocks == 2 + 4


def test_samples_end_one_by_one_and_the_request_with_the_last() -> None:
    sampling = request("a", PROMPT, n=3, max_tokens=8, **DRAWN).sampling
    stop = alone(sampling, 3)[1][2]  # the third token of the second sample
    toy = toy_engine()
    toy.run(request("a", PROMPT, n=3, max_tokens=8, stop_token_ids=(stop,), **DRAWN))
    assert [toy.outcomes[name].finish_reason for name in ("a", "a#1", "a#2")].count("stop") >= 1
    assert samples(toy, "a", 3) == alone(replace(sampling, stop_token_ids=(stop,)), 3)
    assert not toy.engine.has_work


def test_one_token_a_sample_ends_all_in_the_step_of_the_prompt() -> None:
    toy = toy_engine()
    asked = request("a", PROMPT, n=4, max_tokens=1, **DRAWN)
    toy.submit(asked)
    deltas = toy.step()
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(i, "length") for i in range(4)]
    assert samples(toy, "a", 4) == alone(asked.sampling, 4)


def test_samples_are_right_though_they_preempt_each_other() -> None:
    toy = toy_engine(block_size=4, num_blocks=8)
    asked = request("a", PROMPT, n=4, max_tokens=12, **DRAWN)
    toy.run(asked)
    assert toy.engine.stats().num_preemptions > 0
    assert samples(toy, "a", 4) == alone(asked.sampling, 4)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_ends_every_sample_whether_it_has_begun_or_not(num_steps: int) -> None:
    toy = toy_engine(max_num_batched_tokens=6)
    toy.submit(request("a", PROMPT, n=3, max_tokens=8, **DRAWN))
    for _ in range(num_steps):
        toy.step()
    toy.abort("a")
    assert [toy.outcomes[name].finish_reason for name in ("a", "a#1", "a#2")] == ["abort"] * 3
    assert toy.manager.num_free_blocks == toy.manager.num_blocks
    assert not toy.engine.has_work


def test_a_failure_before_they_begin_ends_every_sample() -> None:
    toy = toy_engine()
    toy.executor.failures.append(RuntimeError("flaky"))
    toy.run(request("a", PROMPT, n=3))
    assert {toy.outcomes[name].error for name in ("a", "a#1", "a#2")} == {"RuntimeError: flaky"}


def test_seats_are_kept_for_samples_that_have_not_begun() -> None:
    toy = toy_engine(max_num_seqs=4, max_num_batched_tokens=8)
    toy.submit(request("a", PROMPT, n=3, max_tokens=4), request("b", [40], max_tokens=9), request("c", [41]))
    most_running = 0
    while toy.engine.has_work:
        toy.step()
        most_running = max(most_running, toy.engine.stats().num_running)
    assert most_running == 4


def test_more_samples_than_may_run_are_refused() -> None:
    with pytest.raises(RequestError, match="n: 5 samples are drawn side by side; at most 4 requests run"):
        toy_engine(max_num_seqs=4).submit(request("a", PROMPT, n=5))
    with pytest.raises(RequestError, match="n: 0 is not allowed; it must be between 1 and 128"):
        request("a", PROMPT, n=0)
