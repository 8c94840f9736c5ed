"""The engine: what a request gives does not depend on the cache, the batch or the schedule; and it survives misuse."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from anaphora import KVCacheManager
from anaphora.engine.executor import Batch, Output
from anaphora.engine.loop import Engine
from anaphora.engine.request import Request, RequestError, SamplingParams
from anaphora.tokens import pack
from tests.engine.toy_engine import LetterTokenizer, ToyEngine, request, ticking_clock, toy_engine
from tests.engine.toy_executor import VOCAB_SIZE, ToyExecutor, toy_output

if TYPE_CHECKING:
    from collections.abc import Callable

INDEXES = pytest.mark.parametrize("index", ["radix", "hash"])


# -- exactness ---------------------------------------------------------------------------------------------------------


@INDEXES
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_outputs_are_equal_with_the_cache_off_cold_and_warm(index: str, block_size: int) -> None:
    rng = np.random.default_rng(3)
    prefixes = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (7, 16, 33)]
    prompts = [prefixes[i % 3] + rng.integers(0, VOCAB_SIZE, 1 + i % 5).tolist() for i in range(50)]
    toy = toy_engine(index=index, block_size=block_size, num_blocks=3000 // block_size, max_num_batched_tokens=40)

    def outputs(run: str, **options: Any) -> list[tuple[int, ...]]:
        requests = [request(f"{run}{i}", prompt, max_tokens=4, **options) for i, prompt in enumerate(prompts)]
        return [outcome.token_ids for outcome in toy.run(*requests)]

    off = outputs("off", read_cache=False, write_cache=False)
    assert off == [toy_output(prompt, SamplingParams(max_tokens=4, temperature=0.0)) for prompt in prompts]
    assert toy.manager.stats().hits == 0
    assert outputs("cold") == off
    assert outputs("warm") == off
    stats = toy.engine.stats()
    assert stats.num_preemptions == 0
    assert stats.computed_prompt_tokens + stats.cached_tokens == stats.prompt_tokens == 3 * sum(map(len, prompts))
    full_hits = sum((len(prompt) - 1) // block_size * block_size for prompt in prompts)
    assert stats.cached_tokens >= full_hits


@INDEXES
def test_a_tail_block_is_never_shared_between_two_continuations(index: str) -> None:
    toy = toy_engine(index=index)
    toy.run(request("a", range(1, 7), max_tokens=1))
    b1, b2 = (request(name, [*range(1, 7), token], max_tokens=4) for name, token in (("b1", 40), ("b2", 41)))
    toy.run(b1, b2)
    for b, token in ((b1, 40), (b2, 41)):
        outcome = toy.outcomes[b.request_id]
        assert outcome.num_cached_tokens == 4
        assert outcome.token_ids == toy_output([*range(1, 7), token], b.sampling)


@INDEXES
def test_a_request_that_does_not_read_the_cache_gives_the_same_and_fills_it(index: str) -> None:
    toy = toy_engine(index=index)
    cold, unread, warm = (
        toy.run(request(name, range(1, 10), max_tokens=3, logprobs=2, read_cache=name != "unread"))[0]
        for name in ("cold", "unread", "warm")
    )
    assert [outcome.num_cached_tokens for outcome in (cold, unread, warm)] == [0, 0, 8]
    assert cold.token_ids == unread.token_ids == warm.token_ids
    assert cold.logprobs == unread.logprobs == warm.logprobs

    fresh = toy_engine(index=index)
    fresh.run(request("unread", range(1, 10), max_tokens=3, read_cache=False))
    assert fresh.run(request("warm", range(1, 10), max_tokens=1))[0].num_cached_tokens == 8


def test_a_request_that_does_not_write_the_cache_leaves_nothing() -> None:
    toy = toy_engine()
    toy.run(request("private", range(1, 10), max_tokens=3, write_cache=False))
    assert toy.run(request("next", range(1, 10), max_tokens=1))[0].num_cached_tokens == 0


def test_requests_under_different_salts_share_nothing() -> None:
    toy = toy_engine()
    toy.run(request("a", range(1, 10), salt="one"))
    assert toy.run(request("b", range(1, 10), salt="two"))[0].num_cached_tokens == 0
    assert toy.run(request("c", range(1, 10)))[0].num_cached_tokens == 0
    assert toy.run(request("d", range(1, 10), salt="one"))[0].num_cached_tokens == 8


def test_the_output_of_one_turn_is_a_hit_for_the_next() -> None:
    toy = toy_engine()
    (first,) = toy.run(request("turn 1", range(1, 7), max_tokens=7))
    # 6 + 7 tokens; the KV of the last one was never computed, so 12 tokens are 3 full blocks.
    (second,) = toy.run(request("turn 2", [*range(1, 7), *first.token_ids, 9], max_tokens=1))
    assert second.num_cached_tokens == 12


def test_seeded_samples_do_not_depend_on_neighbours_chunks_or_preemption() -> None:
    seeded = request("s", range(1, 12), temperature=1.5, top_k=30, top_p=0.95, seed=11, max_tokens=10, logprobs=3)
    (alone,) = toy_engine().run(seeded)
    assert alone.token_ids == toy_output(range(1, 12), seeded.sampling)

    toy = toy_engine(num_blocks=7, max_num_batched_tokens=5)
    neighbours = [request(f"n{i}", range(i, i + 9), temperature=1.0, max_tokens=8) for i in range(2)]
    *_, crowded = toy.run(*neighbours, seeded)
    assert toy.engine.stats().num_preemptions >= 1
    assert crowded.token_ids == alone.token_ids
    assert crowded.logprobs == alone.logprobs


def test_unseeded_requests_draw_differently_and_follow_the_engines_seed() -> None:
    def sample(seed: int | None) -> tuple[tuple[int, ...], ...]:
        toy = toy_engine(seed=seed)
        outcomes = toy.run(*(request(name, [1, 2], temperature=2.0, max_tokens=12) for name in "ab"))
        return tuple(outcome.token_ids for outcome in outcomes)

    first, second = sample(5)
    assert first != second
    assert sample(5) == (first, second)
    assert sample(None) != sample(None)


# -- how outputs end ---------------------------------------------------------------------------------------------------


def test_counts_are_totals_and_the_reason_is_on_the_last_delta_only() -> None:
    toy = toy_engine()
    toy.submit(request("a", range(1, 6), max_tokens=3))
    deltas = [toy.step()[0] for _ in range(3)]
    assert [delta.num_output_tokens for delta in deltas] == [1, 2, 3]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert {delta.num_prompt_tokens for delta in deltas} == {5}
    assert not toy.engine.has_work
    assert toy.step() == []


def test_an_end_of_sequence_token_stops_unless_ignored() -> None:
    expected = toy_output([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))
    toy = toy_engine(eos_token_ids=(expected[2],), tokenizer=LetterTokenizer())
    stopped, ignoring = toy.run(
        request("stops", [1, 2, 3], max_tokens=8), request("ignores", [1, 2, 3], max_tokens=8, ignore_eos=True)
    )
    end = expected.index(expected[2]) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (expected[:end], "stop")
    assert stopped.text == "".join(LetterTokenizer().letters[i] for i in expected[: end - 1])
    assert (ignoring.token_ids, ignoring.finish_reason) == (expected, "length")


def test_a_stop_string_ends_the_text_before_it() -> None:
    letters = LetterTokenizer().letters
    expected = toy_output([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))
    text = "".join(letters[i] for i in expected)
    stop = text[3:5]
    end = text.index(stop)
    (outcome,) = toy_engine(tokenizer=LetterTokenizer()).run(request("a", [1, 2, 3], max_tokens=8, stop=(stop,)))
    assert (outcome.text, outcome.finish_reason) == (text[:end], "stop")
    assert outcome.token_ids == expected[: end + 2]


# -- abort -------------------------------------------------------------------------------------------------------------


def queued(toy: ToyEngine) -> None:
    toy.submit(request("holder", range(20, 44), max_tokens=8), request("x", range(1, 14)))
    toy.step()
    assert toy.engine.stats().num_waiting == 1


def matched_while_queued(toy: ToyEngine) -> None:
    toy.run(request("before", range(1, 14), max_tokens=1))
    toy.submit(request("x", range(1, 14)))


def prefilling(toy: ToyEngine) -> None:
    toy.submit(request("x", range(1, 32), max_tokens=1))
    toy.step()
    assert toy.outcomes["x"].token_ids == ()


def decoding(toy: ToyEngine) -> None:
    toy.submit(request("x", range(1, 14)))
    toy.step()
    assert len(toy.outcomes["x"].token_ids) == 1


def preempted(toy: ToyEngine) -> None:
    toy.submit(request("holder", range(20, 36), max_tokens=12), request("x", range(1, 14)))
    while toy.engine.stats().num_preemptions == 0:
        toy.step()
    assert toy.engine.stats().num_waiting == 1


@INDEXES
@pytest.mark.parametrize("reach", [queued, matched_while_queued, prefilling, decoding, preempted])
def test_abort_in_any_state_gives_everything_back_once(reach: Callable[[ToyEngine], None], index: str) -> None:
    toy = toy_engine(index=index, num_blocks=8, max_num_batched_tokens=24)
    reach(toy)
    num_tokens = len(toy.outcomes["x"].token_ids)
    toy.abort("x")
    assert (toy.outcomes["x"].finish_reason, len(toy.outcomes["x"].token_ids)) == ("abort", num_tokens)
    assert toy.engine.abort("x") == []
    toy.abort("holder")  # if there is one
    assert toy.manager.num_free_blocks == 8
    assert not toy.engine.has_work
    (after,) = toy.run(request("x", range(1, 14), max_tokens=4))
    assert after.token_ids == toy_output(range(1, 14), SamplingParams(max_tokens=4, temperature=0.0))


def test_aborting_an_unknown_request_does_nothing() -> None:
    assert toy_engine().engine.abort("nobody") == []


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failing_step_ends_its_own_requests_and_leaves_nothing_of_them() -> None:
    toy = toy_engine(max_num_seqs=2)
    toy.submit(*(request(name, [*range(1, 10), i], max_tokens=2) for i, name in enumerate(("a", "b", "c"))))
    toy.executor.failures.append(OSError("the device is gone"))
    deltas = toy.step()
    assert [(delta.request_id, delta.finish_reason, delta.error) for delta in deltas] == [
        ("a", "error", "OSError: the device is gone"),
        ("b", "error", "OSError: the device is gone"),
    ]
    assert toy.manager.num_free_blocks == toy.manager.num_blocks
    toy.run()
    c = toy.outcomes["c"]
    assert (c.finish_reason, c.num_cached_tokens) == ("length", 0)
    assert c.token_ids == toy_output([*range(1, 10), 2], SamplingParams(max_tokens=2, temperature=0.0))


def test_what_was_committed_before_a_failure_stays_cached() -> None:
    toy = toy_engine(max_num_batched_tokens=8)
    toy.submit(request("a", range(1, 18)))
    toy.step()
    toy.executor.failures.append(RuntimeError("flaky"))
    toy.step()
    assert toy.outcomes["a"].finish_reason == "error"
    (again,) = toy.run(request("again", range(1, 18), max_tokens=3))
    assert again.num_cached_tokens == 8
    assert again.token_ids == toy_output(range(1, 18), SamplingParams(max_tokens=3, temperature=0.0))


def test_an_executor_that_returns_too_little_fails_the_step() -> None:
    toy = toy_engine()
    toy.executor.execute = lambda batch: Output([None] * len(batch.spans))  # type: ignore[method-assign]
    (outcome,) = toy.run(request("a", [1, 2]))
    assert outcome.finish_reason == "error"
    assert outcome.error is not None
    assert "logits" in outcome.error


def test_logits_without_a_distribution_end_one_request_only() -> None:
    toy = toy_engine()
    execute = toy.executor.execute

    def spoil_first(batch: Batch) -> Output:
        output = execute(batch)
        assert output.logits[0] is not None
        output.logits[0][:] = math.nan
        return output

    toy.submit(request("a", [1, 2]), request("b", [3, 4], max_tokens=2))
    toy.executor.execute = spoil_first  # type: ignore[method-assign]
    toy.step()
    toy.executor.execute = execute  # type: ignore[method-assign]
    toy.run()
    assert toy.outcomes["a"].finish_reason == "error"
    assert toy.outcomes["b"].token_ids == toy_output([3, 4], SamplingParams(max_tokens=2, temperature=0.0))


def test_a_tokenizer_that_fails_on_a_token_ends_one_request_only() -> None:
    alone = toy_output([3, 4], SamplingParams(max_tokens=2, temperature=0.0))
    bad = toy_output([1, 2], SamplingParams(max_tokens=1, temperature=0.0))[0]
    assert bad not in alone

    class Failing(LetterTokenizer):
        def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
            if token_id == bad:
                raise KeyError(token_id)
            return super().token_bytes(token_id)

    toy = toy_engine(tokenizer=Failing())
    first, second = toy.run(request("a", [1, 2]), request("b", [3, 4], max_tokens=2))
    assert first.finish_reason == "error"
    assert second.token_ids == alone


def test_kv_that_gave_unusable_logits_is_not_shared() -> None:
    toy = toy_engine()
    execute = toy.executor.execute
    toy.executor.execute = lambda batch: Output(  # type: ignore[method-assign]
        [rows * math.nan for rows in execute(batch).logits if rows is not None]
    )
    assert toy.run(request("bad", range(9)))[0].finish_reason == "error"
    toy.executor.execute = execute  # type: ignore[method-assign]
    assert toy.run(request("good", range(9)))[0].num_cached_tokens == 0


def test_a_request_for_which_others_keep_no_blocks_is_refused_rather_than_stuck() -> None:
    toy = toy_engine(num_blocks=4)
    stranger = toy.manager.start(pack(list(range(12))))
    assert toy.manager.allocate(stranger, 12)
    (outcome,) = toy.run(request("a", range(8), max_tokens=1))
    assert outcome.finish_reason == "error"
    assert outcome.error == "KV blocks: only 1 of 4 can be had, though no other request runs"

    toy.manager.abort(stranger)
    toy.submit(request("b", range(8), max_tokens=8))
    toy.step()
    assert toy.manager.allocate(toy.manager.start(pack(list(range(8)))), 8)
    toy.run()
    assert toy.outcomes["b"].error == "KV blocks: only 0 of 4 can be had, though no other request runs"


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "param", "message"),
    [
        (Request("a", b""), "prompt", "prompt: no tokens; at least 1 is needed"),
        (Request("a", b"12345"), "prompt", "prompt: 5 bytes are no whole number of int32 ids"),
        (request("a", [1, 48]), "prompt", "prompt[1]: 48 is no token id; allowed are 0 to 47"),
        (request("a", [-1]), "prompt", "prompt[0]: -1 is no token id; allowed are 0 to 47"),
        (request("a", [1], stop_token_ids=(99,)), "stop_token_ids", "stop_token_ids: 99 is no token id"),
        (request("a", [1], stop=("x",)), "stop", "stop: the engine has no tokenizer"),
        (
            request("a", [1] * 40, max_tokens=1),
            "prompt",
            "prompt: 40 prompt tokens and max_tokens 1 make 41 tokens; the longest context is 40 tokens",
        ),
        (
            request("a", [1] * 30, max_tokens=11),
            "max_tokens",
            "max_tokens: 30 prompt tokens and max_tokens 11 make 41 tokens; the longest context is 40 tokens",
        ),
        (
            request("a", [1] * 30, max_tokens=5),
            "max_tokens",
            "max_tokens: 30 prompt tokens and max_tokens 5 make 35 tokens, "
            "which need 9 KV blocks of 4 tokens; the pool has 8",
        ),
        (
            request("a", [1] * 32, max_tokens=1),
            "prompt",
            "prompt: 32 prompt tokens and max_tokens 1 make 33 tokens, "
            "which need 9 KV blocks of 4 tokens; the pool has 8",
        ),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_once(bad: Request, param: str, message: str) -> None:
    toy = toy_engine(num_blocks=8, max_context=40)
    with pytest.raises(RequestError) as refusal:
        toy.engine.submit(bad)
    assert refusal.value.param == param
    assert str(refusal.value).startswith(message)
    assert not toy.engine.has_work


def test_the_longest_request_that_fits_is_served() -> None:
    toy = toy_engine(num_blocks=8)
    assert toy.engine.max_request_tokens == 32
    (outcome,) = toy.run(request("a", [1] * 20, max_tokens=12))
    assert len(outcome.token_ids) == 12
    assert toy_engine(num_blocks=8, max_context=20).engine.max_request_tokens == 20


def test_an_id_in_use_is_refused_and_a_finished_one_is_free_again() -> None:
    toy = toy_engine()
    toy.submit(request("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="request_id: 'a' is in use by a live request"):
        toy.engine.submit(request("a", [2]))
    toy.run()
    toy.run(request("a", [2], max_tokens=1))


def test_a_block_size_that_the_executor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size: 3 is not allowed"):
        toy_engine(block_size=3)


def test_a_context_below_one_is_refused_and_the_models_own_is_the_limit() -> None:
    with pytest.raises(ValueError, match="max_context: 0 is not allowed"):
        toy_engine(max_context=0)
    assert toy_engine(max_context=4096).engine.max_context == 1024


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_count_tokens_steps_and_times() -> None:
    toy = toy_engine(clock=ticking_clock(), cpu_clock=ticking_clock())
    toy.run(request("a", range(1, 10), max_tokens=3), request("b", range(20, 25), max_tokens=1))
    toy.run(request("c", range(1, 12), max_tokens=1))
    stats = toy.engine.stats()
    assert stats.num_steps == 4
    assert (stats.prompt_tokens, stats.cached_tokens, stats.computed_prompt_tokens) == (25, 8, 17)
    assert stats.output_tokens == 5
    # Every read of a clock moves it by a second. A step reads the one four times, first to last, twice for a part; the
    # other five times.
    assert (stats.step_s, stats.execute_s) == (12.0, 4.0)
    assert (stats.step_cpu_s, stats.schedule_cpu_s, stats.commit_cpu_s) == (16.0, 4.0, 4.0)
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
    assert stats.kv_usage == 0.0


def test_kv_usage_is_the_share_of_blocks_that_requests_hold() -> None:
    toy = toy_engine(num_blocks=8)
    toy.submit(request("a", range(1, 8), max_tokens=9))
    toy.step()
    assert toy.engine.stats().kv_usage == 0.25


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 2.5),
        ("temperature", "warm"),
        ("top_k", float("nan")),
        ("seed", "x"),
        ("stop", "a string"),
        ("stop_token_ids", (1.5,)),
        ("logit_bias", {"7": 1.0}),
        ("logprobs", 3.0),
        ("n", 2.0),
        ("ignore_eos", None),
    ],
)
def test_sampling_of_another_type_is_refused_before_it_can_fail_in_everybodys_step(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field}: .* is not allowed; it must be ") as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ["a"]),
        ("prompt", array("i", [1, 2, 3, 4])),
        ("sampling", None),
        ("namespace", "tenant"),
        ("priority", 0.5),
        ("read_cache", None),
        ("deadline_s", "soon"),
    ],
)
def test_a_request_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field}: .* is not allowed; it must be "):
        Request(**{"request_id": "a", "prompt": pack([1]), field: value})  # type: ignore[arg-type]


def test_a_copy_that_fails_ends_who_needs_it_though_it_had_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, manager = ToyExecutor(), KVCacheManager(64, 4, match_unit=2)
    toy = ToyEngine(Engine(executor, manager, max_num_seqs=5, max_num_batched_tokens=4), executor, manager)
    toy.run(request("warm", range(1, 10), max_tokens=1))
    toy.submit(request("low", [40], max_tokens=9, priority=5))
    toy.step()
    urgent = request("urgent", [1, 2, 3, 4, 5, 6, 30, 31], max_tokens=4, priority=1)
    toy.submit(request("samples", [41, 42], max_tokens=9, n=4), urgent)
    toy.step()

    def fail(pairs: object) -> None:
        raise RuntimeError("no room to copy")

    # "urgent" takes the seat of "low" and half a block of "warm"; the four samples take all of the step.
    monkeypatch.setattr(executor, "copy_blocks", fail)
    toy.step()
    monkeypatch.undo()
    assert toy.outcomes["urgent"].finish_reason == "error"
    while toy.engine.has_work:
        toy.step()
    assert toy.outcomes["low"].token_ids == toy_output([40], SamplingParams(max_tokens=9, temperature=0.0))
    assert manager.num_free_blocks == manager.num_blocks
