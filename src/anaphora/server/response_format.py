"""What form an answer shall have, in the fields that OpenAI and vLLM have for it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from anaphora.engine.grammars import Form
from anaphora.server.errors import ApiError, bad_field

ANY_OBJECT = '{"type":"object"}'


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`json_schema` of a response format. `name`, `description` and `strict` change nothing: it is always strict."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs`, as vLLM has it; of its kinds all but `structural_tag`."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GuidedRequest(msgspec.Struct, kw_only=True):
    """The fields of a request's body that say what form its answer shall have. Those of `guided_...` are what vLLM had
    before `structured_outputs`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class AskedForm(NamedTuple):
    """What the answer must be, and the path of the field in the body that says so."""

    form: Form
    path: str


def asked_form(body: GuidedRequest) -> AskedForm | None:
    """Return the form that the answer must have.

    Raises:
        ApiError: several are asked for, or none is given where one is needed.
    """
    asked: list[AskedForm] = []

    def ask(path: str, name: str, value: Any) -> None:
        if value is not None:
            asked.append(AskedForm(Form(name, tuple(value) if isinstance(value, list) else value), path))

    response_format, structured = body.response_format, body.structured_outputs or StructuredOutputs()
    if response_format is not None and response_format.type == "json_object":
        ask("response_format", "json_schema", ANY_OBJECT)
    if response_format is not None and response_format.type == "json_schema":
        path = "response_format.json_schema"
        if response_format.json_schema is None or response_format.json_schema.schema is None:
            path += "" if response_format.json_schema is None else ".schema"
            raise ApiError(400, f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
        ask(f"{path}.schema", "json_schema", _as_text(response_format.json_schema.schema))
    ask("structured_outputs.json", "json_schema", _as_text(structured.json))
    ask("structured_outputs.json_object", "json_schema", ANY_OBJECT if structured.json_object else None)
    ask("structured_outputs.regex", "regex", structured.regex)
    ask("structured_outputs.choice", "choice", structured.choice)
    ask("structured_outputs.grammar", "grammar", structured.grammar)
    ask("guided_json", "json_schema", _as_text(body.guided_json))
    ask("guided_regex", "regex", body.guided_regex)
    ask("guided_choice", "choice", body.guided_choice)
    ask("guided_grammar", "grammar", body.guided_grammar)
    if len(asked) > 1:
        raise bad_field(asked[1].path, f"allowed only without {asked[0].path}")
    return asked[0] if asked else None


def _as_text(schema: dict[str, Any] | bool | str | None) -> str | None:
    return schema if schema is None or isinstance(schema, str) else msgspec.json.encode(schema).decode()
