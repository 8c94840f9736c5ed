"""What observability tools export: Langfuse observations, OpenTelemetry spans (OTLP JSON) of GenAI calls."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from anaphora.lab.importers.bodies import openai_parts
from anaphora.lab.importers.fields import Fields
from anaphora.lab.importers.usage import read_attributes, read_buckets, read_usage
from anaphora.lab.record import LoggedRequest, Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.lab.importers.source import Document


def parse_langfuse(document: Document) -> LoggedRequest | None:
    """A GENERATION observation; other types are left out."""
    record = Fields(document.value)
    if record.text("type") not in {"GENERATION", None}:
        return None
    request = LoggedRequest(
        document.line,
        time_s=record.time_s("startTime"),
        end_s=record.time_s("endTime"),
        first_token_s=record.time_s("completionStartTime"),
        request_id=record.label("id"),
        model=record.text("model"),
        session=record.label("sessionId") or record.label("traceId"),
    )
    request.parts = tuple(_input_parts(record.values.get("input")))
    details = record.child("usageDetails")
    usage = read_buckets(details) if details else None
    if usage is None and record.has("usage"):
        older = record.child("usage")
        usage = (read_usage(older) or read_buckets(older)) if older else None
    if usage is not None:
        request.usage = usage
        request.num_prompt_tokens, request.num_output_tokens = usage.prompt, usage.output
    return request


def parse_otlp(document: Document) -> Iterator[LoggedRequest]:
    """Spans that carry GenAI usage or a GenAI model; the rest are none of ours."""
    record = Fields(document.value)
    for i, resource in enumerate(record.items("resourceSpans")):
        outer = Fields(resource, f"resourceSpans[{i}]")
        shared = outer.child("resource")
        tenant = _attributes(shared).label("service.name") if shared else None
        for j, scope in enumerate(outer.items("scopeSpans")):
            inner = Fields(scope, f"{outer.path}.scopeSpans[{j}]")
            for k, item in enumerate(inner.items("spans")):
                request = _span(document.line, Fields(item, f"{inner.path}.spans[{k}]"), tenant)
                if request is not None:
                    yield request


def _span(line: int, span: Fields, tenant: str | None) -> LoggedRequest | None:
    attributes = _attributes(span)
    operation = attributes.values.get("gen_ai.operation.name")
    if str(operation) in {"execute_tool", "invoke_agent", "create_agent", "embeddings"}:
        return None
    usage = read_attributes(attributes)
    if usage is None and not attributes.has("gen_ai.request.model"):
        return None
    request = LoggedRequest(
        line,
        time_s=span.time_s("startTimeUnixNano"),
        end_s=span.time_s("endTimeUnixNano"),
        request_id=attributes.label("gen_ai.response.id") or span.label("spanId"),
        model=attributes.label("gen_ai.request.model") or attributes.label("gen_ai.response.model"),
        provider=attributes.label("gen_ai.provider.name") or attributes.label("gen_ai.system"),
        session=attributes.label("gen_ai.conversation.id") or span.label("traceId"),
        tenant=tenant,
        replica=attributes.label("server.address"),
        usage=usage,
    )
    if usage is not None:
        request.num_prompt_tokens, request.num_output_tokens = usage.prompt, usage.output
    parts = _input_parts(attributes.values.get("gen_ai.tool.definitions"), "tools")
    parts += _input_parts(attributes.values.get("gen_ai.system_instructions"), "system")
    request.parts = tuple(parts + _input_parts(attributes.values.get("gen_ai.input.messages")))
    return request


def _attributes(holder: Fields) -> Fields:
    """A list of {key, value: {stringValue | intValue | ...}} as one object."""
    values: dict[str, object] = {}
    for number, item in enumerate(holder.items("attributes")):
        attribute = Fields(item, f"{holder.path}.attributes[{number}]")
        value = attribute.child("value")
        if value is not None and value.values:
            values[attribute.text("key") or ""] = next(iter(value.values.values()))
    return Fields(values, f"{holder.path}.attributes")


def _input_parts(value: object, section: str = "messages") -> list[Part]:
    """The prompt, where it was stored: messages, a body, text, or any of these as JSON text."""
    if isinstance(value, str) and value[:1] in {"[", "{"}:
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, str):
        return [Part("input", "system" if section == "system" else "prompt", section, value)] if value else []
    if isinstance(value, dict) and "messages" in value:
        return openai_parts(Fields(value, "input"))
    if not isinstance(value, list) or not value:
        return []
    if section == "tools":
        return openai_parts(Fields({"tools": value}))
    if section == "system":
        return openai_parts(Fields({"messages": [{"role": "system", "content": value}]}))
    return openai_parts(Fields({"messages": [_with_content(message) for message in value]}))


def _with_content(message: object) -> object:
    """OpenTelemetry calls a message's content `parts`, and a text in it `content`."""
    if not isinstance(message, dict) or not isinstance(message.get("parts"), list):
        return message
    content = [
        {"type": "text", "text": part["content"]}
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("content"), str)
        else part
        for part in message["parts"]
    ]
    return {"role": message.get("role", "user"), "content": content}


def looks_langfuse(value: object) -> bool:
    """An observation of Langfuse's."""
    return isinstance(value, dict) and "traceId" in value and ("usageDetails" in value or "observations" in value)


def looks_otlp(value: object) -> bool:
    """An export of spans."""
    return isinstance(value, dict) and "resourceSpans" in value
