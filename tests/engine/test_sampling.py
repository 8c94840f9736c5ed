"""How a token is drawn, and its log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.engine.request import SamplingParams
from anaphora.engine.sampling import Sampler, token_logprob


def row(*logits: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(logits, dtype=np.float32)


def draw(logits: Any, num_draws: int = 400, *, seed: int = 1, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**params), seed)
    return [sampler.sample(logits, position) for position in range(num_draws)]


def shares(drawn: list[int], vocab_size: int) -> list[float]:
    return [drawn.count(i) / len(drawn) for i in range(vocab_size)]


RANDOM_ROW = np.random.default_rng(0).standard_normal(5000).astype(np.float32)


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    assert draw(row(1, 5, 5, 2), 3, temperature=0.0) == [1, 1, 1]


def test_draws_follow_the_softmax() -> None:
    drawn = draw(np.log(row(0.5, 0.3, 0.2)), 4000)
    assert shares(drawn, 3) == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits = np.log(row(0.6, 0.3, 0.1))
    assert shares(draw(logits, 4000, temperature=0.5), 3) == pytest.approx([36 / 46, 9 / 46, 1 / 46], abs=0.03)
    flat = np.sqrt([0.6, 0.3, 0.1])
    assert shares(draw(logits, 4000, temperature=2.0), 3) == pytest.approx(list(flat / flat.sum()), abs=0.03)


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(draw(row(1, 3, 2), 50, temperature=1e-300)) == {1}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draw(row(1, 4, 2, 3), top_k=2)) == {1, 3}


def test_top_k_keeps_exactly_k_the_lowest_ids_among_equals() -> None:
    assert set(draw(row(0, 7, 7, 7, 0), top_k=2)) == {1, 2}


def test_top_k_of_one_is_greedy_and_of_the_whole_vocabulary_or_more_is_off() -> None:
    assert set(draw(row(0, 1, 1), 50, top_k=1)) == {1}
    assert draw(RANDOM_ROW, 50, top_k=5000) == draw(RANDOM_ROW, 50, top_k=9999) == draw(RANDOM_ROW, 50)


def test_top_p_keeps_the_smallest_set_that_holds_its_share() -> None:
    logits = np.log(row(0.1, 0.5, 0.15, 0.25))
    assert set(draw(logits, top_p=0.49)) == {1}
    assert set(draw(logits, top_p=0.51)) == {1, 3}
    assert set(draw(logits, top_p=0.76)) == {1, 2, 3}
    assert set(draw(logits, 2000, top_p=0.95)) == {0, 1, 2, 3}


def test_top_p_counts_within_what_top_k_left() -> None:
    # Of 0.5 and 0.25 alone, the first holds two thirds.
    logits = np.log(row(0.1, 0.5, 0.15, 0.25))
    assert set(draw(logits, top_k=2, top_p=0.66)) == {1}
    assert set(draw(logits, top_k=2, top_p=0.67)) == {1, 3}


def test_min_p_keeps_what_is_so_likely_beside_the_likeliest_at_the_temperature() -> None:
    logits = np.log(row(0.1, 0.5, 0.15, 0.25))
    assert set(draw(logits, min_p=0.51)) == {1}
    assert set(draw(logits, min_p=0.49)) == {1, 3}
    assert set(draw(logits, min_p=0.29)) == {1, 2, 3}
    assert set(draw(logits, temperature=0.5, min_p=0.26)) == {1}
    assert set(draw(logits, 50, min_p=1.0)) == {1}


def test_top_p_counts_within_what_min_p_left() -> None:
    logits = np.log(row(0.1, 0.5, 0.15, 0.25))
    assert set(draw(logits, min_p=0.4, top_p=0.66)) == {1}
    assert set(draw(logits, min_p=0.4, top_p=0.67)) == {1, 3}


LARGE_ROWS = st.builds(
    # Few distinct values, so that there are many equals, and rows of more than one group and chunk.
    lambda seed, size, levels: (
        np.random.default_rng(seed).integers(0, levels, size).astype(np.float32) * np.float32(8 / levels)
    ),
    st.integers(0, 2**32),
    st.integers(1, 9000),
    st.sampled_from([1, 2, 30, 3000]),
)


@given(LARGE_ROWS, st.integers(1, 1500))
def test_the_k_likeliest_are_found_in_any_row(logits: Any, k: int) -> None:
    best_first = np.argsort(-logits, kind="stable")[:k].tolist()
    assert set(draw(logits, 30, top_k=k)) <= set(best_first)
    assert [token_id for token_id, _ in token_logprob(logits, 0, k).top] == best_first


@given(LARGE_ROWS, st.floats(0.01, 0.999))
def test_the_nucleus_is_found_in_any_row(logits: Any, top_p: float) -> None:
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1])) / weights.sum()
    allowed = set(order[before < top_p + 1e-5].tolist())
    assert set(draw(logits, 30, top_p=top_p)) <= allowed


def test_top_p_of_a_flat_distribution_looks_beyond_the_likeliest_tokens() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    assert max(draw(flat, 2000, top_p=0.5)) in range(2400, 2500)


def test_an_impossible_token_is_never_drawn() -> None:
    assert set(draw(row(-math.inf, 0, 0, -math.inf))) == {1, 2}


def test_the_logits_stay_as_they_are() -> None:
    before = RANDOM_ROW.copy()
    draw(RANDOM_ROW, 5, top_k=9, top_p=0.5, min_p=0.01, repetition_penalty=1.5, logit_bias={3: 5.0})
    token_logprob(RANDOM_ROW, 3, 5)
    assert (before == RANDOM_ROW).all()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 50}, {"min_p": 0.01, "temperature": 0.7}])
def test_a_row_draws_the_same_wherever_it_lies_in_memory(params: dict[str, Any]) -> None:
    size = len(RANDOM_ROW) - 7  # no whole number of vectors
    expected = draw(RANDOM_ROW[:size].copy(), 50, **params)
    for offset in range(1, 17):
        room = np.empty(size + offset, dtype=np.float32)
        room[offset:] = RANDOM_ROW[:size]
        assert draw(room[offset:], 50, **params) == expected
        assert token_logprob(room[offset:], 9, 3) == token_logprob(RANDOM_ROW[:size].copy(), 9, 3)


def test_a_position_draws_the_same_whatever_was_drawn_before() -> None:
    sampler = Sampler(SamplingParams(), seed=7)
    in_order = [sampler.sample(RANDOM_ROW, position) for position in range(20)]
    backwards = [Sampler(SamplingParams(), seed=7).sample(RANDOM_ROW, position) for position in reversed(range(20))]
    assert in_order == backwards[::-1]
    assert len(set(in_order)) > 15


def test_another_seed_draws_other_tokens() -> None:
    assert draw(RANDOM_ROW, 20, seed=1) != draw(RANDOM_ROW, 20, seed=2)
    assert draw(RANDOM_ROW, 20, seed=-1) != draw(RANDOM_ROW, 20, seed=1)


def test_a_seed_draws_these_tokens_for_ever() -> None:
    flat = np.zeros(1024, dtype=np.float32)
    assert draw(flat, 8, seed=42) == [839, 376, 897, 67, 1010, 990, 869, 417]
    assert draw(flat, 3, seed=-1) == [437, 415, 122]


def test_a_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        Sampler(SamplingParams(), seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_are_an_error(worst: float, temperature: float) -> None:
    logits = row(*([-math.inf] * 2), worst)
    with pytest.raises(ValueError, match="logits: the largest is"):
        draw(logits, 1, temperature=temperature)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = np.log(row(0.1, 0.5, 0.15, 0.25)) + 3
    logprob = token_logprob(logits, 0, 2)
    assert logprob.token_id == 0
    assert logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token_id for token_id, _ in logprob.top] == [1, 3]
    assert [value for _, value in logprob.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_logprobs_list_equals_by_ascending_id_and_no_more_than_there_are() -> None:
    assert [token_id for token_id, _ in token_logprob(row(1, 2, 2, 2), 0, 2).top] == [1, 2]
    assert len(token_logprob(row(1, 2), 0, 20).top) == 2
    assert token_logprob(row(1, 2), 0, 0).top == ()
