"""OpenAI's request logs and batches, and Anthropic's bodies, bare or with their answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from anaphora.lab.importers.bodies import fill_from_body, is_anthropic
from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.importers.usage import events_of_sse, read_usage, usage_of_stream
from anaphora.lab.record import LoggedRequest, Usage

if TYPE_CHECKING:
    from anaphora.lab.importers.source import Document

BATCH_ANSWER = "batch answers have no prompts; give the batch's input"


def parse_openai(document: Document) -> LoggedRequest:
    """One body a line, or {"request", "response", "timestamp"} around it."""
    return _parse(document, "openai")


def parse_anthropic(document: Document) -> LoggedRequest:
    """A Messages body, bare or wrapped in the same way."""
    return _parse(document, "anthropic")


def _parse(document: Document, provider: str) -> LoggedRequest:
    record = Fields(document.value)
    request = LoggedRequest(document.line, provider=provider)
    request.time_s = next(
        (record.time_s(name) for name in ("timestamp", "created_at", "time") if record.has(name)), None
    )
    for name in ("session_id", "session", "conversation_id"):
        request.session = request.session or record.label(name)
    request.tenant = record.label("tenant")
    request.replica = record.label("replica") or record.label("api_base")
    request.adapter = record.label("adapter")
    body = _object(record, "request") or _object(record, "body") or record
    fill_from_body(request, body)
    request.num_output_tokens = None
    answer = record.values.get("response")
    if isinstance(answer, dict):
        fill_from_answer(request, Fields(answer, "response"))
    elif isinstance(answer, (list, str)):
        events = answer if isinstance(answer, list) else events_of_sse(answer)
        _take_usage(request, usage_of_stream(events))
    elif record.has("usage"):
        fill_from_answer(request, record)
    return request


def parse_batch(document: Document) -> LoggedRequest:
    """A line of a batch: {custom_id, method, url, body}, or of its output, which has usage and no prompt."""
    record = Fields(document.value)
    request = LoggedRequest(document.line, provider="openai", request_id=record.label("custom_id"))
    body = record.child("body")
    if body is not None:
        fill_from_body(request, body)
        return request
    answer = record.child("response")
    body = answer.child("body") if answer else None
    if body is None:
        raise FieldError("body: expected an object (or response.body, in a batch's output)")
    fill_from_answer(request, body)
    return request


def fill_from_answer(request: LoggedRequest, answer: Fields) -> None:
    """What an answer tells of its request."""
    request.request_id = answer.label("id") or request.request_id
    request.model = request.model or answer.text("model")
    if request.time_s is None:
        request.time_s = answer.time_s("created")
    for name in ("usage", "usageMetadata"):
        usage = answer.child(name)
        if usage is not None:
            _take_usage(request, read_usage(usage))


def _take_usage(request: LoggedRequest, usage: Usage | None) -> None:
    if usage is not None:
        request.usage = usage
        request.num_prompt_tokens, request.num_output_tokens = usage.prompt, usage.output


def _object(record: Fields, name: str) -> Fields | None:
    """An object, also one that was stored as JSON text."""
    value = record.values.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise record.wrong(name, "an object") from None
    return None if value is None else Fields(value, name)


def is_body(value: object) -> bool:
    """Whether a JSON value looks like a request's body."""
    return isinstance(value, dict) and (
        "messages" in value or ("model" in value and ("prompt" in value or "input" in value or "contents" in value))
    )


def looks_openai(value: object) -> bool:
    """A body, bare or wrapped, that is not Anthropic's."""
    body = _body(value)
    return body is not None and not _is_anthropic_log(value, body)


def looks_anthropic(value: object) -> bool:
    """A body, bare or wrapped, in Anthropic's form, or answered in it."""
    body = _body(value)
    return body is not None and _is_anthropic_log(value, body)


def looks_batch(value: object) -> bool:
    """A line of a batch."""
    return isinstance(value, dict) and "custom_id" in value and ("body" in value or "response" in value)


def _body(value: object) -> dict[str, object] | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("request", value)
    return inner if is_body(inner) else None


def _is_anthropic_log(value: object, body: dict[str, object]) -> bool:
    answer = value.get("response") if isinstance(value, dict) else None
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if isinstance(usage, dict) and "cache_creation_input_tokens" in usage and "prompt_tokens" not in usage:
        return True
    try:
        return is_anthropic(Fields(body))
    except FieldError:
        return False
