"""`response_format` and `structured_outputs`: answers that are JSON of a schema, and schemas that are refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer

pytest.importorskip("llguidance")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "abc"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"const": "so"}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["x", "n"],
    "additionalProperties": False,
}
AS_OPENAI = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}


@pytest.mark.parametrize(
    "fields",
    [AS_OPENAI, {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_answer_is_json_of_the_schema(live: LiveServer, fields: dict[str, Any], temperature: float) -> None:
    asked = {"temperature": temperature, "max_tokens": 1000, "n": 3, **fields}
    chat = live.post(CHAT, {"messages": USER, **asked}).json()["choices"]
    completion = live.post(COMPLETIONS, {"prompt": "abc", **asked}).json()["choices"]
    assert len(chat) == len(completion) == 3
    for choice, text in [(c, c["message"]["content"]) for c in chat] + [(c, c["text"]) for c in completion]:
        value = json.loads(text)
        assert choice["finish_reason"] == "stop"
        assert value["x"] == "so"
        assert 1 <= value["n"] <= 9


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_a_json_object_is_one(live: LiveServer, fields: dict[str, Any]) -> None:
    # The model knows nothing of JSON; it is told to like the end of objects.
    answer = live.post(CHAT, {"messages": USER, "temperature": 0, "logit_bias": {str(ord("}")): 100}, **fields}).json()
    assert answer["choices"][0]["message"]["content"] == "{}"
    assert answer["choices"][0]["finish_reason"] == "stop"


GRAMMAR = 'start: "<" NAME ">"\nNAME: /[a-z]{2,5}/\n'


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[0-9]{3}-[A-F]+x", "[0-9]{3}-[A-F]+x"),
        ("choice", ["positive", "negative", 'neither "one"'], 'positive|negative|neither "one"'),
        ("grammar", GRAMMAR, "<[a-z]{2,5}>"),
        ("grammar", 'root ::= "yes" | "no " [0-9]', "yes|no [0-9]"),
    ],
)
def test_the_answer_matches_what_was_asked_for(live: LiveServer, kind: str, value: Any, pattern: str) -> None:
    for fields in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        asked = {"temperature": 1, "max_tokens": 1000, "n": 3, "logit_bias": {str(ord("x")): 5}, **fields}
        chat = live.post(CHAT, {"messages": USER, **asked}).json()["choices"]
        completion = live.post(COMPLETIONS, {"prompt": "abc", **asked}).json()["choices"]
        for choice, text in [(c, c["message"]["content"]) for c in chat] + [(c, c["text"]) for c in completion]:
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(("kind", "value"), [("regex", "(a"), ("regex", "(?=a)b"), ("grammar", "start: other")])
def test_a_form_that_is_none_is_refused_with_its_field(live: LiveServer, kind: str, value: str) -> None:
    for path, fields in ((f"structured_outputs.{kind}", {"structured_outputs": {kind: value}}),
                         (f"guided_{kind}", {f"guided_{kind}": value})):  # fmt: skip
        response = live.post(COMPLETIONS, {"prompt": "abc", **fields})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == path
        assert error["message"].startswith(f"{path}: at 1(8): ")


def test_text_is_what_there_is_without(live: LiveServer) -> None:
    answer = live.post(CHAT, {"messages": USER, "max_tokens": 3, "response_format": {"type": "text"}}).json()
    assert answer["choices"][0]["message"]["content"] == "def"


SCHEMA_PATH = "response_format.json_schema.schema"


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (of_schema({"type": "foo"}), SCHEMA_PATH, f"{SCHEMA_PATH}: Invalid type: foo"),
        (of_schema({"type": "object", "properties": {"a": {"type": "int"}}}), f"{SCHEMA_PATH}.properties.a",
         f"{SCHEMA_PATH}.properties.a: Invalid type: int"),
        (of_schema([]), SCHEMA_PATH, f"{SCHEMA_PATH}: expected `bool | object | null`, got `array`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "Missing required parameter: 'response_format.json_schema'."),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}}, SCHEMA_PATH,
         f"Missing required parameter: '{SCHEMA_PATH}'."),
        ({"response_format": {"type": "xml"}}, "response_format.type",
         "response_format.type: invalid enum value 'xml'"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json",
         "structured_outputs.json: it is no JSON: "
         "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag",
         "Unknown parameter: 'structured_outputs.structural_tag'."),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice",
         "structured_outputs.choice: () is not allowed; it must be at least one string"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]",
         "guided_choice[1]: '' is not allowed; it must be a string of at least one character"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "guided_choice[1]: expected `str`, got `int`"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex",
         "guided_regex: allowed only without structured_outputs.regex"),
        ({"guided_grammar": "root ::= other"}, "guided_grammar", "guided_grammar: Rule 'other' not found"),
        ({**AS_OPENAI, "structured_outputs": {"json_object": True}}, "structured_outputs.json_object",
         f"structured_outputs.json_object: allowed only without {SCHEMA_PATH}"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_path(
    live: LiveServer, fields: dict[str, Any], param: str, message: str
) -> None:
    response = live.post(CHAT, {"messages": USER, **fields})
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["message"]) == (param, message)
