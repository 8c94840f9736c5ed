"""Every command on every format, and what is predicted beside what the engine itself reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora import KVCacheManager
from anaphora.cli import main
from anaphora.engine.cost_model import HardwareProfile
from anaphora.engine.loop import Engine
from anaphora.engine.reference import ReferenceExecutor
from anaphora.engine.replay import Arrival, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock
from anaphora.lab.encoding import EstimatingEncoder, ModelEncoder, encode_parts
from anaphora.lab.engine_run import EngineSetting, run_engines, tokens_of
from anaphora.lab.importers import FORMATS
from anaphora.lab.providers.catalogue import Catalogue
from anaphora.lab.providers.emulator import Emulator
from anaphora.lab.providers.segments import Call, Segment
from anaphora.lab.record import Part
from anaphora.lab.trace import Prompt, Trace
from anaphora.tokens import TOKEN_BYTES, pack
from tests.tiny_models import random_weights, tiny_shape

from .samples import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

CATALOGUE = Catalogue()


@pytest.mark.parametrize("command", ["simulate", "explain", "providers"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_command_ends_with_a_result_or_a_reason(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(SAMPLES[name])
    code = main([command, str(path)])
    said = capsys.readouterr()
    assert (code == 0 and said.out) or (code == 1 and "anaphora: " in said.err)


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=40), min_size=1, max_size=6),
    capacity=st.sampled_from([8, 14, 40]),
)
def test_what_is_predicted_is_what_the_engine_reports(prompts: list[list[int]], capacity: int) -> None:
    """Cached tokens of every request, equal to the token: a virtual engine beside one that computes a model."""
    shape = tiny_shape()
    trace = Trace("t", 1, [Prompt(pack(ids), None, len(ids), 0.0, num_output_tokens=3) for ids in prompts])
    setting = EngineSetting(capacity, block_size=16, speed=None)
    predicted = run_engines(trace, setting, shape, HardwareProfile("any", 0.1, None, None, None, None))
    clock = VirtualClock()
    engine = Engine(
        ReferenceExecutor(shape, random_weights(shape)), KVCacheManager(capacity, 16, clock=clock), clock=clock,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    arrivals = [Arrival(0.0, Request(str(n), tokens_of(p, 1), sampling)) for n, p in enumerate(trace.prompts)]
    reported = replay(engine, clock, arrivals)
    assert predicted.cached_tokens == sum(each.num_cached_tokens for each in reported)
    assert predicted.preemptions == engine.stats().num_preemptions


SEGMENTS = st.lists(
    st.builds(
        Segment,
        st.sampled_from("abc"),
        st.integers(0, 1500),
        st.just("messages[0]"),
        st.sampled_from(["system", "messages"]),
        st.sampled_from(["text", "tool_use"]),
        st.booleans(),
        st.sampled_from([None, None, 300, 3600]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(calls=st.lists(st.tuples(SEGMENTS, st.floats(0, 900)), min_size=1, max_size=8))
@pytest.mark.parametrize("provider", list(CATALOGUE.rules))
def test_every_token_is_billed_once(provider: str, calls: list[tuple[list[Segment], float]]) -> None:
    emulator, clock = Emulator(CATALOGUE.rules[provider]), 0.0
    for number, (segments, gap_s) in enumerate(calls):
        clock += gap_s
        call = Call(tuple(segments), clock, num_tail_tokens=3)
        billed = emulator.serve(call)
        assert billed.read + billed.write + billed.uncached == call.num_tokens
        assert min(billed.read, billed.write, billed.write_1h, billed.uncached) >= 0
        assert billed.write_1h <= billed.write
        assert number or not billed.read


TEXTS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=20)), min_size=1, max_size=4)


def _parts(texts: list[tuple[str, str]]) -> Iterator[Part]:
    for number, (role, text) in enumerate(texts):
        yield Part(f"messages[{number}].content", "messages", role, text)


@settings(max_examples=100, deadline=None)
@given(texts=TEXTS, more=TEXTS)
def test_a_conversation_that_goes_on_begins_with_what_it_was(
    texts: list[tuple[str, str]], more: list[tuple[str, str]]
) -> None:
    encoder = EstimatingEncoder()
    whole = tuple(_parts([*texts, *more]))
    one, other = encode_parts(whole[: len(texts)], encoder), encode_parts(whole, encoder)
    # The opening of the answer is an assistant's.
    num = one.part_starts[-1] * TOKEN_BYTES
    assert other.ids[:num] == one.ids[:num]
    assert other.part_starts[: len(texts)] == one.part_starts[:-1]


@pytest.mark.model
def test_a_models_own_tokenizer_counts(default_model_path: Path) -> None:
    encoder = ModelEncoder(str(default_model_path))
    assert not encoder.is_estimate
    encoded = encode_parts(tuple(_parts([("user", "How high does Larkspur Hill stand?")])), encoder)
    whole = "<|im_start|>user\nHow high does Larkspur Hill stand?<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.ids == encoder.marker(whole)
