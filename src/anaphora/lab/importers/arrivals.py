"""Tables of arrivals and lengths without content: BurstGPT, Azure's LLM traces. Good for load, silent on sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import Fields
from anaphora.lab.record import LoggedRequest

if TYPE_CHECKING:
    from anaphora.lab.importers.source import Document


def parse_burstgpt(document: Document) -> LoggedRequest | None:
    """Timestamp (s), Model, Request tokens, Response tokens. No response tokens: a failure, left out."""
    row = Fields(document.value)
    output = row.need_count("Response tokens")
    if not output:
        return None
    return LoggedRequest(
        document.line,
        time_s=row.number("Timestamp"),
        model=row.text("Model"),
        session=row.label("Session ID"),
        num_prompt_tokens=row.need_count("Request tokens"),
        num_output_tokens=output,
    )


def parse_azure(document: Document) -> LoggedRequest:
    """TIMESTAMP, ContextTokens, GeneratedTokens."""
    row = Fields(document.value)
    return LoggedRequest(
        document.line,
        time_s=row.time_s("TIMESTAMP"),
        num_prompt_tokens=row.need_count("ContextTokens"),
        num_output_tokens=row.count("GeneratedTokens"),
    )


def looks_burstgpt(value: object) -> bool:
    """A row of BurstGPT's."""
    return isinstance(value, dict) and {"Request tokens", "Response tokens", "Timestamp"} <= value.keys()


def looks_azure(value: object) -> bool:
    """A row of Azure's."""
    return isinstance(value, dict) and {"TIMESTAMP", "ContextTokens"} <= value.keys()
