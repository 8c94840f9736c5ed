"""Outputs of a JSON schema: whatever the model says, they parse and validate; each sample has a state of its own."""

from __future__ import annotations

import json
import re
import sys
from array import array
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.grammars import Form, Grammars, form_of
from anaphora.engine.request import RequestError, SamplingParams
from anaphora.engine.sampling import Sampler
from anaphora.model.tokenizer import Tokenizer
from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PADDED_VOCAB_SIZE = VOCAB_SIZE + 13

NAMES = st.sampled_from(["a", "name", "x_1", "zebra crossing", "é"])
SCALARS = st.one_of(
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-99, 99),
              st.integers(0, 999)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "so"}, {"enum": ["red", 7, None, [1, "b"]]}]),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}-[0-9]$"}),
)  # fmt: skip


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, num_required: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        },
        st.dictionaries(NAMES, parts, max_size=3),
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda parts: st.one_of(
        objects(parts),
        st.builds(lambda part, n: {"type": "array", "items": part, "maxItems": n}, parts, st.integers(0, 3)),
        st.builds(lambda some: {"anyOf": some}, st.lists(parts, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), eos_token_ids=(EOS_TOKEN_ID,))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), (EOS_TOKEN_ID,), PADDED_VOCAB_SIZE)


def said(schema: Any, seed: int, **params: Any) -> str:
    """What a model that says anything at all says under the schema, until that is whole."""
    return drawn_under(Form("json_schema", json.dumps(schema)), seed, **params)


def drawn_under(form: Form, seed: int, **params: Any) -> str:
    """What a model that says anything at all says under a form, until that is whole."""
    constraint = grammars().start(form)
    sampler = Sampler(SamplingParams(**params), seed, constraint=constraint)
    rng = np.random.default_rng(seed)
    drawn: list[int] = []
    while not sampler.is_complete and drawn[-1:] != [EOS_TOKEN_ID]:
        logits = rng.normal(0, 3, PADDED_VOCAB_SIZE).astype(np.float32)
        drawn.append(sampler.sample(logits, len(drawn)))
        assert len(drawn) < 3000
    return tokenizer().decode([token_id for token_id in drawn if token_id != EOS_TOKEN_ID])


@settings(max_examples=60, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 2.0]))
def test_the_output_parses_and_validates_whatever_the_model_says(schema: Any, seed: int, temperature: float) -> None:
    jsonschema.validate(json.loads(said(schema, seed, temperature=temperature)), schema)


def test_filters_bias_and_penalties_draw_from_what_may_come() -> None:
    params = {"top_k": 3, "top_p": 0.4, "min_p": 0.2, "frequency_penalty": 1.0, "logit_bias": {5: 100.0}}
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}
    for seed in range(20):
        jsonschema.validate(json.loads(said(schema, seed, **params)), schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": ', "json_schema: it is no JSON: Expecting value"),
        ("[1]", "json_schema: expected an object or a boolean"),
        ("false", "json_schema: it allows nothing"),
        ('{"type": "foo"}', "json_schema: Invalid type: foo"),
        ('{"properties": {"b": {}, "a": {"items": {"type": "int"}}}}',
         r"json_schema\.properties\.a\.items: Invalid type: int"),
        ('{"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": true}]}',
         r"json_schema\.anyOf\[1\]: Unimplemented keys: \[\"uniqueItems\"\]"),
        ("[" * 100_000, "json_schema: it is no JSON"),
        ('"' + "x" * 2**20 + '"', "json_schema: 1048578 characters are over the limit of 1048576"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(schema: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        grammars().check(Form("json_schema", schema))
    assert refused.value.param == "json_schema"


class ToyTokenizer:
    """48 tokens, as the toy model has them: JSON's signs, some letters and words, an end of sequence."""

    pieces = ("", *'{}[]",: 0123456789-.abcefglmnorstu', '{"', '":', '"}', "true", "false", "null", "ab", "\x02", ", ",
              "12", "name", "\n", "on")  # fmt: skip
    vocab_size = 48
    special_token_ids = frozenset({0})

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        return self.pieces[token_id].encode()

    def encode(self, text: str, *, parse_special: bool = True) -> bytes:
        ids = array("i")
        while text:
            ids.append(
                max((i for i in range(1, 48) if text.startswith(self.pieces[i])), key=lambda i: len(self.pieces[i]))
            )
            text = text[len(self.pieces[ids[-1]]) :]
        return ids.tobytes()


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 500},
        "name": {"type": "string", "maxLength": 12, "pattern": "^[abcef]*$"},
        "on": {"type": "boolean"},
    },
    "required": ["a", "name", "on"],
    "additionalProperties": False,
}


def engine(num_blocks: int = 400, **options: Any) -> ToyEngine:
    return toy_engine(num_blocks=num_blocks, tokenizer=ToyTokenizer(), eos_token_ids=(0,), **options)


def json_request(name: str, prompt: Iterable[int], **sampling: Any) -> Any:
    fields = {"max_tokens": 150, "temperature": 1.0, "json_schema": json.dumps(SCHEMA), **sampling}
    return request(name, prompt, **fields)


def test_the_pieces_are_the_toy_models_vocabulary() -> None:
    assert len(ToyTokenizer.pieces) == len(set(ToyTokenizer.pieces)) == ToyTokenizer.vocab_size


def test_the_output_ends_where_it_is_whole() -> None:
    for ignore_eos in (False, True):
        (outcome,) = engine().run(json_request("r", [1, 2, 3], seed=5, ignore_eos=ignore_eos))
        assert outcome.finish_reason == "stop", outcome.error
        assert outcome.text.endswith("}")
        jsonschema.validate(json.loads(outcome.text), SCHEMA)


def test_an_output_that_could_go_on_ends_with_the_end_of_sequence() -> None:
    schema = json.dumps({"type": "integer", "minimum": 0})
    (outcome,) = engine().run(json_request("r", [1], seed=1, json_schema=schema, logit_bias={0: 50.0}))
    assert outcome.finish_reason == "stop"
    assert outcome.token_ids[-1] == 0
    assert json.loads(outcome.text) >= 0


def test_max_tokens_cut_it() -> None:
    (outcome,) = engine().run(json_request("r", [1], max_tokens=3))
    assert (outcome.finish_reason, len(outcome.token_ids)) == ("length", 3)


def test_samples_are_the_same_alone_in_company_and_across_preemption() -> None:
    asked = [json_request(f"r{i}", range(i, i + 6), n=2, seed=10 * i, repetition_penalty=1.1) for i in range(5)]
    free = [request(f"f{i}", range(i, i + 6), seed=i, temperature=1.0, max_tokens=20) for i in range(3)]
    crowded = engine(num_blocks=50)
    crowded.run(*asked, *free)
    assert crowded.engine.stats().num_preemptions > 0
    for i, each in enumerate(asked):
        for j, name in enumerate((f"r{i}", f"r{i}#1")):
            alone = replace(each, sampling=replace(each.sampling, n=1, seed=10 * i + j))
            (outcome,) = engine().run(alone)
            assert outcome.token_ids == crowded.outcomes[name].token_ids
            assert outcome.finish_reason == "stop"
            jsonschema.validate(json.loads(outcome.text), SCHEMA)


TEXTS = st.text(st.sampled_from('ab"\\/|.*\n é{'), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5, unique=True), st.integers(0, 2**32))
def test_an_output_of_a_choice_is_one_of_its_strings(choice: list[str], seed: int) -> None:
    assert drawn_under(Form("choice", tuple(choice)), seed) in choice


@pytest.mark.parametrize(
    "pattern", [r"[a-f]{2,4}-[0-9]", r"(yes|no|may be)\.", r"a/b\n?", r"[a-z]+@[a-z]+\.(com|org)", r"[^\n]{1,20}!"]
)
def test_an_output_of_a_regular_expression_matches_it_as_a_whole(pattern: str) -> None:
    for seed in range(10):
        assert re.fullmatch(pattern, drawn_under(Form("regex", pattern), seed))


def test_a_grammar_may_be_recursive() -> None:
    for grammar in ('start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'):
        for seed in range(10):
            text = drawn_under(Form("grammar", grammar), seed)
            depth = text.count("(")
            assert text == "(" * depth + "x" + ")" * depth


def test_at_most_one_form_is_asked_for() -> None:
    with pytest.raises(RequestError, match="choice: allowed only without regex"):
        SamplingParams(regex="a", choice=("a",))
    assert form_of(SamplingParams()) is None
    assert form_of(SamplingParams(grammar='start: "a"')) == Form("grammar", 'start: "a"')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": ()}, r"choice: \(\) is not allowed; it must be at least one string"),
        ({"choice": ("a", "")}, r"choice\[1\]: '' is not allowed"),
        ({"choice": ["a"]}, r"choice: \['a'\] is not allowed; it must be a tuple of strings, or None"),
        ({"regex": 3}, "regex: 3 is not allowed; it must be a string, or None"),
    ],
)
def test_a_form_of_another_type_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_an_engine_without_text_or_end_refuses() -> None:
    with pytest.raises(RequestError, match="json_schema: the engine has no tokenizer"):
        toy_engine().submit(json_request("r", [1]))
    with pytest.raises(RequestError, match="json_schema: the model has no end-of-sequence token"):
        toy_engine(tokenizer=ToyTokenizer()).submit(json_request("r", [1]))


def test_without_the_library_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"json_schema: this needs the package llguidance: pip install"):
        Grammars(tokenizer(), (EOS_TOKEN_ID,), VOCAB_SIZE).check(Form("json_schema", "{}"))
