"""What gateways store: LiteLLM's spend logs (JSON, JSONL, CSV), and CSV with a request and a response in each row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from anaphora.lab.importers.bodies import fill_from_body
from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.importers.openai import fill_from_answer, is_body
from anaphora.lab.importers.usage import read_usage
from anaphora.lab.record import LoggedRequest, Usage

if TYPE_CHECKING:
    from anaphora.lab.importers.source import Document

_HIT = {"true": True, "false": False}


def parse_spend_log(document: Document) -> LoggedRequest | None:
    """A row of LiteLLM_SpendLogs. `cache_hit` tells of LiteLLM's cache of whole answers: such a row reached no model
    and is left out."""
    record = Fields(document.value)
    if _HIT.get(str(record.values.get("cache_hit")).lower(), False):
        return None
    request = LoggedRequest(
        document.line,
        time_s=record.time_s("startTime"),
        end_s=record.time_s("endTime"),
        first_token_s=record.time_s("completionStartTime"),
        request_id=record.label("request_id"),
        model=record.text("model"),
        provider=record.text("custom_llm_provider") or None,
        session=record.label("session_id"),
        tenant=record.label("team_id") or record.label("end_user") or record.label("user"),
        replica=record.label("model_id") or record.label("api_base"),
    )
    metadata = _object(record, "metadata")
    stored = metadata.child("usage_object") if metadata else None
    usage = read_usage(stored) if stored else None
    if usage is None and record.count("prompt_tokens") is not None:
        usage = Usage(record.need_count("prompt_tokens"), output=record.count("completion_tokens"))
    if usage is not None:
        request.usage = usage
        request.num_prompt_tokens, request.num_output_tokens = usage.prompt, usage.output
    body = _object(record, "proxy_server_request")
    if body is not None and isinstance(body.values.get("body"), dict):
        body = body.child("body")
    if body is None or not is_body(body.values):
        messages = _json(record.values.get("messages"))
        body = Fields({"messages": messages}) if isinstance(messages, list) and messages else None
    if body is not None:
        model = request.model
        fill_from_body(request, body)
        request.model = model or request.model
    return request


def parse_gateway_row(document: Document) -> LoggedRequest:
    """A row with timestamp, model_name, status_code, request_json, response_json."""
    record = Fields(document.value)
    request = LoggedRequest(document.line, time_s=record.time_s("timestamp"), model=record.text("model_name"))
    body = _object(record, "request_json")
    if body is None:
        raise FieldError("request_json: expected an object")
    fill_from_body(request, body)
    answer = _object(record, "response_json")
    if answer is not None:
        fill_from_answer(request, answer)
    return request


def looks_spend_log(value: object) -> bool:
    """A row of LiteLLM_SpendLogs."""
    return isinstance(value, dict) and "startTime" in value and "call_type" in value and "spend" in value


def looks_gateway_row(value: object) -> bool:
    """A row with the JSON of request and response."""
    return isinstance(value, dict) and "request_json" in value


def _json(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _object(record: Fields, name: str) -> Fields | None:
    value = _json(record.values.get(name))
    return Fields(value, name) if isinstance(value, dict) and value else None
