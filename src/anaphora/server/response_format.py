"""What form an answer shall have, in the fields that OpenAI and vLLM have for it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

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
    """`structured_outputs`, as vLLM has it; of its kinds, the two that are JSON."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None


def asked_schema(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[str, str] | None:
    """Return the JSON schema that the answer must have, as text, and the path of the field that it came from.

    Raises:
        ApiError: several are asked for, or none is given where one is needed.
    """
    asked: list[tuple[str, str]] = []
    if response_format is not None and response_format.type == "json_object":
        asked.append((ANY_OBJECT, "response_format"))
    if response_format is not None and response_format.type == "json_schema":
        path = "response_format.json_schema"
        if response_format.json_schema is None or response_format.json_schema.schema is None:
            path += "" if response_format.json_schema is None else ".schema"
            raise ApiError(400, f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
        asked.append((_as_text(response_format.json_schema.schema), f"{path}.schema"))
    if structured is not None and structured.json is not None:
        asked.append((_as_text(structured.json), "structured_outputs.json"))
    if structured is not None and structured.json_object:
        asked.append((ANY_OBJECT, "structured_outputs.json_object"))
    if len(asked) > 1:
        raise bad_field(asked[1][1], f"allowed only without {asked[0][1]}")
    return asked[0] if asked else None


def _as_text(schema: dict[str, Any] | bool | str) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
