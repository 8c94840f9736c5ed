"""Logit bias and penalties: what they do to the logits, and that they see one request's own tokens and no others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.engine.penalties import Penalties
from anaphora.engine.request import RequestError, SamplingParams
from anaphora.engine.sampling import Sampler
from anaphora.tokens import pack
from tests.engine.toy_engine import request, toy_engine
from tests.engine.toy_executor import VOCAB_SIZE, toy_output

IDS = st.integers(0, VOCAB_SIZE - 1)
ROWS = st.integers(0, 2**32).map(lambda seed: np.random.default_rng(seed).normal(0, 4, VOCAB_SIZE).astype(np.float32))
PENALIZED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7, "logit_bias": {3: 1.5}}


def by_definition(logits: Any, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    values, counts = [float(value) for value in logits], Counter(output)
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        r = params.repetition_penalty
        values[token_id] = values[token_id] / r if values[token_id] > 0 else values[token_id] * r
    for token_id, count in counts.items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return values


@given(
    ROWS,
    st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=4),
    ),
    st.lists(IDS, max_size=10),
    st.lists(IDS, max_size=150),
)
def test_the_logits_are_changed_as_defined(
    logits: Any, params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    penalties = Penalties(params, pack(prompt))
    for token_id in output:
        penalties.add(token_id)
    changed = logits.copy()
    penalties.apply(changed)
    assert changed.tolist() == pytest.approx(by_definition(logits, params, prompt, output), rel=1e-5, abs=1e-4)


@given(ROWS, st.lists(IDS, min_size=1, max_size=10), st.lists(IDS, max_size=10))
def test_neutral_values_change_nothing_to_the_bit(logits: Any, prompt: list[int], output: list[int]) -> None:
    neutral = SamplingParams()
    assert not Penalties.are_needed(neutral)
    penalties = Penalties(neutral, pack(prompt))
    for token_id in output:
        penalties.add(token_id)
    changed = logits.copy()
    penalties.apply(changed)
    assert changed.tobytes() == logits.tobytes()


@given(ROWS, IDS, st.sampled_from([0.0, 0.7, 2.0]), st.integers(0, 2**32))
def test_a_strong_bias_forces_or_forbids_a_token(logits: Any, token_id: int, temperature: float, seed: int) -> None:
    def drawn(bias: float) -> set[int]:
        sampler = Sampler(SamplingParams(temperature=temperature, logit_bias={token_id: bias}), seed)
        return {sampler.sample(logits, position) for position in range(20)}

    assert drawn(100.0) == {token_id}
    assert token_id not in drawn(-100.0)


def test_presence_and_frequency_count_the_output_and_repetition_the_prompt_too() -> None:
    logits = np.array([5.0, 4.9, 4.8], dtype=np.float32)

    def output(**params: Any) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=0.0, **params), 0, prompt=pack([0]))
        return [sampler.sample(logits, position) for position in range(4)]

    assert output(presence_penalty=1.0) == [0, 1, 2, 0]
    assert output(frequency_penalty=0.06) == [0, 0, 1, 0]
    assert output(repetition_penalty=1.5) == [1, 2, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_draws_the_same_alone_in_company_and_across_preemption(temperature: float) -> None:
    prompts = [list(range(i, i + 9)) for i in range(6)]
    asked = [
        request(f"r{i}", prompt, max_tokens=20, temperature=temperature, seed=i, n=2, **PENALIZED)
        for i, prompt in enumerate(prompts)
    ]
    crowded = toy_engine(num_blocks=24)
    crowded.run(*asked)
    assert crowded.engine.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        for j, name in enumerate((f"r{i}", f"r{i}#1")):
            alone = toy_output(prompt, replace(asked[i].sampling, seed=i + j))
            assert crowded.outcomes[name].token_ids == alone
            assert alone != toy_output(prompt, SamplingParams(max_tokens=20, temperature=temperature, seed=i + j))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_p": -0.1}, "min_p: -0.1 is not allowed; it must be between 0 and 1"),
        ({"min_p": 1.1}, "min_p: 1.1 is not allowed; it must be between 0 and 1"),
        ({"presence_penalty": 2.1}, "presence_penalty: 2.1 is not allowed; it must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: nan is not allowed; it must be between -2 and 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not allowed; it must be between 0.01 and 100"),
        ({"logit_bias": {7: 101}}, r"logit_bias\[7\]: 101 is not allowed; it must be between -100 and 100"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(**params)
    assert refused.value.param == next(iter(params))


def test_a_bias_for_an_id_that_is_no_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"logit_bias: 48 is no token id; allowed are 0 to 47"):
        toy_engine().submit(request("a", [1, 2], logit_bias={48: 1.0}))
