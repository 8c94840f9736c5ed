"""Usage in every dialect, read into one meaning: the prompt includes what was cached.

Who includes cached tokens in the prompt's count (OpenAI, Gemini, DeepSeek, vLLM, SGLang, OpenTelemetry), and who counts
only the rest (Anthropic, Bedrock, Langfuse). A count that is absent or null was not reported: None, never 0.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.record import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable


def read_usage(usage: Fields) -> Usage | None:
    """Usage of any of the APIs, by the names of its fields; None where there is none that is known."""
    if usage.has("prompt_tokens"):
        return _openai(usage, "prompt_tokens", "completion_tokens", "prompt_tokens_details")
    if usage.has("input_tokens") and (usage.has("input_tokens_details") or usage.has("cached_input_tokens")):
        return _openai(usage, "input_tokens", "output_tokens", "input_tokens_details")
    if usage.has("input_tokens"):
        return _anthropic(usage)
    if usage.has("inputTokens"):
        return _bedrock(usage)
    if usage.has("promptTokenCount"):
        return Usage(
            usage.need_count("promptTokenCount"),
            usage.count("cachedContentTokenCount"),
            output=usage.count("candidatesTokenCount"),
        )
    return None


def _openai(usage: Fields, prompt: str, output: str, details: str) -> Usage | None:
    total = usage.count(prompt)
    if total is None:
        return None
    detail = usage.child(details) or Fields({})
    split = detail.child("cache_creation_token_details") or Fields({})
    cached = _first(detail.count("cached_tokens"), usage.count("cached_input_tokens"))
    cached = _first(cached, usage.count("prompt_cache_hit_tokens"), usage.count("cache_read_input_tokens"))
    written = _first(detail.count("cache_write_tokens"), detail.count("cache_creation_tokens"))
    written = _first(written, usage.count("cache_creation_input_tokens"))
    return Usage(total, cached, written, split.count("ephemeral_1h_input_tokens") or 0, usage.count(output))


def _anthropic(usage: Fields) -> Usage | None:
    rest = usage.count("input_tokens")
    if rest is None:
        return None
    read, written = usage.count("cache_read_input_tokens"), usage.count("cache_creation_input_tokens")
    split = usage.child("cache_creation") or Fields({})
    written_1h = split.count("ephemeral_1h_input_tokens") or 0
    if written is None and split.values:
        written = written_1h + (split.count("ephemeral_5m_input_tokens") or 0)
    return Usage(rest + (read or 0) + (written or 0), read, written, written_1h, usage.count("output_tokens"))


def _bedrock(usage: Fields) -> Usage | None:
    rest = usage.count("inputTokens")
    if rest is None:
        return None
    read = _first(usage.count("cacheReadInputTokens"), usage.count("cacheReadInputTokenCount"))
    written = _first(usage.count("cacheWriteInputTokens"), usage.count("cacheWriteInputTokenCount"))
    written_1h = 0
    for number, item in enumerate(usage.items("cacheDetails")):
        detail = Fields(item, f"cacheDetails[{number}]")
        if detail.text("ttl") == "1h":
            written_1h += detail.count("inputTokens") or 0
    return Usage(rest + (read or 0) + (written or 0), read, written, written_1h, usage.count("outputTokens"))


def read_buckets(buckets: Fields) -> Usage | None:
    """Langfuse's `usageDetails`: buckets that exclude one another."""
    rest = _first(buckets.count("input"), buckets.count("input_tokens"))
    if rest is None:
        return None
    read = next((buckets.count(name) for name in _READ_BUCKETS if buckets.has(name)), None)
    written = next((buckets.count(name) for name in _WRITE_BUCKETS if buckets.has(name)), None)
    output = _first(buckets.count("output"), buckets.count("output_tokens"))
    return Usage(rest + (read or 0) + (written or 0), read, written, 0, output)


_READ_BUCKETS = ("cache_read_input_tokens", "input_cached_tokens", "input_cache_read", "cached_tokens")
_WRITE_BUCKETS = ("cache_creation_input_tokens", "input_cache_creation", "input_cache_write")

_OTEL_READ = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "gen_ai.usage.input_tokens.cached",
)
_OTEL_WRITE = (
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_creation_input_tokens",
    "gen_ai.usage.input_tokens.cache_write",
)


def read_attributes(attributes: Fields) -> Usage | None:
    """OpenTelemetry's attributes: `gen_ai.usage.input_tokens` includes what was cached."""
    total = _first(attributes.count("gen_ai.usage.input_tokens"), attributes.count("gen_ai.usage.prompt_tokens"))
    if total is None:
        return None
    read = next((attributes.count(name) for name in _OTEL_READ if attributes.has(name)), None)
    written = next((attributes.count(name) for name in _OTEL_WRITE if attributes.has(name)), None)
    output = _first(attributes.count("gen_ai.usage.output_tokens"), attributes.count("gen_ai.usage.completion_tokens"))
    return Usage(total, read, written, 0, output)


def usage_of_stream(events: Iterable[object]) -> Usage | None:
    """Usage of a streamed answer: later values win, and details that a later event leaves out are kept."""
    merged: dict[str, object] = {}
    for event in events:
        if not isinstance(event, dict):
            continue
        message = event.get("message")
        nested = message.get("usage") if isinstance(message, dict) else None
        for usage in (nested, event.get("usage")):
            if isinstance(usage, dict):
                merged |= {name: value for name, value in usage.items() if value is not None}
    return read_usage(Fields(merged, "usage")) if merged else None


def events_of_sse(text: str) -> list[object]:
    """The JSON payloads of server-sent events."""
    events: list[object] = []
    for line in text.splitlines():
        payload = line.removeprefix("data:").strip()
        if line.startswith("data:") and payload != "[DONE]":
            try:
                events.append(json.loads(payload))
            except (ValueError, RecursionError):
                raise FieldError("response: an event of the stream is no JSON") from None
    return events


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
