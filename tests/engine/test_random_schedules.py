"""Whatever the schedule, a request gives what it gives alone: random arrivals, aborts and failures in tiny pools."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.request import Request
from anaphora.tokens import unpack
from tests.engine.toy_engine import request, toy_engine
from tests.engine.toy_executor import VOCAB_SIZE, toy_output

# Prompts are beginnings of two texts with a few tokens behind, so that many of them share a prefix.
TEXTS = [[(7 * i + 3) % VOCAB_SIZE for i in range(40)], [(5 * i + 1) % VOCAB_SIZE for i in range(40)]]

prompts = st.builds(
    lambda text, length, tail: [*TEXTS[text][:length], *tail],
    st.integers(0, 1),
    st.integers(4, 20),
    st.lists(st.integers(0, 3), max_size=3),
)
samplings = st.one_of(
    st.just({}),
    st.builds(lambda seed: {"temperature": 1.2, "top_p": 0.9, "seed": seed}, st.integers(0, 3)),
)
submissions = st.tuples(
    prompts,
    st.integers(1, 12),
    samplings,
    st.sampled_from([None, None, "tenant"]),
    st.sampled_from([{}, {}, {"read_cache": False}, {"write_cache": False}]),
)
submit = st.tuples(st.just("submit"), submissions)
step = st.tuples(st.just("step"), st.integers(1, 4))
abort = st.tuples(st.just("abort"), st.integers(0, 11))
fail = st.tuples(st.just("fail"), st.none())
schedules = st.lists(st.one_of(submit, submit, submit, step, step, abort, fail), min_size=6, max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    index=st.sampled_from(["radix", "hash"]),
    block_size=st.sampled_from([1, 2, 4]),
    num_spare_blocks=st.integers(0, 3),
    max_num_seqs=st.integers(2, 5),
    max_num_batched_tokens=st.integers(1, 24),
    schedule=schedules,
)
def test_every_request_gives_what_it_gives_alone(
    *,
    index: str,
    block_size: int,
    num_spare_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    schedule: list[tuple[str, Any]],
) -> None:
    # Just enough for the longest request, so that others must give way to it.
    longest = max((len(argument[0]) + argument[1] for action, argument in schedule if action == "submit"), default=1)
    toy = toy_engine(
        index=index,
        block_size=block_size,
        num_blocks=-(-longest // block_size) + num_spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    requests: list[Request] = []
    for action, argument in schedule:
        if action == "submit":
            prompt, max_tokens, sampling, salt, cache = argument
            requests.append(request(f"r{len(requests)}", prompt, max_tokens=max_tokens, salt=salt, **sampling, **cache))
            toy.submit(requests[-1])
        elif action == "step":
            for _ in range(argument):
                toy.step()
        elif action == "abort":
            toy.abort(f"r{argument}")
        elif toy.engine.has_work:
            toy.executor.failures.append(RuntimeError("flaky"))
            toy.step()
    toy.run()

    for submitted in requests:
        outcome = toy.outcomes[submitted.request_id]
        alone = toy_output(unpack(submitted.prompt), submitted.sampling)
        if outcome.finish_reason == "length":
            assert outcome.token_ids == alone
        else:
            assert (outcome.finish_reason, outcome.error) in {("abort", None), ("error", "RuntimeError: flaky")}
            assert outcome.token_ids == alone[: len(outcome.token_ids)]
        if not submitted.read_cache:
            assert outcome.num_cached_tokens == 0
    assert toy.manager.num_free_blocks == toy.manager.num_blocks
    stats = toy.manager.stats()
    assert stats.hits == sum(toy.outcomes[r.request_id].num_cached_tokens for r in requests)
    assert stats.finished + stats.aborted == len(requests)
